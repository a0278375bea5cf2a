// What a register tile multiplies, and the table in which each instruction set publishes its tiles.
//
// A *step* is four bytes of an input row: one float32 or two bfloat16. Weights lie in panels of 32
// output columns, `[steps][32][4 bytes]`; rows of x lie in blocks of up to `max_rows` rows, in
// chunks of 64 bytes, `[chunks][rows][64 bytes]`, so that one pointer with constant offsets walks
// each of them. A chunk is 16 steps, or 8 where bfloat16 are packed as the float32 they are
// multiplied as, which saves every tile that reads the block their widening.
//
// A tile multiplies one block by one panel, or by a few that lie one after the other. Each output is
// one chain of multiply-adds in the order of the steps, whatever the number of rows: that is why the
// result of a row depends neither on how many there are nor on its place among them. What a tile reads
// of the panels is a single stream of addresses, fetched ahead past a panel's end.

#pragma once

#include <cstddef>
#include <cstdint>

namespace aioserve::linear {

constexpr int kPanelColumns = 32;
constexpr int kStepBytes = 4;
constexpr int kChunkBytes = 64;
constexpr int kStepPanelBytes = kPanelColumns * kStepBytes;
constexpr int kMaxRows = 32;   // of any instruction set
constexpr int kMaxPanels = 4;  // likewise
constexpr double kPlainByte_ns = 1.0 / 16;  // copied to a block

// What is the same of all panels of a weight.
struct WeightShape {
    int64_t in_features;
    bool bfloat16;  // rows of x; else float32
    int steps;
    std::size_t panel_bytes;
    // Of a weight of integers, 0 else; `grouped/tile.h` says what lies where.
    int groups;
    int group_size;
    int offset;
    bool has_minimums;
    int kind;  // of the scales
    bool has_zero_points;  // which minimums are kept as
    int span;  // groups behind a header
    int header_bytes;
    uint8_t table[16];  // that 4 bits choose from
    // Where they are multiplied as floats: `decoded/tile.h`.
    int storage;
    float numbers[16];  // that 4 bits choose from
};

// Of a weight of floats.
inline WeightShape shape_of_floats(int64_t in_features, bool bfloat16) {
    const int64_t bytes = in_features * (bfloat16 ? 2 : 4);
    WeightShape shape{};
    shape.in_features = in_features;
    shape.bfloat16 = bfloat16;
    shape.steps = static_cast<int>((bytes + kStepBytes - 1) / kStepBytes);
    shape.panel_bytes = static_cast<std::size_t>(shape.steps) * kStepPanelBytes;
    return shape;
}

struct Tile {
    const WeightShape& weight;
    const char* x;  // block of rows
    int rows;
    const char* panel;
    int panels;  // up to `TileSet::max_panels`
    const float* bias;  // of the panels' columns, 32 of each; null for none
    char* y;            // first row, the first panel's first column
    std::ptrdiff_t y_row_bytes;
    int columns;        // of the panels that exist
    bool y_is_float32;  // else bfloat16
};

using TileFunction = void (*)(const Tile&);

struct TileSet {
    int max_rows;
    int block_rows;         // the best number; up to max_rows are still better together
    int max_panels;
    int row_unit;           // blocks have room for a multiple of it; divides max_rows
    int pass_bytes;         // packed rows that pass all panels together, and stay in the second cache
    int min_pass_rows;      // or so many: fewer would take less time than the panels take to come
    int packed_step_bytes;  // of a row in a block: 4, or 8 where it is widened
    int packed_group_bytes; // beside its steps
    int plain_unit_bytes;   // a row as it stands is a block of one if its size is a multiple
    double packing_byte_ns;  // about what a thread takes to pack a byte
    // Writes one row into the block as its row `index`; zeros to its last chunk's end.
    void (*pack_row)(const WeightShape& weight, const char* row, char* block, int index,
                     int rows_in_block);
    TileFunction functions[kMaxRows];  // [rows - 1], up to max_rows
    TileFunction plain;                // one row as it stands; null where it always has to be packed
    // What a thread calls before its first tile and after its last one; null for nothing.
    void (*begin)();
    void (*end)();
};

}  // namespace aioserve::linear
