// Sixteen lanes in two AVX2 registers, for machines without VNNI. Integer products take one multiplication of bytes
// and one that widens; what bounds the kernels is how many of either there are.
#pragma once

namespace nj {

constexpr const char* kInstructionSet = "avx2";
constexpr int kTileGroups = 1, kTileRows = 4;  // 8 integer accumulators of the 16 registers
constexpr int kRowsWithoutPanel = 16;

struct F32x16 { __m256 lo, hi; };
struct I32x16 { __m256i lo, hi; };
struct U8x64 { __m256i lo, hi; };
struct I16x32 { __m256i lo, hi; };

inline F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32x16 a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
inline F32x16 set1(float a) { __m256 v = _mm256_set1_ps(a); return {v, v}; }
inline F32x16 zero() { return set1(0.0f); }
inline F32x16 add(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F32x16 sub(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F32x16 mul(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F32x16 div(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F32x16 sqrt_lanes(F32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32x16 max_keep_nan(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F32x16 min_keep_nan(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F32x16 swap_pairs(F32x16 a) { return {_mm256_permute_ps(a.lo, 0xB1), _mm256_permute_ps(a.hi, 0xB1)}; }
inline F32x16 zero_where_less(F32x16 value, F32x16 a, F32x16 b) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_NLT_UQ), value.lo),
          _mm256_and_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_NLT_UQ), value.hi)};
}
inline F32x16 lanes_below(int n) {
  const __m256i count = _mm256_set1_epi32(n), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, _mm256_add_epi32(lane, _mm256_set1_epi32(8))))};
}
inline F32x16 keep_first(F32x16 a, int n) {
  const __m256 out = _mm256_set1_ps(-__builtin_inff());
  const F32x16 keep = lanes_below(n);
  return {_mm256_blendv_ps(out, a.lo, keep.lo), _mm256_blendv_ps(out, a.hi, keep.hi)};
}
inline F32x16 zero_from(F32x16 a, int n) {
  const F32x16 keep = lanes_below(n);
  return {_mm256_and_ps(keep.lo, a.lo), _mm256_and_ps(keep.hi, a.hi)};
}

inline I32x16 round_to_int(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
inline F32x16 to_float(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I32x16 set1_int(int32_t a) { __m256i v = _mm256_set1_epi32(a); return {v, v}; }
inline I32x16 add_int(I32x16 a, I32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I32x16 sub_int(I32x16 a, I32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline I32x16 shift_left_7(I32x16 a) { return {_mm256_slli_epi32(a.lo, 7), _mm256_slli_epi32(a.hi, 7)}; }
inline I32x16 shift_right_7(I32x16 a) { return {_mm256_srai_epi32(a.lo, 7), _mm256_srai_epi32(a.hi, 7)}; }
inline const __m256i* as_m256i(const void* p) { return static_cast<const __m256i*>(p); }
inline I32x16 load_int(const int32_t* p) {
  return {_mm256_loadu_si256(as_m256i(p)), _mm256_loadu_si256(as_m256i(p + 8))};
}
inline void store_int(int32_t* p, I32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline F32x16 add_exponent(F32x16 a, I32x16 n) {
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.lo), _mm256_slli_epi32(n.lo, 23))),
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.hi), _mm256_slli_epi32(n.hi, 23)))};
}
inline void store_as_int8(int8_t* p, I32x16 a) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

inline void keep_larger_half(__m256 value, __m256i index, __m256* best, __m256i* best_index) {
  __m256 larger = _mm256_cmp_ps(value, *best, _CMP_GT_OQ);
  __m256 equal = _mm256_cmp_ps(value, *best, _CMP_EQ_OQ);
  __m256 lower = _mm256_castsi256_ps(_mm256_cmpgt_epi32(*best_index, index));
  larger = _mm256_or_ps(larger, _mm256_and_ps(equal, lower));
  *best = _mm256_blendv_ps(*best, value, larger);
  *best_index = _mm256_blendv_epi8(*best_index, index, _mm256_castps_si256(larger));
}
inline void keep_larger(F32x16 value, I32x16 index, F32x16* best, I32x16* best_index) {
  keep_larger_half(value.lo, index.lo, &best->lo, &best_index->lo);
  keep_larger_half(value.hi, index.hi, &best->hi, &best_index->hi);
}

inline float reduce_max(F32x16 a) {
  __m256 h = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline float reduce_add(F32x16 a) {
  __m256 h = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline int32_t reduce_add_int(I32x16 a) {
  __m256i h = _mm256_add_epi32(a.lo, a.hi);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xB1)));
}
inline __m256i max_abs_bits(F32x16 a) {
  const __m256i sign_off = _mm256_set1_epi32(0x7FFFFFFF);
  return _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a.lo), sign_off),
                          _mm256_and_si256(_mm256_castps_si256(a.hi), sign_off));
}
inline uint32_t reduce_max_abs_bits(F32x16 a, F32x16 b) {
  __m256i h = _mm256_max_epi32(max_abs_bits(a), max_abs_bits(b));
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4E));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0xB1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(q));
}

inline const __m128i* as_m128i(const void* p) { return static_cast<const __m128i*>(p); }
inline F32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(as_m128i(p))), _mm256_cvtph_ps(_mm_loadu_si128(as_m128i(p + 8)))};
}
inline void store_f16(uint16_t* p, F32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 bf16_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(as_m128i(p))), 16));
}
inline F32x16 load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
inline __m256i bf16_bits(__m256 a) {
  __m256i bits = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7FC0), nan);
}
inline void store_bf16(uint16_t* p, F32x16 a) {
  __m256i words = _mm256_packus_epi32(bf16_bits(a.lo), bf16_bits(a.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xD8));
}

inline U8x64 load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(as_m256i(p)), _mm256_loadu_si256(as_m256i(p + 32))};
}
inline void store_bytes(uint8_t* p, U8x64 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
inline U8x64 low_nibbles(U8x64 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
inline U8x64 high_nibbles(U8x64 a) {
  return low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)});
}
// A compiler may regroup sums of integers, and then has more of them at a time than there are registers: a third of the
// speed. After this it cannot.
inline __m256i as_summed(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}
inline __m256i widen_sum(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

// The products of a block of 32 nibbles sum up to 8 * 2 * 15 * 127 = 30,480 in each 16-bit lane, so they are widened
// once for all. Sums of more would wrap.
using NibbleSum = I16x32;
inline NibbleSum no_nibbles() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline NibbleSum dot_nibbles(NibbleSum sum, U8x64 w, I32x16 x) {
  return {as_summed(_mm256_add_epi16(sum.lo, _mm256_maddubs_epi16(w.lo, x.lo))),
          as_summed(_mm256_add_epi16(sum.hi, _mm256_maddubs_epi16(w.hi, x.hi)))};
}
inline I32x16 total(NibbleSum sum) { return {widen_sum(sum.lo), widen_sum(sum.hi)}; }
inline I32x16 total(I32x16 sum) { return sum; }
// maddubs would saturate on bytes with 128 added: take the sign off the weight and put it on the activation.
inline __m256i dot_signed(__m256i sum, __m256i w, __m256i x) {
  w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  return as_summed(_mm256_add_epi32(sum, widen_sum(products)));
}
inline I32x16 start_bytes(int32_t) { return set1_int(0); }
inline I32x16 dot_bytes(I32x16 sum, U8x64 w, I32x16 x) {
  return {dot_signed(sum.lo, w.lo, x.lo), dot_signed(sum.hi, w.hi, x.hi)};
}

inline I16x32 load_int8_as_int16(const int8_t* p) {
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(as_m128i(p))), _mm256_cvtepi8_epi16(_mm_loadu_si128(as_m128i(p + 16)))};
}
inline I16x32 load_uint8_as_int16(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128(as_m128i(p))), _mm256_cvtepu8_epi16(_mm_loadu_si128(as_m128i(p + 16)))};
}
inline I32x16 set1_four(const int16_t* p) {
  const __m256i v = _mm256_broadcastq_epi64(_mm_loadl_epi64(as_m128i(p)));
  return {v, v};
}
// Lane i is the sum of lanes 2i and 2i + 1 of a and b, one after the other.
inline I32x16 add_neighbours(I32x16 a, I32x16 b) {
  return {_mm256_permute4x64_epi64(_mm256_hadd_epi32(a.lo, a.hi), 0xD8),
          _mm256_permute4x64_epi64(_mm256_hadd_epi32(b.lo, b.hi), 0xD8)};
}
inline void store_as_int16(int16_t* p, I32x16 a) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}
inline I32x16 dot_int16(I32x16 sum, I16x32 w, I32x16 x) {
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(w.lo, x.lo)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(w.hi, x.hi))};
}

}  // namespace nj
