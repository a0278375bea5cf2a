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

    static Ints repeat_16(const void* p) { return load(p); }
    // The bytes at the places that bytes of `places` say.
    Ints looked_up(Ints places) const {
        uint8_t from[16], at[16], to[16];
        __builtin_memcpy(from, &v, sizeof(v));
        __builtin_memcpy(at, &places.v, sizeof(v));
        for (int i = 0; i < 16; ++i) to[i] = from[at[i]];
        return load(to);
    }
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

// In float64 a product of float32 is exact, and a sum with another float32 is rounded. Rounding that
// again, to float32, is as good as rounding once, except where the sum is inexact and a tie of
// float32, or below its normal numbers, whose ties lie elsewhere. There the library's slow function
// says what is right.
struct DoubleSums {
    __m128d low, high;          // of the first two lanes, and of the others
    __m128d product[2], addend[2];

    DoubleSums(__m128 a, __m128 b, __m128 c)
        : product{_mm_mul_pd(_mm_cvtps_pd(a), _mm_cvtps_pd(b)),
                  _mm_mul_pd(_mm_cvtps_pd(_mm_movehl_ps(a, a)), _mm_cvtps_pd(_mm_movehl_ps(b, b)))},
          addend{_mm_cvtps_pd(c), _mm_cvtps_pd(_mm_movehl_ps(c, c))} {
        low = _mm_add_pd(product[0], addend[0]);
        high = _mm_add_pd(product[1], addend[1]);
    }

    Vec rounded() const { return {_mm_movelh_ps(_mm_cvtpd_ps(low), _mm_cvtpd_ps(high))}; }

    // Lanes of ones for those that are ties or small, and not 0.
    Ints::Lanes suspects() const {
        constexpr uint32_t kNormal = (1023u - 126) << 20;  // of float32, in the upper half
        const auto lower = (Ints::Words)halves<0>(low, high);
        const auto upper = (Ints::Words)halves<1>(low, high);
        const auto is_tie = (lower & 0x1fffffffu) == 0x10000000u;
        return (Ints::Lanes)(is_tie | ((upper & 0x7fffffffu) - 1 < kNormal - 1));
    }
    Ints::Lanes exact() const {
        return (Ints::Lanes)halves<0>(is_exact(low, 0), is_exact(high, 1));
    }

  private:
    // Of each float64 the 0: lower, 1: upper half.
    template <int WHICH>
    static __m128 halves(__m128d first, __m128d second) {
        constexpr int kLanes = WHICH == 0 ? 0x88 : 0xdd;
        return _mm_shuffle_ps(_mm_castpd_ps(first), _mm_castpd_ps(second), kLanes);
    }
    __m128d is_exact(__m128d sum, int half) const {
        const __m128d part = _mm_sub_pd(sum, product[half]);
        return _mm_and_pd(_mm_cmpeq_pd(part, addend[half]),
                          _mm_cmpeq_pd(_mm_sub_pd(sum, part), product[half]));
    }
};

// Lanes that may be wrong are made anew.
inline Vec with_again(Vec sum, Ints::Lanes suspects, Vec a, Vec b, Vec c) {
    if (__builtin_expect(_mm_movemask_epi8((__m128i)suspects), 0))
        for (int i = 0; i < 4; ++i)
            if (suspects[i]) sum.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return sum;
}

// a * b + c, rounded once.
inline Vec fused(Vec a, Vec b, Vec c) {
    const DoubleSums sums(a.v, b.v, c.v);
    return with_again(sums.rounded(), sums.suspects(), a, b, c);
}

// The same for numbers of few digits, whose sums are often ties, and exact.
inline Vec fused_short(Vec a, Vec b, Vec c) {
    const DoubleSums sums(a.v, b.v, c.v);
    return with_again(sums.rounded(), sums.suspects() & ~sums.exact(), a, b, c);
}

#else

// a * b + c, rounded once.
inline Vec fused(Vec a, Vec b, Vec c) {
    Vec r;
    for (int i = 0; i < 4; ++i) r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
    return r;
}
inline Vec fused_short(Vec a, Vec b, Vec c) { return fused(a, b, c); }

#endif

}  // namespace
}  // namespace aioserve
