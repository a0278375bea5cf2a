// The register tile that every instruction set shares, and the table in which each publishes its own.
//
// A *step* is four bytes of an input row: one float32 or two bfloat16. Weights lie in panels of 32
// output columns, `[steps][32][4 bytes]`; rows of x lie in blocks of up to `max_rows` rows,
// `[steps / 16][rows][16][4 bytes]`, so that one pointer with constant offsets walks each of them.
// A tile multiplies one block by a few panels. Each output is one chain of multiply-adds in the
// order of the steps, whatever the tile's shape: that is why the result of a row depends neither on
// how many rows there are nor on its place among them.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace aioserve::linear {

constexpr int kPanelColumns = 32;
constexpr int kStepBytes = 4;
constexpr int kChunkSteps = 16;
constexpr int kChunkBytes = kChunkSteps * kStepBytes;
constexpr int kStepPanelBytes = kPanelColumns * kStepBytes;
constexpr int kMaxRows = 12;   // of any instruction set
constexpr int kMaxPanels = 4;  // that one tile covers

struct Tile {
    const char* x;          // block of rows
    const char* panel;      // first panel
    std::size_t panel_bytes;
    int steps;
    const float* bias;      // of the first panel's first column; null for none
    char* y;                // first row, first panel's first column
    std::ptrdiff_t y_row_bytes;
    int columns;            // output columns that exist from there on
    bool y_is_float32;      // else bfloat16
};

using TileFunction = void (*)(const Tile&);

// [rows - 1][panels - 1]; null where a shape isn't offered. Every set offers one panel for
// each number of rows up to `max_rows`.
struct TileSet {
    int max_rows;
    TileFunction functions[kMaxRows][kMaxPanels];

    int panels(int rows, int available) const {
        for (int n = available < kMaxPanels ? available : kMaxPanels; n > 1; --n) {
            if (functions[rows - 1][n - 1]) return n;
        }
        return 1;
    }
};

// The tiles of an instruction set for float32 or bfloat16 weights; null where the compiler doesn't
// target it.
const TileSet* portable_tiles(bool bfloat16);
const TileSet* avx2_tiles(bool bfloat16);
const TileSet* avx512_tiles(bool bfloat16);
const TileSet* avx512_bf16_tiles();

// Everything below is compiled once per instruction set; internal linkage keeps the copies apart.
namespace {

inline std::uint16_t bfloat16_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// V: one vector type. `lanes`; `parts`, the number of products that a step is made of; `Sum`,
// `Weights` and `Input`, registers of `lanes` values; `zero()`, `weights<part>(pointer)`,
// `input<part>(pointer)` (one step of x for every lane), `multiply_add(sum, input, weights)`,
// `add_bias(sum, pointer)`, `store_float32(pointer, sum, columns)`, `store_bfloat16(...)`.

template <class V, int PART, int ROWS>
__attribute__((always_inline)) inline void multiply_step(
    typename V::Sum (&sums)[ROWS][kPanelColumns / V::lanes], const char* x, const char* panel) {
    constexpr int kVectors = kPanelColumns / V::lanes;
    if constexpr (kVectors <= 2) {
        typename V::Weights weights[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v)
            weights[v] = V::template weights<PART>(panel + v * V::lanes * kStepBytes);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const auto input = V::template input<PART>(x + r * kChunkBytes);
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v)
                sums[r][v] = V::multiply_add(sums[r][v], input, weights[v]);
        }
    } else {  // fewer registers: keep the few inputs in them and pass the weights by
        typename V::Input inputs[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) inputs[r] = V::template input<PART>(x + r * kChunkBytes);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const auto weights = V::template weights<PART>(panel + v * V::lanes * kStepBytes);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
                sums[r][v] = V::multiply_add(sums[r][v], inputs[r], weights);
        }
    }
}

template <class V, int ROWS, int PANELS>
void run_tile(const Tile& t) {
    constexpr int kVectors = kPanelColumns / V::lanes;
    constexpr std::size_t kPrefetchBytes = 2048;
    typename V::Sum sums[PANELS][ROWS][kVectors];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) sums[p][r][v] = V::zero();

    const char* x = t.x;
    const char* panel = t.panel;
    for (int left = t.steps; left > 0; left -= kChunkSteps, x += ROWS * kChunkBytes) {
        const int steps = left < kChunkSteps ? left : kChunkSteps;
        for (int s = 0; s < steps; ++s, panel += kStepPanelBytes) {
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; ++p) {
                const char* w = panel + p * t.panel_bytes;
                __builtin_prefetch(w + kPrefetchBytes);
                __builtin_prefetch(w + kPrefetchBytes + 64);
                multiply_step<V, 0, ROWS>(sums[p], x + s * kStepBytes, w);
                if constexpr (V::parts == 2)
                    multiply_step<V, 1, ROWS>(sums[p], x + s * kStepBytes, w);
            }
        }
    }

#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p)
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                const int column = p * kPanelColumns + v * V::lanes;
                const int columns = t.columns - column;
                if (columns <= 0) continue;
                auto sum = sums[p][r][v];
                if (t.bias) sum = V::add_bias(sum, t.bias + column);
                char* row = t.y + r * t.y_row_bytes;
                if (t.y_is_float32)
                    V::store_float32(reinterpret_cast<float*>(row) + column, sum, columns);
                else
                    V::store_bfloat16(reinterpret_cast<std::uint16_t*>(row) + column, sum, columns);
            }
}

// Publishes the tiles of V whose sums fit into BUDGET registers.
template <class V, int ROWS, int BUDGET>
constexpr void offer_tiles(TileSet& set) {
    constexpr int kSums = ROWS * kPanelColumns / V::lanes;
    set.functions[ROWS - 1][0] = run_tile<V, ROWS, 1>;
    if constexpr (2 * kSums <= BUDGET) set.functions[ROWS - 1][1] = run_tile<V, ROWS, 2>;
    if constexpr (4 * kSums <= BUDGET) set.functions[ROWS - 1][3] = run_tile<V, ROWS, 4>;
    if constexpr (ROWS > 1) offer_tiles<V, ROWS - 1, BUDGET>(set);
}

template <class V, int MAX_ROWS, int BUDGET>
constexpr TileSet tiles() {
    TileSet set{MAX_ROWS, {}};
    offer_tiles<V, MAX_ROWS, BUDGET>(set);
    return set;
}

}  // namespace
}  // namespace aioserve::linear
