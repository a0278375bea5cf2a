// 16 floats in an AVX-512 register.

#pragma once

// GCC 12 takes the undefined registers in its own header for ours (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "simd/bf16.h"

namespace aioserve {
namespace {

struct Vec {
    __m512 v;
    static constexpr int kWidth = 16;

    static Vec zero() { return {_mm512_setzero_ps()}; }
    static Vec set(float x) { return {_mm512_set1_ps(x)}; }
    static Vec set_bits(const void* p) {
        int32_t bits;
        __builtin_memcpy(&bits, p, 4);
        return {_mm512_castsi512_ps(_mm512_set1_epi32(bits))};
    }
    static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static Vec load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
    static Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
    static Vec load(const bf16* p, int n) {
        return widen(_mm256_maskz_loadu_epi16(first(n), p));
    }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    void store(bf16* p) const { _mm256_storeu_si256((__m256i*)p, narrow()); }
    void store(float* p, int n) const { _mm512_mask_storeu_ps(p, first(n), v); }
    void store(bf16* p, int n) const { _mm256_mask_storeu_epi16(p, first(n), narrow()); }

    // Of lanes that hold two bfloat16 each: the first of every pair, and the second, as floats.
    Vec first_halves() const {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16))};
    }
    Vec second_halves() const {
        const __m512i mask = _mm512_set1_epi32(-65536);
        return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), mask))};
    }

    static Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    friend Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
    friend Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
    friend Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
    friend Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
    static Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
    static Vec round(Vec a) {
        constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        return {_mm512_roundscale_ps(a.v, kNearest)};
    }
    // a * 2^n for integral n, with n at least -126.
    static Vec scale(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
    static Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
    static Vec copy_sign(Vec magnitude, Vec sign) {
        const __m512i mask = _mm512_set1_epi32(INT32_MIN);
        return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(
            mask, _mm512_castps_si512(sign.v), _mm512_castps_si512(magnitude.v), 0xCA))};
    }
    // Zero where x < limit; NaN stays.
    static Vec zero_below(Vec a, Vec x, Vec limit) {
        const __mmask16 below = _mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ);
        return {_mm512_mask_mov_ps(a.v, below, _mm512_setzero_ps())};
    }
    // The lanes [begin, end) of a, `fill` elsewhere.
    static Vec keep(Vec a, int begin, int end, Vec fill) {
        const __m512i lane =
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __mmask16 inside = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(begin)) &
                                 _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
        return {_mm512_mask_mov_ps(fill.v, inside, a.v)};
    }
    float sum() const { return _mm512_reduce_add_ps(v); }
    float largest() const { return _mm512_reduce_max_ps(v); }
    float front() const { return _mm512_cvtss_f32(v); }

    [[gnu::always_inline]] static inline void transpose(Vec (&rows)[16]) {
        __m512 a[16], b[16];
        for (int i = 0; i < 8; ++i) {
            a[2 * i] = _mm512_unpacklo_ps(rows[2 * i].v, rows[2 * i + 1].v);
            a[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i].v, rows[2 * i + 1].v);
        }
        for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 2; ++j) {
                const __m512d lo = _mm512_castps_pd(a[4 * i + j]);
                const __m512d hi = _mm512_castps_pd(a[4 * i + 2 + j]);
                b[4 * i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(lo, hi));
                b[4 * i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(lo, hi));
            }
        }
        // b[4 i + j] holds column 4 k + j of rows 4 i .. 4 i + 3 in its k-th quarter.
        for (int j = 0; j < 4; ++j) {
            const __m512 x = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88);
            const __m512 y = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88);
            const __m512 z = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xDD);
            const __m512 w = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xDD);
            rows[j].v = _mm512_shuffle_f32x4(x, y, 0x88);
            rows[8 + j].v = _mm512_shuffle_f32x4(x, y, 0xDD);
            rows[4 + j].v = _mm512_shuffle_f32x4(z, w, 0x88);
            rows[12 + j].v = _mm512_shuffle_f32x4(z, w, 0xDD);
        }
    }

private:
    static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
    static Vec widen(__m256i halves) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
    }
    // Round to nearest even; a NaN stays one.
    __m256i narrow() const {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
        return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    }
};

}  // namespace
}  // namespace aioserve
