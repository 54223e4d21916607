// Activations as int8 with one scale per 32 consecutive values of a row, and where they lie in memory.
#pragma once
#include "simd.h"

namespace nj {

constexpr int kBlock = 32;

// Quantised rows of one row block: for each k-block the rows lie side by side.
// q[(kb*stride + row)*32 + i], scale[kb*stride + row]; scaled_sum = scale * sum(q), correction = -128 * sum(q).
struct QuantisedRows {
  int8_t* q;
  float* scale;
  float* scaled_sum;
  int32_t* correction;
  int stride;
};

// The scale that maps the largest absolute value, given as bits, to `steps`, and its inverse. Tiny values count as zero
// (both 0); an infinite or NaN value gives scale NaN and inverse 0.
inline float scale_for(uint32_t largest_bits, float steps, float* inverse) {
  float largest;
  __builtin_memcpy(&largest, &largest_bits, 4);
  const bool finite = largest_bits < 0x7F800000u, usable = finite && largest >= 1e-30f;
  *inverse = usable ? steps / largest : 0.0f;
  return usable ? largest * (1.0f / steps) : finite ? 0.0f : kQuietNaN;
}

// Quantise one block of one row: q = round(x * 127 / max|x|). A block with an infinite or NaN value gets scale NaN, so
// that everything computed from this row is NaN and no other row is touched.
inline void quantise_block(F32x16 low, F32x16 high, const QuantisedRows& to, int kb, int row) {
  const size_t at = static_cast<size_t>(kb) * to.stride + row;
  float inverse;
  const float scale = scale_for(reduce_max_abs_bits(low, high), 127.0f, &inverse);
  if (inverse == 0.0f) low = high = zero();
  I32x16 a = round_to_int(mul(low, set1(inverse))), b = round_to_int(mul(high, set1(inverse)));
  store_as_int8(to.q + at * kBlock, a);
  store_as_int8(to.q + at * kBlock + 16, b);
  const int32_t sum = reduce_add_int(add_int(a, b));
  to.scale[at] = scale;
  to.scaled_sum[at] = scale * static_cast<float>(sum);
  to.correction[at] = -128 * sum;
}

}  // namespace nj
