// What AMX's tile registers hold, real or emulated, and how that is configured.

#pragma once

#include <cstdint>

namespace aioserve {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileRowBytes = 64;
constexpr int kTileBytes = kTileRows * kTileRowBytes;

// As LDTILECFG reads it: of each register, or zeros for one that isn't used.
struct alignas(64) TileSizes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};
static_assert(sizeof(TileSizes) == 64);

constexpr TileSizes kWholeTiles{
    .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {16, 16, 16, 16, 16, 16, 16, 16},
};

}  // namespace
}  // namespace aioserve
