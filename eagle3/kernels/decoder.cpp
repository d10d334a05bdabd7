// The arithmetic of a decoder layer for the few rows of decoding, on a CPU, in float32.
//
// Why it exists: a decoding step reads every weight once, so verifying a handful of draft tokens should cost about as
// much as one vanilla step. The BLAS behind torch.nn.functional.linear can cost two to three times as much for 2 to 16
// rows as for one (benchmarks/linear.py shows it for the machine at hand), which hides the gain of speculation.
//
// Every result depends on its own row alone: a sum runs in an order given by the row's own content, never by how many
// rows are computed beside it or how they are spread over threads. Verifying a tree of 16 tokens therefore gives, bit
// for bit, the logits of single vanilla steps, and a row of a batch those of the row alone.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int PANEL = 16;
constexpr int LANES = 8;
#ifdef __AVX512F__
constexpr int WIDE = 16, ROWS_AT_ONCE = 12;  // 12 accumulators of the 32 vector registers
#else
constexpr int WIDE = 8, ROWS_AT_ONCE = 6;  // 12 accumulators of the 16 vector registers
#endif
constexpr int64_t K_BLOCK = 288;
constexpr uint32_t ONE_LINE = 1 << 16;
typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4)));
typedef uint32_t Word __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef int32_t Integer __attribute__((vector_size(LANES * sizeof(int32_t))));
// What linear layers are computed in.
typedef float WideVector __attribute__((vector_size(WIDE * sizeof(float)), aligned(4)));
typedef uint16_t WideHalf __attribute__((vector_size(WIDE * sizeof(uint16_t)), aligned(2)));
typedef uint32_t WideWord __attribute__((vector_size(WIDE * sizeof(uint32_t))));
typedef int8_t WideByte __attribute__((vector_size(WIDE * sizeof(int8_t)), aligned(1)));
typedef int32_t WideInteger __attribute__((vector_size(WIDE * sizeof(int32_t))));

inline Vector load(const float* p) { return *reinterpret_cast<const Vector*>(p); }

inline WideVector load_wide(const float* p) { return *reinterpret_cast<const WideVector*>(p); }

// bfloat16 is the upper half of a float32: widening is exact.
inline WideVector load_wide(const uint16_t* p) {
  return (WideVector)(__builtin_convertvector(*reinterpret_cast<const WideHalf*>(p), WideWord) << 16);
}

inline WideVector load_wide(const int8_t* p) {
#if defined(__AVX512F__)  // g++ 12 takes the bytes apart one by one
  const WideInteger integers = (WideInteger)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  const WideInteger integers = (WideInteger)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  const WideInteger integers = __builtin_convertvector(*reinterpret_cast<const WideByte*>(p), WideInteger);
#endif
  return __builtin_convertvector(integers, WideVector);
}

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

// Room for `count` floats, not set to anything.
struct Floats {
  float* data;
  explicit Floats(int64_t count) : data(static_cast<float*>(std::malloc(count * sizeof(float)))) {}
  ~Floats() { std::free(data); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;
};

inline float sum_lanes(Vector v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Word){__VA_ARGS__})
#endif

// sum_lanes of eight vectors at once, by the same additions in the same order.
inline Vector sum_lanes_of_each(const Vector (&v)[LANES]) {
  Vector halves[4];  // of vectors r and r + 4: lanes i + (i + 4), side by side
  for (int r = 0; r < 4; r++)
    halves[r] = SHUFFLE(v[r], v[r + 4], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(v[r], v[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  Vector quarters[2];  // of vectors r, r + 1, r + 4, r + 5
  for (int r = 0; r < 2; r++)
    quarters[r] = SHUFFLE(halves[2 * r], halves[2 * r + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
                  SHUFFLE(halves[2 * r], halves[2 * r + 1], 2, 3, 10, 11, 6, 7, 14, 15);
  return SHUFFLE(quarters[0], quarters[1], 0, 2, 8, 10, 4, 6, 12, 14) +
         SHUFFLE(quarters[0], quarters[1], 1, 3, 9, 11, 5, 7, 13, 15);
}

// exp by range reduction and a degree-5 polynomial (Cephes expf); below -87 it is zero. Relative error about 1e-7.
// Arguments of at most 88: beyond, the exponent bits overflow.
inline Vector exponential(Vector x) {
  const auto underflow = x < -87.0f;
  const Vector clipped = underflow ? Vector{} - 87.0f : x;
  const Vector shifted = clipped * 1.44269504088896341f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
  const Vector n = shifted - 12582912.0f;
  Vector r = clipped - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Integer exponent = (__builtin_convertvector(n, Integer) + 127) << 23;
  return underflow ? Vector{} : p * (Vector)exponent;
}

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

// RMS normalisation of one row; the sum of squares runs over fixed lanes.
inline void normalise(const float* x, const float* weight, float* y, int64_t H, float eps) {
  Vector squares = {};
  int64_t i = 0;
  for (; i + LANES <= H; i += LANES) squares += load(x + i) * load(x + i);
  float total = sum_lanes(squares);
  for (; i < H; i++) total += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(total / H + eps);
  for (i = 0; i < H; i++) y[i] = x[i] * scale * weight[i];
}

// Rotary embedding in the "rotate half" convention: (a, b) -> (a cos - b sin, b cos + a sin) for the two halves.
inline void rotate(const float* x, const float* cos, const float* sin, float* y, int64_t D) {
  const int64_t half = D / 2;
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half];
    y[i] = a * cos[i] - b * sin[i];
    y[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

inline Vector silu(Vector x) {
  const Vector negated = -x > 88.0f ? Vector{} + 88.0f : -x;  // beyond, the result is zero in any case
  return x / (1.0f + exponential(negated));
}

// The slots that one new token sees: all before `length`, then the visible ones of the new tokens.
struct Slots {
  const float *keys, *values;
  const int64_t* visible;
  int64_t length, count, padded;
  int64_t at(int64_t j) const { return j < length ? j : visible[j - length]; }
};

// The part of `attend` that adds up values, for COUNT vectors of a head from dimension d on.
template <int HEADS, int COUNT>
inline void weigh(const Slots& slots, const float* scores, const float* inverse, float* result, int64_t d, int64_t D) {
  Vector sums[HEADS][COUNT] = {};
  for (int64_t j = 0; j < slots.count; j++) {
    const float* value = slots.values + slots.at(j) * D + d;
    for (int l = 0; l < COUNT; l++) {
      const Vector part = load(value + l * LANES);
      for (int g = 0; g < HEADS; g++) sums[g][l] += part * scores[g * slots.padded + j];
    }
  }
  for (int g = 0; g < HEADS; g++)
    for (int l = 0; l < COUNT; l++) {
      const Vector scaled = sums[g][l] * inverse[g];
      std::memcpy(result + g * D + d + l * LANES, &scaled, sizeof(Vector));
    }
}

// Attention of HEADS query heads that share keys and values: each of those is loaded once. A head's own sums run as if
// it were alone. query [HEADS, D], scores: room for [HEADS, padded], result [HEADS, D].
template <int HEADS>
inline void attend(const float* query, const Slots& slots, float* scores, float scale, float* result, int64_t D) {
  const int64_t full = D / LANES * LANES;  // the part of a head that fills vectors
  float inverse[HEADS];
  Vector highest[HEADS];
  for (int g = 0; g < HEADS; g++) highest[g] = Vector{} - std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < slots.padded; j += LANES) {
    const float* key[LANES];
    for (int i = 0; i < LANES; i++) key[i] = slots.keys + slots.at(std::min(j + i, slots.count - 1)) * D;
    for (int g = 0; g < HEADS; g++) {
      Vector dot[LANES] = {};
      for (int64_t d = 0; d < full; d += LANES) {
        const Vector part = load(query + g * D + d);
        for (int i = 0; i < LANES; i++) dot[i] += part * load(key[i] + d);
      }
      Vector total = sum_lanes_of_each(dot);
      for (int64_t d = full; d < D; d++)
        for (int i = 0; i < LANES; i++) total[i] += query[g * D + d] * key[i][d];
      total *= scale;
      for (int i = slots.count - j; i < LANES; i++) total[i] = -std::numeric_limits<float>::infinity();
      highest[g] = total > highest[g] ? total : highest[g];
      std::memcpy(scores + g * slots.padded + j, &total, sizeof(Vector));
    }
  }
  for (int g = 0; g < HEADS; g++) {
    float* mine = scores + g * slots.padded;
    float peak = highest[g][0];
    for (int i = 1; i < LANES; i++) peak = std::max(peak, highest[g][i]);
    Vector totals = {};
    for (int64_t j = 0; j < slots.padded; j += LANES) {
      const Vector e = exponential(load(mine + j) - peak);
      totals += e;
      std::memcpy(mine + j, &e, sizeof(Vector));
    }
    inverse[g] = 1.0f / sum_lanes(totals);
    for (int64_t d = full; d < D; d++) {
      float sum = 0.0f;
      for (int64_t j = 0; j < slots.count; j++) sum += slots.values[slots.at(j) * D + d] * mine[j];
      result[g * D + d] = sum * inverse[g];
    }
  }
  int64_t d = 0;
  for (; d + 4 * LANES <= full; d += 4 * LANES) weigh<HEADS, 4>(slots, scores, inverse, result, d, D);
  for (; d < full; d += LANES) weigh<HEADS, 1>(slots, scores, inverse, result, d, D);
}

// y[rows, H] = x * weight / RMS(x).
void normalise_rows(const float* x, const float* weight, float* y, int64_t rows, int64_t H, float eps) {
#pragma omp parallel for schedule(static) if (rows > 8)
  for (int64_t r = 0; r < rows; r++) normalise(x + r * H, weight, y + r * H, H, eps);
}

// y[rows, I] = silu(gate) * up, with x = [gate | up] of width 2 I.
void activate(const float* x, float* y, int64_t rows, int64_t I) {
#pragma omp parallel for schedule(static) if (rows > 4)
  for (int64_t r = 0; r < rows; r++) {
    const float *gate = x + r * 2 * I, *up = gate + I;
    float* out = y + r * I;
    int64_t i = 0;
    for (; i + LANES <= I; i += LANES) {
      const Vector activated = silu(load(gate + i)) * load(up + i);
      std::memcpy(out + i, &activated, sizeof(Vector));
    }
    for (; i < I; i++) out[i] = silu(Vector{} + gate[i])[0] * up[i];
  }
}

inline void add(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i++) y[i] += x[i];
}

// Attention of T new tokens in each of B rows over the cached keys and themselves.
//
// qkv [B, T, (Hq + 2 Hkv) D]; cos, sin [B, T, D]; keys, values: this layer's cache [B, Hkv, C, D], with row_stride and
// head_stride in floats; lengths [B]: slots in use before the call; the T new ones are written behind them, rotated.
// mask: bytes [T, S] (mask_stride 0) or [B, T, S] (mask_stride T * S) over the last S >= T slots, the new ones included,
// nonzero where new token i sees slot j; null: causal, S = T. A new token sees every slot before those, and of those the
// ones its mask names, always in ascending slot order, so the
// sums are those of the same context decoded token by token. q_norm, k_norm [D] may be null. out [B, T, Hq D].
void attention(const float* qkv, const float* cos, const float* sin, const float* q_norm, const float* k_norm, float eps,
               float* keys, float* values, int64_t row_stride, int64_t head_stride, const int64_t* lengths,
               const uint8_t* mask, int64_t mask_stride, float scale, float* out, int64_t B, int64_t T, int64_t Hq,
               int64_t Hkv, int64_t D, int64_t S) {
  const int64_t width = (Hq + 2 * Hkv) * D, group = Hq / Hkv;
  int64_t work = 0;
  for (int64_t b = 0; b < B; b++) work += T * (lengths[b] + T);
#pragma omp parallel if (work > 64)
  {
    std::vector<float> rotated(group * D), scratch(D), scores;
    std::vector<int64_t> visible;
#pragma omp for schedule(static)
    for (int64_t bh = 0; bh < B * Hkv; bh++) {
      const int64_t b = bh / Hkv, h = bh % Hkv;
      for (int64_t t = 0; t < T; t++) {
        const float* token = qkv + (b * T + t) * width;
        const float *key = token + (Hq + h) * D, *value = token + (Hq + Hkv + h) * D;
        if (k_norm) normalise(key, k_norm, scratch.data(), D, eps), key = scratch.data();
        const int64_t slot = b * row_stride + h * head_stride + (lengths[b] + t) * D;
        rotate(key, cos + (b * T + t) * D, sin + (b * T + t) * D, keys + slot, D);
        std::memcpy(values + slot, value, D * sizeof(float));
      }
    }
#pragma omp for schedule(dynamic)
    for (int64_t work_item = 0; work_item < B * T * Hkv; work_item++) {
      const int64_t h = work_item % Hkv, t = work_item / Hkv % T, b = work_item / Hkv / T;
      const int64_t length = lengths[b] + T - S;
      visible.clear();
      for (int64_t j = 0; j < S; j++)
        if (mask ? mask[b * mask_stride + t * S + j] != 0 : j <= t) visible.push_back(length + j);
      const int64_t count = length + visible.size(), padded = (count + LANES - 1) / LANES * LANES;
      const float* key_base = keys + b * row_stride + h * head_stride;
      const float* value_base = values + b * row_stride + h * head_stride;
      scores.resize(3 * padded);
      const int64_t token = b * T + t;
      for (int64_t g = 0; g < group; g++) {
        const float* q = qkv + token * width + (h * group + g) * D;
        if (q_norm) normalise(q, q_norm, scratch.data(), D, eps), q = scratch.data();
        rotate(q, cos + token * D, sin + token * D, rotated.data() + g * D, D);
      }
      const Slots slots{key_base, value_base, visible.data(), length, count, padded};
      for (int64_t g = 0; g < group;) {
        const float* query = rotated.data() + g * D;
        float* result = out + (token * Hq + h * group + g) * D;
        switch (std::min<int64_t>(group - g, 3)) {
          case 3: attend<3>(query, slots, scores.data(), scale, result, D); g += 3; break;
          case 2: attend<2>(query, slots, scores.data(), scale, result, D); g += 2; break;
          default: attend<1>(query, slots, scores.data(), scale, result, D); g += 1; break;
        }
      }
    }
  }
}
}  // namespace

extern "C" {

// How many neighbouring k of bfloat16 weights lie side by side: packed[n / PANEL][k / s][n % PANEL][s].
int64_t bfloat16_side_by_side() {
#ifdef __AVX512BF16__
  return 2;
#else
  return 1;
#endif
}

void linear(const Linear* layer, const float* x, float* y, int64_t M) { apply(*layer, x, y, M); }

void rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t H, float eps) {
  normalise_rows(x, weight, y, rows, H, eps);
}

// The attention half of a decoder layer. input_norm (of the width that qkv reads), q_norm and k_norm may be null.
struct AttentionLayer {
  Linear qkv, output;
  const float *input_norm, *q_norm, *k_norm;
  int64_t query_heads, kv_heads, head_dim;
  float input_eps, head_eps;
};

// y = residual + output(attention(qkv(norm(x)))); x [B, T, qkv.inputs], residual and y [B, T, output.outputs]; the rest is
// as in `attention`.
void attention_layer(const AttentionLayer* layer, const float* x, const float* residual, const float* cos, const float* sin,
                     float* keys, float* values, int64_t row_stride, int64_t head_stride, const int64_t* lengths,
                     const uint8_t* mask, int64_t mask_stride, float* y, int64_t B, int64_t T, int64_t S) {
  const int64_t M = B * T, D = layer->head_dim, width = layer->qkv.inputs;
  const Floats normed(layer->input_norm ? M * width : 0), qkv(M * layer->qkv.outputs), attended(M * layer->query_heads * D);
  if (layer->input_norm) normalise_rows(x, layer->input_norm, normed.data, M, width, layer->input_eps);
  apply(layer->qkv, layer->input_norm ? normed.data : x, qkv.data, M);
  attention(qkv.data, cos, sin, layer->q_norm, layer->k_norm, layer->head_eps, keys, values, row_stride, head_stride,
            lengths, mask, mask_stride, (float)(1.0 / std::sqrt((double)D)), attended.data, B, T, layer->query_heads, layer->kv_heads, D,
            S);
  apply(layer->output, attended.data, y, M);
  add(residual, y, M * layer->output.outputs);
}

// The feed-forward half of a decoder layer.
struct FeedForwardLayer {
  Linear gate_up, down;
  const float* norm;
  float eps;
};

// y = x + down(silu(gate) * up), [gate | up] = gate_up(norm(x)); x and y [M, gate_up.inputs].
void feed_forward_layer(const FeedForwardLayer* layer, const float* x, float* y, int64_t M) {
  const int64_t width = layer->gate_up.inputs, inner = layer->down.inputs;
  const Floats normed(M * width), gate_up(M * 2 * inner), activated(M * inner);
  normalise_rows(x, layer->norm, normed.data, M, width, layer->eps);
  apply(layer->gate_up, normed.data, gate_up.data, M);
  activate(gate_up.data, activated.data, M, inner);
  apply(layer->down, activated.data, y, M);
  add(x, y, M * width);
}
}
