#include "weights/stored.h"

#include <bit>
#include <cstring>

namespace aioserve::weights {
namespace {

uint32_t float32_of_bfloat16(uint16_t bits) { return static_cast<uint32_t>(bits) << 16; }

// Three cases without a branch, so that the compiler makes vectors of it.
uint32_t float32_of_float16(uint16_t bits) {
    constexpr uint32_t kBiases = 112u << 23;  // of the exponents: 127 - 15
    constexpr uint32_t kOne = 113u << 23;     // 2^-14, the smallest normal float16
    const uint32_t magnitude = bits & 0x7fffu;
    const uint32_t shifted = magnitude << 13;
    const uint32_t normal = shifted + kBiases;
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(shifted + kOne) - std::bit_cast<float>(kOne));
    const uint32_t infinite = normal + kBiases;  // and NaN
    const uint32_t value = magnitude < 0x0400u   ? subnormal
                           : magnitude >= 0x7c00u ? infinite
                                                  : normal;
    return value | (static_cast<uint32_t>(bits & 0x8000u) << 16);
}

uint16_t bfloat16_of_float32(uint32_t bits) {
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded >> 16);
}

template <class From, class To, class Function>
void each(const char* from, int64_t count, char* to, Function function) {
    for (int64_t i = 0; i < count; ++i) {
        From value;
        std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
        const To result = function(value);
        std::memcpy(to + i * static_cast<int64_t>(sizeof(To)), &result, sizeof(To));
    }
}

}  // namespace

void convert(const char* from, Stored type, int64_t count, bool to_bfloat16, char* to) {
    if (type == (to_bfloat16 ? Stored::bfloat16 : Stored::float32)) {
        std::memcpy(to, from, static_cast<std::size_t>(count * item_bytes(type)));
    } else if (type == Stored::float32) {
        each<uint32_t, uint16_t>(from, count, to, bfloat16_of_float32);
    } else if (type == Stored::bfloat16) {
        each<uint16_t, uint32_t>(from, count, to, float32_of_bfloat16);
    } else if (to_bfloat16) {
        each<uint16_t, uint16_t>(from, count, to, [](uint16_t half) {
            return bfloat16_of_float32(float32_of_float16(half));
        });
    } else {
        each<uint16_t, uint32_t>(from, count, to, float32_of_float16);
    }
}

}  // namespace aioserve::weights
