// For benchmarks: what the machine can do, whatever runs on it.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "measure/reading.h"

namespace nb = nanobind;
using namespace nb::literals;

void bind_measure(nb::module_& m) {
    m.def("read_seconds", &aioserve::measure::read_seconds, "num_bytes"_a, "passes"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "Seconds of each pass of the thread pool over memory.");
}
