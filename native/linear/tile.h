// The register tile that every instruction set shares, and the table where each publishes its own.
//
// A *step* is four bytes of an input row: one float32 or two bfloat16. Weights lie in panels of 32
// output columns, `[steps][32][4 bytes]`; rows of x lie in blocks of up to `max_rows` rows,
// `[steps / 16][rows][16][4 bytes]`, so that one pointer with constant offsets walks each of them.
// A tile multiplies one block by one panel. Each output is one chain of multiply-adds in the order
// of the steps, whatever the number of rows: that is why the result of a row depends neither on how
// many there are nor on its place among them. One panel at a time, and no prefetching by hand: a
// single stream of addresses gets the most out of the hardware's prefetcher.

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
constexpr int kMaxRows = 12;  // of any instruction set

struct Tile {
    const char* x;  // block of rows
    const char* panel;
    int steps;
    const float* bias;  // of the panel's 32 columns; null for none
    char* y;            // first row, the panel's first column
    std::ptrdiff_t y_row_bytes;
    int columns;        // of the panel that exist
    bool y_is_float32;  // else bfloat16
};

using TileFunction = void (*)(const Tile&);

struct TileSet {
    int max_rows;
    TileFunction functions[kMaxRows];  // [rows - 1], up to max_rows
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

template <class V, int ROWS>
void run_tile(const Tile& t) {
    constexpr int kVectors = kPanelColumns / V::lanes;
    typename V::Sum sums[ROWS][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sums[r][v] = V::zero();

    const char* x = t.x;
    const char* panel = t.panel;
    for (int left = t.steps; left > 0; left -= kChunkSteps, x += ROWS * kChunkBytes) {
        const int steps = left < kChunkSteps ? left : kChunkSteps;
        for (int s = 0; s < steps; ++s, panel += kStepPanelBytes) {
            multiply_step<V, 0, ROWS>(sums, x + s * kStepBytes, panel);
            if constexpr (V::parts == 2) multiply_step<V, 1, ROWS>(sums, x + s * kStepBytes, panel);
        }
    }

#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            const int column = v * V::lanes;
            if (column >= t.columns) continue;
            auto sum = sums[r][v];
            if (t.bias) sum = V::add_bias(sum, t.bias + column);
            char* row = t.y + r * t.y_row_bytes;
            const int columns = t.columns - column;
            if (t.y_is_float32)
                V::store_float32(reinterpret_cast<float*>(row) + column, sum, columns);
            else
                V::store_bfloat16(reinterpret_cast<std::uint16_t*>(row) + column, sum, columns);
        }
}

template <class V, int ROWS>
constexpr void add_tiles(TileSet& set) {
    set.functions[ROWS - 1] = run_tile<V, ROWS>;
    if constexpr (ROWS > 1) add_tiles<V, ROWS - 1>(set);
}

template <class V, int MAX_ROWS>
constexpr TileSet tiles() {
    TileSet set{MAX_ROWS, {}};
    add_tiles<V, MAX_ROWS>(set);
    return set;
}

}  // namespace
}  // namespace aioserve::linear
