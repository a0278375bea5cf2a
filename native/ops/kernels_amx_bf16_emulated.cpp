#include "simd/amx_emulated.h"

namespace aioserve {
namespace {

inline Vec store_rounded(Vec x, bf16* to) {
    store_rounded(x, to, Vec::kWidth);
    return Vec::load(to);
}

}  // namespace
}  // namespace aioserve

namespace aioserve::ops {
namespace {

constexpr int kProductRows = 4;
constexpr int tile_columns(int64_t) { return 2; }
constexpr bool kBfloat16Pairs = true;
constexpr bool kTiles = true;

}  // namespace
}  // namespace aioserve::ops

#include "ops/kernels.inl"

namespace aioserve::ops {
extern constexpr Table kAmxBf16Emulated = kTable;
}
