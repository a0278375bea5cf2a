// Groups of kept weights as the floats that tiles multiply, for the `Vec` and `Ints` in scope.

#include "linear/decoded/tile.h"
#include "linear/grouped/numbers.inl"
#include "linear/grouped/unpack.inl"

namespace aioserve::linear::decoded {
namespace {

using namespace grouped;

constexpr int kColumnVectors = kPanelColumns / Vec::kWidth;
constexpr int kVectorBytes = Vec::kWidth * kStepBytes;

// Numbers of one group for all columns.
struct Parameters {
    alignas(64) float scales[kPanelColumns];
    alignas(64) float zeros[kPanelColumns];
    alignas(64) float minimums[kPanelColumns];
};

// Some columns of a panel, in whole vectors.
struct Columns {
    int first, vectors;
};

// How weights of 8, 6 and 5 bits become floats, input after input of a unit.
template <Storage S>
struct ByteCodes {
    Unit<S, 1> unit;
    Ints bytes[1];

    ByteCodes(const WeightShape&, const char* at, int column)
        : unit(at, column, Ints::zero()), bytes{Ints::zero()} {}
    template <int INPUT>
    __attribute__((always_inline)) Vec input() {
        if constexpr (INPUT % 4 == 0) unit.template unpack<INPUT / 4>(bytes);
        return byte_floats<INPUT % 4>(bytes[0]);
    }
};

// The same of 4 bits.
struct HalfCodes {
    Numbers numbers;
    Ints lines[kHalfLines];

    HalfCodes(const WeightShape& weight, const char* at, int column) : numbers(weight.numbers) {
        for (int line = 0; line < kHalfLines; ++line) {
            const char* from = at + line * kStepPanelBytes + column * kStepBytes;
            prefetch_lines<kVectorBytes>(from);
            lines[line] = Ints::load(from);
        }
    }
    template <int INPUT>
    __attribute__((always_inline)) Vec input() {
        constexpr int kStep = INPUT / 4, kBit = 8 * (INPUT % 4) + 4 * (kStep % 2);
        const Ints line = lines[kStep / 2];
        return numbers.at(kBit == 0 ? line : line.template shifted<-kBit>());
    }
};

struct E4m3Codes {
    const uint8_t* codes;

    E4m3Codes(const WeightShape&, const char* at, int column)
        : codes(reinterpret_cast<const uint8_t*>(at) + column) {
#pragma GCC unroll 16
        for (int i = 0; i < kUnit * Vec::kWidth; i += 64)
            __builtin_prefetch(at + kPrefetchBytes + i + column * kUnit);
    }
    template <int INPUT>
    __attribute__((always_inline)) Vec input() {
        return load_e4m3(codes + INPUT * kPanelColumns);
    }
};

// CODES with scales, which have zero points or minimums.
template <class CODES, bool ZEROS, bool MINIMUMS>
struct Source {
    CODES codes;
    Vec scale, zero, minimum;

    Source(const WeightShape& weight, const Parameters& group, const char* at, int column)
        : codes(weight, at, column),
          scale(Vec::load(group.scales + column)),
          zero(ZEROS ? Vec::load(group.zeros + column) : scale),
          minimum(MINIMUMS ? Vec::load(group.minimums + column) : scale) {}
    template <int INPUT>
    __attribute__((always_inline)) Vec input() {
        Vec w = codes.template input<INPUT>();
        if constexpr (ZEROS) w = w - zero;
        w = w * scale;
        if constexpr (MINIMUMS) w = w + minimum;
        return w;
    }
};

// What becomes of the inputs of a unit: steps of one float32, or of two bfloat16 that ROUND makes.
struct Singles {
    static constexpr int kInputs = 1;
    template <int INPUT, class SOURCE>
    __attribute__((always_inline)) static Vec step(SOURCE& source) {
        return source.template input<INPUT>();
    }
};
template <Vec (*ROUND)(Vec, Vec)>
struct Pairs16 {
    static constexpr int kInputs = 2;
    template <int INPUT, class SOURCE>
    __attribute__((always_inline)) static Vec step(SOURCE& source) {
        const Vec first = source.template input<INPUT>();
        return ROUND(first, source.template input<INPUT + 1>());
    }
};

template <class STEPS, class SOURCE, int INPUT = 0>
__attribute__((always_inline)) inline void store_inputs(SOURCE& source, char* to) {
    const Vec step = STEPS::template step<INPUT>(source);
    step.store(reinterpret_cast<float*>(to + INPUT / STEPS::kInputs * kStepPanelBytes));
    if constexpr (INPUT + STEPS::kInputs < kUnit)
        store_inputs<STEPS, SOURCE, INPUT + STEPS::kInputs>(source, to);
}

// `units` of a group, from `from` on, as steps of a panel at `to`.
using DecodeUnits = void (*)(const WeightShape& weight, const Parameters& group, const char* from,
                             int units, Columns columns, char* to);

template <class STEPS, class SOURCE, Storage S>
void decode_units(const WeightShape& weight, const Parameters& group, const char* from, int units,
                  Columns columns, char* to) {
    constexpr int kStepsOfUnit = kUnit / STEPS::kInputs;
    for (int unit = 0; unit < units; ++unit, from += unit_bytes(S)) {
        for (int v = 0; v < columns.vectors; ++v) {
            const int column = columns.first + v * Vec::kWidth;
            SOURCE source(weight, group, from, column);
            store_inputs<STEPS>(source, to + column * kStepBytes);
        }
        to += kStepsOfUnit * kStepPanelBytes;
    }
}

template <class STEPS, class CODES, Storage S>
DecodeUnits with_parameters(const WeightShape& weight) {
    // The integers of 8, 6 and 5 bits are unsigned where they lie.
    constexpr bool kHasOffset = S == k8Bits || S == k6Bits || S == k5Bits;
    if (weight.has_minimums && !weight.has_zero_points)
        return decode_units<STEPS, Source<CODES, kHasOffset, true>, S>;
    if (kHasOffset || weight.has_zero_points)
        return decode_units<STEPS, Source<CODES, true, false>, S>;
    return decode_units<STEPS, Source<CODES, false, false>, S>;
}

template <class STEPS>
DecodeUnits decoder_of(const WeightShape& weight) {
    switch (weight.storage) {
        case k8Bits: return with_parameters<STEPS, ByteCodes<k8Bits>, k8Bits>(weight);
        case k6Bits: return with_parameters<STEPS, ByteCodes<k6Bits>, k6Bits>(weight);
        case k5Bits: return with_parameters<STEPS, ByteCodes<k5Bits>, k5Bits>(weight);
        case kE4m3: return decode_units<STEPS, Source<E4m3Codes, false, false>, kE4m3>;
        default: return with_parameters<STEPS, HalfCodes, k4Bits>(weight);
    }
}

// Walks the groups of a panel, and knows where their units are.
class Groups {
  public:
    Groups(const WeightShape& weight, const char* panel) : weight_(weight), at_(panel) {
        const bool is_e4m3 = weight.storage == kE4m3;
        factor_ = is_e4m3 ? kE4m3Factor : 1;
        const bool has_offset = weight.storage <= k5Bits;
        offset_ = has_offset ? static_cast<float>(weight.offset) : 0;
        group_bytes_ = weight.group_size / kUnit * unit_bytes(static_cast<Storage>(weight.storage));
    }

    // The units of the next group. Its parameters are there until the one after it.
    const char* next() {
        if (in_span_ == 0) {
            header_ = at_;
            for (int line = 0; line < weight_.header_bytes; line += 64)
                __builtin_prefetch(header_ + kPrefetchBytes + line);
            at_ += weight_.header_bytes;
        }
        read(in_span_);
        if (++in_span_ == weight_.span) in_span_ = 0;
        const char* units = at_;
        at_ += group_bytes_;
        return units;
    }
    const Parameters& parameters() const { return parameters_; }

  private:
    void read(int group) {
        const bool multiples = weight_.kind == kMultiples;
        const int parameters = weight_.has_minimums && !weight_.has_zero_points ? 2 : 1;
        const int bytes = number_bytes(weight_.kind);
        const int first = weight_.has_zero_points ? group * kPanelColumns : 0;
        const int numbers = weight_.has_zero_points ? weight_.span : parameters;
        const auto* integers =
            reinterpret_cast<const int8_t*>(header_) + numbers * kPanelColumns * bytes;
        for (int column = 0; column < kPanelColumns; column += Vec::kWidth) {
            for (int which = 0; which < parameters; ++which) {
                Vec number = load_number(weight_.kind, header_,
                                         which * kPanelColumns + first + column);
                const int at = (which * weight_.span + group) * kPanelColumns + column;
                if (multiples) number = number * Ints::load_bytes(integers + at).floats();
                if (which == 0) number = number * Vec::set(factor_);
                number.store((which == 0 ? parameters_.scales : parameters_.minimums) + column);
            }
            Vec zero = Vec::set(offset_);
            if (weight_.has_zero_points)
                zero = zero + Ints::load_bytes(integers + first + column).floats();
            zero.store(parameters_.zeros + column);
        }
    }

    const WeightShape& weight_;
    const char* at_;
    const char* header_ = nullptr;
    int in_span_ = 0;
    int group_bytes_;
    float offset_, factor_;
    Parameters parameters_;
};

// Weights behind the last input would meet zeros of x, which is not quite nothing: -0 + 0 is 0.
inline void clear_last_half(char* step) {
    for (int column = 0; column < kPanelColumns; ++column)
        __builtin_memset(step + column * kStepBytes + 2, 0, 2);
}

// `unpack` of a panel.
template <class STEPS>
void unpack(const WeightShape& weight, const char* panel, char* to) {
    constexpr int kUnitPanelBytes = kUnit / STEPS::kInputs * kStepPanelBytes;
    constexpr Columns kAll{0, kColumnVectors};
    const DecodeUnits decode = decoder_of<STEPS>(weight);
    Groups groups(weight, panel);
    char* end = to + weight.steps * std::ptrdiff_t{kStepPanelBytes};
    const int unit_bytes_ = unit_bytes(static_cast<Storage>(weight.storage));
    for (int group = 0; group < weight.groups; ++group) {
        const char* from = groups.next();
        const auto room = static_cast<int>((end - to) / kUnitPanelBytes);
        const int units = weight.group_size / kUnit < room ? weight.group_size / kUnit : room;
        decode(weight, groups.parameters(), from, units, kAll, to);
        to += units * kUnitPanelBytes;
        if (units == weight.group_size / kUnit || to == end) continue;
        alignas(64) char last[kUnitPanelBytes];
        decode(weight, groups.parameters(), from + units * unit_bytes_, 1, kAll, last);
        __builtin_memcpy(to, last, end - to);
        to = end;
    }
    if (STEPS::kInputs == 2 && weight.in_features % 2) clear_last_half(end - kStepPanelBytes);
}

}  // namespace
}  // namespace aioserve::linear::decoded
