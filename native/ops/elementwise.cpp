#include "ops/elementwise.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "dispatch.h"

namespace aioserve::ops {
namespace {

// Nanoseconds per element on one thread, roughly; of a copy, per byte.
constexpr double kNorm = 0.2, kGelu = 0.5, kAdd = 0.1, kCap = 0.5, kSearch = 0.1, kCopy = 0.15;

}  // namespace

void append_pick_rows(Phases& phases, const void* table, const int64_t* ids, int64_t count,
                      int64_t row_bytes, void* to) {
    const double work = kCopy * static_cast<double>(count * row_bytes);
    phases.add_ranges(count, work, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            std::memcpy(static_cast<char*>(to) + i * row_bytes,
                        static_cast<const char*>(table) + ids[i] * row_bytes,
                        static_cast<size_t>(row_bytes));
    });
}

void append_copy_rows(Phases& phases, const void* rows, int64_t count, int64_t row_bytes, char* to,
                      int64_t to_stride) {
    const double work = kCopy * static_cast<double>(count * row_bytes);
    phases.add_ranges(count, work, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            std::memcpy(to + i * to_stride, static_cast<const char*>(rows) + i * row_bytes,
                        static_cast<size_t>(row_bytes));
    });
}

void append_spread(Phases& phases, const float* x, int64_t rows, int64_t size,
                   const int64_t* columns, int64_t to_size, float* to) {
    const double work = kCopy * static_cast<double>(rows * (size + to_size) * int64_t{sizeof(float)});
    phases.add_ranges(rows, work, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const float* from = x + i * size;
            float* row = to + i * to_size;
            std::fill_n(row, to_size, -std::numeric_limits<float>::infinity());
            for (int64_t j = 0; j < size; ++j) row[columns[j]] = from[j];
        }
    });
}

void append_add_rows(Phases& phases, const AddRowsArgs& args, DType dtype, int64_t rows) {
    const auto kernel = kernels(dtype).add_rows;
    phases.add_ranges(rows, kAdd * static_cast<double>(rows * args.size),
                      [=](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void append_scale(Phases& phases, void* x, float factor, DType dtype, int64_t size) {
    const auto kernel = kernels(dtype).scale;
    phases.add_ranges(size, kAdd * static_cast<double>(size),
                      [=](int64_t begin, int64_t end) { kernel(x, factor, begin, end); });
}

void append_soft_cap(Phases& phases, float* x, float cap, int64_t size) {
    const auto kernel = kernels(DType::float32).soft_cap;
    phases.add_ranges(size, kCap * static_cast<double>(size),
                      [=](int64_t begin, int64_t end) { kernel(x, cap, begin, end); });
}

void append_layer_norm(Phases& phases, const LayerNormArgs& args, DType dtype, int64_t rows) {
    const auto kernel = kernels(dtype).layer_norm;
    phases.add_ranges(rows, kNorm * static_cast<double>(rows * args.size),
                      [=](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void append_activation(Phases& phases, const ActivationArgs& args, Activation kind, DType dtype,
                       int64_t rows) {
    const auto kernel = kernels(dtype).activation[static_cast<int>(kind)];
    phases.add_ranges(rows, kGelu * static_cast<double>(rows * args.size),
                      [=](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void append_largest(Phases& phases, const float* x, int64_t rows, int64_t size, float* largest,
                    int64_t* columns) {
    const auto kernel = kernels(DType::float32).largest;
    phases.add_ranges(rows, row_search_ns(rows, size),
                      [=](int64_t begin, int64_t end) {
                          for (int64_t row = begin; row < end; ++row) {
                              const Largest found = kernel(x + row * size, size);
                              largest[row] = found.value;
                              columns[row] = found.index;
                          }
                      });
}

void append_largest_of(Phases& phases, const float* x, const std::vector<int64_t>& rows,
                       int64_t size, float* largest, int64_t* columns) {
    const auto kernel = kernels(DType::float32).largest;
    const auto count = static_cast<int64_t>(rows.size());
    phases.add_ranges(count, row_search_ns(count, size),
                      [=, at = rows.data()](int64_t begin, int64_t end) {
                          for (int64_t i = begin; i < end; ++i) {
                              const Largest found = kernel(x + at[i] * size, size);
                              largest[at[i]] = found.value;
                              columns[at[i]] = found.index;
                          }
                      });
}

void append_leave_out(Phases& phases, float* x, const std::vector<RowMask>& masks, int64_t size) {
    const auto kernel = kernels(DType::float32).leave_out;
    const auto count = static_cast<int64_t>(masks.size());
    phases.add_ranges(count, row_search_ns(count, size),
                      [=, of = masks.data()](int64_t begin, int64_t end) {
                          for (int64_t i = begin; i < end; ++i)
                              kernel(of[i].mask, x + of[i].row * size, size);
                      });
}

double row_search_ns(int64_t rows, int64_t size) {
    return kSearch * static_cast<double>(rows * size);
}

}  // namespace aioserve::ops
