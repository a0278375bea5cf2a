// Words of 32 bits whose products are whole: 16 of them, in the lower halves of 64-bit lanes of two
// AVX-512 registers. Upper halves hold anything.

#pragma once

#include "simd/avx512.h"

namespace aioserve {
namespace {

struct Words {
    __m512i even, odd;

    static Words set(uint32_t x) {
        const __m512i all = _mm512_set1_epi32(static_cast<int32_t>(x));
        return {all, all};
    }
    static Words load(const uint32_t* p) {
        const __m512i all = _mm512_loadu_si512(p);
        return {all, _mm512_srli_epi64(all, 32)};
    }
    friend Words operator*(Words a, Words b) {
        return {_mm512_mul_epu32(a.even, b.even), _mm512_mul_epu32(a.odd, b.odd)};
    }
    // Of products the upper words.
    Words upper() const { return {_mm512_srli_epi64(even, 32), _mm512_srli_epi64(odd, 32)}; }
    static Words xor_of(Words a, Words b, Words c) {
        return {_mm512_ternarylogic_epi64(a.even, b.even, c.even, 0x96),
                _mm512_ternarylogic_epi64(a.odd, b.odd, c.odd, 0x96)};
    }
    // The words as the bits of floats.
    Vec joined() const {
        const __m512i shifted = _mm512_slli_epi64(odd, 32);
        return {_mm512_castsi512_ps(_mm512_mask_blend_epi32(0xAAAA, even, shifted))};
    }
};

// Bits as an unsigned number, less its lower 8 bits: that / 2^8.
inline Vec upper_24_bits(Vec x) {
    return {_mm512_cvtepi32_ps(_mm512_srli_epi32(_mm512_castps_si512(x.v), 8))};
}
// Bits of positive floats and of 0, as a number.
inline Vec bits_as_number(Vec x) { return {_mm512_cvtepi32_ps(_mm512_castps_si512(x.v))}; }
// A bit for each lane where a <= b.
inline uint32_t lanes_at_most(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ); }

}  // namespace
}  // namespace aioserve
