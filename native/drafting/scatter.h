#pragma once

#include <cstdint>
#include <random>

namespace aioserve::drafting {

// Drawn once a process, so that nobody who writes a text knows which of its runs meet in a table.
inline uint64_t scatter_key() {
    static const uint64_t key = [] {
        std::random_device source;
        return static_cast<uint64_t>(source()) << 32 | source();
    }();
    return key;
}

// Every bit of a value decides about every bit of what it becomes: the last steps of MurmurHash3
// (Appleby, public domain), of the value and the key.
inline uint64_t scattered(uint64_t value) {
    value ^= scatter_key();
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD;
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53;
    return value ^ value >> 33;
}

}  // namespace aioserve::drafting
