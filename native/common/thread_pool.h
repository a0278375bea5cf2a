// The process's CPU workers: one small pool, shared by every kernel and every calling thread.
//
// Sized from the cgroup's CPU quota and the affinity mask (or AIOSERVE_NUM_THREADS); workers start at
// the first parallel call, spin for some microseconds after work and then sleep, and are joined when
// the interpreter exits. The caller always works too, so N threads means N - 1 workers. Callers
// never need the GIL here and must not hold it. Calls from several threads at once, and calls from
// inside a task, are fine. After a fork the child starts workers of its own.

#pragma once

#include <cstdint>
#include <type_traits>

namespace aioserve {

// `run(context, task)` once for every task in [0, num_tasks), in parallel and in no fixed order.
// `run` must not throw.
struct Phase {
    void (*run)(void* context, int64_t task);
    void* context;
    int64_t num_tasks;
};

// Runs phases one after the other: each begins when the tasks of the one before have ended, not
// when the threads have met, so that a thread which the system holds up is waited for only if it is
// in the middle of a task. One wake-up of the workers for all. `ended`, unless null, gets the time
// at which each phase ended, in nanoseconds of the steady clock.
void run_phases(const Phase* phases, int64_t count, int64_t* ended = nullptr);

template <class Fn>
void parallel_for(int64_t num_tasks, Fn&& fn) {
    using Body = std::remove_reference_t<Fn>;
    const Phase phase{
        [](void* context, int64_t task) { (*static_cast<Body*>(context))(task); },
        const_cast<void*>(static_cast<const void*>(&fn)), num_tasks};
    run_phases(&phase, 1);
}

// `fn(begin, end)` over [0, num_items), in pieces of a few per thread. Runs on the calling thread
// alone where `work` (anything like the nanoseconds that one thread needs for all of it) would not
// pay for waking another.
template <class Fn>
void parallel_ranges(int64_t num_items, double work, Fn&& fn);

// Threads that a parallel call may use, the caller included; at least 1. Fixed at the first call
// unless `set_num_threads` changes it (a hook for tests and benchmarks; not while kernels run).
int num_threads();
void set_num_threads(int count);

// Below this many nanoseconds of work, waking a second thread costs more than it saves.
constexpr double kParallelThreshold = 20'000;

// Stops and joins the workers; later calls run on the calling thread alone.
void shutdown_thread_pool();

// What the machine grants: CPUs in the affinity mask (one per physical core), and the cgroup's
// quota in CPUs (0 where there is none).
int affinity_cpus();
double cgroup_cpus();

template <class Fn>
void parallel_ranges(int64_t num_items, double work, Fn&& fn) {
    const int64_t threads = num_threads();
    if (threads == 1 || num_items <= 1 || work < kParallelThreshold) {
        if (num_items > 0) fn(int64_t{0}, num_items);
        return;
    }
    const int64_t pieces = num_items < threads * 2 ? num_items : threads * 2;
    parallel_for(pieces, [&](int64_t piece) {
        fn(num_items * piece / pieces, num_items * (piece + 1) / pieces);
    });
}

}  // namespace aioserve
