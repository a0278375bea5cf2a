#include <nanobind/nanobind.h>

#include "cuda/sources.h"

namespace nb = nanobind;

void bind_cuda(nb::module_& m) { m.attr("PAGE_COPIES_CU") = aioserve::cuda::kPageCopies; }
