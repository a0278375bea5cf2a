// Codes of weights as 16 floats in an AVX-512 register.

#pragma once

#include "simd/avx512_ints.h"

namespace aioserve {
namespace {

// 16 numbers that the lowest 4 bits of lanes choose from.
struct Numbers {
    __m512 all;

    explicit Numbers(const float* numbers) : all(_mm512_loadu_ps(numbers)) {}
    Vec at(Ints places) const { return {_mm512_permutexvar_ps(places.v, all)}; }
};

// Byte BYTE of each lane, unsigned.
template <int BYTE>
inline Vec byte_floats(Ints x) {
    const __m512i down = BYTE == 0 ? x.v : _mm512_srli_epi32(x.v, 8 * BYTE);
    return {_mm512_cvtepi32_ps(BYTE == 3 ? down : _mm512_and_si512(down, _mm512_set1_epi32(255)))};
}

// Finite floats of E4M3, 256 times smaller. Their bits are those of float16 then, with an exponent of a
// bit less.
inline Vec load_e4m3(const uint8_t* p) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i shifted = _mm256_slli_epi16(codes, 7);
    return {_mm512_cvtph_ps(_mm256_and_si256(shifted, _mm256_set1_epi16(~0x4000)))};
}

// Lanes of two bfloat16, for finite numbers: rounded to nearest, ties to even.
inline Vec rounded_pairs(Vec first, Vec second) {
    const auto rounded = [](Vec x) __attribute__((always_inline)) {
        const __m512i bits = _mm512_castps_si512(x.v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    };
    const __m512i low = _mm512_srli_epi32(rounded(first), 16);
    return {_mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaa, low, rounded(second)))};
}

}  // namespace
}  // namespace aioserve
