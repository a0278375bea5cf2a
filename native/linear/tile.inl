// The register tile, for the `Vec` in scope. Each `tile_*.cpp` includes this with compiler flags of its
// own; internal linkage keeps the copies apart. As in `ops/kernels.inl`, no inline function of the
// standard library.

#include "linear/tile.h"
#include "simd/common.inl"

namespace aioserve::linear {
namespace {

// How a vector of steps of x, all the same, is multiplied by one of the weights: in `parts`, one
// after the other.
struct Float32 {
    static constexpr int parts = 1;
    template <int>
    static Vec part(Vec steps) {
        return steps;
    }
    static Vec multiply_add(Vec x, Vec w, Vec sum) { return Vec::fma(x, w, sum); }
    static void store(Vec sum, bf16* y, int64_t columns) { store_some(sum, y, columns); }
};

// The first of each pair, then the second.
struct Bfloat16 : Float32 {
    static constexpr int parts = 2;
    template <int PART>
    static Vec part(Vec steps) {
        return PART == 0 ? steps.first_halves() : steps.second_halves();
    }
};

template <class P, int PART>
inline Vec weights(const char* p) {
    return P::template part<PART>(Vec::load(reinterpret_cast<const float*>(p)));
}

template <class P, int PART>
inline Vec input(const char* p) {
    return P::template part<PART>(Vec::set_bits(p));
}

constexpr int kVectors = kPanelColumns / Vec::kWidth;
constexpr int kVectorBytes = Vec::kWidth * kStepBytes;

template <class P, int PART, int ROWS>
__attribute__((always_inline)) inline void multiply_step(Vec (&sums)[ROWS][kVectors], const char* x,
                                                         const char* panel) {
    if constexpr (kVectors <= 2) {
        Vec w[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) w[v] = weights<P, PART>(panel + v * kVectorBytes);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const Vec row = input<P, PART>(x + r * kChunkBytes);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v)
                sums[r][v] = P::multiply_add(row, w[v], sums[r][v]);
        }
    } else {  // fewer registers: keep the few inputs in them and pass the weights by
        Vec rows[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) rows[r] = input<P, PART>(x + r * kChunkBytes);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const Vec w = weights<P, PART>(panel + v * kVectorBytes);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
                sums[r][v] = P::multiply_add(rows[r], w, sums[r][v]);
        }
    }
}

template <class P, int ROWS>
void run_tile(const Tile& t) {
    Vec sums[ROWS][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = Vec::zero();

    const char* x = t.x;
    const char* panel = t.panel;
    for (int left = t.steps; left > 0; left -= kChunkSteps, x += ROWS * kChunkBytes) {
        const int steps = left < kChunkSteps ? left : kChunkSteps;
        for (int s = 0; s < steps; ++s, panel += kStepPanelBytes) {
            multiply_step<P, 0, ROWS>(sums, x + s * kStepBytes, panel);
            if constexpr (P::parts == 2) multiply_step<P, 1, ROWS>(sums, x + s * kStepBytes, panel);
        }
    }

#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const int column = v * Vec::kWidth;
            if (column >= t.columns) continue;
            Vec sum = sums[r][v];
            if (t.bias) sum = sum + Vec::load(t.bias + column);
            char* row = t.y + r * t.y_row_bytes;
            const int columns = t.columns - column;
            if (t.y_is_float32)
                store_some(sum, reinterpret_cast<float*>(row) + column, columns);
            else
                P::store(sum, reinterpret_cast<bf16*>(row) + column, columns);
        }
}

template <class P, int ROWS>
constexpr void add_tiles(TileSet& set) {
    set.functions[ROWS - 1] = run_tile<P, ROWS>;
    if constexpr (ROWS > 1) add_tiles<P, ROWS - 1>(set);
}

template <class P, int MAX_ROWS>
constexpr TileSet tiles() {
    TileSet set{MAX_ROWS, {}};
    add_tiles<P, MAX_ROWS>(set);
    return set;
}

}  // namespace
}  // namespace aioserve::linear
