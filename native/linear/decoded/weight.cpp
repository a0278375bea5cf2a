#include "linear/decoded/weight.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "dispatch.h"
#include "simd/portable_codes.h"

namespace aioserve::linear {
namespace {

using namespace grouped;

// Sums of smaller numbers may be below the normal ones.
constexpr double kSmall = 0x1p-100f;

float number_of(const WeightShape& shape, int code) {
    if (shape.storage == kE4m3) return kE4m3Numbers.of[code] * decoded::kE4m3Factor;
    if (shape.storage <= k5Bits) return static_cast<float>(code - shape.offset);
    return shape.numbers[code];
}

bool is_small(double number) { return number != 0 && std::fabs(number) < kSmall; }

}  // namespace

DecodedWeight::DecodedWeight(int64_t out_features, int64_t in_features, const IntegerForm& form,
                             bool bfloat16)
    : GroupedWeight(out_features, in_features, form, bfloat16, true),
      unpacked_(shape_of_floats(in_features, bfloat16)),
      least_number_(1) {
    if ((form.numbers || form.is_e4m3) && form.has_minimums)
        throw std::invalid_argument("has_minimums must be false for codes of floats");
    if (form.is_e4m3) least_number_ = kE4m3Numbers.of[1] * decoded::kE4m3Factor;
    if (!form.numbers) return;
    for (int i = 0; i < 16; ++i) {
        if (!std::isfinite(form.numbers[i]))
            throw std::invalid_argument("numbers must be finite, got " +
                                        std::to_string(form.numbers[i]));
        if (form.numbers[i] != 0)
            least_number_ = std::min(least_number_, std::fabs(form.numbers[i]));
    }
}

void DecodedWeight::set_rows(int64_t first, int64_t count, const int8_t* values,
                             const float* scales, const float* minimums) {
    const int64_t parameters = std::max<int64_t>(count, 0) * groups();
    const auto are_small = [&](const float* numbers, double factor) {
        return std::any_of(numbers, numbers + parameters,
                           [factor](float number) { return is_small(number * factor); });
    };
    GroupedWeight::set_rows(first, count, values, scales, minimums);
    if (are_small(scales, least_number_) || (minimums && are_small(minimums, 1))) has_small_ = true;
}

PanelLayout DecodedWeight::layout(int64_t rows) const {
    const decoded::Decoding& decoding = decoding_in_use(bfloat16());
    const TileSet* few = decoding.few_rows;
    const decoded::Unpack unpack = has_small_ ? decoding.unpack_small : decoding.unpack;
    // Tiles of few rows take small weights as `unpack` does.
    if (few && rows <= few->max_rows && unpack == decoding.unpack) return {&shape(), few, nullptr};
    return {&unpacked_, &tiles_in_use(bfloat16()), unpack};
}

void DecodedWeight::dequantize(const char* header, int in_span, int column,
                               const uint8_t* integers, int64_t count, float* to) const {
    const float scale = read(shape(), header, column, 0, in_span);
    const bool zeros = shape().has_zero_points, minimums = has_minimums() && !zeros;
    const auto zero = static_cast<float>(
        zeros ? read_zero_point(shape(), header, column, in_span) : 0);
    const float minimum = minimums ? read(shape(), header, column, 1, in_span) : 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const float scaled = (number_of(shape(), integers[i]) - zero) * scale;
        to[i] = minimums ? scaled + minimum : scaled;
    }
}

}  // namespace aioserve::linear
