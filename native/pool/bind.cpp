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
        .def(nb::init<int64_t, int64_t, int64_t>(), nb::arg("num_pages"), nb::arg("page_size"),
             nb::arg("num_group_pages") = 0)
        .def("acquire_into",
             [](PagePool& pool, nb::handle out) { pool.acquire(Int32Buffer(out, true).span()); })
        .def("retain",
             [](PagePool& pool, nb::handle pages) { pool.retain(Int32Buffer(pages, false).span()); })
        .def("release",
             [](PagePool& pool, nb::handle pages, int64_t last_step) {
                 pool.release(Int32Buffer(pages, false).span(), last_step);
             })
        .def("unretain",
             [](PagePool& pool, nb::handle pages) {
                 pool.unretain(Int32Buffer(pages, false).span());
             })
        .def("complete", &PagePool::complete)
        .def("attach",
             [](PagePool& pool, PagePool::Page owner, nb::handle pages) {
                 pool.attach(owner, Int32Buffer(pages, false).span());
             })
        .def("detach", &PagePool::detach)
        .def("group_pages_into",
             [](const PagePool& pool, nb::handle pages, nb::handle out) {
                 const Int32Buffer owners(pages, false);
                 const Int32Buffer buffer(out, true);
                 const auto count = static_cast<size_t>(pool.num_group_pages());
                 if (buffer.span().size() != owners.span().size() * count) {
                     throw nb::value_error("out must have num_group_pages entries for each page");
                 }
                 std::span<PagePool::Page> left = buffer.span();
                 for (const PagePool::Page owner : owners.span()) {
                     const std::span<const PagePool::Page> found = pool.group_pages(owner);
                     if (found.empty()) {
                         std::fill_n(left.begin(), count, PagePool::kNoPage);
                     } else {
                         std::copy(found.begin(), found.end(), left.begin());
                     }
                     left = left.subspan(count);
                 }
             })
        .def("idle_owners",
             [](const PagePool& pool) {
                 nb::list owners;
                 for (const auto& [since, number, owner] : pool.idle()) {
                     owners.append(nb::make_tuple(owner, since));
                 }
                 return owners;
             })
        .def("set_clock", &PagePool::set_clock)
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
        .def_prop_ro("num_idle", &PagePool::num_idle)
        .def_prop_ro("done_step", &PagePool::done_step);
}
