// The register tile with both products of a pair in one instruction, `dot_bf16` in scope.

namespace aioserve::linear {
namespace {

constexpr int kPairsRows = 13;
constexpr int vectors_at_once(int, int) { return 2; }

}  // namespace
}  // namespace aioserve::linear

#include "linear/tile.inl"

namespace aioserve::linear {
namespace {

struct Pairs : Float32 {
    static Vec multiply_add(Vec x, Vec w, Vec sum) { return dot_bf16(x, w, sum); }
    static void store(Vec sum, bf16* y, int64_t columns) { store_rounded(sum, y, columns); }
};

}  // namespace
}  // namespace aioserve::linear
