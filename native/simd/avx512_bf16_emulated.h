// The instructions for bfloat16 pairs in those of AVX-512, as Intel documents them: that kernels which
// use them are tested on machines without them.

#pragma once

#include "simd/avx512.h"

namespace aioserve {
namespace {

inline Vec without_denormals(Vec x) {
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    const __mmask16 denormal = _mm512_testn_epi32_mask(_mm512_castps_si512(x.v), exponent);
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    return {_mm512_mask_and_ps(x.v, denormal, x.v, _mm512_castsi512_ps(sign))};
}

// c plus the product of the second of each pair, then that of the first, each rounded once.
inline Vec dot_bf16(Vec a, Vec b, Vec c) {
    const Vec second = Vec::fma(without_denormals(a.second_halves()),
                                without_denormals(b.second_halves()), without_denormals(c));
    const Vec both = Vec::fma(without_denormals(a.first_halves()),
                              without_denormals(b.first_halves()), without_denormals(second));
    return without_denormals(both);
}

inline __m256i round_to_bf16(Vec x) {
    const __m512i bits = _mm512_castps_si512(without_denormals(x).v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

inline __m512i round_to_bf16(Vec first, Vec second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(round_to_bf16(first)), round_to_bf16(second), 1);
}

}  // namespace
}  // namespace aioserve

#include "simd/avx512_pairs.inl"
