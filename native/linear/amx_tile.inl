// The register tile in AMX's tiles, real or emulated, with the `Tiles` and `Vec` in scope; see
// `tile.inl`. 16 or 32 rows by a panel of 32 columns: each tile of A or B that is loaded is used twice
// where there are more than 16 rows.
//
// Of 32 inputs at a time, the sum of the products is added to the output's sum: the same
// instructions for any number of rows. The tiles multiply faster than the second cache gives them
// operands. So a block of two tiles of rows passes a few panels a *part* of their inputs at a
// time, which stays in the first cache, while the sums of the other panels wait in memory.

#include "linear/tile.h"
#include "simd/common.inl"

namespace aioserve::linear {
namespace {

constexpr int kSteps = kTileRows;  // in a tile of B
constexpr int kColumns = kTileRowBytes / kStepBytes;
constexpr int kPanelChunkBytes = kSteps * kStepPanelBytes;
constexpr int kTileFloats = kTileBytes / 4;
constexpr int kPartChunks = 8;
constexpr int kChunksAhead = 2;  // of what is fetched

// Registers: c0 c1 for the first 16 rows, c2 c3 for the others.
enum { c0, c1, c2, c3, a0, a1, b0, b1 };

__attribute__((always_inline)) inline void prefetch_quarter(const char* chunk, int quarter) {
    constexpr int kQuarterBytes = kPanelChunkBytes / 4;
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

// The sums of a panel: those of the first 16 rows and columns, of the next 16 columns, and so on.
template <int ROW_TILES>
struct Sums {
    alignas(64) float tiles[2 * ROW_TILES][kTileFloats];

    const float* of(int row, int half) const {
        return tiles[row / kTileRows * 2 + half] + row % kTileRows * kColumns;
    }
    void load(Tiles& to) const {
        to.load<c0>(tiles[0], kTileRowBytes);
        to.load<c1>(tiles[1], kTileRowBytes);
        if constexpr (ROW_TILES == 2) {
            to.load<c2>(tiles[2], kTileRowBytes);
            to.load<c3>(tiles[3], kTileRowBytes);
        }
    }
    void store(const Tiles& from) {
        from.store<c0>(tiles[0], kTileRowBytes);
        from.store<c1>(tiles[1], kTileRowBytes);
        if constexpr (ROW_TILES == 2) {
            from.store<c2>(tiles[2], kTileRowBytes);
            from.store<c3>(tiles[3], kTileRowBytes);
        }
    }
};

template <int ROW_TILES>
inline void start(Tiles& tiles) {
    tiles.zero<c0>();
    tiles.zero<c1>();
    if constexpr (ROW_TILES == 2) {
        tiles.zero<c2>();
        tiles.zero<c3>();
    }
}

// Some columns of all rows, as T: 32 or, from `first` on, as many as there are.
template <class T, bool kWhole, int ROW_TILES>
inline void write(const Tile& t, const Sums<ROW_TILES>& sums, int first) {
    const int columns = kWhole ? kPanelColumns : t.columns - first;
    const float* bias = t.bias ? t.bias + first : nullptr;
    char* to = t.y + first * static_cast<std::ptrdiff_t>(sizeof(T));
    for (int row = 0; row < t.rows; ++row, to += t.y_row_bytes) {
        T* y = reinterpret_cast<T*>(to);
#pragma GCC unroll 2
        for (int i = 0; i < columns; i += Vec::kWidth) {
            Vec sum = Vec::load(sums.of(row, i / kColumns) + i % kColumns);
            if (bias) sum = sum + Vec::load(bias + i);
            if constexpr (sizeof(T) == sizeof(float)) {
                store_some(sum, y + i, columns - i);
            } else {
                store_rounded(sum, y + i, columns - i);
            }
        }
    }
}

template <int ROW_TILES>
inline void write(const Tile& t, const Sums<ROW_TILES>& sums, int first) {
    const bool whole = t.columns - first >= kPanelColumns;
    if (t.y_is_float32) {
        whole ? write<float, true>(t, sums, first) : write<float, false>(t, sums, first);
    } else {
        whole ? write<bf16, true>(t, sums, first) : write<bf16, false>(t, sums, first);
    }
}

// A chunk is a row's part of a tile of A. With `x_row_bytes` 0 all rows are the same one.
template <int ROW_TILES>
__attribute__((always_inline)) inline void run(const Tile& t, std::ptrdiff_t x_row_bytes,
                                               std::ptrdiff_t x_chunk_bytes) {
    Tiles tiles;
    Sums<ROW_TILES> sums[kMaxPanels];
    const int whole = t.weight.steps / kSteps, last_steps = t.weight.steps % kSteps;
    const int chunks = whole + (last_steps > 0);
    const std::ptrdiff_t panel_bytes = t.weight.steps * std::ptrdiff_t{kStepPanelBytes};
    const int part = ROW_TILES == 2 ? kPartChunks : chunks;
    for (int begin = 0; begin < chunks; begin += part) {
        const int end = begin + part < chunks ? begin + part : chunks;
        const int end_whole = end < whole ? end : whole;
        for (int p = 0; p < t.panels; ++p) {
            const char* panel = t.panel + p * panel_bytes;
            // Behind this part: the same of the next panel, or the next part of the first one.
            const char* behind = p + 1 < t.panels ? panel + panel_bytes + begin * kPanelChunkBytes
                                                  : t.panel + end * kPanelChunkBytes;
            const auto ahead = [&](int chunk) {
                const int later = chunk + kChunksAhead;
                return later < end ? panel + later * kPanelChunkBytes
                                   : behind + (later - end) * kPanelChunkBytes;
            };
            if (begin == 0) {
                start<ROW_TILES>(tiles);
            } else {
                sums[p].load(tiles);
            }
            for (int i = begin; i < end_whole; ++i)
                multiply_chunk<ROW_TILES>(tiles, t.x + i * x_chunk_bytes, x_row_bytes,
                                          panel + i * kPanelChunkBytes, ahead(i));
            if (end > whole) {  // x ends in zeros; the panel does not
                alignas(64) char last[kPanelChunkBytes] = {};
                __builtin_memcpy(last, panel + whole * kPanelChunkBytes,
                                 last_steps * kStepPanelBytes);
                multiply_chunk<ROW_TILES>(tiles, t.x + whole * x_chunk_bytes, x_row_bytes, last,
                                          ahead(whole));
            }
            sums[p].store(tiles);
            if (end == chunks) write(t, sums[p], p * kPanelColumns);
        }
    }
}

template <int ROW_TILES>
void run_tile(const Tile& t) {
    run<ROW_TILES>(t, kChunkBytes, ROW_TILES * kTileRows * kChunkBytes);
}

void run_plain(const Tile& t) { run<1>(t, 0, kChunkBytes); }

inline void pack_row(const WeightShape& weight, const char* row, char* block, int index,
                     int rows_in_block) {
    char* to = block + index * kChunkBytes;
    int64_t num_bytes = weight.in_features * (weight.bfloat16 ? 2 : 4);
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
                .block_rows = 2 * kTileRows,
                .max_panels = kMaxPanels,
                .row_unit = kTileRows,
                .pass_bytes = 384 * 1024,
                .min_pass_rows = 256,
                .packed_step_bytes = kStepBytes,
                .packed_group_bytes = 0,
                .plain_unit_bytes = kChunkBytes,
                .packing_byte_ns = kPlainByte_ns,
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
