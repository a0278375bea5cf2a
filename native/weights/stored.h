// The number formats of weight files, and their conversion to those that are computed with.

#pragma once

#include <cstdint>

namespace aioserve::weights {

enum class Stored : int { float32, bfloat16, float16 };

constexpr int64_t item_bytes(Stored type) { return type == Stored::float32 ? 4 : 2; }

// `count` numbers at `from` become numbers of another format at `to`, which is other memory. They are
// rounded to nearest, ties to even; what is too large for float16 becomes infinite, NaN stays NaN.
void convert(const char* from, Stored type, int64_t count, Stored to_type, char* to);

}  // namespace aioserve::weights
