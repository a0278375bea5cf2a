#include "linear/grouped/storage.h"

#include <cstring>

namespace aioserve::linear::grouped {
namespace {

constexpr uint32_t kLowHalves = 0x0f0f0f0fu;
constexpr uint32_t kOnes = 0x01010101u;

uint32_t word_at(const void* from) {
    uint32_t word;
    std::memcpy(&word, from, sizeof(word));
    return word;
}

// Bits above the low halves of bytes, which four steps have in one word: those of step s from bit
// `bits * s` of each byte on. One bit leaves the upper halves of bytes free, and two bytes are stored.
uint32_t upper_word(int bits, const uint32_t* steps) {
    uint32_t upper = 0;
    for (int step = 0; step < kUnitSteps; ++step)
        upper |= (steps[step] >> 4 & ((1u << bits) - 1) * kOnes) << bits * step;
    return bits == 1 ? upper | upper >> 12 : upper;
}

}  // namespace

bool find_storage(int bits, bool has_table, Storage& storage) {
    for (int known = has_table ? kTable : k8Bits; known < kStorages; ++known) {
        storage = static_cast<Storage>(known);
        if (bits_of(storage) == bits) return true;
    }
    return false;
}

void store_column(Storage storage, const uint8_t* integers, char* unit, int column) {
    if (storage == kE4m3) {
        for (int i = 0; i < kUnit; ++i)
            unit[i * kPanelColumns + column] = static_cast<char>(integers[i]);
        return;
    }
    uint32_t steps[kUnitSteps];
    std::memcpy(steps, integers, sizeof(steps));
    char* to = unit + column * kStepBytes;
    if (storage == k8Bits) {
        for (int step = 0; step < kUnitSteps; ++step)
            std::memcpy(to + step * kStepPanelBytes, &steps[step], kStepBytes);
        return;
    }
    for (int line = 0; line < kHalfLines; ++line) {
        const uint32_t low = steps[2 * line] & kLowHalves, high = steps[2 * line + 1] & kLowHalves;
        const uint32_t both = low | high << 4;
        std::memcpy(to + line * kStepPanelBytes, &both, kStepBytes);
    }
    const int bits = bits_of(storage) - 4;
    const uint32_t upper = upper_word(bits, steps);
    std::memcpy(unit + kUpperAt + column * upper_bytes(storage), &upper,
                static_cast<std::size_t>(upper_bytes(storage)));
}

void load_column(Storage storage, const char* unit, int column, uint8_t* integers) {
    if (storage == kE4m3) {
        for (int i = 0; i < kUnit; ++i)
            integers[i] = static_cast<uint8_t>(unit[i * kPanelColumns + column]);
        return;
    }
    const char* from = unit + column * kStepBytes;
    const int bits = bits_of(storage) - 4;
    uint32_t upper = 0;
    std::memcpy(&upper, unit + kUpperAt + column * upper_bytes(storage),
                storage == k8Bits ? 0 : static_cast<std::size_t>(upper_bytes(storage)));
    if (bits == 1) upper |= upper << 12;
    for (int step = 0; step < kUnitSteps; ++step) {
        uint32_t word;
        if (storage == k8Bits) {
            word = word_at(from + step * kStepPanelBytes);
        } else {
            word = word_at(from + step / 2 * kStepPanelBytes) >> step % 2 * 4 & kLowHalves;
            word |= (upper >> bits * step & ((1u << bits) - 1) * kOnes) << 4;
        }
        std::memcpy(integers + step * kStepBytes, &word, sizeof(word));
    }
}

}  // namespace aioserve::linear::grouped
