#include "measure/reading.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "common/thread_pool.h"
#include "linear/weight_memory.h"

namespace aioserve::measure {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{1} << 20;  // one thread's, from start to end
constexpr std::size_t kSums = 4;  // at a time, so that no addition waits for another

// As wide as the widest registers; narrower ones take several for it.
using Vector = uint64_t __attribute__((vector_size(64)));

[[gnu::always_inline]] inline uint64_t add_up(const char* block) {
    Vector sums[kSums] = {};
    for (std::size_t at = 0; at < kBlockBytes; at += sizeof sums) {
        for (std::size_t i = 0; i < kSums; ++i) {
            Vector values;
            std::memcpy(&values, block + at + i * sizeof values, sizeof values);
            sums[i] += values;
        }
    }
    uint64_t total = 0;
    for (const Vector& sum : sums)
        for (std::size_t i = 0; i < sizeof sum / sizeof sum[0]; ++i) total += sum[i];
    return total;
}

using Sum = uint64_t (*)(const char* block);

uint64_t sum_plain(const char* block) { return add_up(block); }

#if defined(__x86_64__)
[[gnu::target("avx2")]] uint64_t sum_avx2(const char* block) { return add_up(block); }
[[gnu::target("avx512f")]] uint64_t sum_avx512(const char* block) { return add_up(block); }
#endif

// What the machine has, and not what AIOSERVE_ISA leaves of it: it is the machine that is measured.
Sum widest_sum() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return sum_avx512;
    if (__builtin_cpu_supports("avx2")) return sum_avx2;
#endif
    return sum_plain;
}

}  // namespace

std::vector<double> read_seconds(std::size_t num_bytes, int passes) {
    const auto blocks = static_cast<int64_t>(num_bytes / kBlockBytes);
    if (blocks < 1 || passes < 1)
        throw std::invalid_argument("num_bytes must be at least 1 MiB and passes at least 1");
    const std::shared_ptr<char> memory = linear::allocate_weights(num_bytes);
    const auto block_at = [&](int64_t block) {
        return memory.get() + static_cast<std::size_t>(block) * kBlockBytes;
    };
    parallel_for(blocks, [&](int64_t block) { std::memset(block_at(block), 1, kBlockBytes); });

    const Sum sum_of = widest_sum();
    std::vector<double> seconds;
    for (int pass = 0; pass < passes; ++pass) {
        std::atomic<uint64_t> sum{0};
        const auto began = std::chrono::steady_clock::now();
        parallel_for(blocks, [&](int64_t block) {
            sum.fetch_add(sum_of(block_at(block)), std::memory_order_relaxed);
        });
        const auto took = std::chrono::steady_clock::now() - began;
        seconds.push_back(std::chrono::duration<double>(took).count());
        // Nobody else looks at the sum, and reading for nothing would be left out.
        if (sum.load() != static_cast<uint64_t>(blocks) * (kBlockBytes / 8) * 0x0101010101010101u)
            throw std::runtime_error("memory doesn't hold what was written");
    }
    return seconds;
}

}  // namespace aioserve::measure
