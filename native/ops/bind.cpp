#include <nanobind/nanobind.h>

#include "common/thread_pool.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_ops(nb::module_& m) {
    m.def("set_num_threads", &aioserve::set_num_threads, "count"_a,
          nb::call_guard<nb::gil_scoped_release>());
    nb::object at_exit = nb::module_::import_("atexit").attr("register");
    at_exit(nb::cpp_function(&aioserve::shutdown_thread_pool,
                             nb::call_guard<nb::gil_scoped_release>()));
}
