// Units of weights as the vectors that tiles multiply, for the `Ints` in scope.

#include "linear/grouped/tile.h"

namespace aioserve::linear::grouped {
namespace {

constexpr int kPrefetchBytes = 4096;

template <int BYTES>
__attribute__((always_inline)) inline void prefetch_lines(const char* panel) {
#pragma GCC unroll 8
    for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(panel + kPrefetchBytes + line);
}

// The unit at `unit`, of its columns from `column` on as many as VECTORS hold. Its steps are
// unpacked one after the other.
template <Storage S, int VECTORS>
struct Unit {
    static constexpr int kVectorBytes = Ints::kWidth * kStepBytes;
    static constexpr int kUpperBits = S == k8Bits ? 0 : bits_of(S) - 4;

    const char* line;
    Ints table;
    Ints halves[VECTORS];
    Ints upper[VECTORS];

    __attribute__((always_inline)) Unit(const char* unit, int column, Ints table_)
        : line(unit + column * kStepBytes), table(table_) {
        if constexpr (kUpperBits > 0) {
            const char* from = unit + kUpperAt + column * upper_bytes(S);
            constexpr int kBytes = Ints::kWidth * upper_bytes(S);
            prefetch_lines<VECTORS * kBytes>(from);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                if constexpr (kUpperBits == 1) {
                    const Ints both = Ints::load_halves(from + v * kBytes);
                    upper[v] = both | both.template shifted<12>();
                } else {
                    upper[v] = Ints::load(from + v * kBytes);
                }
            }
        }
    }

    // A byte for each integer.
    template <int STEP>
    __attribute__((always_inline)) void unpack(Ints (&bytes)[VECTORS]) {
        constexpr int kLineSteps = S == k8Bits ? 1 : 2;
        if constexpr (STEP % kLineSteps == 0) {
            prefetch_lines<VECTORS * kVectorBytes>(line);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) halves[v] = Ints::load(line + v * kVectorBytes);
            line += kStepPanelBytes;
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            if constexpr (S == k8Bits) {
                bytes[v] = halves[v];
            } else {
                const Ints low = STEP % 2 == 0 ? halves[v] : halves[v].template shifted<-4>();
                if constexpr (S == kTable) {
                    bytes[v] = table.looked_up(low.low_nibbles());
                } else if constexpr (kUpperBits > 0) {
                    const Ints moved = upper[v].template shifted<4 - kUpperBits * STEP>();
                    bytes[v] = low.low_nibbles_below(moved.masked(((1 << kUpperBits) - 1) << 4));
                } else {
                    bytes[v] = low.low_nibbles();
                }
            }
        }
    }
};

template <Storage S, int VECTORS, int STEP = 0>
__attribute__((always_inline)) inline void store_steps(Unit<S, VECTORS>& unit, char* to) {
    Ints bytes[VECTORS];
    unit.template unpack<STEP>(bytes);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) bytes[v].store(to + v * Unit<S, VECTORS>::kVectorBytes);
    if constexpr (STEP + 1 < kUnitSteps)
        store_steps<S, VECTORS, STEP + 1>(unit, to + kStepPanelBytes);
}

// The unit at `unit` as 8 bits hold it. VECTORS hold all columns.
template <Storage S, int VECTORS>
__attribute__((always_inline)) inline void unpack_unit(const char* unit, Ints table, char* to) {
    Unit<S, VECTORS> all(unit, 0, table);
    store_steps(all, to);
}

}  // namespace
}  // namespace aioserve::linear::grouped
