// For instruction sets without AMX's tiles: what `simd/amx.h` offers, as nothing.

#pragma once

namespace aioserve::ops {
namespace {

struct Tiles {};
inline void configure_tiles() {}
inline void release_tiles() {}
constexpr bool kTiles = false;

}  // namespace
}  // namespace aioserve::ops
