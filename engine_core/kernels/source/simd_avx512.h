// Sixteen lanes in one AVX-512 register; integer dot products by VNNI.
#pragma once

namespace nj {

constexpr const char* kInstructionSet = "avx512_vnni";
constexpr int kTileGroups = 2, kTileRows = 6;  // 12 integer and 12 float accumulators of the 32 registers
constexpr int kRowsWithoutPanel = kTileRows;

struct F32x16 { __m512 v; };
struct I32x16 { __m512i v; };
struct U8x64 { __m512i v; };
struct I16x32 { __m512i v; };

inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
inline F32x16 set1(float a) { return {_mm512_set1_ps(a)}; }
inline F32x16 zero() { return {_mm512_setzero_ps()}; }
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 sqrt_lanes(F32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The second operand wins when either is NaN.
inline F32x16 max_keep_nan(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min_keep_nan(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 swap_pairs(F32x16 a) { return {_mm512_permute_ps(a.v, 0xB1)}; }
inline F32x16 zero_where_less(F32x16 value, F32x16 a, F32x16 b) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_NLT_UQ), value.v)};
}
// Lanes from n on become minus infinity.
inline F32x16 keep_first(F32x16 a, int n) {
  __mmask16 keep = n >= 16 ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
  return {_mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), keep, a.v)};
}
// Lanes from n on become zero, whatever they were.
inline F32x16 zero_from(F32x16 a, int n) {
  __mmask16 keep = n >= 16 ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
  return {_mm512_maskz_mov_ps(keep, a.v)};
}

inline I32x16 round_to_int(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32x16 set1_int(int32_t a) { return {_mm512_set1_epi32(a)}; }
inline I32x16 add_int(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I32x16 sub_int(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline I32x16 shift_left_7(I32x16 a) { return {_mm512_slli_epi32(a.v, 7)}; }
inline I32x16 shift_right_7(I32x16 a) { return {_mm512_srai_epi32(a.v, 7)}; }
inline I32x16 load_int(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_int(int32_t* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
inline F32x16 add_exponent(F32x16 a, I32x16 n) {
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a.v), _mm512_slli_epi32(n.v, 23)))};
}
inline void store_as_int8(int8_t* p, I32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

// best = lanes of value where they are larger, or equal with a lower index.
inline void keep_larger(F32x16 value, I32x16 index, F32x16* best, I32x16* best_index) {
  __mmask16 larger = _mm512_cmp_ps_mask(value.v, best->v, _CMP_GT_OQ);
  __mmask16 equal = _mm512_cmp_ps_mask(value.v, best->v, _CMP_EQ_OQ);
  larger |= _mm512_mask_cmplt_epi32_mask(equal, index.v, best_index->v);
  best->v = _mm512_mask_mov_ps(best->v, larger, value.v);
  best_index->v = _mm512_mask_mov_epi32(best_index->v, larger, index.v);
}

inline __m256 upper_half(__m512 a) { return _mm512_extractf32x8_ps(a, 1); }

inline float reduce_max(F32x16 a) {
  __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline float reduce_add(F32x16 a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), upper_half(a.v));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline int32_t reduce_add_int(I32x16 a) { return _mm512_reduce_add_epi32(a.v); }

// The largest absolute value as an integer bit pattern, which is 0x7F800000 or more if any lane is infinite or NaN.
inline uint32_t reduce_max_abs_bits(F32x16 a, F32x16 b) {
  const __m512i sign_off = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i m = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(a.v), sign_off),
                               _mm512_and_si512(_mm512_castps_si512(b.v), sign_off));
  __m256i h = _mm256_max_epi32(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4E));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(q));
}

inline F32x16 load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_f16(uint16_t* p, F32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline F32x16 load_bf16(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline void store_bf16(uint16_t* p, F32x16 a) {
  __m512i bits = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

// --- integer dot products: 16 columns, 4 consecutive k per lane, times the same 4 activations ---
inline U8x64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(uint8_t* p, U8x64 a) { _mm512_storeu_si512(p, a.v); }
inline U8x64 low_nibbles(U8x64 a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline U8x64 high_nibbles(U8x64 a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
using NibbleSum = I32x16;
inline NibbleSum no_nibbles() { return set1_int(0); }
inline I32x16 total(I32x16 sum) { return sum; }
inline NibbleSum dot_nibbles(NibbleSum sum, U8x64 w, I32x16 x) { return {_mm512_dpbusd_epi32(sum.v, w.v, x.v)}; }
// Bytes are stored with 128 added; the accumulator starts at the correction -128 * sum(x).
inline I32x16 start_bytes(int32_t correction) { return {_mm512_set1_epi32(correction)}; }
inline I32x16 dot_bytes(I32x16 sum, U8x64 w, I32x16 x) { return {_mm512_dpbusd_epi32(sum.v, w.v, x.v)}; }

// --- the same with 16-bit integers: 16 columns, 2 consecutive k per lane ---
inline I16x32 load_int8_as_int16(const int8_t* p) {
  return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_as_int16(int16_t* p, I32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
inline I32x16 dot_int16(I32x16 sum, I16x32 w, I32x16 x) { return {_mm512_dpwssd_epi32(sum.v, w.v, x.v)}; }

}  // namespace nj
