#include "ops/no_tiles.h"
#include "simd/portable.h"
#include "simd/portable_words.h"

namespace aioserve::ops {
namespace {

// Rows and vectors of attention's sums that fit the registers.
constexpr int kProductRows = 4;
constexpr int tile_columns(int64_t) { return 2; }
constexpr bool kBfloat16Pairs = false;

}  // namespace
}  // namespace aioserve::ops

#include "ops/kernels.inl"

namespace aioserve::ops {
extern constexpr Table kPortable = kTable;
}
