// Which instruction set the kernels use: the best that the CPU and the build have, or the one that
// AIOSERVE_ISA names.

#pragma once

#include <string>
#include <vector>

#include "ops/types.h"

namespace aioserve::ops {

extern const Table kPortable;
#if defined(__x86_64__)
extern const Table kAvx2;
extern const Table kAvx512;
extern const Table kAvx512Bf16;
#endif

// The kernels in use. Throws std::invalid_argument where AIOSERVE_ISA is unknown or unsupported.
const Kernels& kernels(DType dtype);

// Names from the plainest to the best that this machine supports, and the one in use.
std::vector<std::string> supported_isas();
std::string used_isa();

// Use another one from now on: a hook for tests and benchmarks, not while kernels run.
void set_isa(const std::string& name);

}  // namespace aioserve::ops
