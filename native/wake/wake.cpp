#include "wake/wake.h"

#include <unistd.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace aioserve::wake {
namespace {

// Between two questions: the driver's lock is asked for less often, and the core's twin gets more.
void pause_for_a_moment() {
    for (int i = 0; i < 32; ++i) {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }
}

}  // namespace

void write_eventfd(void* file) noexcept {
    const std::uint64_t one = 1;
    // A counter that is full wakes its reader anyway, and there is nobody to tell of anything else.
    [[maybe_unused]] const auto written =
        ::write(static_cast<int>(reinterpret_cast<std::intptr_t>(file)), &one, sizeof one);
}

int spin_on_event(std::uintptr_t query, std::uintptr_t event, int not_ready, double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto ask = reinterpret_cast<int (*)(void*)>(query);
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    while (true) {
        const int said = ask(reinterpret_cast<void*>(event));
        if (said != not_ready || Clock::now() >= end) return said;
        pause_for_a_moment();
    }
}

}  // namespace aioserve::wake
