#include "common/scratch.h"
#include "ops/dispatch.h"

namespace aioserve::ops {
namespace portable {
#include "ops/vector_portable.h"
//
#include "ops/kernels.inl"
}  // namespace portable

extern const Table kPortable = portable::kTable;

}  // namespace aioserve::ops
