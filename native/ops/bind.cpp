// Binds the ops. What lives for a step or longer (a batch, KV pages) is an object, checked when it is
// made. Activations cross as addresses, with sizes and strides in elements, which the backend in
// `aioserve/ops/native.py` has checked: such calls cost a tenth of array conversion.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/phases.h"
#include "cpu.h"
#include "dispatch.h"
#include "ops/attention.h"
#include "ops/batch.h"
#include "ops/elementwise.h"
#include "ops/held_batch.h"
#include "ops/latent.h"
#include "ops/page_copy.h"
#include "ops/prefault.h"
#include "ops/rowwise.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace aioserve::ops;

namespace {

using Address = uintptr_t;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

DType dtype_of(bool bfloat16) { return bfloat16 ? DType::bfloat16 : DType::float32; }

void bind_rms_norm(Address x, Address residual, Address weight, Address out, bool bfloat16,
                   int64_t rows, int64_t size, int64_t x_stride, float eps, float weight_offset) {
    rms_norm({.x = at(x),
              .x_stride = x_stride,
              .residual = at(residual),
              .weight = at(weight),
              .out = at(out),
              .out_stride = size,
              .size = size,
              .eps = eps,
              .weight_offset = weight_offset},
             dtype_of(bfloat16), rows);
}

void bind_gated(Address gate_up, Address out, bool bfloat16, bool gelu, int64_t rows, int64_t size,
                int64_t stride) {
    gated({.gate_up = at(gate_up), .stride = stride, .out = at(out), .size = size},
          dtype_of(bfloat16), rows, gelu);
}

void bind_layer_norm(Address x, Address residual, Address weight, Address bias, Address out,
                     bool bfloat16, int64_t rows, int64_t size, int64_t x_stride, float eps) {
    const LayerNormArgs args{.x = at(x),
                             .x_stride = x_stride,
                             .residual = at(residual),
                             .weight = at(weight),
                             .bias = at(bias),
                             .out = at(out),
                             .size = size,
                             .eps = eps};
    aioserve::run_now([&](aioserve::Phases& phases) {
        append_layer_norm(phases, args, dtype_of(bfloat16), rows);
    });
}

void bind_activation(Address x, Address out, int kind, bool bfloat16, int64_t rows, int64_t size,
                     int64_t stride) {
    const ActivationArgs args{.x = at(x), .stride = stride, .out = at(out), .size = size};
    aioserve::run_now([&](aioserve::Phases& phases) {
        append_activation(phases, args, static_cast<Activation>(kind), dtype_of(bfloat16), rows);
    });
}

void bind_add_rows(Address x, Address table, Address ids, bool bfloat16, int64_t rows,
                   int64_t size) {
    const AddRowsArgs args{.x = at(x), .table = at(table), .ids = at<int32_t>(ids), .size = size};
    aioserve::run_now([&](aioserve::Phases& phases) {
        append_add_rows(phases, args, dtype_of(bfloat16), rows);
    });
}

void bind_scale(Address x, float factor, bool bfloat16, int64_t size) {
    aioserve::run_now([&](aioserve::Phases& phases) {
        append_scale(phases, at(x), factor, dtype_of(bfloat16), size);
    });
}

void bind_soft_cap(Address x, float cap, int64_t size) {
    aioserve::run_now(
        [&](aioserve::Phases& phases) { append_soft_cap(phases, at<float>(x), cap, size); });
}

void bind_largest(Address x, int64_t rows, int64_t size, Address largest, Address columns) {
    aioserve::run_now([&](aioserve::Phases& phases) {
        append_largest(phases, at<float>(x), rows, size, at<float>(largest), at<int64_t>(columns));
    });
}

// For rows so few that another thread may not be worth waking: nor is it then to let another have the
// GIL, and to wait for it afterwards.
template <class Append>
void run_rows(std::size_t rows, int64_t size, const Append& append) {
    std::optional<nb::gil_scoped_release> release;
    if (row_search_ns(static_cast<int64_t>(rows), size) >= aioserve::kParallelThreshold)
        release.emplace();
    aioserve::run_now(append);
}

void check_row(int64_t row, int64_t num_rows) {
    if (row < 0 || row >= num_rows)
        throw std::out_of_range("rows must be from 0 to " + std::to_string(num_rows - 1) +
                                ", got " + std::to_string(row));
}

void bind_largest_of(Address x, int64_t num_rows, int64_t size, const std::vector<int64_t>& rows,
                     Address largest, Address columns) {
    for (const int64_t row : rows) check_row(row, num_rows);
    run_rows(rows.size(), size, [&](aioserve::Phases& phases) {
        append_largest_of(phases, at<float>(x), rows, size, at<float>(largest),
                          at<int64_t>(columns));
    });
}

void bind_leave_out(Address x, int64_t num_rows, int64_t size,
                    const std::vector<std::pair<int64_t, Array<int32_t, 1>>>& masks) {
    std::vector<RowMask> of_rows;
    for (const auto& [row, mask] : masks) {
        check_row(row, num_rows);
        if (static_cast<int64_t>(mask.shape(0)) != (size + 31) / 32)
            throw std::invalid_argument("masks must have " + std::to_string((size + 31) / 32) +
                                        " words, got " + std::to_string(mask.shape(0)));
        of_rows.push_back({row, mask.data()});
    }
    run_rows(of_rows.size(), size, [&](aioserve::Phases& phases) {
        append_leave_out(phases, at<float>(x), of_rows, size);
    });
}

void make_pages(KVPages* self, Address storage, int64_t num_pages, int64_t layers_per_page,
                int64_t heads, int64_t page_size, int64_t head_dim, bool bfloat16,
                const std::vector<std::pair<int64_t, int64_t>>& places,
                const std::vector<int64_t>& windows, int64_t rank) {
    if (rank < 0 || rank > head_dim || (rank > 0 && heads != 1))
        throw std::invalid_argument("rank must be from 1 to head_dim, of one head, or 0");
    std::vector<KVPlace> of_layers;
    for (const auto& [group, index] : places) of_layers.push_back({group, index});
    new (self) KVPages{at<char>(storage), num_pages, layers_per_page,     heads,
                       page_size,         head_dim,  dtype_of(bfloat16), std::move(of_layers),
                       windows,           rank};
}

void bind_rotary_kv_write(const HeldBatch& held, const KVPages& pages, int64_t layer, Address qkv,
                          int64_t row_stride, int64_t q_heads, Address cos, Address sin,
                          int64_t max_positions, int64_t half, bool interleaved,
                          Address query_scale, Address q_norm, Address k_norm, float eps,
                          float weight_offset) {
    rotary_kv_write(held.batch, pages, layer,
                    {.qkv = at(qkv),
                     .row_stride = row_stride,
                     .q_heads = q_heads,
                     .cos = at<float>(cos),
                     .sin = at<float>(sin),
                     .max_positions = max_positions,
                     .half = half,
                     .interleaved = interleaved,
                     .query_scale = at<float>(query_scale),
                     .q_norm = at(q_norm),
                     .k_norm = at(k_norm),
                     .eps = eps,
                     .weight_offset = weight_offset});
}

void bind_latent_write(const HeldBatch& held, const KVPages& pages, int64_t layer, Address queries,
                       int64_t row_stride, int64_t q_heads, Address latents, int64_t latent_stride,
                       Address norm, float eps, float weight_offset, Address cos, Address sin,
                       int64_t max_positions, int64_t half, bool interleaved) {
    latent_write(held.batch, pages, layer,
                 {.queries = at(queries),
                  .row_stride = row_stride,
                  .q_heads = q_heads,
                  .latents = at(latents),
                  .latent_stride = latent_stride,
                  .norm = at(norm),
                  .eps = eps,
                  .weight_offset = weight_offset,
                  .cos = at<float>(cos),
                  .sin = at<float>(sin),
                  .max_positions = max_positions,
                  .half = half,
                  .interleaved = interleaved});
}

void bind_paged_attention(const HeldBatch& held, const KVPages& pages, int64_t layer, Address qkv,
                          int64_t row_stride, int64_t q_heads, Address out, float scale,
                          float soft_cap, int64_t window, bool logit_rows_only, Address sinks,
                          Address log_sum_exp) {
    paged_attention(held.batch, pages, layer,
                    {.qkv = at(qkv),
                     .row_stride = row_stride,
                     .q_heads = q_heads,
                     .out = at(out),
                     .scale = scale,
                     .soft_cap = soft_cap,
                     .window = window,
                     .logit_rows_only = logit_rows_only,
                     .sinks = at<float>(sinks),
                     .log_sum_exp = at<float>(log_sum_exp)});
}

void bind_merge_attention(Address out, Address log_sum_exp, Address part, Address part_log_sum_exp,
                          bool bfloat16, int64_t rows, int64_t head_dim) {
    aioserve::run_now([&](aioserve::Phases& phases) {
        append_merge_attention(phases,
                               {.out = at(out),
                                .log_sum_exp = at<float>(log_sum_exp),
                                .part = at(part),
                                .part_log_sum_exp = at<float>(part_log_sum_exp),
                                .head_dim = head_dim},
                               dtype_of(bfloat16), rows);
    });
}

void bind_copy_pages(const std::vector<const KVPages*>& caches, Array<int32_t, 2> copies) {
    static_assert(sizeof(PageCopy) == 5 * sizeof(int32_t));
    const nb::gil_scoped_release release;
    copy_pages(caches, reinterpret_cast<const PageCopy*>(copies.data()),
               static_cast<int64_t>(copies.shape(0)));
}

nb::dict cpu_info() {
    nb::dict info;
    info["isa"] = aioserve::used_isa();
    info["best_isa"] = aioserve::best_isa();
    info["integer_isa"] = aioserve::used_integer_isa();
    info["isas_compiled"] = aioserve::compiled_isas();
    info["isas_supported"] = aioserve::supported_isas();
    info["isas_emulated"] = aioserve::emulated_isas();
    info["threads"] = aioserve::num_threads();
    info["affinity_cpus"] = aioserve::affinity_cpus();
    const double quota = aioserve::cgroup_cpus();
    info["cgroup_cpus"] = quota > 0 ? nb::object(nb::float_(quota)) : nb::object(nb::none());
    return info;
}

}  // namespace

void bind_ops(nb::module_& m) {
    nb::class_<KVPages>(m, "KVPages", "The KV pages of every layer, in memory that outlives this.")
        .def("__init__", &make_pages, "storage"_a, "num_pages"_a, "layers_per_page"_a, "heads"_a,
             "page_size"_a, "head_dim"_a, "bfloat16"_a, "places"_a, "windows"_a, "rank"_a = 0)
        .def("prefault", &prefault, "first"_a, "end"_a, ReleaseGil(),
             "Have the memory of pages [first, end) provided.");
    nb::class_<HeldBatch>(m, "Batch", "Where the tokens of one step sit, checked for all layers.")
        .def(nb::init<Array<int32_t, 1>, Array<int32_t, 1>, Array<int32_t, 3>, Array<int64_t, 2>,
                      Array<int32_t, 1>, Array<int64_t, 1>, const KVPages&>(),
             "query_start"_a.noconvert(), "context_lens"_a.noconvert(), "page_table"_a.noconvert(),
             "token_locations"_a.noconvert(), "positions"_a.noconvert(),
             "logit_rows"_a.noconvert(), "pages"_a)
        .def(
            "shared_splits",
            [](const HeldBatch& held, int64_t kv_heads, int64_t group, int64_t head_dim,
               int64_t window, bool logit_rows_only) {
                return held.batch
                    .attention({.kv_group = 0,
                                .kv_heads = kv_heads,
                                .group = group,
                                .head_dim = head_dim,
                                .window = window,
                                .logit_rows_only = logit_rows_only,
                                .threads = aioserve::num_threads()})
                    .num_shared();
            },
            nb::kw_only(), "kv_heads"_a, "group"_a, "head_dim"_a, "window"_a = 0,
            "logit_rows_only"_a = false,
            "How many tasks of the attention of a layer of group 0 read their keys once for several "
            "sequences.");
    m.def("rms_norm", &bind_rms_norm, ReleaseGil());
    m.def("gated", &bind_gated, ReleaseGil());
    m.def("layer_norm", &bind_layer_norm, ReleaseGil());
    m.def("activation", &bind_activation, ReleaseGil());
    m.def("add_rows", &bind_add_rows, ReleaseGil());
    m.def("scale", &bind_scale, ReleaseGil());
    m.def("soft_cap", &bind_soft_cap, ReleaseGil());
    m.def("largest", &bind_largest, ReleaseGil());
    m.def("largest_of", &bind_largest_of);
    m.def("leave_out", &bind_leave_out);
    m.def("rotary_kv_write", &bind_rotary_kv_write, ReleaseGil());
    m.def("latent_write", &bind_latent_write, ReleaseGil());
    m.def("paged_attention", &bind_paged_attention, ReleaseGil());
    m.def("merge_attention", &bind_merge_attention, ReleaseGil());
    m.def("copy_pages", &bind_copy_pages, "caches"_a, "copies"_a.noconvert());
    m.def("cpu_info", &cpu_info,
          "The instruction set and threads of the kernels, and what the machine grants: CPUs in the "
          "affinity mask (one per physical core) and in the cgroup's quota (None: unlimited).");
    m.def("set_isa", &aioserve::set_isa, "name"_a, ReleaseGil(),
          "Use the kernels of another instruction set; for tests, while no kernel runs.");
    m.def("set_num_threads", &aioserve::set_num_threads, "count"_a, ReleaseGil(),
          "Resize the thread pool; for tests and benchmarks, while no kernel runs.");
    nb::object at_exit = nb::module_::import_("atexit").attr("register");
    at_exit(nb::cpp_function(&aioserve::shutdown_thread_pool, ReleaseGil()));
}
