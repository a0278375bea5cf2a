// The register tile, for the `Vec` in scope. Each `tile_*.cpp` includes this with compiler flags of its
// own and says in `vectors_at_once` how its registers are used; internal linkage keeps the copies
// apart. As in `ops/kernels.inl`, no inline function of the standard library.

#include "linear/outputs.inl"
#include "linear/tile.h"

namespace aioserve::linear {
namespace {

// How the steps of a block of x are multiplied by those of the weights: in `parts`, one after the
// other. `kPackedStepBytes` are a step's in the block, `kPartBytes` those of one part.
struct Float32 {
    static constexpr int kParts = 1;
    static constexpr int kPackedStepBytes = 4;
    static constexpr int kPartBytes = 4;
    static Vec input(const char* x, int) { return Vec::set_bits(x); }
    static Vec weights(Vec steps, int) { return steps; }
    static Vec multiply_add(Vec x, Vec w, Vec sum) { return Vec::fma(x, w, sum); }
    static void store(Vec sum, bf16* y, int64_t columns) { store_some(sum, y, columns); }
};

// The first of each pair, then the second; x is float32 already.
struct Widened : Float32 {
    static constexpr int kParts = 2;
    static constexpr int kPackedStepBytes = 8;
    static Vec weights(Vec steps, int part) {
        return part == 0 ? steps.first_halves() : steps.second_halves();
    }
};

// The same of a row that is still bfloat16.
struct Halves : Widened {
    static constexpr int kPackedStepBytes = 4;
    static constexpr int kPartBytes = 0;
    static Vec input(const char* x, int part) { return weights(Vec::set_bits(x), part); }
};

constexpr int kVectors = kPanelColumns / Vec::kWidth;
constexpr int kVectorBytes = Vec::kWidth * kStepBytes;

// The hardware's prefetcher alone leaves a fifth of the last cache's bandwidth unused.
constexpr int kPrefetchBytes = 4096;

template <class P, int ROWS, int VECTORS>
__attribute__((always_inline)) inline void multiply_part(Vec (&sums)[ROWS][VECTORS], const char* x,
                                                         const char* panel, int part) {
    const auto weights = [&](int v) __attribute__((always_inline)) {
        return P::weights(Vec::load(reinterpret_cast<const float*>(panel + v * kVectorBytes)), part);
    };
    if constexpr (VECTORS <= ROWS) {
        Vec w[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) w[v] = weights(v);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const Vec row = P::input(x + r * kChunkBytes, part);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = P::multiply_add(row, w[v], sums[r][v]);
        }
    } else {  // keep the few inputs in registers and pass the weights by
        Vec rows[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) rows[r] = P::input(x + r * kChunkBytes, part);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            const Vec w = weights(v);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) sums[r][v] = P::multiply_add(rows[r], w, sums[r][v]);
        }
    }
}

// The panel's columns from `column` on, as many as VECTORS hold.
template <class P, int ROWS, int VECTORS>
__attribute__((always_inline)) inline void multiply_columns(const Tile& t, int column) {
    Vec sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = Vec::zero();

    constexpr int kChunkSteps = kChunkBytes / P::kPackedStepBytes;
    const char* x = t.x;
    const char* panel = t.panel + column * kStepBytes;
    for (int left = t.weight.steps; left > 0; left -= kChunkSteps, x += ROWS * kChunkBytes) {
        const int steps = left < kChunkSteps ? left : kChunkSteps;
        for (int s = 0; s < steps; ++s, panel += kStepPanelBytes) {
            const char* at = x + s * P::kPackedStepBytes;
#pragma GCC unroll 8
            for (int line = 0; line < VECTORS * kVectorBytes; line += 64)
                __builtin_prefetch(panel + kPrefetchBytes + line);
#pragma GCC unroll 2
            for (int part = 0; part < P::kParts; ++part)
                multiply_part<P, ROWS, VECTORS>(sums, at + part * P::kPartBytes, panel, part);
        }
    }

    write_outputs<P>(t, sums, column);
}

template <class P, int ROWS>
void run_tile(const Tile& t) {
    constexpr int kAtOnce = vectors_at_once(P::kParts, ROWS);
    for (int v = 0; v < kVectors; v += kAtOnce)
        multiply_columns<P, ROWS, kAtOnce>(t, v * Vec::kWidth);
}

inline void pack_steps(const WeightShape& weight, const char* row, char* block, int index,
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

inline void pack_widened(const WeightShape& weight, const char* row, char* block, int index,
                         int rows_in_block) {
    char* to = block + index * kChunkBytes;
    constexpr int64_t kChunk = kChunkBytes / sizeof(float);
    const bf16* from = reinterpret_cast<const bf16*>(row);
    for (int64_t left = weight.in_features; left > 0; left -= kChunk) {
        float* chunk = reinterpret_cast<float*>(to);
#pragma GCC unroll 4
        for (int64_t i = 0; i < kChunk; i += Vec::kWidth) {
            const Vec part = left > i ? load_some(from + i, left - i) : Vec::zero();
            part.store(chunk + i);
        }
        from += kChunk;
        to += rows_in_block * kChunkBytes;
    }
}

template <class P, int ROWS>
constexpr void add_tiles(TileSet& set) {
    set.functions[ROWS - 1] = run_tile<P, ROWS>;
    if constexpr (ROWS > 1) add_tiles<P, ROWS - 1>(set);
}

// P for packed blocks, PLAIN for a row as it stands.
template <class P, int MAX_ROWS, class PLAIN = P>
constexpr TileSet tiles() {
    const bool widened = P::kPackedStepBytes != kStepBytes;
    TileSet set{.max_rows = MAX_ROWS,
                .block_rows = MAX_ROWS,
                .max_panels = 1,
                .row_unit = 1,
                .pass_bytes = widened ? 512 * 1024 : 1024 * 1024,
                .min_pass_rows = MAX_ROWS,
                .packed_step_bytes = P::kPackedStepBytes,
                .packed_group_bytes = 0,
                .plain_unit_bytes = kStepBytes,
                .packing_byte_ns = kPlainByte_ns,
                .pack_row = widened ? pack_widened : pack_steps,
                .functions = {},
                .plain = run_tile<PLAIN, 1>,
                .begin = nullptr,
                .end = nullptr};
    add_tiles<P, MAX_ROWS>(set);
    return set;
}

}  // namespace
}  // namespace aioserve::linear
