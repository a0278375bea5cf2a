// Scales and minimums in the headers of a panel: written if they stay exact, and read again.

#pragma once

#include <cstddef>
#include <cstdint>

#include "linear/grouped/tile.h"

namespace aioserve::linear::grouped {

// Groups behind a header, and its bytes.
int span_of(Scales kind, bool has_zero_points, int group_size);
int header_bytes_of(Scales kind, bool has_zero_points, int span, bool has_minimums);

// The scales of one column of a span, or its minimums, as they lie in its header.
struct Encoded {
    float numbers[kZeroPointsSpan];  // that of multiples is the first
    int8_t integers[kMultiplesInputs / kUnit];  // multiples or zero points
};

// False where `values` [count] can't be kept exactly.
bool encode(Scales kind, const float* values, int count, Encoded& encoded);
bool encode_zero_points(const float* scales, const float* minimums, int count, Encoded& encoded);

// `which`: 0 for scales, 1 for minimums.
void write(const WeightShape& weight, const Encoded& encoded, char* header, int column, int which);
float read(const WeightShape& weight, const char* header, int column, int which, int group);
// The zero point in place of a minimum.
int read_zero_point(const WeightShape& weight, const char* header, int column, int group);

}  // namespace aioserve::linear::grouped
