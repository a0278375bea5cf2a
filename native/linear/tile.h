// What a register tile multiplies, and the table in which each instruction set publishes its tiles.
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

}  // namespace aioserve::linear
