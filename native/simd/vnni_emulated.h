// VNNI's sums of four products of bytes in portable vectors: emulated tiles meet them in one kernel.

#pragma once

#include "simd/portable_ints.h"

namespace aioserve {
namespace {

// sum plus the products of the four uint8 of a with the four int8 of b.
inline Ints dot_bytes(Ints sum, Ints a, Ints b) {
    const Ints first = {(Ints::Lanes)((Ints::Halves)((Ints::Words)b.v << 8) >> 8)};
    const Ints second = {(Ints::Lanes)((Ints::Halves)b.v >> 8)};
    return sum + (multiply_pairs(a.first_bytes(), first) + multiply_pairs(a.second_bytes(), second));
}

}  // namespace
}  // namespace aioserve
