// Binds routing and experts. Arrays cross as addresses, which `aioserve/ops/native_experts.py`, the
// only caller, has checked.

#include <nanobind/nanobind.h>

#include "experts/experts.h"
#include "experts/routing.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace aioserve::mixture;
using aioserve::linear::LinearKernel;

namespace {

using Address = uintptr_t;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

void make_routing(Routing* self, int64_t experts, int64_t top_k, bool sigmoid, bool normalized,
                  float scale, int64_t groups, int64_t top_groups, int64_t group_best,
                  Address correction) {
    const Routing routing{.experts = experts,
                          .top_k = top_k,
                          .sigmoid = sigmoid,
                          .normalized = normalized,
                          .scale = scale,
                          .groups = groups,
                          .top_groups = top_groups,
                          .group_best = group_best,
                          .correction = reinterpret_cast<const float*>(correction)};
    routing.check();
    new (self) Routing(routing);
}

void route(const Routing& self, Address scores, int64_t rows, Address ids, Address weights) {
    aioserve::run_now([&](aioserve::Phases& phases) {
        append_routing(phases, self, reinterpret_cast<const float*>(scores), rows,
                       reinterpret_cast<int32_t*>(ids), reinterpret_cast<float*>(weights));
    });
}

void make_experts(Experts* self, const nb::tuple& ups, const nb::tuple& downs, int gate, float gain,
                  float limit) {
    std::vector<Expert> experts;
    for (std::size_t i = 0; i < ups.size(); ++i)
        experts.push_back({&nb::cast<const LinearKernel&>(ups[i]),
                           &nb::cast<const LinearKernel&>(downs[i])});
    new (self) Experts(std::move(experts), {static_cast<GateKind>(gate), gain, limit});
}

void apply(const Experts& self, Address x, Address ids, Address weights, int64_t rows,
           int64_t top_k, Address y) {
    thread_local aioserve::linear::AlignedMemory memory;
    aioserve::run_now([&](aioserve::Phases& phases) {
        self.append(phases, reinterpret_cast<const char*>(x),
                    {.ids = reinterpret_cast<const int32_t*>(ids),
                     .weights = reinterpret_cast<const float*>(weights),
                     .rows = rows,
                     .top_k = top_k},
                    reinterpret_cast<char*>(y), memory);
    });
}

void sigmoid_scale(Address x, Address gate, bool bfloat16, int64_t rows, int64_t size) {
    using aioserve::ops::DType;
    aioserve::run_now([&](aioserve::Phases& phases) {
        append_sigmoid_scale(phases, reinterpret_cast<void*>(x),
                             reinterpret_cast<const float*>(gate),
                             bfloat16 ? DType::bfloat16 : DType::float32, rows, size);
    });
}

}  // namespace

void bind_experts(nb::module_& m) {
    nb::class_<Routing>(m, "Routing", "How experts are chosen from scores.")
        .def("__init__", &make_routing, "experts"_a, "top_k"_a, "sigmoid"_a, "normalized"_a,
             "scale"_a, "groups"_a, "top_groups"_a, "group_best"_a, "correction"_a)
        .def("route", &route, ReleaseGil());
    nb::class_<Experts>(m, "Experts", "Gated MLPs of which each row has some.")
        .def("__init__", &make_experts, "ups"_a, "downs"_a, "gate"_a, "gain"_a, "limit"_a,
             nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>())
        .def("apply", &apply, ReleaseGil());
    m.def("sigmoid_scale", &sigmoid_scale, ReleaseGil());
}
