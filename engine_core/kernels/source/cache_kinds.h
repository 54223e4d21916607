// How a slice of the cache (16 tokens of one KV head) stores keys and values, one class per kind: here those of floats,
// in int8_slice.h that of bytes.
//
// Each kind has: bytes(head_dim); write(); Queries<N>, the queries as its scores need them; score(), the 16 scores per
// query and slice; accumulate(), which adds a tile's weighted values to 32 dimensions of the result, keys in ascending
// order.
#pragma once
#include "attention.h"

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

}  // namespace nj
