// What wakes the event loop when a device is done with a step.

#include <nanobind/nanobind.h>

#include "wake/wake.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace aioserve::wake;

void bind_wake(nb::module_& m) {
    m.def(
        "eventfd_writer", [] { return reinterpret_cast<std::uintptr_t>(&write_eventfd); },
        "Address of a C function `void (void *)` that adds 1 to the eventfd of the number given.");
    m.def("spin_on_event", &spin_on_event, "query"_a, "event"_a, "not_ready"_a, "seconds"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "Call the C function `int (void *)` at `query` with `event` until it returns anything but "
          "`not_ready`, for at most so many seconds; what it returned last.");
}
