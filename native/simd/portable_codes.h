// Codes of weights as four floats, for any architecture.

#pragma once

#include "simd/portable_ints.h"

namespace aioserve {
namespace {

// 16 numbers that the lowest 4 bits of lanes choose from.
struct Numbers {
    const float* all;

    explicit Numbers(const float* numbers) : all(numbers) {}
    Vec at(Ints places) const {
        const Ints::Lanes at = places.v & 15;
        return {Vec::Floats{all[at[0]], all[at[1]], all[at[2]], all[at[3]]}};
    }
};

// Byte BYTE of each lane, unsigned.
template <int BYTE>
inline Vec byte_floats(Ints x) {
    return Ints{(Ints::Lanes)((Ints::Words)x.v >> 8 * BYTE) & 255}.floats();
}

struct E4m3Table {
    float of[256];

    constexpr E4m3Table() : of() {
        for (int code = 0; code < 256; ++code) {
            const int exponent = code >> 3 & 15;
            float number = static_cast<float>(exponent ? 8 + (code & 7) : code & 7) * 0x1p-17f;
            for (int i = 1; i < exponent; ++i) number *= 2;
            of[code] = code & 128 ? -number : number;
        }
    }
};
constexpr E4m3Table kE4m3Numbers;

// Finite floats of E4M3, 256 times smaller.
inline Vec load_e4m3(const uint8_t* p) {
    return {Vec::Floats{kE4m3Numbers.of[p[0]], kE4m3Numbers.of[p[1]], kE4m3Numbers.of[p[2]], kE4m3Numbers.of[p[3]]}};
}

// Lanes of two bfloat16, for finite numbers: rounded to nearest, ties to even.
inline Vec rounded_pairs(Vec first, Vec second) {
    const auto rounded = [](Vec x) {
        const auto bits = (Ints::Words)x.v;
        return bits + 0x7fffu + ((bits >> 16) & 1u);
    };
    return {(Vec::Floats)(rounded(first) >> 16 | (rounded(second) & 0xffff0000u))};
}

}  // namespace
}  // namespace aioserve
