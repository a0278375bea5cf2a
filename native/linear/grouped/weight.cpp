#include "linear/grouped/weight.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "linear/grouped/tile.h"
#include "weights/stored.h"

namespace aioserve::linear {
namespace {

using namespace grouped;

[[noreturn]] void refuse(const std::string& problem) { throw std::invalid_argument(problem); }

int group_in_panels(int64_t group_size, int64_t in_features) {
    if (group_size == 16 || group_size == 32 || group_size == 64) return static_cast<int>(group_size);
    if (group_size < 1 || (group_size % kMaxGroup != 0 && group_size != in_features))
        refuse("group_size must be 16, 32, 64, a multiple of 128, or in_features, got " +
               std::to_string(group_size));
    return kMaxGroup;
}

std::size_t weight_bytes(int group_size, int bits) {
    return static_cast<std::size_t>(group_size * kPanelColumns * bits / 8);
}

WeightShape shape_of(int64_t out_features, int64_t in_features, int64_t group_size, int bits,
                     bool has_minimums, bool bfloat16) {
    if (out_features < 1)
        refuse("out_features must be at least 1, got " + std::to_string(out_features));
    if (in_features < 1)
        refuse("in_features must be at least 1, got " + std::to_string(in_features));
    if (bits != 4 && bits != 8) refuse("bits must be 4 or 8, got " + std::to_string(bits));
    const int size = group_in_panels(group_size, in_features);
    const auto groups = static_cast<int>((in_features + size - 1) / size);
    const std::size_t group_bytes =
        (has_minimums ? 2 : 1) * kParameterBytes + weight_bytes(size, bits);
    return {.in_features = in_features,
            .bfloat16 = bfloat16,
            .steps = groups * size / 4,
            .panel_bytes = static_cast<std::size_t>(groups) * group_bytes,
            .groups = groups,
            .group_size = size,
            .offset = bits == 8 ? 128 : has_minimums ? 0 : 8,
            .has_minimums = has_minimums};
}

}  // namespace

GroupedWeight::GroupedWeight(int64_t out_features, int64_t in_features, int64_t group_size,
                             int bits, bool has_minimums, bool bfloat16)
    : PanelKernel(out_features,
                  shape_of(out_features, in_features, group_size, bits, has_minimums, bfloat16)),
      bits_(bits),
      group_size_(group_size) {}

std::size_t GroupedWeight::group_bytes() const {
    return shape().panel_bytes / static_cast<std::size_t>(shape().groups);
}

void GroupedWeight::set_rows(int64_t first, int64_t count, const int8_t* values,
                             const float* scales, const float* minimums) {
    if (first < 0 || count < 0 || count > out_features() - first)
        throw std::out_of_range("rows must be from 0 to " + std::to_string(out_features() - 1) +
                                ", got " + std::to_string(count) + " from " +
                                std::to_string(first) + " on");
    if (bits_ == 4 && count > 0) {
        const auto [least, most] = std::minmax_element(values, values + count * in_features());
        const int lowest = -shape().offset;
        if (*least < lowest || *most > lowest + 15)
            refuse("values must be from " + std::to_string(lowest) + " to " +
                   std::to_string(lowest + 15) + ", got " +
                   std::to_string(*least < lowest ? *least : *most));
    }
    for (int64_t i = 0; i < count; ++i)
        set_row(first + i, values + i * in_features(), scales + i * groups(),
                minimums ? minimums + i * groups() : nullptr);
}

void GroupedWeight::set_row(int64_t id, const int8_t* values, const float* scales,
                            const float* minimums) {
    const int offset = shape().offset, size = shape().group_size;
    char* group = panel_at(id / kPanelColumns) + id % kPanelColumns * kStepBytes;
    for (int g = 0; g < shape().groups; ++g, group += group_bytes()) {
        const int64_t begin = int64_t{g} * size;
        const int64_t given = begin / group_size_;
        std::memcpy(group, scales + given, 4);
        char* to = group + kParameterBytes;
        if (minimums) {
            std::memcpy(to, minimums + given, 4);
            to += kParameterBytes;
        }
        const int64_t end = std::min<int64_t>(size, in_features() - begin);
        for (int64_t i = 0; i < end; ++i) {
            const auto stored = static_cast<uint8_t>(values[begin + i] + offset);
            const int64_t step = i / 4;
            auto* byte = reinterpret_cast<uint8_t*>(to + i % 4);
            if (bits_ == 8) {
                byte[step * kStepPanelBytes] = stored;
            } else {
                uint8_t& both = byte[step / 2 * kStepPanelBytes];
                both = static_cast<uint8_t>(step % 2 ? (both & 0x0f) | stored << 4
                                                     : (both & 0xf0) | stored);
            }
        }
    }
}

void GroupedWeight::row(int64_t id, char* out) const {
    thread_local std::vector<float> made;
    made.resize(static_cast<std::size_t>(in_features()));
    const int offset = shape().offset, size = shape().group_size;
    const char* group = panel_at(id / kPanelColumns) + id % kPanelColumns * kStepBytes;
    for (int g = 0; g < shape().groups; ++g, group += group_bytes()) {
        const char* from = group + kParameterBytes;
        float scale, minimum = 0;
        std::memcpy(&scale, group, 4);
        if (has_minimums()) {
            std::memcpy(&minimum, from, 4);
            from += kParameterBytes;
        }
        const int64_t begin = int64_t{g} * size;
        const int64_t end = std::min<int64_t>(size, in_features() - begin);
        for (int64_t i = 0; i < end; ++i) {
            const int64_t step = i / 4;
            const auto* byte = reinterpret_cast<const uint8_t*>(from + i % 4);
            const int stored = bits_ == 8 ? byte[step * kStepPanelBytes]
                                          : byte[step / 2 * kStepPanelBytes] >> step % 2 * 4 & 15;
            const float scaled = static_cast<float>(stored - offset) * scale;
            made[static_cast<std::size_t>(begin + i)] = has_minimums() ? scaled + minimum : scaled;
        }
    }
    weights::convert(reinterpret_cast<const char*>(made.data()), weights::Stored::float32,
                     in_features(),
                     bfloat16() ? weights::Stored::bfloat16 : weights::Stored::float32, out);
}

const TileSet& GroupedWeight::tiles() const { return integer_tiles_in_use(bits_); }

}  // namespace aioserve::linear
