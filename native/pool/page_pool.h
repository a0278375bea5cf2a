// Who owns which page of the KV cache.
//
// Knows page numbers, reference counts and step numbers. Knows nothing of tokens, tensors, Python or
// threads: one caller at a time.

#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <ostream>
#include <set>
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
// A page of group 0 may have group pages: those that the other groups have at its position, always
// as many. It has a reference of its own to each, until they are detached from it or its own last
// reference goes. While nobody else refers to any of them they are idle, together.
//
// Every operation either happens whole or throws and changes nothing.
class PagePool {
  public:
    using Page = int32_t;
    using Step = int64_t;

    static constexpr Step kNoStep = -1;  // before any step: nothing has touched the page
    static constexpr Page kNoPage = -1;

    PagePool(int64_t num_pages, int64_t page_size, int64_t num_group_pages = 0);

    void acquire(std::span<Page> out);
    void retain(std::span<const Page> pages);
    void release(std::span<const Page> pages, Step last_step);
    // Takes back a `retain` that led to nothing: group pages that become idle again are so since
    // they were.
    void unretain(std::span<const Page> pages);
    void complete(Step step);

    // Group pages of `owner`, which has none: held pages that are nobody's group pages.
    void attach(Page owner, std::span<const Page> pages);
    // Ends the references of `owner` to its group pages; step `last_step` may be the last to touch
    // them.
    void detach(Page owner, Step last_step);
    // Group pages of `owner`; empty if it has none.
    std::span<const Page> group_pages(Page owner) const;
    bool has_group_pages(Page owner) const {
        return num_group_pages_ > 0 && group_pages_[first_group_page(owner)] != kNoPage;
    }
    bool is_group_page(Page page) const {
        return num_group_pages_ > 0 && owners_[static_cast<size_t>(page)] != kNoPage;
    }
    int64_t num_group_pages() const { return num_group_pages_; }  // of a page that has any

    // Owners whose group pages are idle, in the order in which they became so: each with the time
    // of that, and a number that is unique.
    struct Idle {
        int64_t since;
        int64_t number;
        Page owner;

        auto operator<=>(const Idle&) const = default;
    };
    const std::set<Idle>& idle() const { return idle_; }
    int64_t num_idle() const { return static_cast<int64_t>(idle_.size()); }
    // What the time is, for what becomes idle from now on.
    void set_clock(int64_t now) { now_ = now; }

    int64_t num_pages() const { return static_cast<int64_t>(counts_.size()); }
    int64_t page_size() const { return page_size_; }
    int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
    int64_t num_fenced() const { return num_fenced_; }
    int64_t num_held() const { return num_pages() - num_free() - num_fenced_; }
    Step done_step() const { return done_; }

    int32_t ref_count(int64_t page) const { return counts_[checked(page, "ref_count")]; }
    PageState state(int64_t page) const { return states_[checked(page, "state")]; }
    std::span<const int32_t> ref_counts() const { return counts_; }
    // How many have exactly one reference beside that of the page whose group pages they are.
    int64_t num_unshared(std::span<const Page> pages) const;
    // Whether a step in flight may touch a page, as one of those said who let go of it.
    bool is_touched(Page page) const { return last_steps_[static_cast<size_t>(page)] > done_; }

    // Recounts everything from the lists; throws with every term that is off.
    void sanity_check() const;

  private:
    size_t checked(int64_t page, const char* operation) const;
    [[noreturn]] void refuse(const char* operation, Page page) const;
    std::string state_name(int64_t page) const;
    size_t first_group_page(Page owner) const {
        return static_cast<size_t>(owner) * static_cast<size_t>(num_group_pages_);
    }
    // References of others than the owner, if the page is a group page.
    int32_t others(size_t index) const {
        return counts_[index] - (num_group_pages_ > 0 && owners_[index] != kNoPage ? 1 : 0);
    }
    void let_go(Page page, Step last_step);
    void count_down(std::span<const Page> pages, const char* operation);
    void count_user(size_t index, int64_t change, bool is_used = true);
    void check_group_pages(std::ostream& wrong) const;

    int64_t page_size_;
    int64_t num_group_pages_;
    Step done_ = kNoStep;
    int64_t num_fenced_ = 0;
    std::vector<int32_t> counts_;    // references; 0 unless held
    std::vector<PageState> states_;
    std::vector<Step> last_steps_;   // latest step that anybody who let go named
    std::vector<Page> free_;         // a stack: the page freed last is the first to be reused
    std::map<Step, std::vector<Page>> fences_;

    // Empty where pages have no group pages.
    std::vector<Page> group_pages_;  // num_group_pages_ for each page, kNoPage where it has none
    std::vector<Page> owners_;      // of which a page is a group page
    std::vector<int64_t> users_;    // of each owner: references of others to its group pages
    std::vector<Idle> last_idle_;   // of each owner: as it was listed last
    std::set<Idle> idle_;
    int64_t num_listed_ = 0;  // so far
    int64_t now_ = 0;
};

}  // namespace aioserve
