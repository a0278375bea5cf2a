// Work that is put together first and then run in one go: phases, and what they need to run.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "common/thread_pool.h"

namespace aioserve {

class Phases {
  public:
    // `fn(task)` for each task. Kept by value: what it refers to must live until `run` returns.
    template <class Fn>
    void add(int64_t num_tasks, const Fn& fn) {
        phases_.push_back({[](void* context, int64_t task) { (*static_cast<Fn*>(context))(task); },
                           keep(fn), num_tasks});
    }

    // A copy that lives as long as the phases.
    template <class T>
    T* keep(const T& value) {
        static_assert(std::is_trivially_destructible_v<T> && alignof(T) <= kAlignment);
        static_assert(sizeof(T) <= kBlockBytes);
        return new (take(sizeof(T))) T(value);
    }

    // `fn(begin, end)` over [0, num_items), in pieces of a few per thread; in one piece where `work`
    // (anything like the nanoseconds that one thread needs for all of it) is not worth sharing.
    template <class Fn>
    void add_ranges(int64_t num_items, double work, const Fn& fn) {
        const int64_t threads = num_threads();
        const bool alone = threads == 1 || work < kParallelThreshold;
        const int64_t most = alone ? 1 : threads * 2;
        const int64_t pieces = num_items < most ? num_items : most;
        add(pieces, [fn, num_items, pieces](int64_t piece) {
            fn(num_items * piece / pieces, num_items * (piece + 1) / pieces);
        });
    }

    // What is added from `begin_side_by_side` on, up to each `next_beside`, is one strand. Strands
    // don't wait for each other: the first phases of all become one phase, then the second ones, and
    // so on.
    void begin_side_by_side() {
        beside_ = count();
        strand_ends_.clear();
    }
    void next_beside() { strand_ends_.push_back(count()); }
    void end_side_by_side() {
        merged_.clear();
        for (int64_t step = 0;; ++step) {
            std::vector<Phase> together;
            int64_t begin = beside_, num_tasks = 0;
            for (const int64_t end : strand_ends_) {
                if (begin + step < end) {
                    together.push_back(phases_[static_cast<std::size_t>(begin + step)]);
                    num_tasks += together.back().num_tasks;
                }
                begin = end;
            }
            if (together.empty()) break;
            merged_.push_back(merge(std::move(together), num_tasks));
        }
        phases_.resize(static_cast<std::size_t>(beside_));
        phases_.insert(phases_.end(), merged_.begin(), merged_.end());
    }

    int64_t count() const { return static_cast<int64_t>(phases_.size()); }

    // As `run_phases` does. They stay, and may run again.
    void run(int64_t* ended = nullptr) const { run_phases(phases_.data(), count(), ended); }

    // In the calling thread alone.
    void run_here() const {
        for (const Phase& phase : phases_)
            for (int64_t task = 0; task < phase.num_tasks; ++task) phase.run(phase.context, task);
    }

    // Keeps the memory for the next ones.
    void clear() {
        phases_.clear();
        strands_.clear();
        block_ = 0;
        used_ = 0;
    }

  private:
    static constexpr std::size_t kAlignment = alignof(std::max_align_t);
    static constexpr std::size_t kBlockBytes = 16 * 1024;

    void* take(std::size_t bytes) {
        bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
        if (!blocks_.empty() && used_ + bytes > kBlockBytes) {
            ++block_;
            used_ = 0;
        }
        if (block_ == blocks_.size()) blocks_.emplace_back(new std::byte[kBlockBytes]);
        void* memory = blocks_[block_].get() + used_;
        used_ += bytes;
        return memory;
    }

    // The tasks of several phases, one phase after the other.
    struct Together {
        std::vector<Phase> phases;
        std::vector<int64_t> ends;  // of their tasks

        void run(int64_t task) const {
            const auto at = std::upper_bound(ends.begin(), ends.end(), task) - ends.begin();
            const Phase& phase = phases[static_cast<std::size_t>(at)];
            phase.run(phase.context, task - (ends[static_cast<std::size_t>(at)] - phase.num_tasks));
        }
    };

    Phase merge(std::vector<Phase> phases, int64_t num_tasks) {
        if (phases.size() == 1) return phases.front();
        std::vector<int64_t> ends;
        int64_t end = 0;
        for (const Phase& phase : phases) ends.push_back(end += phase.num_tasks);
        strands_.push_back(std::make_unique<Together>(std::move(phases), std::move(ends)));
        return {[](void* context, int64_t task) { static_cast<Together*>(context)->run(task); },
                strands_.back().get(), num_tasks};
    }

    std::vector<Phase> phases_;
    std::vector<std::unique_ptr<Together>> strands_;
    std::vector<Phase> merged_;
    int64_t beside_ = 0;
    std::vector<int64_t> strand_ends_;
    std::vector<std::unique_ptr<std::byte[]>> blocks_;
    std::size_t block_ = 0;
    std::size_t used_ = 0;
};

// What `append(phases)` adds, at once.
template <class Append>
void run_now(const Append& append) {
    thread_local Phases phases;
    phases.clear();
    append(phases);
    phases.run();
}

}  // namespace aioserve
