#include "experts/experts.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "dispatch.h"
#include "simd/portable.h"

namespace aioserve::mixture {
namespace {

constexpr double kSum_ns = 0.2;  // for each number that is added

std::size_t round_up(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// Rows of x that an expert reads, in the order of the pairs.
struct Gathered {
    const char* x;
    const int32_t* rows;
    std::ptrdiff_t row_bytes;
};

const char* gathered_row(const void* context, int64_t index, char*) {
    const auto& from = *static_cast<const Gathered*>(context);
    return from.x + from.rows[index] * from.row_bytes;
}

// act(gate) * up of rows that lie one after the other.
struct GatedRows {
    const char* gate_up;
    int64_t size;
    int64_t element_bytes;
    void (*kernel)(const ops::GatedArgs&, int64_t, int64_t);
    float gain, limit;
};

const char* gated_row(const void* context, int64_t index, char* memory) {
    const auto& from = *static_cast<const GatedRows*>(context);
    from.kernel({.gate_up = from.gate_up + index * 2 * from.size * from.element_bytes,
                 .stride = 2 * from.size,
                 .out = memory,
                 .size = from.size,
                 .gain = from.gain,
                 .limit = from.limit},
                0, 1);
    return memory;
}

// Sums of weighted rows of float32.
struct Sums {
    const float* parts;    // [pairs, size], sorted by expert
    const int32_t* places;  // [rows, top_k]: which of them; -1: none
    const float* weights;  // [rows, top_k]
    int64_t top_k;
    int64_t size;
};

template <class T>
void sum_row(const Sums& sums, int64_t row, T* y) {
    const int32_t* places = sums.places + row * sums.top_k;
    const float* weights = sums.weights + row * sums.top_k;
    for (int64_t column = 0; column < sums.size; column += Vec::kWidth) {
        const auto left = static_cast<int>(std::min<int64_t>(Vec::kWidth, sums.size - column));
        Vec sum = Vec::zero();
        for (int64_t rank = 0; rank < sums.top_k; ++rank) {
            if (places[rank] < 0) continue;
            const float* part = sums.parts + places[rank] * sums.size + column;
            const Vec numbers = left == Vec::kWidth ? Vec::load(part) : Vec::load(part, left);
            sum = sum + numbers * Vec::set(weights[rank]);
        }
        if (left == Vec::kWidth) {
            sum.store(y + column);
        } else {
            sum.store(y + column, left);
        }
    }
}

template <class T>
void scale_row(T* x, float factor, int64_t size) {
    for (int64_t column = 0; column < size; column += Vec::kWidth) {
        const auto left = static_cast<int>(std::min<int64_t>(Vec::kWidth, size - column));
        const Vec scaled = Vec::load(x + column, left) * Vec::set(factor);
        scaled.store(x + column, left);
    }
}

auto gated_kernel(const ops::Kernels& table, GateKind kind) {
    if (kind == GateKind::clamped_swiglu) return table.clamped_swiglu;
    return kind == GateKind::silu ? table.silu_mul : table.gelu_tanh_mul;
}

}  // namespace

Experts::Experts(std::vector<Expert> experts, Gate gate)
    : experts_(std::move(experts)), gate_(gate) {
    if (experts_.empty()) throw std::invalid_argument("experts must be at least one");
    for (std::size_t i = 0; i < experts_.size(); ++i) {
        const linear::LinearKernel& up = *experts_[i].up;
        const linear::LinearKernel& down = *experts_[i].down;
        if (up.in_features() != hidden() || up.out_features() != 2 * inner() ||
            down.in_features() != inner() || down.out_features() != hidden() ||
            up.bfloat16() != bfloat16() || down.bfloat16() != bfloat16())
            throw std::invalid_argument(
                "experts must be alike: expert " + std::to_string(i) + " has linear layers of " +
                std::to_string(up.in_features()) + " to " + std::to_string(up.out_features()) +
                " and " + std::to_string(down.in_features()) + " to " +
                std::to_string(down.out_features()));
    }
}

void Experts::append(Phases& phases, const char* x, const Routes& routes, char* y,
                     linear::AlignedMemory& memory) const {
    const int64_t pairs = routes.rows * routes.top_k;
    std::vector<int64_t> starts(experts_.size() + 1);
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int32_t id = routes.ids[pair];
        if (id < -1 || id >= count())
            throw std::invalid_argument("ids must be from -1 to " + std::to_string(count() - 1) +
                                        ", got " + std::to_string(id));
        if (id >= 0) ++starts[static_cast<std::size_t>(id) + 1];
    }
    for (std::size_t i = 1; i < starts.size(); ++i) starts[i] += starts[i - 1];
    const int64_t sorted = starts.back();

    // Memory: sorted rows' numbers and places, gate and up, results, then what each expert packs.
    const int64_t element = bfloat16() ? 2 : 4;
    const auto bytes_of = [](int64_t count, int64_t bytes) {
        return round_up(static_cast<std::size_t>(count * bytes));
    };
    std::size_t size = 0;
    const auto take = [&size](std::size_t bytes) {
        const std::size_t at = size;
        size += bytes;
        return at;
    };
    const std::size_t rows_at = take(bytes_of(sorted, sizeof(int32_t)));
    const std::size_t places_at = take(bytes_of(pairs, sizeof(int32_t)));
    const std::size_t middle_at = take(bytes_of(sorted, 2 * inner() * element));
    const std::size_t parts_at = take(bytes_of(sorted, hidden() * 4));
    std::vector<std::size_t> packed_at(experts_.size());
    for (std::size_t i = 0; i < experts_.size(); ++i) {
        const int64_t rows = starts[i + 1] - starts[i];
        if (rows == 0) continue;
        packed_at[i] = take(round_up(
            std::max(experts_[i].up->packed_bytes(rows), experts_[i].down->packed_bytes(rows))));
    }
    char* const at = memory.at_least(size);

    auto* const row_of = reinterpret_cast<int32_t*>(at + rows_at);
    auto* const places = reinterpret_cast<int32_t*>(at + places_at);
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t pair = 0; pair < pairs; ++pair) {
        const int32_t id = routes.ids[pair];
        places[pair] = -1;
        if (id < 0) continue;
        const int64_t place = next[static_cast<std::size_t>(id)]++;
        places[pair] = static_cast<int32_t>(place);
        row_of[place] = static_cast<int32_t>(pair / routes.top_k);
    }

    const ops::Kernels& table =
        kernels(bfloat16() ? ops::DType::bfloat16 : ops::DType::float32);
    const auto gated = gated_kernel(table, gate_.kind);
    const std::ptrdiff_t x_row_bytes = hidden() * element;
    char* const middle = at + middle_at;
    char* const parts = at + parts_at;
    phases.begin_side_by_side();
    for (std::size_t i = 0; i < experts_.size(); ++i) {
        const int64_t first = starts[i], rows = starts[i + 1] - first;
        if (rows == 0) continue;
        const Expert& expert = experts_[i];
        linear::RowSource from = linear::RowSource::plain(
            x + row_of[first] * x_row_bytes, x_row_bytes);
        if (rows > 1)
            from = {gathered_row, phases.keep(Gathered{x, row_of + first, x_row_bytes}), 0};
        char* const own = middle + first * 2 * inner() * element;
        expert.up->append(phases, from, rows, at + packed_at[i],
                          {own, 2 * inner() * element, !bfloat16()});
        const linear::RowSource active{
            gated_row,
            phases.keep(GatedRows{own, inner(), element, gated, gate_.gain, gate_.limit}), 0};
        expert.down->append(phases, active, rows, at + packed_at[i],
                            {parts + first * hidden() * 4, hidden() * 4, true});
        phases.next_beside();
    }
    phases.end_side_by_side();

    const Sums sums{.parts = reinterpret_cast<const float*>(parts),
                    .places = places,
                    .weights = routes.weights,
                    .top_k = routes.top_k,
                    .size = hidden()};
    const bool narrow = bfloat16();
    const double work = kSum_ns * static_cast<double>(pairs * hidden());
    phases.add_ranges(routes.rows, work, [=](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            if (narrow) {
                sum_row(sums, row, reinterpret_cast<bf16*>(y) + row * sums.size);
            } else {
                sum_row(sums, row, reinterpret_cast<float*>(y) + row * sums.size);
            }
        }
    });
}

void append_sigmoid_scale(Phases& phases, void* x, const float* gate, ops::DType dtype, int64_t rows,
                          int64_t size) {
    const bool narrow = dtype == ops::DType::bfloat16;
    phases.add_ranges(rows, kSum_ns * static_cast<double>(rows * size),
                      [=](int64_t begin, int64_t end) {
                          for (int64_t row = begin; row < end; ++row) {
                              const float factor = 1.0f / (1.0f + std::exp(-gate[row]));
                              if (narrow) {
                                  scale_row(static_cast<bf16*>(x) + row * size, factor, size);
                              } else {
                                  scale_row(static_cast<float*>(x) + row * size, factor, size);
                              }
                          }
                      });
}

}  // namespace aioserve::mixture
