// Random numbers of tokens: pure functions of seed, position and id, as `aioserve/ops/philox.py` has
// them.

#pragma once

#include <cstdint>

#include "ops/types.h"

namespace aioserve::sampling {

ops::Noise noise_of(uint64_t seed, uint64_t position);

// Exponentially distributed with a mean of 1, from 64 random bits: from 2^-65 to 45.1.
double exponential(const ops::Noise& noise, int64_t id);

}  // namespace aioserve::sampling
