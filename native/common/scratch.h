// Working memory of the calling thread, kept between calls.

#pragma once

#include <cstdint>

namespace aioserve {

// At least `count` floats, aligned to 64 bytes, valid until this thread asks again. Holds garbage.
float* scratch(int64_t count);

// Zeros, aligned to 64 bytes.
extern const float kZeros[1024];

}  // namespace aioserve
