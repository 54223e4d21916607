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
  static I32x16 start(int32_t) { return set1_int(0); }
  static I32x16 dot(I32x16 sum, U8x64 w, I32x16 x) { return dot_nibbles(sum, w, x); }
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
  static I32x16 start(int32_t) { return set1_int(0); }
  static I32x16 dot(I32x16 sum, U8x64 w, I32x16 x) { return dot_nibbles(sum, w, x); }
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
  static I32x16 start(int32_t correction) { return start_bytes(correction); }
  static I32x16 dot(I32x16 sum, U8x64 w, I32x16 x) { return dot_bytes(sum, w, x); }
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

// The tile: R rows from `row` on x 2 groups over k-blocks [begin, end); w points at k-block `begin`.
template <class Source, int R>
void tile(const uint8_t* w, KRange k, const QuantisedRows& x, int row, float* y, Upcoming* upcoming) {
  F32x16 f[2][R];
  unroll<R>([&](int r) NJ_INLINE {
    const float* from = y + (row + r) * kPair;
    f[0][r] = k.begin == 0 ? zero() : load(from), f[1][r] = k.begin == 0 ? zero() : load(from + kGroup);
  });
  Upcoming next = *upcoming;
  size_t at = static_cast<size_t>(k.begin) * x.stride + row;
  for (int kb = k.begin; kb < k.end; kb++, w += Source::kBytes, at += x.stride) {
    const int8_t* q = x.q + at * kBlock;
    next.request();
    I32x16 c[2][R];
    unroll<R>([&](int r) NJ_INLINE { c[0][r] = c[1][r] = Source::start(x.correction[at + r]); });
    unroll<4>([&](int i) NJ_INLINE {
      U8x64 even[2], odd[2];
      Source::quads(w, 0, i, &even[0], &odd[0]);
      Source::quads(w, 1, i, &even[1], &odd[1]);
      unroll<R>([&](int r) NJ_INLINE {
        const I32x16 a = broadcast_quad(q + r * kBlock + 8 * i), b = broadcast_quad(q + r * kBlock + 8 * i + 4);
        c[0][r] = Source::dot(c[0][r], even[0], a), c[1][r] = Source::dot(c[1][r], even[1], a);
        c[0][r] = Source::dot(c[0][r], odd[0], b), c[1][r] = Source::dot(c[1][r], odd[1], b);
      });
    });
    const F32x16 d0 = Source::scale(w, 0), d1 = Source::scale(w, 1);
    const F32x16 m0 = Source::minimum(w, 0), m1 = Source::minimum(w, 1);
    unroll<R>([&](int r) NJ_INLINE {
      const F32x16 s = set1(x.scale[at + r]);
      if (Source::kHasMin) {
        const F32x16 u = set1(x.scaled_sum[at + r]);
        f[0][r] = fma(m0, u, f[0][r]), f[1][r] = fma(m1, u, f[1][r]);
      }
      f[0][r] = fma(mul(d0, s), to_float(c[0][r]), f[0][r]);
      f[1][r] = fma(mul(d1, s), to_float(c[1][r]), f[1][r]);
    });
  }
  *upcoming = next;
  unroll<R>([&](int r) NJ_INLINE {
    store(y + (row + r) * kPair, f[0][r]), store(y + (row + r) * kPair + kGroup, f[1][r]);
  });
}

template <class Source>
void tile_of(int rows, const uint8_t* w, KRange k, const QuantisedRows& x, int row, float* y, Upcoming* upcoming) {
  switch (rows) {
    case 1: return tile<Source, 1>(w, k, x, row, y, upcoming);
    case 2: return tile<Source, 2>(w, k, x, row, y, upcoming);
#if defined(__AVX512VNNI__)
    case 3: return tile<Source, 3>(w, k, x, row, y, upcoming);
    case 4: return tile<Source, 4>(w, k, x, row, y, upcoming);
    case 5: return tile<Source, 5>(w, k, x, row, y, upcoming);
    case 6: return tile<Source, 6>(w, k, x, row, y, upcoming);
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
  const int steps = num_tiles(num_rows) * weights.blocks, lines = static_cast<int>((bytes + 63) / 64);
  Upcoming upcoming{w + weights.pair_bytes(), w + weights.pair_bytes() + bytes, (lines + steps - 1) / steps};
  if (weights.kind == WeightKind::kQ8) return all_tiles<Q8Packed>(w, {0, weights.blocks}, x, num_rows, y, &upcoming);
  if (num_rows <= kTileRows) return all_tiles<Q4Packed>(w, {0, weights.blocks}, x, num_rows, y, &upcoming);
  for (int begin = 0; begin < weights.blocks; begin += kPanelBlocks) {
    const KRange k{begin, std::min(begin + kPanelBlocks, weights.blocks)};
    unpack_panel(w + static_cast<size_t>(begin) * kQ4Bytes, k.end - k.begin, panel);
    all_tiles<Q4Panel>(panel, k, x, num_rows, y, &upcoming);
  }
}

}  // namespace nj
