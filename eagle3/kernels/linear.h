// Linear layers for few rows.
#pragma once
#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int PANEL = 16;
#ifdef __AVX512F__
constexpr int ROWS_AT_ONCE = 12;  // 12 accumulators of the 32 vector registers
#else
constexpr int ROWS_AT_ONCE = 6;  // 12 accumulators of the 16 vector registers
#endif
constexpr int64_t K_BLOCK = 288;
constexpr uint32_t ONE_LINE = 1 << 16;

inline WideVector add_product(WideVector sum, WideVector weights, float x) { return sum + weights * x; }

#ifdef __AVX512BF16__
// Two bfloat16 of neighbouring k, which the processor multiplies by two others and adds up in one instruction.
struct Pair {
  uint16_t even, odd;
};

inline __m512bh load_wide(const Pair* p) { return (__m512bh)_mm512_loadu_si512(p); }

inline WideVector add_product(WideVector sum, __m512bh weights, Pair x) {
  int32_t both;
  std::memcpy(&both, &x, sizeof both);
  return (WideVector)_mm512_dpbf16_ps((__m512)sum, weights, (__m512bh)_mm512_set1_epi32(both));
}

// x [rows, K] rounded to bfloat16, as pairs [rows, (K + 1) / 2]; a last odd k has zero beside it.
inline void round_to_pairs(const float* x, Pair* pairs, int64_t rows, int64_t K) {
  const int64_t width = (K + 1) / 2;
#pragma omp parallel for schedule(static) if (rows > 8)
  for (int64_t r = 0; r < rows; r++) {
    const float* from = x + r * K;
    uint16_t* to = reinterpret_cast<uint16_t*>(pairs + r * width);
    for (int64_t k = 0; k < 2 * width; k += WIDE) {
      const __mmask16 inside = k + WIDE <= K ? 0xffff : (__mmask16)((1u << (K - k)) - 1);
      const __mmask16 written = k + WIDE <= 2 * width ? 0xffff : (__mmask16)((1u << (2 * width - k)) - 1);
      const __m256bh half = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(inside, from + k));
      _mm256_mask_storeu_epi16(to + k, written, (__m256i)half);
    }
  }
}
#endif

// y = x @ W^T. Layout of W: panels of PANEL outputs, packed[n / PANEL][k][n % PANEL], the last padded with zeros: one k of
// a panel of float32 is one cache line, and all of W is one stream of them.
// Each output is one sum over ascending k in its own accumulator, whatever the number of rows. Between two blocks of k
// the accumulators wait in `sums` [ROWS, PANEL]: storing a float and reading it again does not change it.
//
// ahead, share: while it computes, the block asks for lines ahead, ahead + share, ahead + 2 share, ... of the stream, with
// share in units of 1 / ONE_LINE (floating point would take the place of products). Without it, waiting for memory and
// computing take turns instead of overlapping. One or two rows ask for lines into the first-level cache; with more, their
// activations fill that, and lines wait in the second.
constexpr int NEAR_ROWS = 2;
constexpr int64_t lines_ahead(int64_t rows) { return rows <= NEAR_ROWS ? 64 : 128; }

template <int ROWS, typename Weight, typename Value>
inline void block(const Value* x, int64_t x_stride, const Weight* panel, float* sums, int64_t k_count, bool first,
                  const Weight* ahead, uint32_t share) {
  constexpr int PARTS = PANEL / WIDE;
  WideVector sum[ROWS][PARTS];
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < PARTS; i++) sum[r][i] = first ? WideVector{} : load_wide(sums + r * PANEL + i * WIDE);
  constexpr int64_t LINE = 64 / (PANEL * sizeof(Weight));  // steps of k in a cache line
  uint64_t line = 0;
  const auto step = [&](int64_t k) {
    for (int i = 0; i < PARTS; i++) {
      const auto weights = load_wide(panel + k * PANEL + i * WIDE);
      for (int r = 0; r < ROWS; r++) sum[r][i] = add_product(sum[r][i], weights, x[r * x_stride + k]);
    }
  };
  int64_t k = 0;
  for (; k + LINE <= k_count; k += LINE) {
    __builtin_prefetch(ahead + line / ONE_LINE * (PANEL * LINE), 0, ROWS <= NEAR_ROWS ? 3 : 2);
    line += share;
    for (int64_t i = 0; i < LINE; i++) step(k + i);
  }
  for (; k < k_count; k++) step(k);
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < PARTS; i++) std::memcpy(sums + r * PANEL + i * WIDE, &sum[r][i], sizeof(WideVector));
}

// `block` for a number of rows, 1 to ROWS, known only now.
template <int ROWS, typename Weight, typename Value>
inline void block_of(int64_t rows, const Value* x, int64_t x_stride, const Weight* panel, float* sums, int64_t k_count,
                     bool first, const Weight* ahead, uint32_t share) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return block_of<ROWS - 1>(rows, x, x_stride, panel, sums, k_count, first, ahead, share);
  block<ROWS>(x, x_stride, panel, sums, k_count, first, ahead, share);
}

// scales [N]: what each output is multiplied by before the bias is added, or null.
template <typename Weight, typename Value>
void linear(const Value* x, const Weight* packed, const float* scales, const float* bias, float* y, int64_t M, int64_t N,
            int64_t K) {
  const int64_t panels = (N + PANEL - 1) / PANEL;
  // Rows are computed in groups of nearly equal size. With several groups, a block of k is read from memory by the
  // first and from the first-level cache by the others, while every group asks for its share of the next block.
  const int64_t groups = (M + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  const int64_t k_block = groups > 1 ? std::min(K, K_BLOCK) : K;
  const uint32_t share = ONE_LINE / groups;
#pragma omp parallel
  {
    std::vector<float> sums(M * PANEL);
#pragma omp for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
      const Weight* panel = packed + p * PANEL * K;
      for (int64_t k = 0; k < K; k += k_block) {
        const int64_t count = std::min(k_block, K - k);
        const Weight* part = panel + k * PANEL;
        for (int64_t group = 0, m = 0; group < groups; group++) {
          const int64_t rows = (M - m) / (groups - group);
          const Value* xm = x + m * K + k;
          float* sums_m = sums.data() + m * PANEL;
          const int64_t line = 64 / (PANEL * (int64_t)sizeof(Weight));  // steps of k
          const int64_t distance = groups > 1 ? count + group * count / groups : lines_ahead(M) * line;
          const Weight* ahead = part + distance * PANEL;
          block_of<ROWS_AT_ONCE>(rows, xm, K, part, sums_m, count, k == 0, ahead, share);
          m += rows;
        }
      }
      const int64_t columns = std::min<int64_t>(PANEL, N - p * PANEL);
      for (int64_t m = 0; m < M; m++) {
        float* out = sums.data() + m * PANEL;
        if (scales)
          for (int64_t c = 0; c < columns; c++) out[c] *= scales[p * PANEL + c];
        if (bias)
          for (int64_t c = 0; c < columns; c++) out[c] += bias[p * PANEL + c];
        std::memcpy(y + m * N + p * PANEL, out, columns * sizeof(float));
      }
    }
  }
}

// What `linear` is given of one layer. dtype: 0 float32, 1 bfloat16, 2 int8.
struct Linear {
  const void* packed;
  const float *scales, *bias;
  int64_t outputs, inputs, dtype;
};

// x [M, inputs] -> y [M, outputs].
void apply(const Linear& layer, const float* x, float* y, int64_t M) {
  const int64_t N = layer.outputs, K = layer.inputs;
  switch (layer.dtype) {
    case 0: return linear(x, static_cast<const float*>(layer.packed), layer.scales, layer.bias, y, M, N, K);
    case 2: return linear(x, static_cast<const int8_t*>(layer.packed), layer.scales, layer.bias, y, M, N, K);
  }
#ifdef __AVX512BF16__  // the processor multiplies bfloat16: x is rounded to it as well, as torch does
  const Floats room(M * ((K + 1) / 2));
  Pair* pairs = reinterpret_cast<Pair*>(room.data);
  round_to_pairs(x, pairs, M, K);
  linear(pairs, static_cast<const Pair*>(layer.packed), layer.scales, layer.bias, y, M, N, (K + 1) / 2);
#else
  linear(x, static_cast<const uint16_t*>(layer.packed), layer.scales, layer.bias, y, M, N, K);
#endif
}

}  // namespace
