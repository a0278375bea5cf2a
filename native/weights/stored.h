// The number formats of weight files, and their conversion to those that are computed with.

#pragma once

#include <cstdint>

namespace aioserve::weights {

enum class Stored : int { float32, bfloat16, float16 };

constexpr int64_t item_bytes(Stored type) { return type == Stored::float32 ? 4 : 2; }

// `count` numbers at `from` become float32, or bfloat16 rounded to nearest, ties to even, at `to`,
// which is other memory. NaN stays NaN.
void convert(const char* from, Stored type, int64_t count, bool to_bfloat16, char* to);

}  // namespace aioserve::weights
