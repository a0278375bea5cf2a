#include "linear/joined.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace aioserve::linear {
namespace {

constexpr double kMadeByte_ns = 1.0 / 4;

std::size_t round_up(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

const LinearKernel& first_of(const std::vector<const LinearKernel*>& parts) {
    if (parts.empty()) throw std::invalid_argument("parts must have at least one kernel");
    return *parts.front();
}

int64_t outputs_of(const std::vector<const LinearKernel*>& parts) {
    int64_t sum = 0;
    for (const LinearKernel* part : parts) sum += part->out_features();
    return sum;
}

}  // namespace

JoinedKernel::JoinedKernel(std::vector<const LinearKernel*> parts)
    : LinearKernel(outputs_of(parts), first_of(parts).in_features(), first_of(parts).bfloat16()),
      parts_(std::move(parts)) {
    for (const LinearKernel* part : parts_)
        if (part->in_features() != in_features() || part->bfloat16() != bfloat16())
            throw std::invalid_argument(
                "parts must have the same dtype and in_features, got " +
                std::to_string(part->in_features()) + " beside " + std::to_string(in_features()));
}

template <class Fn>
void JoinedKernel::for_each_part(const Fn& fn) const {
    int64_t first = 0;
    for (const LinearKernel* part : parts_) {
        fn(*part, first);
        first += part->out_features();
    }
}

// Behind what the parts pack, one after the other in the same memory.
JoinedKernel::Memory JoinedKernel::memory(int64_t rows) const {
    std::size_t packed = 0;
    for (const LinearKernel* part : parts_) packed = std::max(packed, part->packed_bytes(rows));
    return {.made = round_up(packed),
            .row_bytes = round_up(static_cast<std::size_t>(in_features() * element_bytes()))};
}

std::size_t JoinedKernel::packed_bytes(int64_t rows) const {
    const Memory memory = this->memory(rows);
    return memory.made + memory.row_bytes * static_cast<std::size_t>(rows);
}

RowSource JoinedKernel::append_rows(Phases& phases, const RowSource& x, int64_t rows,
                                    char* packed) const {
    if (!x.row) return x;
    const Memory memory = this->memory(rows);
    char* to = packed + memory.made;
    const auto stride = static_cast<std::ptrdiff_t>(memory.row_bytes);
    const auto bytes = static_cast<std::size_t>(in_features() * element_bytes());
    const double nanoseconds = static_cast<double>(rows * stride) * kMadeByte_ns;
    phases.add_ranges(rows, nanoseconds, [x, to, stride, bytes](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            char* memory = to + row * stride;
            const char* made = x.at(row, memory);
            if (made != memory) std::memcpy(memory, made, bytes);
        }
    });
    return RowSource::plain(to, stride);
}

void JoinedKernel::append(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                          const Rows& y) const {
    const RowSource made = append_rows(phases, x, rows, packed);
    for_each_part([&](const LinearKernel& part, int64_t first) {
        Rows outputs = y;
        outputs.data += first * (y.float32 ? 4 : 2);
        part.append(phases, made, rows, packed, outputs);
    });
}

// The parts' own memory, then for each part columns [rows] and values [rows].
void JoinedKernel::append_argmax(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                                 char* partial, const KeptRows& kept,
                                 const Largest& largest) const {
    const RowSource made = append_rows(phases, x, rows, packed);
    const auto num_parts = static_cast<int64_t>(parts_.size());
    auto* columns = reinterpret_cast<int64_t*>(partial + most_argmax_bytes(rows));
    auto* values = reinterpret_cast<float*>(columns + num_parts * rows);
    int64_t index = 0;
    for_each_part([&](const LinearKernel& part, int64_t first) {
        KeptRows outputs = kept;
        if (kept.y) outputs.y += first;
        part.append_argmax(phases, made, rows, packed, partial, outputs,
                           {values + index * rows, columns + index * rows});
        ++index;
    });
    phases.add(1, [this, rows, columns, values, largest](int64_t) {
        for (int64_t row = 0; row < rows; ++row) {
            Best best{values[row], static_cast<int32_t>(columns[row])};
            int64_t at = row;
            for_each_part([&](const LinearKernel&, int64_t first) {
                if (first) best.take({values[at], static_cast<int32_t>(first + columns[at])});
                at += rows;
            });
            largest.values[row] = best.value;
            largest.columns[row] = best.column;
        }
    });
}

std::size_t JoinedKernel::most_argmax_bytes(int64_t rows) const {
    std::size_t most = 0;
    for (const LinearKernel* part : parts_) most = std::max(most, part->argmax_bytes(rows));
    return round_up(most);
}

std::size_t JoinedKernel::argmax_bytes(int64_t rows) const {
    const std::size_t each = (sizeof(int64_t) + sizeof(float)) * static_cast<std::size_t>(rows);
    return most_argmax_bytes(rows) + each * parts_.size();
}

std::size_t JoinedKernel::num_bytes() const {
    std::size_t sum = 0;
    for (const LinearKernel* part : parts_) sum += part->num_bytes();
    return sum;
}

void JoinedKernel::row(int64_t id, char* out) const {
    for_each_part([&](const LinearKernel& part, int64_t first) {
        if (id >= first && id < first + part.out_features()) part.row(id - first, out);
    });
}

}  // namespace aioserve::linear
