// As AVX-512, with products of bfloat16 pairs: twice the multiplications per instruction, exact
// products, float32 sums. Attention weights are rounded to bfloat16 for it.

#if defined(__x86_64__)
// GCC 12 takes the undefined registers in its own header for ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "common/scratch.h"
#include "ops/dispatch.h"

#define AIOSERVE_DOT_BF16 1

namespace aioserve::ops {
namespace avx512_bf16 {
#include "ops/vector_avx512.h"

static inline Vec dot_bf16(Vec a, Vec b, Vec c) {
    return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)};
}

// Up to 32 values, zeros past `left`.
static inline Vec load_pairs(const bf16* p, int64_t left) {
    if (left >= 32) return {_mm512_castsi512_ps(_mm512_loadu_si512(p))};
    const __mmask32 some = static_cast<__mmask32>((1u << left) - 1);
    return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(some, p))};
}

// out[i] = (even[i], odd[i]), padded with zeros to whole vectors.
static inline void interleave(const bf16* even, const bf16* odd, int64_t size, float* out) {
    alignas(64) static constexpr uint16_t kLow[32] = {
        0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
        8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i low = _mm512_load_si512(kLow);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t i = 0; i < size; i += 32) {
        const __m512i a = _mm512_castps_si512(load_pairs(even + i, size - i).v);
        const __m512i b = _mm512_castps_si512(load_pairs(odd + i, size - i).v);
        _mm512_storeu_si512(out + i, _mm512_permutex2var_epi16(a, low, b));
        if (size - i > 16) _mm512_storeu_si512(out + i + 16, _mm512_permutex2var_epi16(a, high, b));
    }
}

// Stores x as bfloat16 and returns what was stored; weights too small for a normal number become 0.
static inline Vec store_rounded(Vec x, bf16* to) {
    const __m256i halves = (__m256i)_mm512_cvtneps_pbh(x.v);
    _mm256_storeu_si256((__m256i*)to, halves);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}

#include "ops/kernels.inl"
}  // namespace avx512_bf16

extern const Table kAvx512Bf16 = avx512_bf16::kTable;

}  // namespace aioserve::ops
#endif
