// Codes of weights as 8 floats in an AVX2 register, with F16C.

#pragma once

#include "simd/avx2_ints.h"

namespace aioserve {
namespace {

// 16 numbers that the lowest 4 bits of lanes choose from.
struct Numbers {
    __m256 low, high;

    explicit Numbers(const float* numbers)
        : low(_mm256_loadu_ps(numbers)), high(_mm256_loadu_ps(numbers + 8)) {}
    Vec at(Ints places) const {
        const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(places.v, 28));
        return {_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, places.v),
                                 _mm256_permutevar8x32_ps(high, places.v), is_high)};
    }
};

// Byte BYTE of each lane, unsigned.
template <int BYTE>
inline Vec byte_floats(Ints x) {
    const __m256i down = BYTE == 0 ? x.v : _mm256_srli_epi32(x.v, 8 * BYTE);
    return {_mm256_cvtepi32_ps(BYTE == 3 ? down : _mm256_and_si256(down, _mm256_set1_epi32(255)))};
}

// Finite floats of E4M3, 256 times smaller. Their bits are those of float16 then, with an exponent of a
// bit less.
inline Vec load_e4m3(const uint8_t* p) {
    const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
    const __m128i shifted = _mm_slli_epi16(codes, 7);
    return {_mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(~0x4000)))};
}

// Lanes of two bfloat16, for finite numbers: rounded to nearest, ties to even.
inline Vec rounded_pairs(Vec first, Vec second) {
    const auto rounded = [](Vec x) __attribute__((always_inline)) {
        const __m256i bits = _mm256_castps_si256(x.v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    };
    const __m256i low = _mm256_srli_epi32(rounded(first), 16);
    return {_mm256_castsi256_ps(_mm256_blend_epi16(low, rounded(second), 0xaa))};
}

}  // namespace
}  // namespace aioserve
