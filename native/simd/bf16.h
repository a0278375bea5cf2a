// Storage of bfloat16: the upper half of a float32.

#pragma once

#include <cstdint>

namespace aioserve {

struct bf16 {
    uint16_t bits;
};

}  // namespace aioserve
