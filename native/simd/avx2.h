// 8 floats in an AVX2 register, with FMA.

#pragma once

#include <immintrin.h>

#include "simd/bf16.h"

namespace aioserve {
namespace {

struct Vec {
    __m256 v;
    static constexpr int kWidth = 8;

    static Vec zero() { return {_mm256_setzero_ps()}; }
    static Vec set(float x) { return {_mm256_set1_ps(x)}; }
    static Vec set_bits(const void* p) {
        int32_t bits;
        __builtin_memcpy(&bits, p, 4);
        return {_mm256_castsi256_ps(_mm256_set1_epi32(bits))};
    }
    static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
    static Vec load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
    static Vec load(const float* p, int n) { return {_mm256_maskload_ps(p, first(n))}; }
    static Vec load(const bf16* p, int n) {
        bf16 padded[8] = {};
        __builtin_memcpy(padded, p, n * sizeof(bf16));
        return load(padded);
    }
    void store(float* p) const { _mm256_storeu_ps(p, v); }
    void store(bf16* p) const { _mm_storeu_si128((__m128i*)p, narrow()); }
    void store(float* p, int n) const { _mm256_maskstore_ps(p, first(n), v); }
    void store(bf16* p, int n) const {
        bf16 padded[8];
        store(padded);
        __builtin_memcpy(p, padded, n * sizeof(bf16));
    }

    // Of lanes that hold two bfloat16 each: the first of every pair, and the second, as floats.
    Vec first_halves() const {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16))};
    }
    Vec second_halves() const {
        const __m256i mask = _mm256_set1_epi32(-65536);
        return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(v), mask))};
    }

    static Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    friend Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
    static Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
    static Vec round(Vec a) {
        return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    }
    // a * 2^n for integral n, with a in [0.5, 2) and n from -125 to 126.
    static Vec scale(Vec a, Vec n) {
        const __m256i shift = _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23);
        return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a.v), shift))};
    }
    static Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
    static Vec copy_sign(Vec magnitude, Vec sign) {
        const __m256 mask = _mm256_set1_ps(-0.0f);
        return {_mm256_or_ps(_mm256_and_ps(mask, sign.v), _mm256_andnot_ps(mask, magnitude.v))};
    }
    // Zero where x < limit; NaN stays.
    static Vec zero_below(Vec a, Vec x, Vec limit) {
        return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_LT_OQ), a.v)};
    }
    // The lanes [begin, end) of a, `fill` elsewhere.
    static Vec keep(Vec a, int begin, int end, Vec fill) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i inside = _mm256_andnot_si256(
            _mm256_cmpgt_epi32(_mm256_set1_epi32(begin), lane),
            _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane));
        return {_mm256_blendv_ps(fill.v, a.v, _mm256_castsi256_ps(inside))};
    }
    float sum() const {
        __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
    }
    float largest() const {
        __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        x = _mm_max_ps(x, _mm_movehl_ps(x, x));
        return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
    }
    float front() const { return _mm256_cvtss_f32(v); }

    [[gnu::always_inline]] static inline void transpose(Vec (&rows)[8]) {
        __m256 a[8], b[8];
        for (int i = 0; i < 4; ++i) {
            a[2 * i] = _mm256_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
            a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
        }
        for (int i = 0; i < 2; ++i) {
            for (int j = 0; j < 2; ++j) {
                const __m256d lo = _mm256_castps_pd(a[4 * i + j]);
                const __m256d hi = _mm256_castps_pd(a[4 * i + 2 + j]);
                b[4 * i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(lo, hi));
                b[4 * i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(lo, hi));
            }
        }
        for (int j = 0; j < 4; ++j) {
            rows[j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
            rows[4 + j].v = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
        }
    }

private:
    static __m256i first(int n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    static Vec widen(__m128i halves) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
    }
    // Round to nearest even; a NaN stays one.
    __m128i narrow() const {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
        rounded = _mm256_srli_epi32(rounded, 16);
        return _mm_packus_epi32(_mm256_castsi256_si128(rounded),
                                _mm256_extracti128_si256(rounded, 1));
    }
};

}  // namespace
}  // namespace aioserve
