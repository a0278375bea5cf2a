#include "linear/grouped/scales.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "weights/stored.h"

namespace aioserve::linear::grouped {
namespace {

using weights::Stored;

uint16_t float16_of(float value) {
    uint16_t half;
    weights::convert(reinterpret_cast<const char*>(&value), Stored::float32, 1, Stored::float16,
                     reinterpret_cast<char*>(&half));
    return half;
}

float float32_of(uint16_t half) {
    float value;
    weights::convert(reinterpret_cast<const char*>(&half), Stored::float16, 1, Stored::float32,
                     reinterpret_cast<char*>(&value));
    return value;
}

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
    encoded.number = number;
    for (int i = 0; i < count; ++i) {
        const float multiple = number == 0 ? std::copysign(1.0f, values[i]) : values[i] / number;
        if (!(multiple >= -128 && multiple <= 127) || multiple != std::rint(multiple)) return false;
        encoded.multiples[i] = static_cast<int8_t>(multiple);
        if (!same_bits(static_cast<float>(encoded.multiples[i]) * number, values[i])) return false;
    }
    return true;
}

}  // namespace

int span_of(Scales kind, int group_size) {
    return kind == kMultiples ? kMultiplesInputs / group_size : 1;
}

int header_bytes_of(Scales kind, int span, bool has_minimums) {
    const int each = kind == kFloat16 ? 2 : kind == kFloat32 ? 4 : 4 + span;
    return (has_minimums ? 2 : 1) * each * kPanelColumns;
}

bool encode(Scales kind, const float* values, int count, Encoded& encoded) {
    if (kind != kMultiples) {
        encoded.number = *values;
        return kind == kFloat32 ||
               (std::isfinite(*values) && same_bits(float32_of(float16_of(*values)), *values));
    }
    const float measure = common_measure(values, count);
    return encode_multiples(values, count, measure, encoded) ||
           encode_multiples(values, count, -measure, encoded);
}

void write(const WeightShape& weight, const Encoded& encoded, char* header, int column, int which) {
    const int at = which * kPanelColumns + column;
    if (weight.kind == kFloat16) {
        const uint16_t half = float16_of(encoded.number);
        std::memcpy(header + 2 * at, &half, 2);
        return;
    }
    std::memcpy(header + 4 * at, &encoded.number, 4);
    if (weight.kind == kFloat32) return;
    char* multiples = header + (weight.has_minimums ? 8 : 4) * kPanelColumns;
    for (int group = 0; group < weight.span; ++group)
        multiples[(which * weight.span + group) * kPanelColumns + column] =
            static_cast<char>(encoded.multiples[group]);
}

float read(const WeightShape& weight, const char* header, int column, int which, int group) {
    const int at = which * kPanelColumns + column;
    if (weight.kind == kFloat16) {
        uint16_t half;
        std::memcpy(&half, header + 2 * at, 2);
        return float32_of(half);
    }
    float number;
    std::memcpy(&number, header + 4 * at, 4);
    if (weight.kind == kFloat32) return number;
    const char* multiples = header + (weight.has_minimums ? 8 : 4) * kPanelColumns;
    const auto multiple = static_cast<int8_t>(
        multiples[(which * weight.span + group) * kPanelColumns + column]);
    return static_cast<float>(multiple) * number;
}

}  // namespace aioserve::linear::grouped
