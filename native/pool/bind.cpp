// Python's view of the page pool; `aioserve/kv/page_pool.py` is the typed face of this class.

#include <nanobind/nanobind.h>

#include <algorithm>

#include "common/int32_buffer.h"
#include "pool/page_pool.h"

namespace nb = nanobind;
using aioserve::Int32Buffer;
using aioserve::PagePool;
using aioserve::PoolError;

void bind_pool(nb::module_& m) {
    const nb::object invariant_error = nb::module_::import_("aioserve.errors").attr("InvariantError");
    nb::exception<PoolError>(m, "PoolError", invariant_error);

    nb::class_<PagePool>(m, "PagePool")
        .def(nb::init<int64_t, int64_t>(), nb::arg("num_pages"), nb::arg("page_size"))
        .def("acquire_into",
             [](PagePool& pool, nb::handle out) { pool.acquire(Int32Buffer(out, true).span()); })
        .def("retain",
             [](PagePool& pool, nb::handle pages) { pool.retain(Int32Buffer(pages, false).span()); })
        .def("release",
             [](PagePool& pool, nb::handle pages, int64_t last_step) {
                 pool.release(Int32Buffer(pages, false).span(), last_step);
             })
        .def("complete", &PagePool::complete)
        .def("ref_count", &PagePool::ref_count)
        .def("num_unshared",
             [](const PagePool& pool, nb::handle pages) {
                 return pool.num_unshared(Int32Buffer(pages, false).span());
             })
        .def("state", [](const PagePool& pool, int64_t page) { return int(pool.state(page)); })
        .def("ref_counts_into",
             [](const PagePool& pool, nb::handle out) {
                 const Int32Buffer buffer(out, true);
                 const std::span<const int32_t> counts = pool.ref_counts();
                 if (buffer.span().size() != counts.size()) {
                     throw nb::value_error("out must have num_pages entries");
                 }
                 std::copy(counts.begin(), counts.end(), buffer.span().begin());
             })
        .def("sanity_check", &PagePool::sanity_check)
        .def_prop_ro("num_free", &PagePool::num_free)
        .def_prop_ro("num_fenced", &PagePool::num_fenced)
        .def_prop_ro("num_held", &PagePool::num_held)
        .def_prop_ro("done_step", &PagePool::done_step);
}
