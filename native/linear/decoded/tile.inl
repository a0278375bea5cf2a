// The register tile of one block of rows with kept weights, behind `decode.inl` and `linear/tile.inl`.

namespace aioserve::linear::decoded {
namespace {

// The columns from `column` on, as many as VECTORS hold.
template <class P, class STEPS, int ROWS, int VECTORS>
__attribute__((always_inline)) inline void multiply_columns(const Tile& t, DecodeUnits decode,
                                                            int column) {
    Vec sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = Vec::zero();

    constexpr int kUnitSteps = kUnit / STEPS::kInputs;
    constexpr int kChunkSteps = kChunkBytes / P::kPackedStepBytes;
    alignas(64) char steps[kUnitSteps * kStepPanelBytes];
    const Columns columns{column, VECTORS};
    const int units = t.weight.group_size / kUnit;
    const int bytes = unit_bytes(static_cast<Storage>(t.weight.storage));
    Groups groups(t.weight, t.panel);
    const char* x = t.x;
    const char* from = nullptr;
    int unit = 0, step = 0;  // in its group, and in its chunk
    for (int left = t.weight.steps; left > 0; left -= kUnitSteps, from += bytes) {
        if (unit == 0) from = groups.next();
        if (++unit == units) unit = 0;
        decode(t.weight, groups.parameters(), from, 1, columns, steps);
        if (STEPS::kInputs == 2 && left <= kUnitSteps && t.weight.in_features % 2)
            clear_last_half(steps + (left - 1) * kStepPanelBytes);
        const int count = left < kUnitSteps ? left : kUnitSteps;
        const char* panel = steps + column * kStepBytes;
        for (int s = 0; s < count; ++s, panel += kStepPanelBytes) {
            const char* at = x + step * P::kPackedStepBytes;
#pragma GCC unroll 2
            for (int part = 0; part < P::kParts; ++part)
                multiply_part<P, ROWS, VECTORS>(sums, at + part * P::kPartBytes, panel, part);
            if (++step < kChunkSteps) continue;
            step = 0;
            x += ROWS * kChunkBytes;
        }
    }
    write_outputs<P>(t, sums, column);
}

template <class P, class STEPS, int ROWS>
void run_tile(const Tile& t) {
    constexpr int kAtOnce = vectors_at_once(P::kParts, ROWS);
    const DecodeUnits decode = decoder_of<STEPS>(t.weight);
    for (int v = 0; v < kVectors; v += kAtOnce)
        multiply_columns<P, STEPS, ROWS, kAtOnce>(t, decode, v * Vec::kWidth);
}

template <class P, class STEPS, int ROWS>
constexpr void add_tiles(TileSet& set) {
    set.functions[ROWS - 1] = run_tile<P, STEPS, ROWS>;
    if constexpr (ROWS > 1) add_tiles<P, STEPS, ROWS - 1>(set);
}

// As `linear::tiles`.
template <class P, class STEPS, int MAX_ROWS, class PLAIN = P>
constexpr TileSet few_rows() {
    TileSet set = tiles<P, MAX_ROWS, PLAIN>();
    set.plain = run_tile<PLAIN, STEPS, 1>;
    add_tiles<P, STEPS, MAX_ROWS>(set);
    return set;
}

}  // namespace
}  // namespace aioserve::linear::decoded
