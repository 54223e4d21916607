// Keys and values as bytes.
#pragma once
#include <cstring>

#include "cache_kinds.h"
#include "quantise.h"

namespace nj {

// Queries as 15-bit integers, round(x * 16256 / max|x|), with one scale per 32 dimensions. multiply() yields the exact
// integer products of those with 32 dimensions of S slices of keys, 16 tokens each, in the way that costs the
// instruction set least.
#if defined(__AVX512VNNI__)

// Two dot products of bytes: q = 128 * high + low, with low in [-64, 63].
template <int N>
struct IntQueries {
  static constexpr int kQueriesForTwo = 4;
  int32_t high[N][kMaxHeadDim / 4], low[N][kMaxHeadDim / 4];  // four bytes each
  float scale[N][kMaxHeadDim / kDimBlock];
  int32_t high_correction[N][kMaxHeadDim / kDimBlock], low_correction[N][kMaxHeadDim / kDimBlock];

  IntQueries(const float* const* query, int head_dim) {
    for (int j = 0; j < N; j++)
      for (int d = 0; d < head_dim; d += kDimBlock) split(query[j] + d, j, d);
  }

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

  template <int S>
  void multiply(const uint8_t* const* slices, int b, UpcomingLines* upcoming, I32x16 (*product)[S]) const {
    UpcomingLines next = *upcoming;
    I32x16 h[N][S], l[N][S];
    unroll<N>([&](int j) NJ_INLINE {
      unroll<S>([&](int s) NJ_INLINE {
        h[j][s] = start_bytes(high_correction[j][b]), l[j][s] = start_bytes(low_correction[j][b]);
      });
    });
    for (int quad = b * 8; quad < b * 8 + 8; quad++) {
      U8x64 keys[S];
      unroll<S>([&](int s) NJ_INLINE { keys[s] = load_bytes(slices[s] + quad * 64); });
      for (int i = 0; i < 3; i++) next.request();
      unroll<N>([&](int j) NJ_INLINE {
        const I32x16 qh = set1_int(high[j][quad]), ql = set1_int(low[j][quad]);
        unroll<S>([&](int s) NJ_INLINE {
          h[j][s] = dot_bytes(h[j][s], keys[s], qh), l[j][s] = dot_bytes(l[j][s], keys[s], ql);
        });
      });
    }
    *upcoming = next;
    unroll<N>([&](int j) NJ_INLINE {
      unroll<S>([&](int s) NJ_INLINE { product[j][s] = add_int(shift_left_7(h[j][s]), l[j][s]); });
    });
  }
};

#else

// Keys widened to 16 bits once for all queries: a multiplication of bytes would need two, each widened afterwards.
template <int N>
struct IntQueries {
  static constexpr int kQueriesForTwo = 0;
  int16_t query[N][kMaxHeadDim];
  float scale[N][kMaxHeadDim / kDimBlock];
  int32_t correction[N][kMaxHeadDim / kDimBlock];

  IntQueries(const float* const* from, int head_dim) {
    for (int j = 0; j < N; j++)
      for (int d = 0; d < head_dim; d += kDimBlock) quantise(from[j] + d, j, d);
  }

  void quantise(const float* x, int j, int d) {
    const F32x16 values[2] = {load(x), load(x + 16)};
    float inverse;
    scale[j][d / kDimBlock] = scale_for(reduce_max_abs_bits(values[0], values[1]), 16256.0f, &inverse);
    I32x16 sum = set1_int(0);
    for (int i = 0; i < 2; i++) {
      const I32x16 q = round_to_int(mul(inverse == 0.0f ? zero() : values[i], set1(inverse)));
      store_as_int16(query[j] + d + 16 * i, q);
      sum = add_int(sum, q);
    }
    correction[j][d / kDimBlock] = -128 * reduce_add_int(sum);
  }

  template <int S>
  void multiply(const uint8_t* const* slices, int b, UpcomingLines* upcoming, I32x16 (*product)[S]) const {
    UpcomingLines next = *upcoming;
    unroll<S>([&](int s) NJ_INLINE {
      I32x16 sum[2][N];  // of 8 tokens each: a token's even and odd pairs of dimensions side by side
      unroll<2>([&](int half) NJ_INLINE {
        unroll<N>([&](int j) NJ_INLINE { sum[half][j] = set1_int(0); });
        for (int quad = b * 8; quad < b * 8 + 8; quad++) {
          const I16x32 keys = load_uint8_as_int16(slices[s] + quad * 64 + half * 32);
          next.request();
          unroll<N>([&](int j) NJ_INLINE {
            sum[half][j] = dot_int16(sum[half][j], keys, set1_four(query[j] + quad * 4));
          });
        }
      });
      unroll<N>([&](int j) NJ_INLINE {
        product[j][s] = add_int(add_neighbours(sum[0][j], sum[1][j]), set1_int(correction[j][b]));
      });
    });
    *upcoming = next;
  }
};

#endif

// Bytes with one scale per token and 32 dimensions:
//   keys + 128 [head_dim / 4][16 tokens][4], scales of keys [head_dim / 32][16 tokens],
//   values [8 pairs of tokens][head_dim][2], scales of values [head_dim / 32][16 tokens].
// Scores are integer dot products with the query as 15-bit integers, one scale per 32 dimensions; so are the weighted
// values. Against the error of the stored bytes that of 15 bits is nothing.
struct Int8Slice {
  static constexpr int kQueriesForTwo = IntQueries<1>::kQueriesForTwo;
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
  using Queries = IntQueries<N>;

  template <int N, int S>
  static void score(const uint8_t* const* slices, const Queries<N>& queries, int head_dim, UpcomingLines* upcoming,
                    F32x16 (*scores)[2]) {
    F32x16 sum[N][S];
    unroll<N>([&](int j) NJ_INLINE { unroll<S>([&](int s) NJ_INLINE { sum[j][s] = zero(); }); });
    for (int b = 0; b < head_dim / kDimBlock; b++) {
      I32x16 product[N][S];
      queries.multiply(slices, b, upcoming, product);
      unroll<S>([&](int s) NJ_INLINE {
        const F32x16 key_scale = load(scales(slices[s], head_dim, b * kDimBlock));
        unroll<N>([&](int j) NJ_INLINE {
          sum[j][s] = fma(mul(key_scale, set1(queries.scale[j][b])), to_float(product[j][s]), sum[j][s]);
        });
      });
    }
    unroll<N>([&](int j) NJ_INLINE { unroll<S>([&](int s) NJ_INLINE { scores[j][s] = sum[j][s]; }); });
  }

  // The weights times the values' scales become 15-bit integers, one scale per query, tile and 32 dimensions.
  template <int N>
  static void accumulate(const WeightedTile<N>& tile, int head_dim, int dim, UpcomingLines* upcoming, float* out) {
    alignas(64) int16_t weight[N][2 * kSlice];
    float scale[N];
    for (int j = 0; j < N; j++) scale[j] = weigh_values(tile, j, head_dim, dim, weight[j]);
    // So many of the two halves at a time as the registers hold sums of.
    for (int half = 0; half < 2; half += kTileGroups) {
      UpcomingLines next = *upcoming;
      const int at = dim + half * kSlice;
      I32x16 sum[N][kTileGroups];
      unroll<N>([&](int j) NJ_INLINE { unroll<kTileGroups>([&](int h) NJ_INLINE { sum[j][h] = set1_int(0); }); });
      for (int pair = 0; 2 * pair < tile.num_keys; pair++) {
        const int8_t* values = reinterpret_cast<const int8_t*>(tile.slices[pair / 8] + value_offset(head_dim)) +
                               (pair % 8 * head_dim + at) * 2;
        I16x32 v[kTileGroups];
        unroll<kTileGroups>([&](int h) NJ_INLINE { v[h] = load_int8_as_int16(values + 2 * kSlice * h); });
        unroll<kTileGroups>([&](int) NJ_INLINE { next.request(); });
        unroll<N>([&](int j) NJ_INLINE {
          int32_t two;
          std::memcpy(&two, weight[j] + 2 * pair, 4);
          const I32x16 p = set1_int(two);
          unroll<kTileGroups>([&](int h) NJ_INLINE { sum[j][h] = dot_int16(sum[j][h], v[h], p); });
        });
      }
      *upcoming = next;
      unroll<N>([&](int j) NJ_INLINE {
        unroll<kTileGroups>([&](int h) NJ_INLINE {
          float* to = out + j * head_dim + at + h * kSlice;
          store(to, fma(set1(scale[j]), to_float(sum[j][h]), load(to)));
        });
      });
    }
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
