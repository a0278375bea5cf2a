// The register tile of integers, for the `Vec` and `Ints` in scope. Each `tile_*.cpp` includes it behind
// `dot.inl` or `pairs.inl`, which say how steps are multiplied, and behind `vectors_at_once`, which
// says how registers are used.

#include "linear/grouped/numbers.inl"
#include "linear/grouped/tile.h"
#include "linear/grouped/unpack.inl"
#include "linear/outputs.inl"

namespace aioserve::linear::grouped {
namespace {

constexpr int kVectors = kPanelColumns / Vec::kWidth;

struct Generic {
    static void store(Vec sum, bf16* y, int64_t columns) { store_some(sum, y, columns); }
};

// Of the groups of a span, the scales and minimums of some columns: where they lie as numbers of KIND
// or, where they are products, as float32 in memory of the tile's own.
template <int KIND, int VECTORS>
class Parameters {
  public:
    __attribute__((always_inline)) void read(const WeightShape& weight, const char* header,
                                             int column) {
        if (KIND == kFloat32 && is_made(weight)) {
            make(weight, header, column);
            return;
        }
        numbers_[0] = header + column * number_bytes(KIND);
        numbers_[1] = numbers_[0] + kPanelColumns * number_bytes(KIND);
    }

    // Of a group of the span, for the columns of vector `v`.
    __attribute__((always_inline)) Vec scale(int group, int v) const { return number(0, group, v); }
    __attribute__((always_inline)) Vec minimum(int group, int v) const {
        return number(1, group, v);
    }

    // The first `count` of both, as numbers of KIND. Returns what lies behind them.
    char* write(int group, int count, char* to) const {
        constexpr int kBytes = kCount * number_bytes(KIND);
        for (int which = 0; which < count; ++which, to += kBytes)
            __builtin_memcpy(to, numbers_[which] + group * kBytes, kBytes);
        return to;
    }

  private:
    static constexpr int kCount = VECTORS * Vec::kWidth;

    __attribute__((always_inline)) Vec number(int which, int group, int v) const {
        return load_number(KIND, numbers_[which], group * kCount + v * Vec::kWidth);
    }

    // A call of its own, so that the outputs stay in registers where there is none.
    __attribute__((noinline)) void make(const WeightShape& weight, const char* header, int column) {
        if (weight.has_zero_points)
            make_minimums(weight, header, column);
        else
            make_products(weight, header, column);
        for (int which = 0; which < 2; ++which)
            numbers_[which] = reinterpret_cast<const char*>(made_[which]);
    }

    void make_minimums(const WeightShape& weight, const char* header, int column) {
        const auto* zeros = reinterpret_cast<const int8_t*>(header) +
                            kZeroPointsSpan * kPanelColumns * number_bytes(weight.kind);
        for (int group = 0; group < kZeroPointsSpan; ++group) {
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) {
                const int at = group * kPanelColumns + column + v * Vec::kWidth;
                const Vec scale = load_number(weight.kind, header, at);
                scale.store(made_[0][group] + v * Vec::kWidth);
                const Vec minus = Vec::zero() - Ints::load_bytes(zeros + at).floats();
                (minus * scale).store(made_[1][group] + v * Vec::kWidth);
            }
        }
    }

    void make_products(const WeightShape& weight, const char* header, int column) {
        const int parameters = weight.has_minimums ? 2 : 1;
        const auto* numbers = reinterpret_cast<const float*>(header);
        const auto* multiples =
            reinterpret_cast<const int8_t*>(numbers + parameters * kPanelColumns) + column;
        for (int which = 0; which < parameters; ++which) {
            Vec number[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                number[v] = Vec::load(numbers + which * kPanelColumns + column + v * Vec::kWidth);
            for (int group = 0; group < weight.span; ++group, multiples += kPanelColumns)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v) {
                    const Ints multiple = Ints::load_bytes(multiples + v * Vec::kWidth);
                    (number[v] * multiple.floats()).store(made_[which][group] + v * Vec::kWidth);
                }
        }
    }

    const char* numbers_[2];
    alignas(64) float made_[2][kMultiplesInputs / kUnit][kCount];
};

// `fn` with the KIND of the weight's parameters: a choice within its loops would cost a tenth.
template <class Fn>
void for_kind(const WeightShape& weight, const Fn& fn) {
    const int kind = is_made(weight) ? kFloat32 : weight.kind;
    if (kind == kFloat16) return fn.template operator()<kFloat16>();
    if (kind == kBfloat16) return fn.template operator()<kBfloat16>();
    fn.template operator()<kFloat32>();
}

// From the unit's step STEP on.
template <class P, int ROWS, int VECTORS, int STEP = 0, class UNIT, class PARTIAL>
__attribute__((always_inline)) inline void multiply_steps(PARTIAL& partial, UNIT& unit,
                                                          const char* x) {
    constexpr int kChunkSteps = kRowChunkBytes / P::kStepBytes;
    const char* at =
        x + STEP / kChunkSteps * (ROWS * kRowChunkBytes) + STEP % kChunkSteps * P::kStepBytes;
    Ints bytes[VECTORS];
    unit.template unpack<STEP>(bytes);
    typename P::Weights w[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) w[v] = P::weights(bytes[v]);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) partial.add(r, v, w[v], at + r * kRowChunkBytes);
    if constexpr (STEP + 1 < kUnitSteps) multiply_steps<P, ROWS, VECTORS, STEP + 1>(partial, unit, x);
}

// The columns from `column` on of the unit at `panel`.
template <class P, Storage S, int ROWS, int VECTORS>
__attribute__((always_inline)) inline void multiply_unit(Ints (&sums)[ROWS][VECTORS],
                                                         const char* x, const char* panel,
                                                         int column, Ints table) {
    typename P::template Partial<ROWS, VECTORS> partial(sums);
    Unit<S, VECTORS> unit(panel, column, table);
    multiply_steps<P, ROWS, VECTORS>(partial, unit, x);
    partial.finish();
}

// An output with a group more: `row` is a RowGroup.
template <bool HAS_MINIMUMS>
__attribute__((always_inline)) inline Vec add_group(Vec output, Ints sum, const char* row,
                                                    Vec scale, Vec minimum) {
    Vec term;
    if constexpr (HAS_MINIMUMS) {
        const Vec row_sum = Vec::set_bits(row + __builtin_offsetof(RowGroup, sum));
        term = fused_short(scale, sum.floats(), minimum * row_sum);
    } else {
        term = scale * sum.floats();
    }
    return fused(Vec::set_bits(row), term, output);
}

// The panel's columns from `column` on, as many as VECTORS hold.
template <class P, Storage S, int KIND, int ROWS, int VECTORS>
__attribute__((always_inline)) inline void multiply_columns(const Tile& t, int column) {
    constexpr int kUnitRowBytes = ROWS * kUnitSteps * P::kStepBytes;
    Vec outputs[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) outputs[r][v] = Vec::zero();

    const Ints table = Ints::repeat_16(t.weight.table);
    const int units = t.weight.group_size / kUnit;
    const int span = t.weight.span;
    const bool has_minimums = t.weight.has_minimums;
    const char* x = t.x;
    const char* panel = t.panel;
    const char* header = panel;
    Parameters<KIND, VECTORS> parameters;
    for (int group = 0, in_span = 0; group < t.weight.groups; ++group) {
        if (in_span == 0) {
            header = panel;
            panel += t.weight.header_bytes;
            for (int line = 0; line < t.weight.header_bytes; line += 64)
                __builtin_prefetch(header + kPrefetchBytes + line);
            parameters.read(t.weight, header, column);
        }
        const char* rows = x;
        x += ROWS * kRowChunkBytes;
        Ints sums[ROWS][VECTORS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const char* at = rows + r * kRowChunkBytes + __builtin_offsetof(RowGroup, start);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = Ints::repeat(at);
        }
        for (int unit = 0; unit < units; ++unit) {
            multiply_unit<P, S, ROWS, VECTORS>(sums, x, panel, column, table);
            x += kUnitRowBytes;
            panel += unit_bytes(S);
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            const Vec scale = parameters.scale(in_span, v);
            if (has_minimums) {
                const Vec minimum = parameters.minimum(in_span, v);
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r)
                    outputs[r][v] = add_group<true>(outputs[r][v], sums[r][v],
                                                    rows + r * kRowChunkBytes, scale, minimum);
            } else {
#pragma GCC unroll 16
                for (int r = 0; r < ROWS; ++r)
                    outputs[r][v] = add_group<false>(outputs[r][v], sums[r][v],
                                                     rows + r * kRowChunkBytes, scale, scale);
            }
        }
        if (++in_span == span) in_span = 0;
    }
    write_outputs<Generic>(t, outputs, column);
}

template <class P, Storage S, int ROWS>
void run_tile(const Tile& t) {
    constexpr int kAtOnce = vectors_at_once(ROWS);
    for_kind(t.weight, [&]<int KIND>() {
        for (int v = 0; v < kVectors; v += kAtOnce)
            multiply_columns<P, S, KIND, ROWS, kAtOnce>(t, v * Vec::kWidth);
    });
}

// As many groups as a vector has lanes, whose factors and sums are then found together.
constexpr int kGroupsAtOnce = Vec::kWidth;

struct Groups {
    int count;
    int64_t left;  // inputs
    const WeightShape& weight;
    int index;  // of the row in its block
    int rows_in_block;
};

template <bool WHOLE, class T>
__attribute__((always_inline)) inline Vec load_inputs(const T* from, int64_t left) {
    if constexpr (WHOLE) return Vec::load(from);
    return left > 0 ? load_some(from, left) : Vec::zero();
}

// The lanes of each, added up; exact for integers. The vectors are lost.
inline Vec sum_of_each(Vec (&x)[kGroupsAtOnce]) {
    Vec::transpose(x);
    Vec sum = x[0];
    for (int i = 1; i < kGroupsAtOnce; ++i) sum = sum + x[i];
    return sum;
}

// Writes the scales of some groups, and returns what their inputs are multiplied by: a lane for each.
template <int SIZE, bool WHOLE, class T>
__attribute__((always_inline)) inline Vec find_scales(const Groups& groups, const T* from,
                                                      float* scales) {
    Vec tops[kGroupsAtOnce];
    Vec finite[2] = {};
    int64_t left = groups.left;
    for (int group = 0; group < groups.count; ++group, from += SIZE, left -= SIZE) {
        Vec top = Vec::zero();
#pragma GCC unroll 8
        for (int i = 0; i < SIZE; i += Vec::kWidth) {
            const Vec x = load_inputs<WHOLE>(from + i, left - i);
            Vec& sum = finite[i / Vec::kWidth % 2];
            sum = Vec::fma(x, Vec::zero(), sum);  // infinity * 0 is NaN
            top = Vec::max(top, Vec::abs(x));
        }
        tops[group] = top;
    }
    const Vec amax = largest_of_each(tops, groups.count);
    if ((finite[0] + finite[1]).sum() != 0) {  // one such group makes NaN of all results
        Vec::set(__builtin_nanf("")).store(scales);
        return Vec::zero();
    }
    const Vec smallest = Vec::set(0x1p-119f), most = Vec::set(127.0f);
    Vec::zero_below(amax / most, amax, smallest).store(scales);
    return Vec::zero_below(most / Vec::max(amax, smallest), amax, smallest);
}

// Piece by piece: put together first, and read as a whole, it would wait for its pieces.
inline void write_header(char* to, float scale, float sum, int32_t start) {
    __builtin_memcpy(to + __builtin_offsetof(RowGroup, scale), &scale, 4);
    __builtin_memcpy(to + __builtin_offsetof(RowGroup, sum), &sum, 4);
    __builtin_memcpy(to + __builtin_offsetof(RowGroup, start), &start, 4);
}

// `to`: where the groups begin in the block. Returns where the next ones do.
template <class P, int SIZE, bool WHOLE, class T>
char* pack_some(const Groups& groups, const T* from, char* to) {
    alignas(64) int8_t integers[SIZE];
    alignas(64) float scales[kGroupsAtOnce], factors[kGroupsAtOnce], sums[kGroupsAtOnce];
    alignas(64) int32_t starts[kGroupsAtOnce];
    find_scales<SIZE, WHOLE>(groups, from, scales).store(factors);
    const bool is_finite = scales[0] == scales[0];
    const int headers_bytes = groups.rows_in_block * kRowChunkBytes;
    constexpr int kChunks = 1 + SIZE / 4 * P::kStepBytes / kRowChunkBytes;
    const int group_bytes = kChunks * headers_bytes;
    Vec totals[kGroupsAtOnce];
    for (int group = groups.count; group < kGroupsAtOnce; ++group) totals[group] = Vec::zero();
    int64_t left = groups.left;
    for (int group = 0; group < groups.count; ++group, from += SIZE, left -= SIZE) {
        const Vec factor = Vec::set(factors[group]);
        Ints total = Ints::zero();
#pragma GCC unroll 8
        for (int i = 0; i < SIZE; i += Vec::kWidth) {
            const Vec x = load_inputs<WHOLE>(from + i, left - i);
            const Ints rounded = Ints::rounded(is_finite ? x * factor : Vec::zero());
            rounded.store_bytes(integers + i);
            total = total + rounded;
        }
        totals[group] = total.floats();
        P::template place<SIZE>(integers, to + group * group_bytes + headers_bytes, groups.index,
                                groups.rows_in_block);
    }
    const Vec sum = sum_of_each(totals);
    sum.store(sums);
    const auto offset = static_cast<float>(-groups.weight.offset);
    Ints::rounded(sum * Vec::set(offset)).store(starts);
    char* header = to + groups.index * kRowChunkBytes;
    for (int group = 0; group < groups.count; ++group, header += group_bytes)
        write_header(header, scales[group], sums[group], starts[group]);
    return to + groups.count * group_bytes;
}

template <class P, int SIZE, class T>
void pack_groups(const WeightShape& weight, const T* from, char* to, int index,
                 int rows_in_block) {
    Groups groups{0, weight.in_features, weight, index, rows_in_block};
    for (int begin = 0; begin < weight.groups; begin += kGroupsAtOnce) {
        const int rest = weight.groups - begin;
        groups.count = rest < kGroupsAtOnce ? rest : kGroupsAtOnce;
        const bool whole = groups.left >= groups.count * SIZE;
        to = whole ? pack_some<P, SIZE, true>(groups, from, to)
                   : pack_some<P, SIZE, false>(groups, from, to);
        from += kGroupsAtOnce * SIZE;
        groups.left -= kGroupsAtOnce * SIZE;
    }
}

template <class P, class T>
void pack_numbers(const WeightShape& weight, const char* row, char* block, int index,
                  int rows_in_block) {
    const T* from = reinterpret_cast<const T*>(row);
    switch (weight.group_size) {
        case 16: return pack_groups<P, 16>(weight, from, block, index, rows_in_block);
        case 32: return pack_groups<P, 32>(weight, from, block, index, rows_in_block);
        case 64: return pack_groups<P, 64>(weight, from, block, index, rows_in_block);
        default: return pack_groups<P, kMaxGroup>(weight, from, block, index, rows_in_block);
    }
}

template <class P>
void pack_row(const WeightShape& weight, const char* row, char* block, int index,
              int rows_in_block) {
    if (weight.bfloat16) return pack_numbers<P, bf16>(weight, row, block, index, rows_in_block);
    pack_numbers<P, float>(weight, row, block, index, rows_in_block);
}

template <class P, Storage S, int ROWS>
constexpr void add_tiles(TileSet& set) {
    set.functions[ROWS - 1] = run_tile<P, S, ROWS>;
    if constexpr (ROWS > 1) add_tiles<P, S, ROWS - 1>(set);
}

template <class P, Storage S, int BLOCK_ROWS, int MAX_ROWS = BLOCK_ROWS>
constexpr TileSet tiles() {
    TileSet set{.max_rows = MAX_ROWS,
                .block_rows = BLOCK_ROWS,
                .max_panels = 1,
                .row_unit = 1,
                .pass_bytes = 512 * 1024,
                .min_pass_rows = BLOCK_ROWS,
                .packed_step_bytes = P::kStepBytes,
                .packed_group_bytes = kRowChunkBytes,
                .plain_unit_bytes = 0,
                .packing_byte_ns = 1.0 / 8,
                .pack_row = pack_row<P>,
                .functions = {},
                .plain = nullptr,
                .begin = nullptr,
                .end = nullptr};
    add_tiles<P, S, MAX_ROWS>(set);
    return set;
}

// As `unpacked` says that it lies then.
template <Storage S>
void unpack_panel(const WeightShape& kept, const char* panel, char* to) {
    const Ints table = Ints::repeat_16(kept.table);
    const int units = kept.group_size / kUnit;
    const int parameters = kept.has_minimums ? 2 : 1;
    Parameters<kFloat32, kVectors> made;
    for (int group = 0, in_span = 0; group < kept.groups; ++group) {
        if (in_span == 0) {
            if (is_made(kept)) {
                made.read(kept, panel, 0);
            } else {
                __builtin_memcpy(to, panel, static_cast<std::size_t>(kept.header_bytes));
                to += kept.header_bytes;
            }
            panel += kept.header_bytes;
        }
        if (is_made(kept)) to = made.write(in_span, parameters, to);
        for (int unit = 0; unit < units; ++unit) {
            unpack_unit<S, kVectors>(panel, table, to);
            panel += unit_bytes(S);
            to += unit_bytes(k8Bits);
        }
        if (++in_span == kept.span) in_span = 0;
    }
}

constexpr StorageTiles never_unpacked(const TileSet& kept) { return {&kept, 0, nullptr, nullptr}; }

template <Storage S>
constexpr StorageTiles unpacked_from(int rows, const TileSet& kept, const TileSet& unpacked) {
    return {&kept, rows, &unpacked, unpack_panel<S>};
}

}  // namespace
}  // namespace aioserve::linear::grouped
