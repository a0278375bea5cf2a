// The register tile of integers in AMX's tiles, real or emulated, with the `Tiles`, `Vec`, `Ints` and
// `dot_bytes` in scope. Up to 32 rows by a panel: of each group the sums of 32 outputs fill four
// registers, or two where there are no more than 16 rows. They go to memory, where scales meet them as
// in `tile.inl`, while the tiles multiply the next group.
//
// The chunks of a block are as long as a group, up to a tile's 64 bytes: a tile of A is a chunk of
// 16 rows, one of B is 16 columns of as many steps of the panel. Registers are configured to the
// rows that there are. For few rows, as many as `kFewRows`, vectors are faster.

#include "linear/grouped/dot.inl"
#include "simd/tile_sizes.h"

namespace aioserve::linear::grouped {
namespace {

constexpr int kFewRows = 4;
constexpr int vectors_at_once(int) { return 2; }

// Blocks of few rows are those of vectors.
struct Chunks : Dot {
    template <int COUNT>
    static void place(const int8_t* integers, char* chunks, int index, int rows) {
        if (rows <= kFewRows) return Dot::place<COUNT>(integers, chunks, index, rows);
        constexpr int kBytes = COUNT < kTileRowBytes ? COUNT : kTileRowBytes;
        char* to = chunks + index * kBytes;
        for (int i = 0; i < COUNT; i += kBytes, to += rows * kBytes)
            __builtin_memcpy(to, integers + i, kBytes);
    }
};

}  // namespace
}  // namespace aioserve::linear::grouped

#include "linear/grouped/tile.inl"

namespace aioserve::linear::grouped {
namespace {

constexpr int kTileColumns = kTileRowBytes / kStepBytes;
constexpr int kTilePanelBytes = kTileRows * kStepPanelBytes;

// Registers: c0 c1 for the first 16 rows, c2 c3 for the others.
enum { c0, c1, c2, c3, a0, a1, b0, b1 };

inline void configure(int rows, int group_size) {
    const int chunk_bytes = group_size < kTileRowBytes ? group_size : kTileRowBytes;
    TileSizes sizes;
    const auto set = [&](int tile, int tile_rows, int row_bytes) {
        sizes.rows[tile] = static_cast<uint8_t>(tile_rows);
        sizes.row_bytes[tile] = static_cast<uint16_t>(row_bytes);
    };
    const int first = rows < kTileRows ? rows : kTileRows;
    set(c0, first, kTileRowBytes);
    set(c1, first, kTileRowBytes);
    set(a0, first, chunk_bytes);
    set(b0, chunk_bytes / kStepBytes, kTileRowBytes);
    set(b1, chunk_bytes / kStepBytes, kTileRowBytes);
    if (rows > kTileRows) {
        set(c2, rows - kTileRows, kTileRowBytes);
        set(c3, rows - kTileRows, kTileRowBytes);
        set(a1, rows - kTileRows, chunk_bytes);
    }
    configure_tiles(sizes);
}

// A group of a block and of a panel.
struct Group {
    const char* rows;
    const char* header;  // of its span
    int in_span;
};

template <int KIND, int ROW_TILES>
class PanelProduct {
  public:
    explicit PanelProduct(const Tile& t) : t_(t), chunk_bytes_(chunk_bytes_of(t.weight)) {
        for (int row = 0; row < t.rows; ++row)
            for (Vec& output : outputs_[row][0]) output = Vec::zero();
    }

    template <Storage S>
    void run() {
        const WeightShape& weight = t_.weight;
        const int weight_bytes = weight.group_size / kUnit * unit_bytes(S);
        const char* panel = t_.panel;
        Group group{t_.x, panel, 0}, before{};
        for (int i = 0; i < weight.groups; ++i) {
            if (group.in_span == 0) {
                group.header = panel;
                prefetch(panel, weight.header_bytes);
                panel += weight.header_bytes;
            }
            if constexpr (S == k8Bits) prefetch(panel, weight_bytes);
            multiply(group, bytes_of<S>(panel));
            if (i > 0) add(before);
            store();
            before = group;
            panel += weight_bytes;
            group.rows += t_.rows * (kRowChunkBytes + weight.group_size);
            if (++group.in_span == weight.span) group.in_span = 0;
        }
        add(before);
        for (int row = 0; row < t_.rows; ++row) {
            Tile one = t_;
            one.y += row * t_.y_row_bytes;
            write_outputs<Generic>(one, outputs_[row], 0);
        }
    }

  private:
    static int chunk_bytes_of(const WeightShape& weight) {
        return weight.group_size < kTileRowBytes ? weight.group_size : kTileRowBytes;
    }

    static void prefetch(const char* from, int bytes) {
        for (int line = 0; line < bytes; line += 64)
            __builtin_prefetch(from + kPrefetchBytes + line);
    }

    // The weights of a group as steps of bytes.
    template <Storage S>
    const char* bytes_of(const char* weights) {
        if constexpr (S == k8Bits) return weights;
        const Ints table = Ints::repeat_16(t_.weight.table);
        char* to = bytes_;
        for (int i = 0; i < t_.weight.group_size; i += kUnit) {
            unpack_unit<S, kVectors>(weights, table, to);
            weights += unit_bytes(S);
            to += unit_bytes(k8Bits);
        }
        return bytes_;
    }

    void multiply(const Group& group, const char* weights) {
        const char* x = group.rows + t_.rows * kRowChunkBytes;
        tiles_.template zero<c0>();
        tiles_.template zero<c1>();
        if constexpr (ROW_TILES == 2) {
            tiles_.template zero<c2>();
            tiles_.template zero<c3>();
        }
        for (int i = 0; i < t_.weight.group_size; i += chunk_bytes_) {
            tiles_.template load<a0>(x, chunk_bytes_);
            tiles_.template load<b0>(weights, kStepPanelBytes);
            tiles_.template multiply_add_bytes<c0, a0, b0>();
            tiles_.template load<b1>(weights + kTileRowBytes, kStepPanelBytes);
            tiles_.template multiply_add_bytes<c1, a0, b1>();
            if constexpr (ROW_TILES == 2) {
                tiles_.template load<a1>(x + kTileRows * chunk_bytes_, chunk_bytes_);
                tiles_.template multiply_add_bytes<c2, a1, b0>();
                tiles_.template multiply_add_bytes<c3, a1, b1>();
            }
            x += t_.rows * chunk_bytes_;
            weights += kTilePanelBytes;
        }
    }

    void store() {
        constexpr std::ptrdiff_t kSumsRowBytes = sizeof(sums_[0]);
        tiles_.template store<c0>(sums_[0], kSumsRowBytes);
        tiles_.template store<c1>(sums_[0] + kTileColumns, kSumsRowBytes);
        if constexpr (ROW_TILES == 2) {
            tiles_.template store<c2>(sums_[kTileRows], kSumsRowBytes);
            tiles_.template store<c3>(sums_[kTileRows] + kTileColumns, kSumsRowBytes);
        }
    }

    void add(const Group& group) {
        if (group.in_span == 0) parameters_.read(t_.weight, group.header, 0);
        t_.weight.has_minimums ? add_sums<true>(group) : add_sums<false>(group);
    }

    template <bool HAS_MINIMUMS>
    void add_sums(const Group& group) {
        Vec scales[kVectors], minimums[kVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
            scales[v] = parameters_.scale(group.in_span, v);
            minimums[v] = HAS_MINIMUMS ? parameters_.minimum(group.in_span, v) : scales[v];
        }
        for (int r = 0; r < t_.rows; ++r) {
            const char* row = group.rows + r * kRowChunkBytes;
            const Ints start = Ints::repeat(row + __builtin_offsetof(RowGroup, start));
#pragma GCC unroll 8
            for (int v = 0; v < kVectors; ++v) {
                const Ints sum = Ints::load(sums_[r] + v * Vec::kWidth) + start;
                outputs_[r][0][v] = add_group<HAS_MINIMUMS>(outputs_[r][0][v], sum, row, scales[v],
                                                            minimums[v]);
            }
        }
    }

    const Tile& t_;
    const int chunk_bytes_;
    Tiles tiles_;
    Parameters<KIND, kVectors> parameters_;
    Vec outputs_[ROW_TILES * kTileRows][1][kVectors];
    alignas(64) int32_t sums_[ROW_TILES * kTileRows][kPanelColumns];
    alignas(64) char bytes_[kMaxGroup * kPanelColumns];
};

template <class Fn>
void for_each_panel(const Tile& t, const Fn& fn) {
    Tile one = t;
    one.panels = 1;
    for (int p = 0; p < t.panels; ++p) {
        const int column = p * kPanelColumns, left = t.columns - column;
        one.panel = t.panel + static_cast<std::size_t>(p) * t.weight.panel_bytes;
        one.bias = t.bias ? t.bias + column : nullptr;
        one.y = t.y + column * (t.y_is_float32 ? 4 : 2);
        one.columns = left < kPanelColumns ? left : kPanelColumns;
        fn(one);
    }
}

template <Storage S, int ROW_TILES>
void run_in_tiles(const Tile& t) {
    configure(t.rows, t.weight.group_size);
    for_kind(t.weight, [&]<int KIND>() {
        for_each_panel(t, [](const Tile& one) {
            PanelProduct<KIND, ROW_TILES>(one).template run<S>();
        });
    });
}

template <Storage S, int ROWS>
void run_few(const Tile& t) {
    for_each_panel(t, run_tile<Chunks, S, ROWS>);
}

template <Storage S, int ROWS = kFewRows>
constexpr void add_few(TileSet& set) {
    set.functions[ROWS - 1] = run_few<S, ROWS>;
    if constexpr (ROWS > 1) add_few<S, ROWS - 1>(set);
}

template <Storage S>
constexpr TileSet amx_tiles() {
    TileSet set = tiles<Chunks, S, kFewRows>();
    set.max_rows = set.block_rows = 2 * kTileRows;
    set.max_panels = kMaxPanels;
    set.min_pass_rows = 256;
    set.end = release_tiles;
    add_few<S>(set);
    for (int i = kFewRows; i < set.max_rows; ++i)
        set.functions[i] = i < kTileRows ? run_in_tiles<S, 1> : run_in_tiles<S, 2>;
    return set;
}

template <Storage S>
constexpr TileSet kTiles = amx_tiles<S>();
// Several blocks. One is unpacked group by group, which the first cache holds.
template <Storage S>
constexpr StorageTiles kUnpacked = unpacked_from<S>(2 * kTileRows + 1, kTiles<S>, kTiles<k8Bits>);

}  // namespace
}  // namespace aioserve::linear::grouped
