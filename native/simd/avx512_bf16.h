// As AVX-512, with products of bfloat16 pairs: twice the multiplications per instruction, exact
// products, float32 sums. It takes denormal numbers as zeros.

#pragma once

#include "simd/avx512.h"

namespace aioserve {
namespace {

// c plus both products of each pair.
inline Vec dot_bf16(Vec a, Vec b, Vec c) {
    return {_mm512_dpbf16_ps(c.v, (__m512bh)a.v, (__m512bh)b.v)};
}

inline __m256i round_to_bf16(Vec x) { return (__m256i)_mm512_cvtneps_pbh(x.v); }
inline __m512i round_to_bf16(Vec first, Vec second) {
    return (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
}

}  // namespace
}  // namespace aioserve

#include "simd/avx512_pairs.inl"
