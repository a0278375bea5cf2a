// The register tile in AMX's tiles, real or emulated, with the `Tiles` and `Vec` in scope; see
// `tile.inl`. 16 or 32 rows by a panel of 32 columns: each tile of A or B that is loaded is used twice
// where there are more than 16 rows.
//
// Of 32 inputs at a time, the sum of the products is added to the output's sum: the same
// instructions for any number of rows.

#include "linear/tile.h"
#include "simd/common.inl"

namespace aioserve::linear {
namespace {

constexpr int kSteps = kTileRows;  // in a tile of B
constexpr int kColumns = kTileRowBytes / kStepBytes;
constexpr int kPrefetchBytes = 4096;

// Registers: c0 c1 for the first 16 rows, c2 c3 for the others.
enum { c0, c1, c2, c3, a0, a1, b0, b1 };

__attribute__((always_inline)) inline void prefetch_quarter(const char* chunk, int quarter) {
    constexpr int kQuarterBytes = kSteps * kStepPanelBytes / 4;
#pragma GCC unroll 8
    for (int line = 0; line < kQuarterBytes; line += 64)
        __builtin_prefetch(chunk + quarter * kQuarterBytes + line);
}

// `next`: what will be loaded some chunks later, fetched a little between any two products.
template <int ROW_TILES>
__attribute__((always_inline)) inline void multiply_chunk(Tiles& tiles, const char* x,
                                                          std::ptrdiff_t x_row_bytes,
                                                          const char* panel, const char* next) {
    tiles.load<a0>(x, x_row_bytes);
    tiles.load<b0>(panel, kStepPanelBytes);
    prefetch_quarter(next, 0);
    tiles.multiply_add<c0, a0, b0>();
    tiles.load<b1>(panel + kTileRowBytes, kStepPanelBytes);
    prefetch_quarter(next, 1);
    tiles.multiply_add<c1, a0, b1>();
    if constexpr (ROW_TILES == 2) tiles.load<a1>(x + kTileBytes, x_row_bytes);
    prefetch_quarter(next, 2);
    if constexpr (ROW_TILES == 2) tiles.multiply_add<c2, a1, b0>();
    prefetch_quarter(next, 3);
    if constexpr (ROW_TILES == 2) tiles.multiply_add<c3, a1, b1>();
}

// `columns` of one row from `sums`, of which `kColumns` follow each other.
inline void store_columns(const Tile& t, const float* sums, int row, int first) {
    for (int i = 0; i < kColumns; i += Vec::kWidth) {
        const int column = first + i;
        if (column >= t.columns) return;
        Vec sum = Vec::load(sums + i);
        if (t.bias) sum = sum + Vec::load(t.bias + column);
        char* y = t.y + row * t.y_row_bytes;
        const int columns = t.columns - column;
        if (t.y_is_float32)
            store_some(sum, reinterpret_cast<float*>(y) + column, columns);
        else
            store_rounded(sum, reinterpret_cast<bf16*>(y) + column, columns);
    }
}

// A chunk is a row's part of a tile of A. With `x_row_bytes` 0 all rows are the same one.
template <int ROW_TILES>
__attribute__((always_inline)) inline void run(const Tile& t, std::ptrdiff_t x_row_bytes,
                                               std::ptrdiff_t x_chunk_bytes) {
    Tiles tiles;
    tiles.zero<c0>();
    tiles.zero<c1>();
    if constexpr (ROW_TILES == 2) {
        tiles.zero<c2>();
        tiles.zero<c3>();
    }
    const char* x = t.x;
    const char* panel = t.panel;
    int left = t.steps;
    for (; left >= kSteps; left -= kSteps, x += x_chunk_bytes, panel += kSteps * kStepPanelBytes)
        multiply_chunk<ROW_TILES>(tiles, x, x_row_bytes, panel, panel + kPrefetchBytes);
    if (left > 0) {  // x ends in zeros; the panel does not
        alignas(64) char last[kSteps * kStepPanelBytes] = {};
        __builtin_memcpy(last, panel, left * kStepPanelBytes);
        multiply_chunk<ROW_TILES>(tiles, x, x_row_bytes, last, panel + kPrefetchBytes);
    }

    alignas(64) float sums[ROW_TILES * kTileRows][kPanelColumns];
    constexpr std::ptrdiff_t kSumsRowBytes = sizeof(sums[0]);
    tiles.store<c0>(&sums[0][0], kSumsRowBytes);
    tiles.store<c1>(&sums[0][kColumns], kSumsRowBytes);
    if constexpr (ROW_TILES == 2) {
        tiles.store<c2>(&sums[kTileRows][0], kSumsRowBytes);
        tiles.store<c3>(&sums[kTileRows][kColumns], kSumsRowBytes);
    }
    for (int row = 0; row < t.rows; ++row) {
        store_columns(t, sums[row], row, 0);
        store_columns(t, sums[row] + kColumns, row, kColumns);
    }
}

template <int ROW_TILES>
void run_tile(const Tile& t) {
    run<ROW_TILES>(t, kChunkBytes, ROW_TILES * kTileRows * kChunkBytes);
}

void run_plain(const Tile& t) { run<1>(t, 0, kChunkBytes); }

inline void pack_row(const char* row, std::size_t num_bytes, char* to, int rows_in_block) {
    for (; num_bytes >= kChunkBytes; num_bytes -= kChunkBytes) {
        __builtin_memcpy(to, row, kChunkBytes);
        to += rows_in_block * kChunkBytes;
        row += kChunkBytes;
    }
    if (!num_bytes) return;
    __builtin_memset(to, 0, kChunkBytes);
    __builtin_memcpy(to, row, num_bytes);
}

constexpr TileSet amx_tiles() {
    TileSet set{.max_rows = 2 * kTileRows,
                .row_unit = kTileRows,
                .packed_step_bytes = kStepBytes,
                .plain_unit_bytes = kChunkBytes,
                .pack_row = pack_row,
                .functions = {},
                .plain = run_plain,
                .begin = configure_tiles,
                .end = release_tiles};
    for (int i = 0; i < 2 * kTileRows; ++i)
        set.functions[i] = i < kTileRows ? run_tile<1> : run_tile<2>;
    return set;
}

}  // namespace
}  // namespace aioserve::linear
