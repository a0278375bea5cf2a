// Words of 32 bits whose products are whole: four of them, in the lower halves of 64-bit lanes of two
// vectors. Upper halves hold anything.

#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "simd/portable.h"

namespace aioserve {
namespace {

struct Words {
    using Lanes = uint64_t __attribute__((vector_size(16)));

    Lanes even, odd;

    static Words set(uint32_t x) { return {Lanes{x, x}, Lanes{x, x}}; }
    static Words load(const uint32_t* p) { return {Lanes{p[0], p[2]}, Lanes{p[1], p[3]}}; }
    friend Words operator*(Words a, Words b) {
        return {product(a.even, b.even), product(a.odd, b.odd)};
    }
    // Of products the upper words.
    Words upper() const { return {even >> 32, odd >> 32}; }
    static Words xor_of(Words a, Words b, Words c) {
        return {a.even ^ b.even ^ c.even, a.odd ^ b.odd ^ c.odd};
    }
    // The words as the bits of floats.
    Vec joined() const { return {(Vec::Floats)((even & kLower) | (odd << 32))}; }

private:
    static constexpr Lanes kLower = {0xffffffffu, 0xffffffffu};

    static Lanes product(Lanes a, Lanes b) {
#if defined(__SSE2__)
        return (Lanes)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
        return (a & kLower) * (b & kLower);
#endif
    }
};

// Bits as an unsigned number, less its lower 8 bits: that / 2^8.
inline Vec upper_24_bits(Vec x) {
    return {__builtin_convertvector((Vec::Ints)((Vec::Words)x.v >> 8), Vec::Floats)};
}
// Bits of positive floats and of 0, as a number.
inline Vec bits_as_number(Vec x) {
    return {__builtin_convertvector((Vec::Ints)x.v, Vec::Floats)};
}
// A bit for each lane where a <= b.
inline uint32_t lanes_at_most(Vec a, Vec b) {
    uint32_t lanes = 0;
    for (int i = 0; i < Vec::kWidth; ++i) lanes |= (a.v[i] <= b.v[i] ? 1u : 0u) << i;
    return lanes;
}

}  // namespace
}  // namespace aioserve
