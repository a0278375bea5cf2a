// Python's view of the page pool. Arrays cross through the buffer protocol, which costs a tenth of a
// DLPack exchange; `aioserve/kv/page_pool.py` is the typed face of this class.

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>

#include "pool/page_pool.h"

namespace nb = nanobind;
using aioserve::PagePool;
using aioserve::PoolError;

namespace {

// A one-dimensional, contiguous int32 array, borrowed for the length of a call.
class Int32Buffer {
  public:
    Int32Buffer(nb::handle object, bool writable) {
        const int flags = PyBUF_FORMAT | PyBUF_ND | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
        if (view_.ndim != 1 || view_.itemsize != 4 || !is_int(view_.format)) {
            PyBuffer_Release(&view_);
            throw nb::type_error("pages must be a one-dimensional int32 array");
        }
    }
    ~Int32Buffer() { PyBuffer_Release(&view_); }
    Int32Buffer(const Int32Buffer&) = delete;
    Int32Buffer& operator=(const Int32Buffer&) = delete;

    std::span<int32_t> span() const {
        return {static_cast<int32_t*>(view_.buf), static_cast<size_t>(view_.len) / 4};
    }

  private:
    static bool is_int(const char* format) {
        return std::strcmp(format, "i") == 0 || std::strcmp(format, "l") == 0;
    }

    Py_buffer view_;
};

}  // namespace

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
        .def_prop_ro("num_pages", &PagePool::num_pages)
        .def_prop_ro("page_size", &PagePool::page_size)
        .def_prop_ro("num_free", &PagePool::num_free)
        .def_prop_ro("num_fenced", &PagePool::num_fenced)
        .def_prop_ro("num_held", &PagePool::num_held)
        .def_prop_ro("done_step", &PagePool::done_step);
}
