#include "simd/amx_emulated.h"
#include "simd/common.inl"
#include "simd/portable_words.h"

namespace aioserve {
namespace {

// As `simd/avx512_pairs.inl` has it.
inline Vec store_powers(Vec first, Vec second, bf16* to, Vec sum) {
    store_rounded(exp2(first), to, Vec::kWidth);
    store_rounded(exp2(second), to + Vec::kWidth, Vec::kWidth);
    return sum + Vec::load(to) + Vec::load(to + Vec::kWidth);
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
