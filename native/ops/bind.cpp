// Binds the ops under flat argument lists: addresses, sizes and strides in elements, which the
// wrappers in `aioserve/ops/native.py` have checked. Such calls cost a tenth of array conversion.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "common/thread_pool.h"
#include "ops/attention.h"
#include "ops/dispatch.h"
#include "ops/page_copy.h"
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

void bind_rotary_kv_write(Address q, int64_t q_token_stride, int64_t q_head_stride, Address k,
                          int64_t k_token_stride, int64_t k_head_stride, Address v,
                          int64_t v_token_stride, int64_t v_head_stride, int64_t tokens,
                          int64_t q_heads, int64_t kv_heads, int64_t head_dim, Address cos,
                          Address sin, int64_t max_positions, int64_t half, Address positions,
                          Address slots, Address k_pages, Address v_pages, int64_t num_pages,
                          int64_t page_size, Address q_norm, Address k_norm, float eps,
                          float weight_offset, bool bfloat16) {
    rotary_kv_write({.q = at(q),
                     .k = at(k),
                     .v = at(v),
                     .q_token_stride = q_token_stride,
                     .q_head_stride = q_head_stride,
                     .k_token_stride = k_token_stride,
                     .k_head_stride = k_head_stride,
                     .v_token_stride = v_token_stride,
                     .v_head_stride = v_head_stride,
                     .q_heads = q_heads,
                     .kv_heads = kv_heads,
                     .head_dim = head_dim,
                     .cos = at<float>(cos),
                     .sin = at<float>(sin),
                     .half = half,
                     .positions = at<int32_t>(positions),
                     .slots = at<int64_t>(slots),
                     .k_pages = at(k_pages),
                     .v_pages = at(v_pages),
                     .page_size = page_size,
                     .q_norm = at(q_norm),
                     .k_norm = at(k_norm),
                     .eps = eps,
                     .weight_offset = weight_offset},
                    dtype_of(bfloat16), tokens, num_pages * page_size, max_positions);
}

void bind_paged_attention(Address q, int64_t q_token_stride, int64_t q_head_stride, Address out,
                          Address k_pages, Address v_pages, int64_t num_pages, int64_t kv_heads,
                          int64_t page_size, int64_t head_dim, int64_t group, Address query_start,
                          Address context_lens, Address page_table, int64_t num_sequences,
                          int64_t table_width, int64_t num_tokens, float scale, float soft_cap,
                          int64_t window, bool bfloat16) {
    paged_attention({.args = {.q = at(q),
                              .q_token_stride = q_token_stride,
                              .q_head_stride = q_head_stride,
                              .out = at(out),
                              .k_pages = at(k_pages),
                              .v_pages = at(v_pages),
                              .kv_heads = kv_heads,
                              .group = group,
                              .head_dim = head_dim,
                              .page_size = page_size,
                              .scale = scale,
                              .soft_cap = soft_cap,
                              .window = window},
                     .dtype = dtype_of(bfloat16),
                     .num_pages = num_pages,
                     .num_sequences = num_sequences,
                     .table_width = table_width,
                     .num_tokens = num_tokens,
                     .query_start = at<int32_t>(query_start),
                     .context_lens = at<int32_t>(context_lens),
                     .page_table = at<int32_t>(page_table)});
}

void bind_copy_pages(const std::vector<std::pair<Address, int64_t>>& caches, int64_t planes,
                     int64_t heads, int64_t page_size, int64_t row_bytes, Address copies,
                     int64_t num_copies) {
    std::vector<PageCache> pages;
    for (const auto& [address, num_pages] : caches) pages.push_back({at<char>(address), num_pages});
    copy_pages({.caches = pages.data(),
                .num_caches = static_cast<int64_t>(pages.size()),
                .planes = planes,
                .heads = heads,
                .page_size = page_size,
                .row_bytes = row_bytes,
                .copies = at<PageCopy>(copies),
                .num_copies = num_copies});
}

nb::dict cpu_info() {
    nb::dict info;
    info["isa"] = used_isa();
    info["isas_supported"] = supported_isas();
    info["threads"] = aioserve::num_threads();
    info["affinity_cpus"] = aioserve::affinity_cpus();
    const double quota = aioserve::cgroup_cpus();
    info["cgroup_cpus"] = quota > 0 ? nb::object(nb::float_(quota)) : nb::object(nb::none());
    return info;
}

}  // namespace

void bind_ops(nb::module_& m) {
    m.def("rms_norm", &bind_rms_norm, ReleaseGil());
    m.def("gated", &bind_gated, ReleaseGil());
    m.def("rotary_kv_write", &bind_rotary_kv_write, ReleaseGil());
    m.def("paged_attention", &bind_paged_attention, ReleaseGil());
    m.def("copy_pages", &bind_copy_pages, ReleaseGil());
    m.def("cpu_info", &cpu_info,
          "The instruction set and threads of the kernels, and what the machine grants: CPUs in the "
          "affinity mask (one per physical core) and in the cgroup's quota (None: unlimited).");
    m.def("set_isa", &set_isa, "name"_a, ReleaseGil(),
          "Use the kernels of another instruction set; for tests, while no kernel runs.");
    m.def("set_num_threads", &aioserve::set_num_threads, "count"_a, ReleaseGil(),
          "Resize the thread pool; for tests and benchmarks, while no kernel runs.");
    nb::object at_exit = nb::module_::import_("atexit").attr("register");
    at_exit(nb::cpp_function(&aioserve::shutdown_thread_pool, ReleaseGil()));
}
