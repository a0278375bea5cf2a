// Scales and minimums as they lie in a header, for the `Vec` in scope.

#pragma once

#include "linear/grouped/tile.h"

namespace aioserve::linear::grouped {
namespace {

__attribute__((always_inline)) inline Vec load_number(int kind, const char* numbers, int index) {
    const auto* halves = reinterpret_cast<const uint16_t*>(numbers) + index;
    if (kind == kFloat16) return load_float16(halves);
    if (kind == kBfloat16) return Vec::load(reinterpret_cast<const bf16*>(halves));
    return Vec::load(reinterpret_cast<const float*>(numbers) + index);
}

}  // namespace
}  // namespace aioserve::linear::grouped
