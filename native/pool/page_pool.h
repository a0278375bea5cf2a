// Who owns which page of the KV cache.
//
// Knows page numbers, reference counts and step numbers. Knows nothing of tokens, tensors, Python or
// threads: one caller at a time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace aioserve {

// The caller broke the pool's rules, or the pool's books don't balance: a bug, not a full cache.
class PoolError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

enum class PageState : uint8_t { kFree = 0, kFenced = 1, kHeld = 2 };

//                acquire                    release, last reference
//      free ----------------> held (count) -------------------------> free      step is done
//        ^                                 \------------------------> fenced    step still in flight
//        |____________________________________________________________/ complete
//
// Every operation either happens whole or throws and changes nothing.
class PagePool {
  public:
    using Page = int32_t;
    using Step = int64_t;

    static constexpr Step kNoStep = -1;  // before any step: nothing has touched the page

    PagePool(int64_t num_pages, int64_t page_size);

    void acquire(std::span<Page> out);
    void retain(std::span<const Page> pages);
    void release(std::span<const Page> pages, Step last_step);
    void complete(Step step);

    int64_t num_pages() const { return static_cast<int64_t>(counts_.size()); }
    int64_t page_size() const { return page_size_; }
    int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
    int64_t num_fenced() const { return num_fenced_; }
    int64_t num_held() const { return num_pages() - num_free() - num_fenced_; }
    Step done_step() const { return done_; }

    int32_t ref_count(int64_t page) const { return counts_[checked(page, "ref_count")]; }
    PageState state(int64_t page) const { return states_[checked(page, "state")]; }
    std::span<const int32_t> ref_counts() const { return counts_; }
    int64_t num_unshared(std::span<const Page> pages) const;  // those with exactly one reference
    // Whether a step in flight may touch a page, as one of those said who let go of it.
    bool is_touched(Page page) const { return last_steps_[static_cast<size_t>(page)] > done_; }

    // Recounts everything from the lists; throws with every term that is off.
    void sanity_check() const;

  private:
    size_t checked(int64_t page, const char* operation) const;
    [[noreturn]] void refuse(const char* operation, Page page) const;
    std::string state_name(int64_t page) const;

    int64_t page_size_;
    Step done_ = kNoStep;
    int64_t num_fenced_ = 0;
    std::vector<int32_t> counts_;    // references; 0 unless held
    std::vector<PageState> states_;
    std::vector<Step> last_steps_;   // latest step that anybody who let go named
    std::vector<Page> free_;         // a stack: the page freed last is the first to be reused
    std::map<Step, std::vector<Page>> fences_;
};

}  // namespace aioserve
