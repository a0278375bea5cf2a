// The arithmetic of integer weights: what lies in their panels and blocks, and what a tile makes of it.
//
// Weights have a scale, and maybe a minimum, for each column and *group* of 16, 32, 64 or 128 inputs:
// w = q * scale + minimum. Rows of x become integers group by group, too: with amax the largest
// magnitude in the group,
//
//     sx = amax / 127,  qx = round(x * (127 / amax)), ties to even, from -127 to 127
//     xsum = sum of qx
//
// Zeros where amax is below 2^-119, whose reciprocal would not be finite. Where a number isn't finite sx
// is NaN, which makes NaN of all results of the row. An output is a chain over the groups in order,
// in float32, every fused multiply-add rounded once:
//
//     isum = sum of q * qx                          exact
//     t    = fma(scale, isum, minimum * xsum)       scale * isum where there are no minimums
//     y    = fma(sx, t, y)                          from 0 on; then + bias
//
// Integers are exact in any order, so that all instruction sets and all numbers of rows give the same
// bits. Inputs past the last are zeros in x.
//
// A panel holds *span* after span of groups for 32 columns: a header with their scales, then group after
// group their weights, unsigned: q + offset. A step is four inputs, a unit four steps. A unit of 8
// bits is `[4][32][4]` bytes. Of fewer bits it begins with `[2][32][4]` bytes whose low halves have
// the lowest 4 bits of one step and whose high halves those of the next one. The upper bits of all
// its steps lie behind them, those of a column together: in 6 bits `[32][4]` bytes with the bits of
// step s from bit 2 * s on; in 5 bits `[32][2]` bytes, in which byte i has in its low half the
// bits of all steps for input i, in its high half those for input i + 2. In a unit of a weight that has
// a table, 4 bits are the place in it of q + offset, where the least of the table's q is -offset. A unit of
// E4M3 is `[16][32]` bytes.
//
// A header is one of these, in which [2] is [1] where there are no minimums:
//
//     float32, float16, bfloat16    `[2][32]` numbers of the one group in the span
//     the same with zero points     `[2][32]` numbers of the two groups in the span, then `[2][32]`
//                                   int8: a minimum is -(zero point * scale)
//     multiples                     `[2][32]` float32, then `[2][groups][32]` int8: their products
//                                   are the scales and minimums of the groups in 256 inputs
//
// A block holds group after group for its rows, in chunks of 16 bytes: `[rows]` of `RowGroup`, then
// the integers, `[chunks][rows][16]`. A tile either takes int8, of which a chunk holds four steps, or
// int16, of which it holds two: of each step first the inputs 0 and 2, then 1 and 3. AMX's tiles take
// int8 in longer chunks (`amx_tile.inl`).

#pragma once

#include "linear/tile.h"

namespace aioserve::linear::grouped {

constexpr int kMaxGroup = 128;
constexpr int kUnit = 16;  // inputs; groups are made of whole units
constexpr int kUnitSteps = kUnit / 4;
constexpr int kRowChunkBytes = 16;
constexpr int kMultiplesInputs = 256;

// How scales and minimums are kept: no less exact than they came.
enum Scales : int { kFloat32, kFloat16, kBfloat16, kMultiples };
constexpr int kZeroPointsSpan = 2;  // so that headers are whole lines

constexpr int number_bytes(int kind) { return kind == kFloat16 || kind == kBfloat16 ? 2 : 4; }

// How integers lie in a unit; and behind them codes of floats, which are multiplied as floats alone
// (`decoded/tile.h`): four bits that choose from 16 floats, and E4M3.
enum Storage : int { k8Bits, k6Bits, k5Bits, k4Bits, kTable, kFloatTable, kE4m3 };
constexpr int kStorages = 5;  // of integers

constexpr int bits_of(Storage storage) {
    constexpr int kBits[] = {8, 6, 5, 4, 4, 4, 8};
    return kBits[storage];
}
constexpr int unit_bytes(Storage storage) { return kUnit * kPanelColumns * bits_of(storage) / 8; }

// Of less than 8 bits: rows of 128 bytes that hold two steps each, then the upper bits, of which each
// column has so many bytes.
constexpr int kHalfLines = 2;
constexpr int kUpperAt = kHalfLines * kStepPanelBytes;
constexpr int upper_bytes(Storage storage) { return kUnit * (bits_of(storage) - 4) / 8; }

struct RowGroup {
    float scale;
    float sum;      // of the integers
    int32_t start;  // - offset * sum: sums of unsigned weights begin here
    int32_t unused;
};
static_assert(sizeof(RowGroup) == kRowChunkBytes);

constexpr bool is_made(const WeightShape& weight) {
    return weight.kind == kMultiples || weight.has_zero_points;
}

// Of panels once they are unpacked: the same unsigned integers in 8 bits, and float32 instead of scales
// or minimums that are products.
constexpr WeightShape unpacked(WeightShape weight) {
    if (is_made(weight)) {
        weight.kind = kFloat32;
        weight.has_zero_points = false;
        weight.span = 1;
        weight.header_bytes = (weight.has_minimums ? 2 : 1) * kPanelColumns * 4;
    }
    const int spans = (weight.groups + weight.span - 1) / weight.span;
    weight.panel_bytes = static_cast<std::size_t>(spans) * weight.header_bytes +
                         static_cast<std::size_t>(weight.steps) * kStepPanelBytes;
    return weight;
}

// The tiles of a storage. Tasks of at least `unpacked_rows` rows unpack their panels, which `unpacked`
// multiplies.
struct StorageTiles {
    const TileSet* kept;
    int unpacked_rows;
    const TileSet* unpacked;
    void (*unpack)(const WeightShape& kept, const char* panel, char* to);  // null: they never are
};

// What an instruction set publishes.
struct IntegerTiles {
    StorageTiles of[kStorages];  // in their order
};

}  // namespace aioserve::linear::grouped
