#include "ops/rowwise.h"

#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace aioserve::ops {
namespace {

// Nanoseconds per element on one thread, roughly.
constexpr double kNorm = 0.15, kGate = 0.6, kRotary = 0.4;

}  // namespace

void append_rms_norm(Phases& phases, const RmsNormArgs& args, DType dtype, int64_t rows) {
    const auto kernel = kernels(dtype).rms_norm;
    phases.add_ranges(rows, kNorm * rows * args.size, [args, kernel](int64_t begin, int64_t end) {
        kernel(args, begin, end);
    });
}

void append_gated(Phases& phases, const GatedArgs& args, DType dtype, int64_t rows, bool gelu) {
    const Kernels& table = kernels(dtype);
    const auto kernel = gelu ? table.gelu_tanh_mul : table.silu_mul;
    phases.add_ranges(rows, kGate * rows * args.size, [args, kernel](int64_t begin, int64_t end) {
        kernel(args, begin, end);
    });
}

void rms_norm(const RmsNormArgs& args, DType dtype, int64_t rows) {
    run_now([&](Phases& phases) { append_rms_norm(phases, args, dtype, rows); });
}

void gated(const GatedArgs& args, DType dtype, int64_t rows, bool gelu) {
    run_now([&](Phases& phases) { append_gated(phases, args, dtype, rows, gelu); });
}

void append_rotary_kv_write(Phases& phases, const Batch& batch, const KVPages& pages, int64_t layer,
                            const RotaryCall& call) {
    batch.check_pages(pages);
    if (call.cos && batch.end_position() > call.max_positions)
        throw std::invalid_argument("batch: positions go to " +
                                    std::to_string(batch.end_position() - 1) + ", but cos has " +
                                    std::to_string(call.max_positions) + " rows");
    const int64_t q_size = call.q_heads * pages.head_dim, k_size = pages.heads * pages.head_dim;
    char* const q = static_cast<char*>(call.qkv);
    const int64_t element_bytes = pages.dtype == DType::bfloat16 ? 2 : 4;
    const RotaryArgs args{.q = q,
                          .k = q + q_size * element_bytes,
                          .v = q + (q_size + k_size) * element_bytes,
                          .q_token_stride = call.row_stride,
                          .q_head_stride = pages.head_dim,
                          .k_token_stride = call.row_stride,
                          .k_head_stride = pages.head_dim,
                          .v_token_stride = call.row_stride,
                          .v_head_stride = pages.head_dim,
                          .q_heads = call.q_heads,
                          .kv_heads = pages.heads,
                          .head_dim = pages.head_dim,
                          .cos = call.cos,
                          .sin = call.sin,
                          .half = call.half,
                          .interleaved = call.interleaved,
                          .query_scale = call.query_scale,
                          .positions = batch.positions(),
                          .slots = batch.token_locations(pages.places[layer].group),
                          .k_pages = pages.keys(layer),
                          .v_pages = pages.values(layer),
                          .page_bytes = pages.page_bytes(),
                          .head_bytes = pages.head_bytes(),
                          .page_size = pages.page_size,
                          .q_norm = call.q_norm,
                          .k_norm = call.k_norm,
                          .eps = call.eps,
                          .weight_offset = call.weight_offset};
    const auto kernel = kernels(pages.dtype).rotary_kv_write;
    const double elements = static_cast<double>(batch.num_tokens() * (q_size + 2 * k_size));
    phases.add_ranges(
        batch.num_tokens(), kRotary * elements,
        [args, kernel](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void rotary_kv_write(const Batch& batch, const KVPages& pages, int64_t layer,
                     const RotaryCall& call) {
    run_now([&](Phases& phases) { append_rotary_kv_write(phases, batch, pages, layer, call); });
}

}  // namespace aioserve::ops
