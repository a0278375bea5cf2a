// Weights of integers, or of codes of floats, that are multiplied as floats of the rows' dtype.
//
// They are kept as `grouped/tile.h` says. On the way to the tiles they become the floats that they
// stand for, in float32 and in this order:
//
//     w = (code - zero point) * scale + minimum
//
// The difference is exact, the product is rounded and then the sum; where rows are bfloat16 the result
// is rounded once more. These are the numbers that the weight would have been held as, and the same
// tiles multiply them: results are the same to the bit.
//
// A block of rows that is alone meets a panel group by group: a group is decoded to the first cache and
// multiplied there. Where more blocks follow, whole panels are decoded, as `PackedWeight` keeps them, once for
// all blocks of a task.

#pragma once

#include "linear/grouped/tile.h"

namespace aioserve::linear::decoded {

constexpr float kE4m3Factor = 256;  // between `load_e4m3` and the numbers

using Unpack = void (*)(const WeightShape& kept, const char* panel, char* to);

// What an instruction set publishes for one dtype of rows.
struct Decoding {
    Unpack unpack;
    // The same where weights may be below the normal numbers, which `unpack` may take as zeros as tiles do.
    Unpack unpack_small;
    const TileSet* few_rows;  // for one block; null: there are none
};

}  // namespace aioserve::linear::decoded
