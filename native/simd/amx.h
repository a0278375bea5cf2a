// Matrix products in AMX's tile registers.
//
// A tile register holds 16 rows of 64 bytes: of A, a row's 16 pairs of bfloat16; of B, 16 pairs deep
// and 16 columns across, a pair being 4 bytes; of C, 16 float32. Every register is configured whole:
// what is smaller is padded, and rows of A that nobody reads may hold anything.
//
// A thread computes between `configure_tiles` and `release_tiles`: while tiles are in use, each of
// its context switches saves 8 KiB more, and the core must not rest as deeply.

#pragma once

#include <cstddef>
#include <cstdint>

namespace aioserve {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;

inline void configure_tiles() {
    struct alignas(64) {
        uint8_t palette = 1;
        uint8_t start_row = 0;
        uint8_t reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const config;
    static_assert(sizeof(config) == 64);
    asm volatile("ldtilecfg %0" : : "m"(config));
}

inline void release_tiles() { asm volatile("tilerelease"); }

// Assembly rather than the header's macros, which take no template parameters.
struct Tiles {
    template <int TILE>
    void zero() {
        asm volatile("tilezero %%tmm%c0" : : "i"(TILE));
    }
    template <int TILE>
    void load(const void* from, std::ptrdiff_t row_stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                     :
                     : "r"(from), "r"(row_stride), "i"(TILE)
                     : "memory");
    }
    template <int TILE>
    void store(void* to, std::ptrdiff_t row_stride) const {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                     :
                     : "r"(to), "r"(row_stride), "i"(TILE)
                     : "memory");
    }
    // c += a b. Denormal numbers, in and out, are zeros.
    template <int C, int A, int B>
    void multiply_add() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
    }
};

}  // namespace
}  // namespace aioserve
