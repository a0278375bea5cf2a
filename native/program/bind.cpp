// Binds step programs. Weights cross as addresses, which `aioserve/ops/program.py`, the only caller,
// keeps alive and has checked.

#include <nanobind/nanobind.h>

#include "ops/held_batch.h"
#include "program/program.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace aioserve::program;
using aioserve::ops::DType;
using aioserve::ops::HeldBatch;
using aioserve::ops::KVPages;

namespace {

using Address = uintptr_t;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void make(Program* self, bool bfloat16, int64_t kv_heads, int64_t head_dim, int64_t rank) {
    new (self) Program(bfloat16 ? DType::bfloat16 : DType::float32, kv_heads, head_dim, rank);
}

ValueId embedding(Program& self, Address table, int64_t vocab, int64_t columns) {
    return self.embedding(at(table), vocab, columns);
}

ValueId scatter_columns(Program& self, ValueId x, Address columns, int64_t size) {
    return self.scatter_columns(x, at<int64_t>(columns), size);
}

void add_positions(Program& self, ValueId x, Address table, int64_t positions) {
    self.add_positions(x, at(table), positions);
}

ValueId rms_norm(Program& self, ValueId x, ValueId residual, Address weight, float eps,
                 float weight_offset) {
    return self.rms_norm(x, residual, at(weight), eps, weight_offset);
}

ValueId layer_norm(Program& self, ValueId x, ValueId residual, Address weight, Address bias,
                   float eps) {
    return self.layer_norm(x, residual, at(weight), at(bias), eps);
}

void norm_columns(Program& self, ValueId x, int64_t first, int64_t size, Address weight, float eps,
                  float weight_offset) {
    self.norm_columns(x, first, size, at(weight), eps, weight_offset);
}

ValueId attention(Program& self, ValueId qkv, int64_t layer, float scale, float soft_cap,
                  int64_t window, Address sinks, bool logit_rows_only) {
    return self.attention(qkv, layer, scale, soft_cap, window, at<float>(sinks), logit_rows_only);
}

ValueId activation(Program& self, ValueId x, int kind) {
    return self.activation(x, static_cast<aioserve::ops::Activation>(kind));
}

void set_rotation(Program& self, int index, Address cos, Address sin, Address query_scale,
                  int64_t max_positions) {
    self.set_rotation(index, at<float>(cos), at<float>(sin), at<float>(query_scale), max_positions);
}

void rotary_kv_write(Program& self, ValueId qkv, int64_t layer, int rotation, Address q_norm,
                     Address k_norm, float eps, float weight_offset) {
    self.rotary_kv_write(qkv, layer, rotation, {at(q_norm), at(k_norm), eps, weight_offset});
}

void latent_write(Program& self, ValueId queries, ValueId latents, int64_t layer, int rotation,
                  Address norm, float eps, float weight_offset) {
    self.latent_write(queries, latents, layer, rotation, {at(norm), eps, weight_offset});
}

void run(Program& self, const HeldBatch& held, const KVPages& pages, Address token_ids,
         Address given, Address states, Address logits, Address kept, Address largest,
         Address columns) {
    self.run({held.batch, pages, at<int64_t>(token_ids), at<char>(given)},
             {at<float>(logits), at<uint8_t>(kept), at<float>(largest), at<int64_t>(columns),
              at<char>(states)});
}

nb::dict nanoseconds(const Program& self) {
    nb::dict by_kind;
    const auto& counted = self.nanoseconds();
    by_kind["linear"] = counted[static_cast<int>(Kind::linear)];
    by_kind["attention"] = counted[static_cast<int>(Kind::attention)];
    by_kind["rowwise"] = counted[static_cast<int>(Kind::rowwise)];
    return by_kind;
}

}  // namespace

void bind_program(nb::module_& m) {
    nb::class_<Program>(m, "Program", "A decoder's ops, recorded once and run for every step.")
        .def("__init__", &make, "bfloat16"_a, "kv_heads"_a,
             "head_dim"_a, "rank"_a = 0)
        .def("embedding", &embedding)
        .def("packed_embedding", &Program::packed_embedding, nb::keep_alive<1, 2>())
        .def("hidden_in", &Program::hidden_in)
        .def("concat", &Program::concat)
        .def("scatter_columns", &scatter_columns)
        .def("add_positions", &add_positions)
        .def("add", &Program::add)
        .def("scale", &Program::scale)
        .def("linear", &Program::linear, nb::keep_alive<1, 3>())
        .def("rms_norm", &rms_norm)
        .def("norm_columns", &norm_columns)
        .def("layer_norm", &layer_norm)
        .def("add_rotation", &Program::add_rotation)
        .def("set_rotation", &set_rotation)
        .def("rotary_kv_write", &rotary_kv_write)
        .def("latent_write", &latent_write)
        .def("attention", &attention)
        .def("per_head", &Program::per_head, nb::keep_alive<1, 3>())
        .def("gated", &Program::gated)
        .def("activation", &activation)
        .def("experts", &Program::experts, nb::keep_alive<1, 4>())
        .def("sigmoid_scale", &Program::sigmoid_scale)
        .def("logit_rows", &Program::logit_rows)
        .def("soft_cap", &Program::soft_cap)
        .def("tap", &Program::tap)
        .def("finish", &Program::finish)
        .def("run", &run, ReleaseGil())
        .def("measure", &Program::measure)
        .def_prop_ro("nanoseconds", &nanoseconds)
        .def_prop_ro("keeps_logit_rows", &Program::keeps_logit_rows)
        .def_prop_ro("num_ops", &Program::num_ops)
        .def_prop_ro("arena_bytes", &Program::arena_bytes);
}
