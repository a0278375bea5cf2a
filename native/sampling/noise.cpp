#include "sampling/noise.h"

#include <algorithm>
#include <cmath>

namespace aioserve::sampling {
namespace {

using ops::kRaceBlock;
using ops::kRaceCalls;

uint32_t upper(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

// One word of Philox4x32-10.
uint32_t word_of(const ops::Noise& noise, int64_t id, uint32_t half) {
    uint32_t c[4] = {noise.position[0], noise.position[1],
                     static_cast<uint32_t>(id / kRaceBlock * kRaceCalls + id % kRaceCalls), half};
    for (const auto& key : noise.keys) {
        const uint64_t product0 = uint64_t{0xD2511F53u} * c[0];
        const uint64_t product1 = uint64_t{0xCD9E8D57u} * c[2];
        c[0] = upper(product1) ^ c[1] ^ key[0];
        c[1] = static_cast<uint32_t>(product1);
        c[2] = upper(product0) ^ c[3] ^ key[1];
        c[3] = static_cast<uint32_t>(product0);
    }
    return c[id / kRaceCalls % 4];
}

}  // namespace

ops::Noise noise_of(uint64_t seed, uint64_t position) {
    ops::Noise noise{.position = {static_cast<uint32_t>(position), upper(position)}, .keys = {}};
    uint32_t first = static_cast<uint32_t>(seed), second = upper(seed);
    for (auto& key : noise.keys) {
        key[0] = first;
        key[1] = second;
        first += 0x9E3779B9u;
        second += 0xBB67AE85u;
    }
    return noise;
}

double exponential(const ops::Noise& noise, int64_t id) {
    const uint64_t bits = uint64_t{word_of(noise, id, ops::kUpperWords)} << 32 |
                          word_of(noise, id, ops::kLowerWords);
    // The nearer end of the unit interval keeps its distance to the last bit.
    const double distance = (static_cast<double>(std::min(bits, ~bits)) + 0.5) * 0x1p-64;
    return bits >> 63 ? -std::log(distance) : -std::log1p(-distance);
}

}  // namespace aioserve::sampling
