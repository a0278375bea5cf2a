#include "linear/kernel.h"

#include <stdexcept>
#include <string>

namespace aioserve::linear {

void LinearKernel::apply(const char* x, int64_t rows, std::ptrdiff_t x_row_bytes, char* y,
                         bool y_is_float32) const {
    thread_local Phases phases;
    thread_local AlignedMemory packed;
    phases.clear();
    append(phases, RowSource::plain(x, x_row_bytes), rows, packed.at_least(packed_bytes(rows)),
           {y, out_features() * (y_is_float32 ? 4 : 2), y_is_float32});
    phases.run();
}

void LinearKernel::argmax(const char* x, int64_t rows, std::ptrdiff_t x_row_bytes,
                          const KeptRows& kept, const Largest& largest) const {
    thread_local Phases phases;
    thread_local AlignedMemory packed, partial;
    phases.clear();
    append_argmax(phases, RowSource::plain(x, x_row_bytes), rows,
                  packed.at_least(packed_bytes(rows)), partial.at_least(argmax_bytes(rows)), kept,
                  largest);
    phases.run();
}

void LinearKernel::gather(const int64_t* ids, int64_t count, char* out) const {
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= out_features_)
            throw std::out_of_range("ids must be from 0 to " + std::to_string(out_features_ - 1) +
                                    ", got " + std::to_string(ids[i]));
    }
    const int64_t row_bytes = in_features_ * element_bytes();
    const double nanoseconds = static_cast<double>(count * row_bytes) / 2;
    parallel_ranges(count, nanoseconds, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) row(ids[i], out + i * row_bytes);
    });
}

}  // namespace aioserve::linear
