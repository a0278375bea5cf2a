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
    if (group_size == 16 || group_size == 32 || group_size == 64)
        return static_cast<int>(group_size);
    if (group_size < 1 || (group_size % kMaxGroup != 0 && group_size != in_features))
        refuse("group_size must be 16, 32, 64, a multiple of 128, or in_features, got " +
               std::to_string(group_size));
    return kMaxGroup;
}

WeightShape shape_of(int64_t out_features, int64_t in_features, int64_t group_size, int bits,
                     bool has_minimums, Scales scales, bool bfloat16) {
    if (out_features < 1)
        refuse("out_features must be at least 1, got " + std::to_string(out_features));
    if (in_features < 1)
        refuse("in_features must be at least 1, got " + std::to_string(in_features));
    if (bits != 4 && bits != 8) refuse("bits must be 4 or 8, got " + std::to_string(bits));
    const int size = group_in_panels(group_size, in_features);
    const auto groups = static_cast<int>((in_features + size - 1) / size);
    const int span = span_of(scales, size);
    const int header_bytes = header_bytes_of(scales, span, has_minimums);
    const int64_t headers = (groups + span - 1) / span;
    const int64_t weight_bytes = int64_t{groups} * size * kPanelColumns * bits / 8;
    return {.in_features = in_features,
            .bfloat16 = bfloat16,
            .steps = groups * size / 4,
            .panel_bytes = static_cast<std::size_t>(headers * header_bytes + weight_bytes),
            .groups = groups,
            .group_size = size,
            .offset = bits == 8 ? 128 : has_minimums ? 0 : 8,
            .has_minimums = has_minimums,
            .kind = scales,
            .span = span,
            .header_bytes = header_bytes};
}

}  // namespace

GroupedWeight::GroupedWeight(int64_t out_features, int64_t in_features, int64_t group_size,
                             int bits, bool has_minimums, Scales scales, bool bfloat16)
    : PanelKernel(out_features, shape_of(out_features, in_features, group_size, bits, has_minimums,
                                         scales, bfloat16)),
      bits_(bits),
      group_size_(group_size) {}

std::size_t GroupedWeight::weight_bytes() const {
    return static_cast<std::size_t>(shape().group_size * kPanelColumns * bits_ / 8);
}

char* GroupedWeight::header_at(int64_t id, int group) const {
    const auto spans = static_cast<std::size_t>(group / shape().span);
    const auto span = static_cast<std::size_t>(shape().span);
    const auto header_bytes = static_cast<std::size_t>(shape().header_bytes);
    return panel_at(id / kPanelColumns) + spans * (header_bytes + span * weight_bytes());
}

// From the row's own column on.
char* GroupedWeight::weights_at(int64_t id, int group) const {
    return header_at(id, group) + shape().header_bytes +
           static_cast<std::size_t>(group % shape().span) * weight_bytes() +
           id % kPanelColumns * kStepBytes;
}

void GroupedWeight::check_values(const int8_t* values, int64_t count) const {
    if (bits_ == 8) return;
    int8_t least = 0, most = 0;  // every range has 0
    for (int64_t i = 0; i < count * in_features(); ++i) {
        least = std::min(least, values[i]);
        most = std::max(most, values[i]);
    }
    const int lowest = -shape().offset, highest = lowest + 15;
    if (least < lowest || most > highest)
        refuse("values must be from " + std::to_string(lowest) + " to " + std::to_string(highest) +
               ", got " + std::to_string(least < lowest ? least : most));
}

// A span's after the other's.
void GroupedWeight::encode_row(const float* values, const char* name, Encoded* encoded) const {
    float of_groups[kMultiplesInputs / kUnit];
    const int span = shape().span;
    for (int first = 0; first < shape().groups; first += span, ++encoded) {
        const int count = std::min(span, shape().groups - first);
        for (int i = 0; i < count; ++i)
            of_groups[i] = values[int64_t{first + i} * shape().group_size / group_size_];
        if (encode(static_cast<Scales>(shape().kind), of_groups, count, *encoded)) continue;
        refuse(name + std::string(shape().kind == kFloat16
                                      ? " must be numbers of float16"
                                      : " must be multiples, by -128 to 127, of one number for " +
                                            std::to_string(kMultiplesInputs) + " inputs") +
               ", got " + std::to_string(of_groups[0]));
    }
}

void GroupedWeight::set_rows(int64_t first, int64_t count, const int8_t* values,
                             const float* scales, const float* minimums) {
    if (first < 0 || count < 0 || count > out_features() - first)
        throw std::out_of_range("rows must be from 0 to " + std::to_string(out_features() - 1) +
                                ", got " + std::to_string(count) + " from " +
                                std::to_string(first) + " on");
    check_values(values, count);
    const auto spans = static_cast<std::size_t>((shape().groups + shape().span - 1) / shape().span);
    const int parameters = has_minimums() ? 2 : 1;
    const float* sources[] = {scales, minimums};
    const char* names[] = {"scales", "minimums"};
    std::vector<Encoded> encoded(static_cast<std::size_t>(count * parameters) * spans);
    const auto encoded_at = [&](int64_t row, int which) {
        return encoded.data() + static_cast<std::size_t>(row * parameters + which) * spans;
    };
    for (int64_t row = 0; row < count; ++row)
        for (int which = 0; which < parameters; ++which)
            encode_row(sources[which] + row * groups(), names[which], encoded_at(row, which));
    for (int64_t row = 0; row < count; ++row) {
        const int64_t id = first + row;
        for (int which = 0; which < parameters; ++which)
            for (std::size_t span = 0; span < spans; ++span)
                write(shape(), encoded_at(row, which)[span],
                      header_at(id, static_cast<int>(span) * shape().span),
                      static_cast<int>(id % kPanelColumns), which);
        set_row(id, values + row * in_features());
    }
}

// Four at a time: a step, whose bytes lie together. Inputs past the last become values of 0.
void GroupedWeight::set_row(int64_t id, const int8_t* values) {
    const uint32_t offset = static_cast<uint32_t>(shape().offset) * 0x01010101u;
    const int64_t steps = shape().group_size / 4;
    const auto step_at = [&](int64_t first) {
        uint32_t step = 0;
        const int64_t left = in_features() - first;
        const auto count = static_cast<std::size_t>(std::clamp<int64_t>(left, 0, 4));
        std::memcpy(&step, values + first, count);
        // To add the offset is to flip the highest bit: nothing carries from byte to byte.
        return bits_ == 8 ? step ^ offset : ((step & 0x0f0f0f0fu) ^ offset) & 0x0f0f0f0fu;
    };
    for (int group = 0; group < shape().groups; ++group) {
        char* to = weights_at(id, group);
        const int64_t begin = int64_t{group} * shape().group_size;
        for (int64_t step = 0; step < steps; step += 8 / bits_, to += kStepPanelBytes) {
            uint32_t word = step_at(begin + 4 * step);
            if (bits_ == 4) word |= step_at(begin + 4 * step + 4) << 4;
            std::memcpy(to, &word, 4);
        }
    }
}

void GroupedWeight::row(int64_t id, char* out) const {
    thread_local std::vector<float> made;
    made.resize(static_cast<std::size_t>(in_features()));
    const auto column = static_cast<int>(id % kPanelColumns);
    const int offset = shape().offset, size = shape().group_size, span = shape().span;
    for (int group = 0; group < shape().groups; ++group) {
        const char* header = header_at(id, group);
        const char* from = weights_at(id, group);
        const float scale = read(shape(), header, column, 0, group % span);
        const float minimum =
            has_minimums() ? read(shape(), header, column, 1, group % span) : 0.0f;
        const int64_t begin = int64_t{group} * size;
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
