// 16 int32 in an AVX-512 register, or the 64 bytes and 32 halves that they are made of.

#pragma once

#include "simd/avx512.h"

namespace aioserve {
namespace {

struct Ints {
    __m512i v;
    static constexpr int kWidth = 16;

    static Ints zero() { return {_mm512_setzero_si512()}; }
    static Ints load(const void* p) { return {_mm512_loadu_si512(p)}; }
    void store(void* p) const { _mm512_storeu_si512(p, v); }
    // A lane for each int8.
    static Ints load_bytes(const int8_t* p) {
        return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))};
    }
    // A lane for each uint16.
    static Ints load_halves(const void* p) {
        return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))};
    }
    // The same four bytes in each lane.
    static Ints repeat(const void* p) {
        int32_t bits;
        __builtin_memcpy(&bits, p, 4);
        return {_mm512_set1_epi32(bits)};
    }
    friend Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }

    // The same 16 bytes in each quarter.
    static Ints repeat_16(const void* p) {
        return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p))};
    }
    // Of 16 bytes that are repeated, those at the places that bytes of `places` say.
    Ints looked_up(Ints places) const { return {_mm512_shuffle_epi8(v, places.v)}; }
    // Lanes moved to the left by BITS, or to the right by -BITS; zeros come in.
    template <int BITS>
    Ints shifted() const {
        return {BITS < 0 ? _mm512_srli_epi32(v, -BITS) : _mm512_slli_epi32(v, BITS)};
    }
    friend Ints operator|(Ints a, Ints b) { return {_mm512_or_si512(a.v, b.v)}; }
    // The bits of each byte that `mask` has.
    Ints masked(int mask) const {
        return {_mm512_and_si512(v, _mm512_set1_epi8(static_cast<char>(mask)))};
    }
    Ints low_nibbles() const { return masked(15); }
    // Below bits of `upper`, which has none there.
    Ints low_nibbles_below(Ints upper) const {
        return {_mm512_ternarylogic_epi32(_mm512_set1_epi8(15), v, upper.v, 0xEA)};
    }
    // Of each pair of bytes the first, and the second, as uint16.
    Ints first_bytes() const { return {_mm512_and_si512(v, _mm512_set1_epi16(255))}; }
    Ints second_bytes() const { return {_mm512_srli_epi16(v, 8)}; }

    Vec floats() const { return {_mm512_cvtepi32_ps(v)}; }
    // To nearest, ties to even; within int32.
    static Ints rounded(Vec x) { return {_mm512_cvtps_epi32(x.v)}; }
    // The lanes as int8, which they fit.
    void store_bytes(int8_t* p) const { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }
    int32_t sum() const { return _mm512_reduce_add_epi32(v); }
};

inline Vec load_float16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}

// Sums of the products of neighbouring int16.
inline Ints multiply_pairs(Ints a, Ints b) { return {_mm512_madd_epi16(a.v, b.v)}; }
// The same of uint8 and int8, as int16 that has to hold the sum.
inline Ints multiply_bytes(Ints a, Ints b) { return {_mm512_maddubs_epi16(a.v, b.v)}; }
inline Ints add_halves(Ints a, Ints b) { return {_mm512_add_epi16(a.v, b.v)}; }

// Computes x here, where a compiler would first collect all its terms and run out of registers.
inline void settle(Ints& x) { asm("" : "+v"(x.v)); }

// a * b + c, rounded once.
inline Vec fused(Vec a, Vec b, Vec c) { return Vec::fma(a, b, c); }
inline Vec fused_short(Vec a, Vec b, Vec c) { return fused(a, b, c); }

}  // namespace
}  // namespace aioserve
