// Rows of x in blocks as int8, for tiles that multiply bytes.

#include "linear/grouped/tile.h"

namespace aioserve::linear::grouped {
namespace {

struct Bytes {
    static constexpr int kStepBytes = 4;
    using Weights = Ints;
    static Ints weights(Ints steps) { return steps; }
    // COUNT integers of row `index` into the chunks of a group.
    template <int COUNT>
    static void place(const int8_t* integers, char* chunks, int index, int rows) {
        char* to = chunks + index * kRowChunkBytes;
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i += kRowChunkBytes, to += rows * kRowChunkBytes)
            __builtin_memcpy(to, integers + i, kRowChunkBytes);
    }
};

}  // namespace
}  // namespace aioserve::linear::grouped
