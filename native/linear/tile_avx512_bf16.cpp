// Only bfloat16: float32 is as on AVX-512.

#if defined(__x86_64__)

#include "simd/avx512_bf16.h"

namespace aioserve::linear {
namespace {

constexpr int vectors_at_once(int, int) { return 2; }

}  // namespace
}  // namespace aioserve::linear

#include "linear/tile.inl"

namespace aioserve::linear {
namespace {

// Both products of a pair in one instruction.
struct Pairs : Float32 {
    static Vec multiply_add(Vec x, Vec w, Vec sum) { return dot_bf16(x, w, sum); }
    static void store(Vec sum, bf16* y, int64_t columns) { store_rounded(sum, y, columns); }
};

}  // namespace

extern constexpr TileSet kAvx512Bf16Bfloat16 = tiles<Pairs, 13>();

}  // namespace aioserve::linear

#endif
