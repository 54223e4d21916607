// How a slice of the cache (16 tokens of one KV head) stores keys and values, one class per kind.
//
// Each kind has: bytes(head_dim); write(); Queries<N>, the queries as its scores need them; score(), the 16 scores per
// query and slice; accumulate(), which adds a tile's weighted values to 32 dimensions of the result, keys in ascending
// order.
#pragma once
#include <cstring>

#include "attention.h"
#include "quantise.h"

namespace nj {

// Cache lines that will be needed next, asked for one by one while the present ones are used. Loops work on a copy,
// which stays in registers.
struct UpcomingLines {
  const uint8_t* line;
  const uint8_t* end;

  void request() {
    if (line >= end) return;
    __builtin_prefetch(line, 0, 3);
    line += 64;
  }
  void request_rest() {
    while (line < end) request();
  }
};

// A tile of keys: two slices, the first num_keys tokens of which are there. weight[j][s] is a register of query j's
// softmax weights, zero where it may not look.
template <int N>
struct WeightedTile {
  const uint8_t* const* slices;
  int num_keys;
  const F32x16 (*weight)[2];
};

struct F32Element {
  using Type = float;
  static F32x16 read(const Type* p) { return load(p); }
  static void write(Type* p, F32x16 a) { store(p, a); }
};
struct F16Element {
  using Type = uint16_t;
  static F32x16 read(const Type* p) { return load_f16(p); }
  // A value beyond the range of half is clamped, not made infinite; NaN stays NaN.
  static void write(Type* p, F32x16 a) {
    store_f16(p, min_keep_nan(set1(65504.0f), max_keep_nan(set1(-65504.0f), a)));
  }
};
struct BF16Element {
  using Type = uint16_t;
  static F32x16 read(const Type* p) { return load_bf16(p); }
  static void write(Type* p, F32x16 a) { store_bf16(p, a); }
};

// Floats: keys [head_dim][16 tokens], then values [16 tokens][head_dim].
template <class Element>
struct FloatSlice {
  using Type = typename Element::Type;
  static constexpr int kQueriesForTwo = 6;  // so many queries can be scored against two slices at once
  static size_t bytes(int head_dim) { return 2 * kSlice * sizeof(Type) * head_dim; }

  static void write(uint8_t* slice, int head_dim, const KeyOrValue& from) {
    Type* to = reinterpret_cast<Type*>(slice);
    if (from.is_value) {
      to += (kSlice + from.lane) * head_dim + from.dim;
      Element::write(to, from.low);
      Element::write(to + 16, from.high);
      return;
    }
    Type converted[kDimBlock];
    Element::write(converted, from.low);
    Element::write(converted + 16, from.high);
    for (int i = 0; i < kDimBlock; i++) to[(from.dim + i) * kSlice + from.lane] = converted[i];
  }

  template <int N>
  struct Queries {
    const float* const* query;
    Queries(const float* const* queries, int) : query(queries) {}
  };

  // S slices at once: one chain of sums over the dimensions per query and slice.
  template <int N, int S>
  static void score(const uint8_t* const* slices, const Queries<N>& queries, int head_dim, UpcomingLines* upcoming,
                    F32x16 (*scores)[2]) {
    F32x16 sum[N][S];
    unroll<N>([&](int j) NJ_INLINE { unroll<S>([&](int s) NJ_INLINE { sum[j][s] = zero(); }); });
    UpcomingLines next = *upcoming;
    for (int d = 0; d < head_dim; d++) {
      F32x16 keys[S];
      unroll<S>([&](int s) NJ_INLINE {
        keys[s] = Element::read(reinterpret_cast<const Type*>(slices[s]) + d * kSlice);
      });
      for (size_t i = 0; i < sizeof(Type) / 2; i++) next.request();
      unroll<N>([&](int j) NJ_INLINE {
        const F32x16 q = set1(queries.query[j][d]);
        unroll<S>([&](int s) NJ_INLINE { sum[j][s] = fma(q, keys[s], sum[j][s]); });
      });
    }
    *upcoming = next;
    unroll<N>([&](int j) NJ_INLINE { unroll<S>([&](int s) NJ_INLINE { scores[j][s] = sum[j][s]; }); });
  }

  template <int N>
  static void accumulate(const WeightedTile<N>& tile, int head_dim, int dim, UpcomingLines* upcoming, float* out) {
    alignas(64) float weight[N][2 * kSlice];
    F32x16 low[N], high[N];
    unroll<N>([&](int j) NJ_INLINE {
      store(weight[j], tile.weight[j][0]), store(weight[j] + kSlice, tile.weight[j][1]);
      low[j] = load(out + j * head_dim + dim), high[j] = load(out + j * head_dim + dim + 16);
    });
    UpcomingLines next = *upcoming;
    for (int key = 0; key < tile.num_keys; key++) {
      const Type* slice = reinterpret_cast<const Type*>(tile.slices[key / kSlice]);
      const Type* value = slice + (kSlice + key % kSlice) * head_dim + dim;
      const F32x16 a = Element::read(value), b = Element::read(value + 16);
      next.request();
      unroll<N>([&](int j) NJ_INLINE {
        const F32x16 p = set1(weight[j][key]);
        low[j] = fma(p, a, low[j]), high[j] = fma(p, b, high[j]);
      });
    }
    *upcoming = next;
    unroll<N>([&](int j) NJ_INLINE {
      store(out + j * head_dim + dim, low[j]), store(out + j * head_dim + dim + 16, high[j]);
    });
  }
};

// Bytes with one scale per token and 32 dimensions:
//   keys + 128 [head_dim / 4][16 tokens][4], scales of keys [head_dim / 32][16 tokens],
//   values [8 pairs of tokens][head_dim][2], scales of values [head_dim / 32][16 tokens].
// Scores are integer dot products with the query as 15-bit integers (a high and a low byte), one scale per 32
// dimensions; so are the weighted values. Against the error of the stored bytes that of 15 bits is nothing.
struct Int8Slice {
  static constexpr int kQueriesForTwo = 4;
  static size_t bytes(int head_dim) { return 2 * (kSlice * head_dim + head_dim / kDimBlock * kSlice * sizeof(float)); }
  static size_t value_offset(int head_dim) { return bytes(head_dim) / 2; }
  static const float* scales(const uint8_t* half, int head_dim, int dim) {
    return reinterpret_cast<const float*>(half + kSlice * head_dim) + dim / kDimBlock * kSlice;
  }

  static void write(uint8_t* slice, int head_dim, const KeyOrValue& from) {
    int8_t q[kDimBlock];
    float scale, scaled_sum;
    int32_t correction;
    quantise_block(from.low, from.high, {q, &scale, &scaled_sum, &correction, 1}, 0, 0);
    uint8_t* half = slice + (from.is_value ? value_offset(head_dim) : 0);
    const_cast<float*>(scales(half, head_dim, from.dim))[from.lane] = scale;
    if (from.is_value) {
      int8_t* to = reinterpret_cast<int8_t*>(half) + (from.lane / 2 * head_dim + from.dim) * 2 + from.lane % 2;
      for (int i = 0; i < kDimBlock; i++) to[2 * i] = q[i];
      return;
    }
    for (int i = 0; i < kDimBlock; i += 4) {
      uint32_t quad;
      std::memcpy(&quad, q + i, 4);
      quad ^= 0x80808080u;
      std::memcpy(half + ((from.dim + i) / 4 * kSlice + from.lane) * 4, &quad, 4);
    }
  }

  template <int N>
  struct Queries {
    int32_t high[N][kMaxHeadDim / 4], low[N][kMaxHeadDim / 4];  // four bytes each
    float scale[N][kMaxHeadDim / kDimBlock];
    int32_t high_correction[N][kMaxHeadDim / kDimBlock], low_correction[N][kMaxHeadDim / kDimBlock];

    Queries(const float* const* query, int head_dim) {
      for (int j = 0; j < N; j++)
        for (int d = 0; d < head_dim; d += kDimBlock) split(query[j] + d, j, d);
    }

    // 32 values as round(x * 16256 / max|x|) = 128 * high + low, with low in [-64, 63].
    void split(const float* x, int j, int d) {
      const F32x16 values[2] = {load(x), load(x + 16)};
      float inverse;
      scale[j][d / kDimBlock] = scale_for(reduce_max_abs_bits(values[0], values[1]), 16256.0f, &inverse);
      I32x16 high_sum = set1_int(0), low_sum = set1_int(0);
      for (int i = 0; i < 2; i++) {
        const I32x16 q = round_to_int(mul(inverse == 0.0f ? zero() : values[i], set1(inverse)));
        const I32x16 h = shift_right_7(add_int(q, set1_int(64))), l = sub_int(q, shift_left_7(h));
        store_as_int8(reinterpret_cast<int8_t*>(high[j] + (d + 16 * i) / 4), h);
        store_as_int8(reinterpret_cast<int8_t*>(low[j] + (d + 16 * i) / 4), l);
        high_sum = add_int(high_sum, h), low_sum = add_int(low_sum, l);
      }
      high_correction[j][d / kDimBlock] = -128 * reduce_add_int(high_sum);
      low_correction[j][d / kDimBlock] = -128 * reduce_add_int(low_sum);
    }
  };

  template <int N, int S>
  static void score(const uint8_t* const* slices, const Queries<N>& queries, int head_dim, UpcomingLines* upcoming,
                    F32x16 (*scores)[2]) {
    F32x16 sum[N][S];
    unroll<N>([&](int j) NJ_INLINE { unroll<S>([&](int s) NJ_INLINE { sum[j][s] = zero(); }); });
    UpcomingLines next = *upcoming;
    for (int b = 0; b < head_dim / kDimBlock; b++) {
      I32x16 high[N][S], low[N][S];
      unroll<N>([&](int j) NJ_INLINE {
        unroll<S>([&](int s) NJ_INLINE {
          high[j][s] = start_bytes(queries.high_correction[j][b]);
          low[j][s] = start_bytes(queries.low_correction[j][b]);
        });
      });
      for (int quad = b * 8; quad < b * 8 + 8; quad++) {
        U8x64 keys[S];
        unroll<S>([&](int s) NJ_INLINE { keys[s] = load_bytes(slices[s] + quad * 64); });
        for (int i = 0; i < 3; i++) next.request();
        unroll<N>([&](int j) NJ_INLINE {
          const I32x16 h = set1_int(queries.high[j][quad]), l = set1_int(queries.low[j][quad]);
          unroll<S>([&](int s) NJ_INLINE {
            high[j][s] = dot_bytes(high[j][s], keys[s], h), low[j][s] = dot_bytes(low[j][s], keys[s], l);
          });
        });
      }
      unroll<S>([&](int s) NJ_INLINE {
        const F32x16 key_scale = load(scales(slices[s], head_dim, b * kDimBlock));
        unroll<N>([&](int j) NJ_INLINE {
          const F32x16 product = to_float(add_int(shift_left_7(high[j][s]), low[j][s]));
          sum[j][s] = fma(mul(key_scale, set1(queries.scale[j][b])), product, sum[j][s]);
        });
      });
    }
    *upcoming = next;
    unroll<N>([&](int j) NJ_INLINE { unroll<S>([&](int s) NJ_INLINE { scores[j][s] = sum[j][s]; }); });
  }

  // The weights times the values' scales become 15-bit integers, one scale per query, tile and 32 dimensions.
  template <int N>
  static void accumulate(const WeightedTile<N>& tile, int head_dim, int dim, UpcomingLines* upcoming, float* out) {
    alignas(64) int16_t weight[N][2 * kSlice];
    float scale[N];
    for (int j = 0; j < N; j++) scale[j] = weigh_values(tile, j, head_dim, dim, weight[j]);
    I32x16 low[N], high[N];
    unroll<N>([&](int j) NJ_INLINE { low[j] = high[j] = set1_int(0); });
    UpcomingLines next = *upcoming;
    for (int pair = 0; 2 * pair < tile.num_keys; pair++) {
      const int8_t* values = reinterpret_cast<const int8_t*>(tile.slices[pair / 8] + value_offset(head_dim)) +
                             (pair % 8 * head_dim + dim) * 2;
      const I16x32 a = load_int8_as_int16(values), b = load_int8_as_int16(values + 32);
      next.request();
      next.request();
      unroll<N>([&](int j) NJ_INLINE {
        int32_t two;
        std::memcpy(&two, weight[j] + 2 * pair, 4);
        const I32x16 p = set1_int(two);
        low[j] = dot_int16(low[j], a, p), high[j] = dot_int16(high[j], b, p);
      });
    }
    *upcoming = next;
    unroll<N>([&](int j) NJ_INLINE {
      float* to = out + j * head_dim + dim;
      store(to, fma(set1(scale[j]), to_float(low[j]), load(to)));
      store(to + 16, fma(set1(scale[j]), to_float(high[j]), load(to + 16)));
    });
  }

  // Scales of tokens that are not there yet may be anything, so their lanes are made zero.
  template <int N>
  static float weigh_values(const WeightedTile<N>& tile, int j, int head_dim, int dim, int16_t* weight) {
    F32x16 w[2];
    for (int s = 0; s < 2; s++) {
      const int present = tile.num_keys - s * kSlice;
      w[s] = zero();
      if (present <= 0) continue;
      const F32x16 value_scale = load(scales(tile.slices[s] + value_offset(head_dim), head_dim, dim));
      w[s] = zero_from(mul(tile.weight[j][s], value_scale), present);
    }
    float inverse;
    const float scale = scale_for(reduce_max_abs_bits(w[0], w[1]), 16256.0f, &inverse);
    for (int s = 0; s < 2; s++)
      store_as_int16(weight + s * kSlice, round_to_int(mul(inverse == 0.0f ? zero() : w[s], set1(inverse))));
    return scale;
  }
};

}  // namespace nj
