// Matrix products in AMX's tile registers.
//
// A tile register holds up to 16 rows of 64 bytes. A has so many rows of x, each of up to 16 *steps* of
// 4 bytes: two bfloat16, or four int8. B has a row for each of these steps, of 16 columns: two
// bfloat16 each, or four uint8. C has the rows of A and the columns of B: float32, or int32.
// Registers that are configured whole take padded operands; rows of A that nobody reads may hold
// anything.
//
// A thread computes between `configure_tiles` and `release_tiles`: while tiles are in use, each of
// its context switches saves 8 KiB more, and the core must not rest as deeply.

#pragma once

#include <cstddef>

#include "simd/tile_sizes.h"

namespace aioserve {
namespace {

// What the registers held is lost.
inline void configure_tiles(const TileSizes& sizes) {
    asm volatile("ldtilecfg %0" : : "m"(sizes));
}

inline void configure_tiles() { configure_tiles(kWholeTiles); }
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
    // c += a b, of int8 in a and uint8 in b, exact in int32.
    template <int C, int A, int B>
    void multiply_add_bytes() {
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
    }
};

}  // namespace
}  // namespace aioserve
