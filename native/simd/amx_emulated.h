// The same as `simd/amx.h` in plain C++, bit by bit as Intel documents TDPBF16PS and TDPBSUD, for any
// machine: that the kernels which use tiles are tested on machines without them. What the processor
// doesn't execute, since the sizes of operands don't fit, ends the process here too.

#pragma once

#include <cstddef>
#include <cstdint>

#include "simd/portable.h"
#include "simd/tile_sizes.h"

namespace aioserve {
namespace {

// Of the calling thread.
inline TileSizes& tile_sizes() {
    thread_local TileSizes sizes;
    return sizes;
}

inline void configure_tiles(const TileSizes& sizes) { tile_sizes() = sizes; }
inline void configure_tiles() { configure_tiles(kWholeTiles); }
inline void release_tiles() { configure_tiles(TileSizes{}); }

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline float without_denormal(float x) {
    const uint32_t bits = bits_of(x);
    return (bits & 0x7f800000u) == 0 ? float_of(bits & 0x80000000u) : x;
}

// a b + sum, rounded once, for factors that were bfloat16: their product is exact unless it leaves
// the range of float32, and only then is the library's slow function needed.
inline float fused_multiply_add(float a, float b, float sum) {
    const float product = a * b;
    const uint32_t exponent = bits_of(product) & 0x7f800000u;
    const bool exact = (exponent != 0 && exponent != 0x7f800000u) || a == 0 || b == 0;
    return without_denormal(exact ? product + sum : __builtin_fmaf(a, b, sum));
}

struct Tiles {
    template <int TILE>
    void zero() {
        __builtin_memset(rows_[TILE], 0, kTileBytes);
    }
    template <int TILE>
    void load(const void* from, std::ptrdiff_t row_stride) {
        zero<TILE>();
        for (int r = 0; r < rows_of(TILE); ++r)
            __builtin_memcpy(rows_[TILE][r], static_cast<const char*>(from) + r * row_stride,
                             row_bytes_of(TILE));
    }
    template <int TILE>
    void store(void* to, std::ptrdiff_t row_stride) const {
        for (int r = 0; r < rows_of(TILE); ++r)
            __builtin_memcpy(static_cast<char*>(to) + r * row_stride, rows_[TILE][r],
                             row_bytes_of(TILE));
    }
    // Two chains of sums per output, of the first and of the second of each pair; then their sum
    // is added to c.
    template <int C, int A, int B>
    void multiply_add() {
        check_sizes(C, A, B);
        for (int m = 0; m < rows_of(C); ++m) {
            float sums[2][kColumns] = {};
            for (int k = 0; k < rows_of(B); ++k) {
                const float first = half(rows_[A][m][k], 0), second = half(rows_[A][m][k], 1);
                for (int n = 0; n < kColumns; ++n) {
                    const uint32_t b = rows_[B][k][n];
                    sums[0][n] = fused_multiply_add(first, half(b, 0), sums[0][n]);
                    sums[1][n] = fused_multiply_add(second, half(b, 1), sums[1][n]);
                }
            }
            for (int n = 0; n < kColumns; ++n) {
                const float sum = without_denormal(sums[0][n] + sums[1][n]);
                const float c = without_denormal(float_of(rows_[C][m][n]));
                rows_[C][m][n] = bits_of(without_denormal(c + sum));
            }
        }
    }
    template <int C, int A, int B>
    void multiply_add_bytes() {
        check_sizes(C, A, B);
        for (int m = 0; m < rows_of(C); ++m)
            for (int k = 0; k < rows_of(B); ++k)
                for (int n = 0; n < kColumns; ++n)
                    rows_[C][m][n] += sum_of_products(rows_[A][m][k], rows_[B][k][n]);
    }

  private:
    static constexpr int kColumns = kTileRowBytes / 4;

    static int rows_of(int tile) { return tile_sizes().rows[tile]; }
    static int row_bytes_of(int tile) { return tile_sizes().row_bytes[tile]; }

    static void check_sizes(int c, int a, int b) {
        const bool fit = rows_of(c) > 0 && rows_of(c) == rows_of(a) &&
                         row_bytes_of(c) == row_bytes_of(b) && row_bytes_of(a) == 4 * rows_of(b);
        if (!fit) __builtin_trap();
    }

    // Of four int8 with four uint8; modulo 2^32.
    static uint32_t sum_of_products(uint32_t a, uint32_t b) {
        int sum = 0;
        for (int shift = 0; shift < 32; shift += 8)
            sum += static_cast<int8_t>(a >> shift) * static_cast<uint8_t>(b >> shift);
        return static_cast<uint32_t>(sum);
    }

    static float half(uint32_t pair, int which) {
        return without_denormal(float_of(which == 0 ? pair << 16 : pair & 0xffff0000u));
    }

    uint32_t rows_[8][kTileRows][kColumns];
};

// As the conversion of AVX-512-BF16, which the kernels over real tiles use, rounds.
inline bf16 round_to_bf16(float x) {
    const uint32_t bits = bits_of(without_denormal(x));
    if (x != x) return {static_cast<uint16_t>((bits | 0x00400000u) >> 16)};
    return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// Stores the first `count` lanes, or all, as bfloat16; denormal numbers as zeros.
inline void store_rounded(Vec x, bf16* to, int64_t count) {
    for (int i = 0; i < Vec::kWidth && i < count; ++i) to[i] = round_to_bf16(x.v[i]);
}

}  // namespace
}  // namespace aioserve
