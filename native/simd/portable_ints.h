// Four int32 in the vectors of GCC and Clang, or the 16 bytes and 8 halves that they are made of.

#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "simd/portable.h"

namespace aioserve {
namespace {

struct Ints {
    using Lanes = int32_t __attribute__((vector_size(16)));
    using Words = uint32_t __attribute__((vector_size(16)));
    using Halves = int16_t __attribute__((vector_size(16)));

    Lanes v;
    static constexpr int kWidth = 4;

    static Ints zero() { return {Lanes{}}; }
    static Ints load(const void* p) {
        Ints r;
        __builtin_memcpy(&r.v, p, sizeof(r.v));
        return r;
    }
    void store(void* p) const { __builtin_memcpy(p, &v, sizeof(v)); }
    // A lane for each int8.
    static Ints load_bytes(const int8_t* p) { return {Lanes{p[0], p[1], p[2], p[3]}}; }
    // A lane for each uint16.
    static Ints load_halves(const void* p) {
        uint16_t halves[4];
        __builtin_memcpy(halves, p, sizeof(halves));
        return {Lanes{halves[0], halves[1], halves[2], halves[3]}};
    }
    // The same four bytes in each lane.
    static Ints repeat(const void* p) {
        int32_t bits;
        __builtin_memcpy(&bits, p, 4);
        return {Lanes{bits, bits, bits, bits}};
    }
    friend Ints operator+(Ints a, Ints b) { return {a.v + b.v}; }

    // Lanes moved to the left by BITS, or to the right by -BITS; zeros come in.
    template <int BITS>
    Ints shifted() const {
        return {(Lanes)(BITS < 0 ? (Words)v >> (BITS < 0 ? -BITS : 0)
                                 : (Words)v << (BITS < 0 ? 0 : BITS))};
    }
    friend Ints operator|(Ints a, Ints b) { return {a.v | b.v}; }
    // The bits of each byte that `mask` has.
    Ints masked(int mask) const { return {v & mask * 0x01010101}; }
    Ints low_nibbles() const { return masked(15); }
    // Below bits of `upper`, which has none there.
    Ints low_nibbles_below(Ints upper) const { return low_nibbles() | upper; }
    // Of each pair of bytes the first, and the second, as uint16.
    Ints first_bytes() const { return {v & 0x00ff00ff}; }
    Ints second_bytes() const { return {(Lanes)((Words)v >> 8) & 0x00ff00ff}; }

    Vec floats() const { return {__builtin_convertvector(v, Vec::Floats)}; }
    // To nearest, ties to even, for |x| < 2^22.
    static Ints rounded(Vec x) { return {__builtin_convertvector(Vec::round(x).v, Lanes)}; }
    // The lanes as int8, which they fit.
    void store_bytes(int8_t* p) const {
        for (int i = 0; i < 4; ++i) p[i] = static_cast<int8_t>(v[i]);
    }
    int32_t sum() const { return v[0] + v[1] + v[2] + v[3]; }
};

// Of finite numbers.
inline Vec load_float16(const uint16_t* p) {
    const Ints::Words halves = {p[0], p[1], p[2], p[3]};
    const Vec magnitude = {(Vec::Floats)((halves & 0x7fff) << 13) * 0x1p112f};
    return Vec::copy_sign(magnitude, {(Vec::Floats)(halves >> 15 << 31)});
}

// Sums of the products of neighbouring int16: of products that are int16, too.
inline Ints multiply_pairs(Ints a, Ints b) {
#if defined(__SSE2__)
    return {(Ints::Lanes)_mm_madd_epi16((__m128i)a.v, (__m128i)b.v)};
#else
    const Ints::Lanes products = (Ints::Lanes)((Ints::Halves)a.v * (Ints::Halves)b.v);
    return {((Ints::Lanes)((Ints::Words)products << 16) >> 16) + (products >> 16)};
#endif
}

// Computes x here, where a compiler would first collect all its terms and run out of registers.
inline void settle(Ints& x) {
#if defined(__SSE2__)
    asm("" : "+x"(x.v));
#endif
}

#if defined(__SSE2__) && !defined(__FP_FAST_FMAF)

// a * b + c, rounded once. In float64 the product is exact, and the sum is rounded. Rounding the sum
// again, to float32, is rounding once unless the sum is a tie of float32, or below its normal numbers,
// whose ties lie elsewhere: then the library's slow function says what is right.
inline Vec fused(Vec a, Vec b, Vec c) {
    const __m128 x = a.v, y = b.v, z = c.v;
    const __m128d low = _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(x), _mm_cvtps_pd(y)), _mm_cvtps_pd(z));
    const __m128d high =
        _mm_add_pd(_mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(x, x)), _mm_cvtps_pd(_mm_movehl_ps(y, y))),
                   _mm_cvtps_pd(_mm_movehl_ps(z, z)));
    Vec sum = {_mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high))};

    const __m128 halves[] = {_mm_castpd_ps(low), _mm_castpd_ps(high)};
    const auto lower = (Ints::Words)_mm_shuffle_ps(halves[0], halves[1], 0x88);
    const auto upper = (Ints::Words)_mm_shuffle_ps(halves[0], halves[1], 0xdd);
    const auto is_tie = (lower & 0x1fffffffu) == 0x10000000u;
    constexpr uint32_t kNormal = (1023u - 126) << 20;  // of float32, in the upper half
    const auto is_small = (upper & 0x7fffffffu) - 1 < kNormal - 1;  // and not 0
    const auto is_rounded_twice = (Ints::Lanes)(is_tie | is_small);
    if (__builtin_expect(_mm_movemask_epi8((__m128i)is_rounded_twice), 0)) {
        for (int i = 0; i < 4; ++i)
            if (is_rounded_twice[i]) sum.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    }
    return sum;
}

#else

// a * b + c, rounded once.
inline Vec fused(Vec a, Vec b, Vec c) {
    Vec r;
    for (int i = 0; i < 4; ++i) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return r;
}

#endif

}  // namespace
}  // namespace aioserve
