// How a device wakes the host without Python: what a driver calls, and asking a driver without the GIL.
//
// Knows no CUDA header: a driver's functions come as addresses.

#pragma once

#include <cstdint>

namespace aioserve::wake {

// For `cuLaunchHostFunc`: adds 1 to the eventfd whose number `file` is. It must take no lock that
// Python code may hold, and this takes none.
void write_eventfd(void* file) noexcept;

// Calls `query(event)` until it says anything but `not_ready`, for at most `seconds`; what it said
// last. `query` is a function like `cuEventQuery`, which the caller keeps loaded.
int spin_on_event(std::uintptr_t query, std::uintptr_t event, int not_ready, double seconds);

}  // namespace aioserve::wake
