#include "ops/latent.h"

#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace aioserve::ops {
namespace {

// Nanoseconds per element on one thread, roughly.
constexpr double kLatent = 0.4;

}  // namespace

void append_latent_write(Phases& phases, const Batch& batch, const KVPages& pages, int64_t layer,
                         const LatentCall& call) {
    batch.check_pages(pages);
    if (pages.rank == 0) throw std::invalid_argument("pages must be latent");
    if (batch.end_position() > call.max_positions)
        throw std::invalid_argument("batch: positions go to " +
                                    std::to_string(batch.end_position() - 1) + ", but cos has " +
                                    std::to_string(call.max_positions) + " rows");
    const LatentArgs args{.queries = call.queries,
                          .query_stride = call.row_stride,
                          .q_heads = call.q_heads,
                          .latents = call.latents,
                          .latent_stride = call.latent_stride,
                          .rank = pages.rank,
                          .rotated = pages.head_dim - pages.rank,
                          .norm = call.norm,
                          .eps = call.eps,
                          .weight_offset = call.weight_offset,
                          .cos = call.cos,
                          .sin = call.sin,
                          .half = call.half,
                          .interleaved = call.interleaved,
                          .positions = batch.positions(),
                          .locations = batch.token_locations(pages.places[layer].group),
                          .pages = pages.keys(layer),
                          .page_bytes = pages.page_bytes(),
                          .page_size = pages.page_size};
    const int64_t tokens = batch.num_tokens();
    const double turned = static_cast<double>(call.q_heads * args.rotated + pages.head_dim);
    const auto kernel = kernels(pages.dtype).latent_write;
    phases.add_ranges(tokens, kLatent * static_cast<double>(tokens) * turned,
                      [args, kernel](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

void latent_write(const Batch& batch, const KVPages& pages, int64_t layer, const LatentCall& call) {
    run_now([&](Phases& phases) { append_latent_write(phases, batch, pages, layer, call); });
}

}  // namespace aioserve::ops
