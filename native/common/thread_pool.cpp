#include "common/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace aioserve {
namespace {

// Long enough to bridge the Python between two ops of a layer, short enough not to starve torch's
// own threads, which share these cores.
constexpr auto kSpin = std::chrono::microseconds(20);

// A phase's last task takes some microseconds more than the others. Whoever still waits then lets
// other threads have its CPU: one of them may be what it waits for.
constexpr int kSpinsBeforeYield = 1000;

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// Phases in progress. A ticket is a phase (high half) and a task of it (low half); tickets past a
// phase's last task are void. Whoever ends a phase's last task opens the next.
struct Job {
    const Phase* phases;
    uint64_t count;
    int64_t* ended;
    std::atomic<uint64_t> ticket{0};
    std::atomic<int64_t> done{0};  // tasks of the open phase
    int workers = 0;               // inside `work`; guarded by Pool::mutex
    Job* following = nullptr;

    Job(const Phase* phases_, int64_t count_, int64_t* ended_)
        : phases(phases_), count(static_cast<uint64_t>(count_)), ended(ended_) {
        open(0);
    }

    static uint64_t phase_of(uint64_t of_ticket) { return of_ticket >> 32; }

    static int64_t task_of(uint64_t of_ticket) {
        return static_cast<int64_t>(of_ticket & 0xffffffffu);
    }

    bool has_tasks() const { return phase_of(ticket.load(std::memory_order_relaxed)) < count; }

    // The phase, or the first after it that has tasks.
    void open(uint64_t phase) {
        for (; phase < count && phases[phase].num_tasks <= 0; ++phase)
            if (ended) ended[phase] = now_ns();
        done.store(0, std::memory_order_relaxed);
        ticket.store(phase << 32, std::memory_order_release);
    }

    void work() {
        for (;;) {
            const uint64_t open_now = ticket.load(std::memory_order_acquire);
            if (phase_of(open_now) >= count) return;
            if (task_of(open_now) >= phases[phase_of(open_now)].num_tasks) {
                wait_for_next(phase_of(open_now));
                continue;
            }
            const uint64_t mine = ticket.fetch_add(1, std::memory_order_acq_rel);
            const uint64_t phase = phase_of(mine);
            if (phase >= count) return;
            const Phase& current = phases[phase];
            if (task_of(mine) >= current.num_tasks) continue;
            current.run(current.context, task_of(mine));
            if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < current.num_tasks) continue;
            if (ended) ended[phase] = now_ns();
            open(phase + 1);
        }
    }

    void wait_for_next(uint64_t phase) const {
        for (int i = 0; phase_of(ticket.load(std::memory_order_acquire)) == phase; ++i) {
            if (i < kSpinsBeforeYield) {
                relax();
            } else {
                std::this_thread::yield();
            }
        }
    }
};

// A job lives on its caller's stack. Workers enter and leave it under the mutex, and its caller
// unlinks it and waits until nobody is inside before it returns.
struct Pool {
    std::mutex mutex;
    std::condition_variable work_ready;
    std::condition_variable job_left;
    std::atomic<uint64_t> posted{0};  // jobs so far: what a spinning worker watches
    Job* jobs = nullptr;
    std::vector<std::thread> workers;
    std::atomic<int> size{1};
    int sleeping = 0;
    bool stopping = false;

    void start(int threads) {
        size.store(threads, std::memory_order_relaxed);
        // Signals stay with the threads of the host program.
        sigset_t all, previous;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &previous);
        for (int i = 1; i < threads; ++i) {
            workers.emplace_back([this] { run_worker(); });
            pthread_setname_np(workers.back().native_handle(), "aioserve-ops");
        }
        pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    }

    void stop() {
        {
            std::lock_guard lock(mutex);
            stopping = true;
        }
        posted.fetch_add(1, std::memory_order_release);
        work_ready.notify_all();
        for (auto& worker : workers) worker.join();
        workers.clear();
        stopping = false;
        size.store(1, std::memory_order_relaxed);
    }

    Job* find() {
        for (Job* job = jobs; job; job = job->following)
            if (job->has_tasks()) return job;
        return nullptr;
    }

    void run_worker() {
        std::unique_lock lock(mutex);
        for (;;) {
            if (Job* job = find()) {
                ++job->workers;
                lock.unlock();
                job->work();
                lock.lock();
                if (--job->workers == 0) job_left.notify_all();
                continue;
            }
            if (stopping) return;
            const uint64_t seen = posted.load(std::memory_order_relaxed);
            lock.unlock();
            const bool more = spin(seen);
            lock.lock();
            if (more || stopping) continue;
            ++sleeping;
            work_ready.wait(lock, [&] {
                return stopping || posted.load(std::memory_order_relaxed) != seen;
            });
            --sleeping;
        }
    }

    bool spin(uint64_t seen) const {
        const auto until = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 16; ++i) {
                if (posted.load(std::memory_order_acquire) != seen) return true;
                relax();
            }
        } while (std::chrono::steady_clock::now() < until);
        return false;
    }

    // `most_tasks`: of any phase.
    void run(Job& job, int64_t most_tasks) {
        const int helpers_wanted = static_cast<int>(std::min<int64_t>(most_tasks, size.load()) - 1);
        int wake;
        {
            std::lock_guard lock(mutex);
            job.following = jobs;
            jobs = &job;
            posted.fetch_add(1, std::memory_order_release);
            wake = std::min(sleeping, helpers_wanted);
        }
        for (int i = 0; i < wake; ++i) work_ready.notify_one();
        job.work();
        std::unique_lock lock(mutex);
        Job** link = &jobs;
        while (*link != &job) link = &(*link)->following;
        *link = job.following;
        if (job.workers == 0) return;
        // The last tasks are usually about as long as ours were: look again before sleeping.
        for (int i = 0; i < 64 && job.workers; ++i) {
            lock.unlock();
            for (int j = 0; j < 32; ++j) relax();
            lock.lock();
        }
        job_left.wait(lock, [&] { return job.workers == 0; });
    }
};

// Never destroyed, so that a thread which still computes at exit finds it.
std::atomic<Pool*> g_pool{nullptr};
std::mutex* g_start = new std::mutex;
bool g_shut_down = false;

int detect_threads() {
    if (const char* text = std::getenv("AIOSERVE_NUM_THREADS"); text && *text) {
        char* end = nullptr;
        const long count = std::strtol(text, &end, 10);
        if (*end != '\0' || count < 1 || count > 1024) {
            throw std::invalid_argument(
                "AIOSERVE_NUM_THREADS must be a number from 1 to 1024, got '" + std::string(text) +
                "'");
        }
        return static_cast<int>(count);
    }
    int count = affinity_cpus();
    if (const double quota = cgroup_cpus(); quota > 0)
        count = std::min(count, static_cast<int>(std::ceil(quota)));
    return std::max(count, 1);
}

// The child has none of the parent's workers, and the parent's locks may be held for ever: leave
// them where they are and begin anew.
void forget_after_fork() {
    g_pool.store(nullptr);
    g_start = new std::mutex;
}

Pool& pool() {
    if (Pool* existing = g_pool.load(std::memory_order_acquire)) return *existing;
    std::lock_guard lock(*g_start);
    if (Pool* existing = g_pool.load(std::memory_order_acquire)) return *existing;
    static const bool registered = pthread_atfork(nullptr, nullptr, forget_after_fork) == 0;
    (void)registered;
    const int threads = g_shut_down ? 1 : detect_threads();
    auto* fresh = new Pool;
    fresh->start(threads);
    g_pool.store(fresh, std::memory_order_release);
    return *fresh;
}

}  // namespace

void run_phases(const Phase* phases, int64_t count, int64_t* ended) {
    int64_t most_tasks = 0;
    for (int64_t i = 0; i < count; ++i) most_tasks = std::max(most_tasks, phases[i].num_tasks);
    Pool& shared = pool();
    Job job(phases, count, ended);
    if (most_tasks <= 1 || shared.size.load(std::memory_order_relaxed) == 1) {
        job.work();
    } else {
        shared.run(job, most_tasks);
    }
}

int num_threads() { return pool().size.load(std::memory_order_relaxed); }

void set_num_threads(int count) {
    if (count < 1 || count > 1024)
        throw std::invalid_argument("count must be from 1 to 1024, got " + std::to_string(count));
    Pool& shared = pool();
    std::lock_guard lock(*g_start);
    shared.stop();
    if (!g_shut_down) shared.start(count);
}

void shutdown_thread_pool() {
    std::lock_guard lock(*g_start);
    g_shut_down = true;
    if (Pool* existing = g_pool.load()) existing->stop();
}

}  // namespace aioserve
