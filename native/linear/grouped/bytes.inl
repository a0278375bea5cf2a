// Rows of x in blocks as int8, for tiles that multiply bytes.

#include "linear/grouped/tile.h"

namespace aioserve::linear::grouped {
namespace {

struct Bytes {
    static constexpr int kStepBytes = 4;
    using Weights = Ints;
    static Ints weights(Ints steps) { return steps; }
    template <int COUNT>
    static void place(const int8_t* integers, char* to, int row_bytes) {
#pragma GCC unroll 8
        for (int i = 0; i < COUNT; i += kRowChunkBytes, to += row_bytes)
            __builtin_memcpy(to, integers + i, kRowChunkBytes);
    }
};

}  // namespace
}  // namespace aioserve::linear::grouped
