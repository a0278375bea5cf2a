#include "common/scratch.h"

#include <memory>
#include <new>

namespace aioserve {

alignas(64) const float kZeros[1024] = {};

float* scratch(int64_t count) {
    struct Free {
        void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
    };
    thread_local std::unique_ptr<float[], Free> memory;
    thread_local int64_t size = 0;
    if (size < count) {
        memory.reset();
        size = 0;
        memory.reset(static_cast<float*>(
            ::operator new[](count * sizeof(float), std::align_val_t{64})));
        size = count;
    }
    return memory.get();
}

}  // namespace aioserve
