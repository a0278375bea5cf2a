// Words of 32 bits whose products are whole: 8 of them, in the lower halves of 64-bit lanes of two
// AVX2 registers. Upper halves hold anything.

#pragma once

#include "simd/avx2.h"

namespace aioserve {
namespace {

struct Words {
    __m256i even, odd;

    static Words set(uint32_t x) {
        const __m256i all = _mm256_set1_epi32(static_cast<int32_t>(x));
        return {all, all};
    }
    static Words load(const uint32_t* p) {
        const __m256i all = _mm256_loadu_si256((const __m256i*)p);
        return {all, _mm256_srli_epi64(all, 32)};
    }
    friend Words operator*(Words a, Words b) {
        return {_mm256_mul_epu32(a.even, b.even), _mm256_mul_epu32(a.odd, b.odd)};
    }
    // Of products the upper words.
    Words upper() const { return {_mm256_srli_epi64(even, 32), _mm256_srli_epi64(odd, 32)}; }
    static Words xor_of(Words a, Words b, Words c) {
        return {_mm256_xor_si256(_mm256_xor_si256(a.even, b.even), c.even),
                _mm256_xor_si256(_mm256_xor_si256(a.odd, b.odd), c.odd)};
    }
    // The words as the bits of floats.
    Vec joined() const {
        const __m256i shifted = _mm256_slli_epi64(odd, 32);
        return {_mm256_castsi256_ps(_mm256_blend_epi32(even, shifted, 0xAA))};
    }
};

// Bits as an unsigned number, less its lower 8 bits: that / 2^8.
inline Vec upper_24_bits(Vec x) {
    return {_mm256_cvtepi32_ps(_mm256_srli_epi32(_mm256_castps_si256(x.v), 8))};
}
// Bits of positive floats and of 0, as a number.
inline Vec bits_as_number(Vec x) { return {_mm256_cvtepi32_ps(_mm256_castps_si256(x.v))}; }
// A bit for each lane where a <= b.
inline uint32_t lanes_at_most(Vec a, Vec b) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)));
}

}  // namespace
}  // namespace aioserve
