#if defined(__x86_64__)
// GCC 12 takes the undefined registers in its own header for ours.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "common/scratch.h"
#include "ops/dispatch.h"

namespace aioserve::ops {
namespace avx512 {
#include "ops/vector_avx512.h"
//
#include "ops/kernels.inl"
}  // namespace avx512

extern const Table kAvx512 = avx512::kTable;

}  // namespace aioserve::ops
#endif
