#include "linear/grouped/scales.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "weights/stored.h"

namespace aioserve::linear::grouped {
namespace {

using weights::Stored;

bool same_bits(float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b);
}

// The largest number of which all values are multiples; 0 where there is none or all are 0.
float common_measure(const float* values, int count) {
    constexpr int kBits = 24;
    uint64_t measure = 0;
    int exponent = 0;  // of the measure's last bit
    for (int i = 0; i < count; ++i) {
        if (!std::isfinite(values[i])) return 0;
        if (values[i] == 0) continue;
        int own;
        const float fraction = std::frexp(std::fabs(values[i]), &own);
        auto mantissa = static_cast<uint64_t>(std::ldexp(fraction, kBits));
        own -= kBits;
        const int zeros = std::countr_zero(mantissa);
        mantissa >>= zeros;
        own += zeros;
        if (measure == 0) exponent = own;
        const int difference = own - exponent;
        if (std::abs(difference) > 32) return 0;  // far more than a multiple has
        if (difference < 0) {
            measure <<= -difference;
            exponent = own;
        } else {
            mantissa <<= difference;
        }
        measure = std::gcd(measure, mantissa);
    }
    return std::ldexp(static_cast<float>(measure), exponent);
}

bool encode_multiples(const float* values, int count, float number, Encoded& encoded) {
    encoded.numbers[0] = number;
    for (int i = 0; i < count; ++i) {
        const float multiple = number == 0 ? std::copysign(1.0f, values[i]) : values[i] / number;
        if (!(multiple >= -128 && multiple <= 127) || multiple != std::rint(multiple)) return false;
        encoded.integers[i] = static_cast<int8_t>(multiple);
        if (!same_bits(static_cast<float>(encoded.integers[i]) * number, values[i])) return false;
    }
    return true;
}

Stored stored_as(int kind) {
    return kind == kFloat16    ? Stored::float16
           : kind == kBfloat16 ? Stored::bfloat16
                               : Stored::float32;
}

void write_number(int kind, float number, char* to) {
    weights::convert(reinterpret_cast<const char*>(&number), Stored::float32, 1, stored_as(kind),
                     to);
}

float read_number(int kind, const char* from) {
    float number;
    weights::convert(from, stored_as(kind), 1, Stored::float32, reinterpret_cast<char*>(&number));
    return number;
}

// Where multiples or zero points begin.
int integers_at(const WeightShape& weight) {
    if (weight.has_zero_points) return weight.span * kPanelColumns * number_bytes(weight.kind);
    return (weight.has_minimums ? 2 : 1) * kPanelColumns * number_bytes(weight.kind);
}

}  // namespace

int span_of(Scales kind, bool has_zero_points, int group_size) {
    return kind == kMultiples ? kMultiplesInputs / group_size
           : has_zero_points  ? kZeroPointsSpan
                              : 1;
}

int header_bytes_of(Scales kind, bool has_zero_points, int span, bool has_minimums) {
    const int bytes = number_bytes(kind);
    if (has_zero_points) return span * (bytes + 1) * kPanelColumns;
    return (has_minimums ? 2 : 1) * (kind == kMultiples ? bytes + span : bytes) * kPanelColumns;
}

bool encode(Scales kind, const float* values, int count, Encoded& encoded) {
    if (kind == kMultiples) {
        const float measure = common_measure(values, count);
        return encode_multiples(values, count, measure, encoded) ||
               encode_multiples(values, count, -measure, encoded);
    }
    for (int i = 0; i < count; ++i) {
        encoded.numbers[i] = values[i];
        if (kind == kFloat32) continue;
        char kept[sizeof(float)];
        write_number(kind, values[i], kept);
        if (!std::isfinite(values[i]) || !same_bits(read_number(kind, kept), values[i]))
            return false;
    }
    return true;
}

bool encode_zero_points(const float* scales, const float* minimums, int count, Encoded& encoded) {
    for (int i = 0; i < count; ++i) {
        float zero = std::rint(-minimums[i] / scales[i]);
        if (scales[i] == 0) zero = std::signbit(minimums[i]) == std::signbit(scales[i]) ? -1 : 0;
        if (!(zero >= -128 && zero <= 127) || !same_bits(-(zero * scales[i]), minimums[i]))
            return false;
        encoded.integers[i] = static_cast<int8_t>(zero);
    }
    return true;
}

void write(const WeightShape& weight, const Encoded& encoded, char* header, int column, int which) {
    const int bytes = number_bytes(weight.kind);
    auto* integers = reinterpret_cast<int8_t*>(header) + integers_at(weight) + column;
    if (weight.has_zero_points) {
        for (int group = 0; group < weight.span; ++group) {
            const int at = group * kPanelColumns;
            if (which == 0)
                write_number(weight.kind, encoded.numbers[group], header + (at + column) * bytes);
            else
                integers[at] = encoded.integers[group];
        }
        return;
    }
    write_number(weight.kind, encoded.numbers[0],
                 header + (which * kPanelColumns + column) * bytes);
    if (weight.kind != kMultiples) return;
    for (int group = 0; group < weight.span; ++group)
        integers[(which * weight.span + group) * kPanelColumns] = encoded.integers[group];
}

float read(const WeightShape& weight, const char* header, int column, int which, int group) {
    const int bytes = number_bytes(weight.kind);
    const auto* integers = reinterpret_cast<const int8_t*>(header) + integers_at(weight) + column;
    if (weight.has_zero_points) {
        const int at = group * kPanelColumns;
        const float scale = read_number(weight.kind, header + (at + column) * bytes);
        return which == 0 ? scale : -(static_cast<float>(integers[at]) * scale);
    }
    const float number =
        read_number(weight.kind, header + (which * kPanelColumns + column) * bytes);
    if (weight.kind != kMultiples) return number;
    return static_cast<float>(integers[(which * weight.span + group) * kPanelColumns]) * number;
}

int read_zero_point(const WeightShape& weight, const char* header, int column, int group) {
    const auto* integers = reinterpret_cast<const int8_t*>(header) + integers_at(weight) + column;
    return integers[group * kPanelColumns];
}

}  // namespace aioserve::linear::grouped
