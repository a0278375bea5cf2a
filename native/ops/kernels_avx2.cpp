#if defined(__x86_64__)
#include <immintrin.h>

#include "common/scratch.h"
#include "ops/dispatch.h"

namespace aioserve::ops {
namespace avx2 {
#include "ops/vector_avx2.h"
//
#include "ops/kernels.inl"
}  // namespace avx2

extern const Table kAvx2 = avx2::kTable;

}  // namespace aioserve::ops
#endif
