#include "linear.h"

#include <algorithm>

namespace nj {

namespace {

// Where a tile finds the two groups' weights of a k-block. `quads` yields the registers of k-quads 2i and 2i+1.
struct Q4Packed {
  static constexpr int kBytes = kQ4Bytes;
  static constexpr bool kHasMin = true;
  static void quads(const uint8_t* p, int group, int i, U8x64* even, U8x64* odd) {
    U8x64 both = load_bytes(p + group * kQ4Nibbles + i * 64);
    *even = low_nibbles(both), *odd = high_nibbles(both);
  }
  static F32x16 halves(const uint8_t* p, int index) {
    return load_f16(reinterpret_cast<const uint16_t*>(p + 2 * kQ4Nibbles) + index * kGroup);
  }
  static F32x16 scale(const uint8_t* p, int group) { return halves(p, group); }
  static F32x16 minimum(const uint8_t* p, int group) { return halves(p, 2 + group); }
  using Sum = NibbleSum;
  static Sum start(int32_t) { return no_nibbles(); }
  static Sum dot(Sum sum, U8x64 w, I32x16 x) { return dot_nibbles(sum, w, x); }
};

struct Q4Panel {
  static constexpr int kBytes = 2 * kQ8Values + 4 * kGroup * 4;
  static constexpr bool kHasMin = true;
  static void quads(const uint8_t* p, int group, int i, U8x64* even, U8x64* odd) {
    *even = load_bytes(p + group * kQ8Values + i * 128), *odd = load_bytes(p + group * kQ8Values + i * 128 + 64);
  }
  static F32x16 floats(const uint8_t* p, int index) {
    return load(reinterpret_cast<const float*>(p + 2 * kQ8Values) + index * kGroup);
  }
  static F32x16 scale(const uint8_t* p, int group) { return floats(p, group); }
  static F32x16 minimum(const uint8_t* p, int group) { return floats(p, 2 + group); }
  using Sum = NibbleSum;
  static Sum start(int32_t) { return no_nibbles(); }
  static Sum dot(Sum sum, U8x64 w, I32x16 x) { return dot_nibbles(sum, w, x); }
};

struct Q8Packed {
  static constexpr int kBytes = kQ8Bytes;
  static constexpr bool kHasMin = false;
  static void quads(const uint8_t* p, int group, int i, U8x64* even, U8x64* odd) {
    Q4Panel::quads(p, group, i, even, odd);
  }
  static F32x16 scale(const uint8_t* p, int group) {
    return load_f16(reinterpret_cast<const uint16_t*>(p + 2 * kQ8Values) + group * kGroup);
  }
  static F32x16 minimum(const uint8_t*, int) { return zero(); }
  using Sum = I32x16;
  static Sum start(int32_t correction) { return start_bytes(correction); }
  static Sum dot(Sum sum, U8x64 w, I32x16 x) { return dot_bytes(sum, w, x); }
};

inline I32x16 broadcast_quad(const int8_t* p) {
  int32_t quad;
  __builtin_memcpy(&quad, p, 4);
  return set1_int(quad);
}

struct KRange {
  int begin, end;
};

// Weights that will be needed next, asked for while the present ones are used: a few cache lines per k-block of a tile,
// so that memory works while the dot products do.
struct Upcoming {
  const uint8_t* line;
  const uint8_t* end;
  int lines_per_block;

  void request() {
    for (int i = 0; i < lines_per_block && line < end; i++, line += 64) __builtin_prefetch(line, 0, 2);
  }
};

// The tile: R rows from `row` on x G groups from `group` on, over k-blocks [begin, end); w points at k-block `begin`.
template <class Source, int R, int G>
void tile(const uint8_t* w, KRange k, const QuantisedRows& x, int row, int group, float* y, Upcoming* upcoming) {
  y += row * kPair + group * kGroup;
  F32x16 f[G][R];
  unroll<R>([&](int r) NJ_INLINE {
    unroll<G>([&](int g) NJ_INLINE { f[g][r] = k.begin == 0 ? zero() : load(y + r * kPair + g * kGroup); });
  });
  Upcoming next = *upcoming;
  size_t at = static_cast<size_t>(k.begin) * x.stride + row;
  for (int kb = k.begin; kb < k.end; kb++, w += Source::kBytes, at += x.stride) {
    const int8_t* q = x.q + at * kBlock;
    next.request();
    typename Source::Sum c[G][R];
    unroll<R>([&](int r) NJ_INLINE {
      unroll<G>([&](int g) NJ_INLINE { c[g][r] = Source::start(x.correction[at + r]); });
    });
    unroll<4>([&](int i) NJ_INLINE {
      U8x64 even[G], odd[G];
      unroll<G>([&](int g) NJ_INLINE { Source::quads(w, group + g, i, &even[g], &odd[g]); });
      unroll<R>([&](int r) NJ_INLINE {
        const I32x16 a = broadcast_quad(q + r * kBlock + 8 * i), b = broadcast_quad(q + r * kBlock + 8 * i + 4);
        unroll<G>([&](int g) NJ_INLINE { c[g][r] = Source::dot(c[g][r], even[g], a); });
        unroll<G>([&](int g) NJ_INLINE { c[g][r] = Source::dot(c[g][r], odd[g], b); });
      });
    });
    unroll<G>([&](int g) NJ_INLINE {
      const F32x16 d = Source::scale(w, group + g), m = Source::minimum(w, group + g);
      unroll<R>([&](int r) NJ_INLINE {
        if (Source::kHasMin) f[g][r] = fma(m, set1(x.scaled_sum[at + r]), f[g][r]);
        f[g][r] = fma(mul(d, set1(x.scale[at + r])), to_float(total(c[g][r])), f[g][r]);
      });
    });
  }
  *upcoming = next;
  unroll<R>([&](int r) NJ_INLINE {
    unroll<G>([&](int g) NJ_INLINE { store(y + r * kPair + g * kGroup, f[g][r]); });
  });
}

// Groups that a tile of so many rows takes at once: both, if there are registers for their sums.
constexpr int groups_at_once(int rows) { return 2 * rows <= kTileGroups * kTileRows ? 2 : 1; }

template <class Source, int R>
void tile_pair(const uint8_t* w, KRange k, const QuantisedRows& x, int row, float* y, Upcoming* upcoming) {
  constexpr int G = groups_at_once(R);
  for (int group = 0; group < 2; group += G) tile<Source, R, G>(w, k, x, row, group, y, upcoming);
}

template <class Source>
void tile_of(int rows, const uint8_t* w, KRange k, const QuantisedRows& x, int row, float* y, Upcoming* upcoming) {
  switch (rows) {
    case 1: return tile_pair<Source, 1>(w, k, x, row, y, upcoming);
    case 2: return tile_pair<Source, 2>(w, k, x, row, y, upcoming);
    case 3: return tile_pair<Source, 3>(w, k, x, row, y, upcoming);
    case 4: return tile_pair<Source, 4>(w, k, x, row, y, upcoming);
#if defined(__AVX512VNNI__)
    case 5: return tile_pair<Source, 5>(w, k, x, row, y, upcoming);
    case 6: return tile_pair<Source, 6>(w, k, x, row, y, upcoming);
#endif
  }
}

int num_tiles(int num_rows) { return (num_rows + kTileRows - 1) / kTileRows; }

// All rows in tiles of nearly equal size, none larger than kTileRows.
template <class Source>
void all_tiles(const uint8_t* w, KRange k, const QuantisedRows& x, int num_rows, float* y, Upcoming* upcoming) {
  const int tiles = num_tiles(num_rows);
  const int size = num_rows / tiles, larger = num_rows % tiles;
  for (int t = 0, row = 0; t < tiles; t++) {
    const int rows = size + (t < larger ? 1 : 0);
    tile_of<Source>(rows, w, k, x, row, y, upcoming);
    row += rows;
  }
}

void unpack_panel(const uint8_t* w, int num_blocks, uint8_t* panel) {
  for (int kb = 0; kb < num_blocks; kb++, w += Q4Packed::kBytes, panel += Q4Panel::kBytes) {
    for (int g = 0; g < 2; g++) {
      for (int i = 0; i < 4; i++) {
        U8x64 even, odd;
        Q4Packed::quads(w, g, i, &even, &odd);
        store_bytes(panel + g * kQ8Values + i * 128, even);
        store_bytes(panel + g * kQ8Values + i * 128 + 64, odd);
      }
      float* floats = reinterpret_cast<float*>(panel + 2 * kQ8Values);
      store(floats + g * kGroup, Q4Packed::scale(w, g));
      store(floats + (2 + g) * kGroup, Q4Packed::minimum(w, g));
    }
  }
}

}  // namespace

void multiply_pair(const PackedMatrix& weights, int pair, const QuantisedRows& x, int num_rows, float* y,
                   uint8_t* panel) {
  const uint8_t* w = weights.pair(pair);
  const size_t bytes = pair + 1 < weights.pairs ? weights.pair_bytes() : 0;
  const int tiles = num_tiles(num_rows), passes = 2 / groups_at_once((num_rows + tiles - 1) / tiles);
  const int steps = tiles * passes * weights.blocks, lines = static_cast<int>((bytes + 63) / 64);
  Upcoming upcoming{w + weights.pair_bytes(), w + weights.pair_bytes() + bytes, (lines + steps - 1) / steps};
  if (weights.kind == WeightKind::kQ8) return all_tiles<Q8Packed>(w, {0, weights.blocks}, x, num_rows, y, &upcoming);
  if (num_rows <= kRowsWithoutPanel) return all_tiles<Q4Packed>(w, {0, weights.blocks}, x, num_rows, y, &upcoming);
  for (int begin = 0; begin < weights.blocks; begin += kPanelBlocks) {
    const KRange k{begin, std::min(begin + kPanelBlocks, weights.blocks)};
    unpack_panel(w + static_cast<size_t>(begin) * kQ4Bytes, k.end - k.begin, panel);
    all_tiles<Q4Panel>(panel, k, x, num_rows, y, &upcoming);
  }
}

}  // namespace nj
