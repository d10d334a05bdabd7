// Norms, rotary embedding and attention over a KV cache.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

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
