// Sixteen-lane vectors: the only place that knows instruction sets.
//
// Both variants perform the same elementwise operations in the same order, so a result has the same bits with AVX-512
// and with AVX2. Reductions use one fixed tree. Nothing here may be compiled with -ffast-math or contracted by the
// compiler: every fused multiply-add is written out.
#pragma once
#include <cstddef>
#include <cstdint>
#include <immintrin.h>
#include <utility>

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#error "compile with AVX-512 VNNI or with AVX2, FMA and F16C"
#endif

#define NJ_INLINE __attribute__((always_inline))

namespace nj {

// f(0), f(1), …, f(N-1), written out: an array of registers lives in registers only if every index is a constant.
template <class F, int... I>
inline NJ_INLINE void unroll_over(F&& f, std::integer_sequence<int, I...>) { (f(I), ...); }
template <int N, class F>
inline NJ_INLINE void unroll(F&& f) { unroll_over(f, std::make_integer_sequence<int, N>{}); }

constexpr float kInfinity = __builtin_inff();
constexpr float kQuietNaN = __builtin_nanf("");

// 2^x to 2.5e-9 before rounding (polynomial through the Chebyshev nodes of degree 6 on [-0.5, 0.5]); exactly 0 below
// -126, NaN stays NaN, x must not exceed 127.
inline F32x16 exp2_lanes(F32x16 x) {
  F32x16 clamped = max_keep_nan(set1(-126.0f), x);
  I32x16 n = round_to_int(clamped);
  F32x16 r = sub(clamped, to_float(n));
  F32x16 p = set1(1.5461444551858e-4f);
  p = fma(p, r, set1(1.3400428177951e-3f));
  p = fma(p, r, set1(9.6180566790259e-3f));
  p = fma(p, r, set1(5.5503272266685e-2f));
  p = fma(p, r, set1(2.4022650922284e-1f));
  p = fma(p, r, set1(6.9314720670283e-1f));
  p = fma(p, r, set1(1.0f));
  return zero_where_less(add_exponent(p, n), x, set1(-126.0f));
}

// x * sigmoid(x), element by element.
inline F32x16 silu_lanes(F32x16 x) {
  F32x16 e = exp2_lanes(min_keep_nan(set1(126.0f), mul(x, set1(-1.44269504088896341f))));
  return div(x, add(set1(1.0f), e));
}

// What a step needs of the floating-point unit whatever its caller set: round to nearest, denormals are zero.
class RoundingScope {
 public:
  RoundingScope() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80 | 0x8040); }
  ~RoundingScope() { _mm_setcsr(saved_); }
  RoundingScope(const RoundingScope&) = delete;
  RoundingScope& operator=(const RoundingScope&) = delete;

 private:
  unsigned saved_;
};

}  // namespace nj
