// Both products of a block in AMX's tiles, real or emulated, for any number of rows: every score is
// the sum over 32 dimensions at a time, every output over 32 keys at a time, in the same instructions
// for a decode and for a prefill. Templates over the tiles, which only some instruction sets have.

constexpr int kTileLines = 16;                // rows of a tile: of A, or steps of B
constexpr int kTileKeys = 2 * kTileLines;     // tokens that a tile of P, or of V, has
constexpr std::ptrdiff_t kScoreBytes = kKeyBlock * sizeof(float);

// Registers: c0 c1 for the first 16 rows, c2 c3 for the others.
enum TileRegister { c0, c1, c2, c3, a0, a1, b0, b1 };

// A as a matrix of rows.
struct TileRows {
    const char* at;
    std::ptrdiff_t row_bytes;
};

// C = A B, or C += A B, for 16 or 32 rows and 16 or 32 columns. `b(i, j)`: tile i of the summed
// dimension, tile j of the columns.
template <int ROWS, int COLUMNS, bool kAdd, class Registers, class B>
static inline void multiply_tiles(Registers& tiles, const TileRows& a, int64_t depth, const B& b,
                                  int64_t column, char* c, std::ptrdiff_t c_row_bytes) {
    char* const below = c + kTileLines * c_row_bytes;
    if constexpr (kAdd) {
        tiles.template load<c0>(c, c_row_bytes);
        if constexpr (COLUMNS == 2) tiles.template load<c1>(c + 64, c_row_bytes);
        if constexpr (ROWS == 2) tiles.template load<c2>(below, c_row_bytes);
        if constexpr (ROWS == 2 && COLUMNS == 2) tiles.template load<c3>(below + 64, c_row_bytes);
    } else {
        tiles.template zero<c0>();
        if constexpr (COLUMNS == 2) tiles.template zero<c1>();
        if constexpr (ROWS == 2) tiles.template zero<c2>();
        if constexpr (ROWS == 2 && COLUMNS == 2) tiles.template zero<c3>();
    }
    for (int64_t i = 0; i < depth; ++i) {
        const char* rows = a.at + i * 64;
        tiles.template load<a0>(rows, a.row_bytes);
        tiles.template load<b0>(b.at(i, column), b.row_bytes);
        tiles.template multiply_add<c0, a0, b0>();
        if constexpr (COLUMNS == 2) {
            tiles.template load<b1>(b.at(i, column + 1), b.row_bytes);
            tiles.template multiply_add<c1, a0, b1>();
        }
        if constexpr (ROWS == 2) {
            tiles.template load<a1>(rows + kTileLines * a.row_bytes, a.row_bytes);
            tiles.template multiply_add<c2, a1, b0>();
            if constexpr (COLUMNS == 2) tiles.template multiply_add<c3, a1, b1>();
        }
    }
    tiles.template store<c0>(c, c_row_bytes);
    if constexpr (COLUMNS == 2) tiles.template store<c1>(c + 64, c_row_bytes);
    if constexpr (ROWS == 2) tiles.template store<c2>(below, c_row_bytes);
    if constexpr (ROWS == 2 && COLUMNS == 2) tiles.template store<c3>(below + 64, c_row_bytes);
}

// The tiles of columns [column, columns) of one or two tiles of rows.
template <bool kAdd, class Registers, class B>
static void multiply_in_tiles(Registers& tiles, const TileRows& a, int64_t depth, const B& b,
                              bool two_rows, int64_t column, int64_t columns, float* c,
                              std::ptrdiff_t c_row_bytes) {
    for (int64_t j = column; j < columns; j += 2) {
        char* const at = reinterpret_cast<char*>(c) + j * 64;
        if (j + 1 < columns && two_rows) {
            multiply_tiles<2, 2, kAdd>(tiles, a, depth, b, j, at, c_row_bytes);
        } else if (j + 1 < columns) {
            multiply_tiles<1, 2, kAdd>(tiles, a, depth, b, j, at, c_row_bytes);
        } else if (two_rows) {
            multiply_tiles<2, 1, kAdd>(tiles, a, depth, b, j, at, c_row_bytes);
        } else {
            multiply_tiles<1, 1, kAdd>(tiles, a, depth, b, j, at, c_row_bytes);
        }
    }
}

// Keys as B: 16 steps deep, 16 keys across.
struct KeyTiles {
    const float* const* vectors;
    std::ptrdiff_t row_bytes;
    const char* at(int64_t step_tile, int64_t column) const {
        return reinterpret_cast<const char*>(vectors[column]) + step_tile * kTileLines * row_bytes;
    }
};

// Values as B: 16 pairs of tokens deep, 16 dimensions across.
struct ValueTiles {
    const char* tiles[kKeyBlock / kTileKeys];
    int64_t first;
    std::ptrdiff_t row_bytes;
    const char* at(int64_t tile, int64_t column) const { return tiles[first + tile] + column * 64; }
};

// Each tile of values where its 16 rows lie together, else copied to `packed[32][padded_dim]`, with
// zeros for what is outside the block.
template <class T>
static void find_value_tiles(const Shape<T>& shape, const Block<T>& block, float* packed,
                             ValueTiles& found) {
    const int64_t padded = shape.padded_dim;
    found.row_bytes = padded * static_cast<std::ptrdiff_t>(sizeof(float));
    for (int64_t tile = found.first; tile * kTileLines < block.end_row(); ++tile) {
        const int64_t first = tile * kTileLines, end = first + kTileLines;
        bool together = first >= block.first_row() && end <= block.end_row();
        for (int64_t row = first + 1; together && row < end; ++row)
            together = block.v[row] == block.v[row - 1] + padded;
        if (together) {
            found.tiles[tile] = reinterpret_cast<const char*>(block.v[first]);
            continue;
        }
        for (int64_t row = first; row < end; ++row) {
            float* to = packed + row * padded;
            if (row >= block.first_row() && row < block.end_row()) {
                __builtin_memcpy(to, block.v[row], padded * sizeof(float));
            } else {
                __builtin_memset(to, 0, padded * sizeof(float));
            }
        }
        found.tiles[tile] = reinterpret_cast<const char*>(packed + first * padded);
    }
}

template <class B>
static inline void fetch_lines(const B& ahead, int64_t rows, int64_t floats) {
    constexpr int64_t kLine = 64 / sizeof(float);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < floats; i += kLine) fetch_ahead(ahead, row, i / B::kFloats);
}

// Two tiles of rows at a time, whose scores and outputs stay in the first cache.
template <class T, class Registers>
static void attend_in_tiles(const AttentionArgs& args, const AttentionUnit& unit,
                            const Shape<T>& shape, const Block<T>& block,
                            const Block<T>* ahead, Registers& tiles, const Working<T>& at,
                            const Partial& partial) {
    constexpr std::ptrdiff_t kFloat = sizeof(float);
    constexpr int64_t kRows = 2 * kTileLines;
    const KeyTiles keys{block.k, block.k_stride * kFloat};
    ValueTiles values{.tiles = {}, .first = block.first_row() / kTileLines, .row_bytes = 0};
    const int64_t end = (block.end_row() + kTileLines - 1) / kTileLines;
    const TileRows weights{reinterpret_cast<const char*>(at.scores) + values.first * 64, kScoreBytes};
    if (ahead) fetch_lines(ahead->keys(), shape.steps, kKeyBlock);
    for (int64_t first = 0; first < shape.rows; first += kRows) {
        const bool two_rows = first + kTileLines < shape.rows;
        const int64_t end_row = first + kRows < shape.rows ? first + kRows : shape.rows;
        const TileRows queries{reinterpret_cast<const char*>(at.q + first * shape.q_stride),
                               shape.q_stride * kFloat};
        multiply_in_tiles<false>(tiles, queries, shape.q_stride / kTileLines, keys, two_rows,
                                 block.first_column(), block.end_column(), at.scores, kScoreBytes);
        weigh_rows(args, unit, block, first, end_row, at.scores, at, partial);
        float* const out = partial.out + first * shape.padded_dim;
        for (int64_t row = first; row < end_row; ++row) {
            if (at.factors[row] == 1.0f) continue;
            const Vec factor = Vec::set(at.factors[row]);
            float* scaled = out + (row - first) * shape.padded_dim;
            for (int64_t i = 0; i < shape.padded_dim; i += Vec::kWidth)
                (Vec::load(scaled + i) * factor).store(scaled + i);
        }
        if (first == 0) {
            if (ahead) fetch_lines(ahead->values(), kKeyBlock / 2, shape.padded_dim);
            find_value_tiles(shape, block, at.widened, values);
        }
        multiply_in_tiles<true>(tiles, weights, end - values.first, values, two_rows, 0,
                                shape.padded_dim / kTileLines, out, shape.padded_dim * kFloat);
    }
}
