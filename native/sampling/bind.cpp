// Binds draws. Logits and results cross as addresses, which `aioserve/ops/native_sampler.py`, the only
// caller, has made or checked.

#include <nanobind/nanobind.h>

#include <stdexcept>

#include "ops/held_batch.h"
#include "sampling/draw.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace aioserve::sampling;
using aioserve::ops::Array;

namespace {

using Address = uintptr_t;

// `call` with the arguments, without the GIL.
template <class Call>
void checked(Address logits, int64_t vocab, Address largest,
             const Array<double, 1>& temperatures, const Array<int64_t, 1>& top_ks,
             const Array<double, 1>& top_ps, const Array<double, 1>& min_ps,
             const Array<double, 1>& typical_ps, const Array<uint64_t, 1>& seeds,
             const Array<uint64_t, 1>& positions, const Array<int64_t, 1>& drawn,
             const Call& call) {
    const std::size_t rows = temperatures.shape(0);
    if (top_ks.shape(0) != rows || top_ps.shape(0) != rows || min_ps.shape(0) != rows ||
        typical_ps.shape(0) != rows || seeds.shape(0) != rows ||
        positions.shape(0) != rows)
        throw std::invalid_argument("the arrays of a draw have different lengths");
    for (std::size_t i = 0; i < drawn.shape(0); ++i)
        if (drawn.data()[i] < 0 || drawn.data()[i] >= static_cast<int64_t>(rows))
            throw std::invalid_argument("drawn must be rows");
    const nb::gil_scoped_release release;
    call(DrawArgs{.logits = reinterpret_cast<const float*>(logits),
                  .vocab = vocab,
                  .largest = reinterpret_cast<const float*>(largest),
                  .temperatures = temperatures.data(),
                  .top_ks = top_ks.data(),
                  .top_ps = top_ps.data(),
                  .min_ps = min_ps.data(),
                  .typical_ps = typical_ps.data(),
                  .seeds = seeds.data(),
                  .positions = positions.data(),
                  .drawn = drawn.data(),
                  .num_drawn = static_cast<int64_t>(drawn.shape(0))});
}

void bind_draw(Address logits, int64_t vocab, Address largest, Address token_ids,
               Array<double, 1> temperatures, Array<int64_t, 1> top_ks, Array<double, 1> top_ps,
               Array<double, 1> min_ps, Array<double, 1> typical_ps, Array<uint64_t, 1> seeds,
               Array<uint64_t, 1> positions, Array<int64_t, 1> drawn) {
    checked(logits, vocab, largest, temperatures, top_ks, top_ps, min_ps, typical_ps, seeds,
            positions, drawn, [&](const DrawArgs& args) {
                draw(args, reinterpret_cast<int64_t*>(token_ids));
            });
}

void bind_weigh(Address logits, int64_t vocab, Address largest, Address probabilities,
                Array<double, 1> temperatures, Array<int64_t, 1> top_ks, Array<double, 1> top_ps,
                Array<double, 1> min_ps, Array<double, 1> typical_ps, Array<uint64_t, 1> seeds,
                Array<uint64_t, 1> positions, Array<int64_t, 1> drawn) {
    checked(logits, vocab, largest, temperatures, top_ks, top_ps, min_ps, typical_ps, seeds,
            positions, drawn, [&](const DrawArgs& args) {
                weigh(args, reinterpret_cast<float*>(probabilities));
            });
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("draw", &bind_draw, "logits"_a, "vocab"_a, "largest"_a, "token_ids"_a,
          "temperatures"_a.noconvert(), "top_ks"_a.noconvert(), "top_ps"_a.noconvert(),
          "min_ps"_a.noconvert(), "typical_ps"_a.noconvert(), "seeds"_a.noconvert(),
          "positions"_a.noconvert(), "drawn"_a.noconvert());
    m.def("probabilities", &bind_weigh, "logits"_a, "vocab"_a, "largest"_a, "probabilities"_a,
          "temperatures"_a.noconvert(), "top_ks"_a.noconvert(), "top_ps"_a.noconvert(),
          "min_ps"_a.noconvert(), "typical_ps"_a.noconvert(), "seeds"_a.noconvert(),
          "positions"_a.noconvert(), "drawn"_a.noconvert());
}
