// As AVX2, with sums of four products of bytes in one instruction.

#pragma once

#include "simd/avx2_ints.h"

namespace aioserve {
namespace {

// sum plus the products of the four uint8 of a with the four int8 of b.
inline Ints dot_bytes(Ints sum, Ints a, Ints b) {
    return {_mm256_dpbusd_avx_epi32(sum.v, a.v, b.v)};
}

}  // namespace
}  // namespace aioserve
