#include "linear/grouped/weight.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "dispatch.h"
#include "linear/grouped/storage.h"
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

Storage storage_of(const IntegerForm& form) {
    if (form.is_e4m3) return kE4m3;
    if (form.numbers) return kFloatTable;
    Storage storage;
    if (!find_storage(form.bits, form.table != nullptr, storage))
        refuse(std::string("bits must be ") + (form.table ? "4 with a table" : "4, 5, 6 or 8") +
               ", got " + std::to_string(form.bits));
    return storage;
}

WeightShape shape_of(int64_t out_features, int64_t in_features, const IntegerForm& form,
                     bool bfloat16, bool in_floats) {
    if (out_features < 1)
        refuse("out_features must be at least 1, got " + std::to_string(out_features));
    if (in_features < 1)
        refuse("in_features must be at least 1, got " + std::to_string(in_features));
    if (form.has_zero_points && (!form.has_minimums || form.scales == kMultiples))
        refuse("has_zero_points must be false without minimums, and where scales are multiples");
    const Storage storage = storage_of(form);
    const int size = group_in_panels(form.group_size, in_features);
    const auto groups = static_cast<int>((in_features + size - 1) / size);
    const int span = span_of(form.scales, form.has_zero_points, size);
    const int header_bytes =
        header_bytes_of(form.scales, form.has_zero_points, span, form.has_minimums);
    const int64_t headers = (groups + span - 1) / span;
    const int64_t weight_bytes = int64_t{groups} * (size / kUnit) * unit_bytes(storage);
    int offset = storage != k8Bits && form.has_minimums ? 0 : 1 << (form.bits - 1);
    if (form.table) offset = -*std::min_element(form.table, form.table + 16);
    if (form.numbers || form.is_e4m3) offset = 0;
    WeightShape shape{
            .in_features = in_features,
            .bfloat16 = bfloat16,
            .steps = in_floats ? shape_of_floats(in_features, bfloat16).steps : groups * size / 4,
            .panel_bytes = static_cast<std::size_t>(headers * header_bytes + weight_bytes),
            .groups = groups,
            .group_size = size,
            .offset = offset,
            .has_minimums = form.has_minimums,
            .kind = form.scales,
            .has_zero_points = form.has_zero_points,
            .span = span,
            .header_bytes = header_bytes,
            .table = {},
            .storage = storage,
            .numbers = {}};
    for (int i = 0; i < 16; ++i) {
        if (form.table) shape.table[i] = static_cast<uint8_t>(form.table[i] + offset);
        shape.numbers[i] = form.numbers ? form.numbers[i]
                           : form.table ? static_cast<float>(form.table[i])
                                        : static_cast<float>(i - offset);
    }
    return shape;
}

std::array<int16_t, 256> codes_of(const WeightShape& shape, const IntegerForm& form) {
    std::array<int16_t, 256> codes;
    codes.fill(-1);
    if (form.is_e4m3) {
        for (int code = 0; code < 256; ++code)
            if ((code & 127) != 127)  // NaN
                codes[static_cast<std::size_t>(code)] = static_cast<int16_t>(code);
        return codes;
    }
    if (form.table) {
        for (int code = 15; code >= 0; --code)  // of equal ones the first
            codes[static_cast<uint8_t>(form.table[code])] = static_cast<int16_t>(code);
        return codes;
    }
    for (int code = 0; code < 1 << form.bits; ++code)
        codes[static_cast<uint8_t>(code - shape.offset)] = static_cast<int16_t>(code);
    return codes;
}

}  // namespace

GroupedWeight::GroupedWeight(int64_t out_features, int64_t in_features, const IntegerForm& form,
                             bool bfloat16)
    : GroupedWeight(out_features, in_features, form, bfloat16, false) {}

GroupedWeight::GroupedWeight(int64_t out_features, int64_t in_features, const IntegerForm& form,
                             bool bfloat16, bool in_floats)
    : PanelKernel(out_features, shape_of(out_features, in_features, form, bfloat16, in_floats)),
      storage_(storage_of(form)),
      unpacked_shape_(unpacked(shape())),
      codes_(codes_of(shape(), form)),
      group_size_(form.group_size) {}

char* GroupedWeight::header_at(int64_t id, int group) const {
    const auto spans = static_cast<std::size_t>(group / shape().span);
    const auto span = static_cast<std::size_t>(shape().span);
    const auto header_bytes = static_cast<std::size_t>(shape().header_bytes);
    const auto group_bytes = static_cast<std::size_t>(units() * unit_bytes(storage_));
    return panel_at(id / kPanelColumns) + spans * (header_bytes + span * group_bytes);
}

char* GroupedWeight::unit_at(int64_t id, int group, int unit) const {
    return header_at(id, group) + shape().header_bytes +
           (group % shape().span * units() + unit) * unit_bytes(storage_);
}

void GroupedWeight::check_values(const int8_t* values, int64_t count) const {
    if (storage_ == k8Bits) return;
    const int8_t* end = values + count * in_features();
    const int8_t* bad = std::find_if(values, end, [&](int8_t value) { return code_of(value) < 0; });
    if (bad == end) return;
    const int lowest = -shape().offset, highest = lowest + (1 << bits()) - 1;
    refuse((storage_ == kTable   ? std::string("values must be in the table")
            : storage_ == kE4m3 ? std::string("values must be codes of numbers")
                                : "values must be from " + std::to_string(lowest) + " to " +
                                      std::to_string(highest)) +
           ", got " + std::to_string(*bad));
}

// A span's after the other's. `which`: 0 for scales, 1 for minimums.
void GroupedWeight::encode_row(const float* scales, const float* minimums, int which,
                               Encoded* encoded) const {
    static const std::string kNeeded[] = {
        "finite", "numbers of float16", "numbers of bfloat16",
        "multiples, by -128 to 127, of one number for " + std::to_string(kMultiplesInputs) +
            " inputs"};
    float of_groups[2][kMultiplesInputs / kUnit];
    const float* sources[] = {scales, minimums};
    const auto kind = static_cast<Scales>(shape().kind);
    const bool as_zeros = which == 1 && shape().has_zero_points;
    const int span = shape().span;
    for (int first = 0; first < shape().groups; first += span, ++encoded) {
        const int count = std::min(span, shape().groups - first);
        for (int source = 0; source <= which; ++source)
            for (int i = 0; i < count; ++i)
                of_groups[source][i] =
                    sources[source][int64_t{first + i} * shape().group_size / group_size_];
        const bool kept = as_zeros ? encode_zero_points(of_groups[0], of_groups[1], count, *encoded)
                                   : encode(kind, of_groups[which], count, *encoded);
        if (!kept)
            refuse((which == 0 ? "scales must be " : "minimums must be ") +
                   (as_zeros ? "-(zero point * scale), with zero points from -128 to 127"
                             : kNeeded[kind]) +
                   ", got " + std::to_string(of_groups[which][0]));
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
    std::vector<Encoded> encoded(static_cast<std::size_t>(count * parameters) * spans);
    const auto encoded_at = [&](int64_t row, int which) {
        return encoded.data() + static_cast<std::size_t>(row * parameters + which) * spans;
    };
    for (int64_t row = 0; row < count; ++row)
        for (int which = 0; which < parameters; ++which)
            encode_row(scales + row * groups(),
                       has_minimums() ? minimums + row * groups() : nullptr, which,
                       encoded_at(row, which));
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

// Inputs past the last, which are 0 in x, become any.
void GroupedWeight::set_row(int64_t id, const int8_t* values) {
    const auto column = static_cast<int>(id % kPanelColumns);
    for (int group = 0; group < shape().groups; ++group)
        for (int unit = 0; unit < units(); ++unit) {
            const int64_t begin = int64_t{group} * shape().group_size + unit * kUnit;
            const int64_t count = std::clamp<int64_t>(in_features() - begin, 0, kUnit);
            uint8_t integers[kUnit] = {};
            for (int64_t i = 0; i < count; ++i)
                integers[i] = static_cast<uint8_t>(code_of(values[begin + i]));
            store_column(storage_, integers, unit_at(id, group, unit), column);
        }
}

void GroupedWeight::dequantize(const char* header, int in_span, int column,
                               const uint8_t* integers, int64_t count, float* to) const {
    const float scale = read(shape(), header, column, 0, in_span);
    const float minimum = has_minimums() ? read(shape(), header, column, 1, in_span) : 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        const int stored = storage_ == kTable ? shape().table[integers[i]] : integers[i];
        const float scaled = static_cast<float>(stored - shape().offset) * scale;
        to[i] = has_minimums() ? scaled + minimum : scaled;
    }
}

void GroupedWeight::row(int64_t id, char* out) const {
    thread_local std::vector<float> made;
    made.resize(static_cast<std::size_t>(in_features()));
    const auto column = static_cast<int>(id % kPanelColumns);
    for (int group = 0; group < shape().groups; ++group)
        for (int unit = 0; unit < units(); ++unit) {
            uint8_t integers[kUnit];
            load_column(storage_, unit_at(id, group, unit), column, integers);
            const int64_t begin = int64_t{group} * shape().group_size + unit * kUnit;
            const int64_t count = std::clamp<int64_t>(in_features() - begin, 0, kUnit);
            if (count == 0) break;
            dequantize(header_at(id, group), group % shape().span, column, integers, count,
                       made.data() + begin);
        }
    weights::convert(reinterpret_cast<const char*>(made.data()), weights::Stored::float32,
                     in_features(),
                     bfloat16() ? weights::Stored::bfloat16 : weights::Stored::float32, out);
}

PanelLayout GroupedWeight::layout(int64_t rows) const {
    const StorageTiles& tiles = integer_tiles_in_use(storage_);
    if (tiles.unpack && rows >= tiles.unpacked_rows)
        return {&unpacked_shape_, tiles.unpacked, tiles.unpack};
    return {&shape(), tiles.kept, nullptr};
}

}  // namespace aioserve::linear
