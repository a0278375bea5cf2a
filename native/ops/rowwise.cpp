#include "ops/rowwise.h"

#include <stdexcept>
#include <string>

#include "common/thread_pool.h"
#include "ops/dispatch.h"

namespace aioserve::ops {
namespace {

// Nanoseconds per element on one thread, roughly.
constexpr double kNorm = 0.15, kGate = 0.6, kRotary = 0.4;

}  // namespace

void rms_norm(const RmsNormArgs& args, DType dtype, int64_t rows) {
    const auto kernel = kernels(dtype).rms_norm;
    parallel_ranges(rows, kNorm * rows * args.size,
                    [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void gated(const GatedArgs& args, DType dtype, int64_t rows, bool gelu) {
    const Kernels& table = kernels(dtype);
    const auto kernel = gelu ? table.gelu_tanh_mul : table.silu_mul;
    parallel_ranges(rows, kGate * rows * args.size,
                    [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void rotary_kv_write(const RotaryArgs& args, DType dtype, int64_t tokens, int64_t num_slots,
                     int64_t max_positions) {
    for (int64_t i = 0; i < tokens; ++i) {
        if (args.slots[i] < 0 || args.slots[i] >= num_slots)
            throw std::invalid_argument("batch.token_locations[" + std::to_string(i) + "] is " +
                                        std::to_string(args.slots[i]) + ", outside the " +
                                        std::to_string(num_slots) + " slots of k_pages");
        if (args.cos && (args.positions[i] < 0 || args.positions[i] >= max_positions))
            throw std::invalid_argument("batch.positions[" + std::to_string(i) + "] is " +
                                        std::to_string(args.positions[i]) + ", but cos has " +
                                        std::to_string(max_positions) + " rows");
    }
    const auto kernel = kernels(dtype).rotary_kv_write;
    const double elements =
        static_cast<double>(tokens * (args.q_heads + 2 * args.kv_heads) * args.head_dim);
    parallel_ranges(tokens, kRotary * elements,
                    [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

}  // namespace aioserve::ops
