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

uint16_t float16_of_float32(uint32_t bits) {
    constexpr uint32_t kBiases = 112u << 23;
    const uint32_t magnitude = bits & 0x7fffffffu;
    // From 0.5 to 1 a float32's last bit is a subnormal float16's last bit: the sum is rounded there.
    const float sum = std::bit_cast<float>(magnitude) + 0.5f;
    const uint32_t subnormal = std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(0.5f);
    const uint32_t normal = (magnitude - kBiases + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
    const uint32_t value = magnitude > 0x7f800000u    ? 0x7e00u
                           : magnitude >= 0x477ff000u ? 0x7c00u   // 65520 and more
                           : magnitude < 0x38800000u  ? subnormal  // below 2^-14
                                                      : normal;
    return static_cast<uint16_t>(value | ((bits >> 16) & 0x8000u));
}

uint32_t same(uint32_t bits) { return bits; }

// Functions are template arguments, so that the loops become vectors.
template <class From, class To, auto widen, auto narrow>
void each(const char* from, int64_t count, char* to) {
    for (int64_t i = 0; i < count; ++i) {
        From value;
        std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
        const To result = narrow(widen(value));
        std::memcpy(to + i * static_cast<int64_t>(sizeof(To)), &result, sizeof(To));
    }
}

template <class From, auto widen>
void each_to(const char* from, int64_t count, Stored to_type, char* to) {
    switch (to_type) {
        case Stored::float32: return each<From, uint32_t, widen, same>(from, count, to);
        case Stored::bfloat16:
            return each<From, uint16_t, widen, bfloat16_of_float32>(from, count, to);
        case Stored::float16:
            return each<From, uint16_t, widen, float16_of_float32>(from, count, to);
    }
}

}  // namespace

void convert(const char* from, Stored type, int64_t count, Stored to_type, char* to) {
    if (type == to_type) {
        std::memcpy(to, from, static_cast<std::size_t>(count * item_bytes(type)));
        return;
    }
    switch (type) {
        case Stored::float32: return each_to<uint32_t, same>(from, count, to_type, to);
        case Stored::bfloat16:
            return each_to<uint16_t, float32_of_bfloat16>(from, count, to_type, to);
        case Stored::float16:
            return each_to<uint16_t, float32_of_float16>(from, count, to_type, to);
    }
}

}  // namespace aioserve::weights
