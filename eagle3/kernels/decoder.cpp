// The arithmetic of a decoder layer for the few rows of decoding, on a CPU, in float32.
//
// Why it exists: a decoding step reads every weight once, so verifying a handful of draft tokens should cost about as
// much as one vanilla step. The BLAS behind torch.nn.functional.linear can cost two to three times as much for 2 to 16
// rows as for one (benchmarks/linear.py shows it for the machine at hand), which hides the gain of speculation.
//
// Every result depends on its own row alone: a sum runs in an order given by the row's own content, never by how many
// rows are computed beside it or how they are spread over threads. Verifying a tree of 16 tokens therefore gives, bit
// for bit, the logits of single vanilla steps, and a row of a batch those of the row alone.
#include <cmath>

#include "attention.h"
#include "linear.h"
#include "vectors.h"

namespace {

inline Vector silu(Vector x) {
  const Vector negated = -x > 88.0f ? Vector{} + 88.0f : -x;  // beyond, the result is zero in any case
  return x / (1.0f + exponential(negated));
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
