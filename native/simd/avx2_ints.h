// 8 int32 in an AVX2 register, or the 32 bytes and 16 halves that they are made of.

#pragma once

#include "simd/avx2.h"

namespace aioserve {
namespace {

struct Ints {
    __m256i v;
    static constexpr int kWidth = 8;

    static Ints zero() { return {_mm256_setzero_si256()}; }
    static Ints load(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
    void store(void* p) const { _mm256_storeu_si256((__m256i*)p, v); }
    // A lane for each int8.
    static Ints load_bytes(const int8_t* p) {
        return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))};
    }
    // A lane for each uint16.
    static Ints load_halves(const void* p) {
        return {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p))};
    }
    // The same four bytes in each lane.
    static Ints repeat(const void* p) {
        int32_t bits;
        __builtin_memcpy(&bits, p, 4);
        return {_mm256_set1_epi32(bits)};
    }
    friend Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a.v, b.v)}; }

    // The same 16 bytes in each half.
    static Ints repeat_16(const void* p) {
        return {_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p))};
    }
    // Of 16 bytes that are repeated, those at the places that bytes of `places` say.
    Ints looked_up(Ints places) const { return {_mm256_shuffle_epi8(v, places.v)}; }
    // Lanes moved to the left by BITS, or to the right by -BITS; zeros come in.
    template <int BITS>
    Ints shifted() const {
        return {BITS < 0 ? _mm256_srli_epi32(v, -BITS) : _mm256_slli_epi32(v, BITS)};
    }
    friend Ints operator|(Ints a, Ints b) { return {_mm256_or_si256(a.v, b.v)}; }
    // The bits of each byte that `mask` has.
    Ints masked(int mask) const {
        return {_mm256_and_si256(v, _mm256_set1_epi8(static_cast<char>(mask)))};
    }
    Ints low_nibbles() const { return masked(15); }
    // Below bits of `upper`, which has none there.
    Ints low_nibbles_below(Ints upper) const { return low_nibbles() | upper; }
    // Of each pair of bytes the first, and the second, as uint16.
    Ints first_bytes() const { return {_mm256_and_si256(v, _mm256_set1_epi16(255))}; }
    Ints second_bytes() const { return {_mm256_srli_epi16(v, 8)}; }

    Vec floats() const { return {_mm256_cvtepi32_ps(v)}; }
    // To nearest, ties to even; within int32.
    static Ints rounded(Vec x) { return {_mm256_cvtps_epi32(x.v)}; }
    // The lanes as int8, which they fit.
    void store_bytes(int8_t* p) const {
        const __m128i halves =
            _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
    }
    int32_t sum() const {
        __m128i x = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
        return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
    }
};

// Of finite numbers.
inline Vec load_float16(const uint16_t* p) {
    const __m256i halves = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi32(0x7fff));
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(halves, 15), 31);
    const __m256 small = _mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 13));
    const __m256 positive = _mm256_mul_ps(small, _mm256_set1_ps(0x1p112f));
    return {_mm256_or_ps(positive, _mm256_castsi256_ps(sign))};
}

// Sums of the products of neighbouring int16.
inline Ints multiply_pairs(Ints a, Ints b) { return {_mm256_madd_epi16(a.v, b.v)}; }
// The same of uint8 and int8, as int16 that has to hold the sum.
inline Ints multiply_bytes(Ints a, Ints b) { return {_mm256_maddubs_epi16(a.v, b.v)}; }
inline Ints add_halves(Ints a, Ints b) { return {_mm256_add_epi16(a.v, b.v)}; }

// Computes x here, where a compiler would first collect all its terms and run out of registers.
inline void settle(Ints& x) { asm("" : "+x"(x.v)); }

// a * b + c, rounded once.
inline Vec fused(Vec a, Vec b, Vec c) { return Vec::fma(a, b, c); }
inline Vec fused_short(Vec a, Vec b, Vec c) { return fused(a, b, c); }

}  // namespace
}  // namespace aioserve
