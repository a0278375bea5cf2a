#include "pool/page_pool.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <sstream>

namespace aioserve {

PagePool::PagePool(int64_t num_pages, int64_t page_size, int64_t num_group_pages)
    : page_size_(page_size), num_group_pages_(num_group_pages) {
    constexpr int64_t kMost = std::numeric_limits<Page>::max();
    if (num_pages < 0 || num_pages > kMost) {
        throw std::invalid_argument("num_pages must be in [0, " + std::to_string(kMost) + "], got " +
                                    std::to_string(num_pages));
    }
    if (page_size < 1 || page_size > kMost) {
        throw std::invalid_argument("page_size must be in [1, " + std::to_string(kMost) + "], got " +
                                    std::to_string(page_size));
    }
    constexpr int64_t kMostGroupPages = 1024;
    if (num_group_pages < 0 || num_group_pages > kMostGroupPages) {
        throw std::invalid_argument("num_group_pages must be in [0, " +
                                    std::to_string(kMostGroupPages) + "], got " +
                                    std::to_string(num_group_pages));
    }
    const auto size = static_cast<size_t>(num_pages);
    if (num_group_pages > 0) {
        group_pages_.assign(size * static_cast<size_t>(num_group_pages), kNoPage);
        owners_.assign(size, kNoPage);
        users_.assign(size, 0);
        last_idle_.assign(size, Idle{});
    }
    counts_.assign(size, 0);
    states_.assign(size, PageState::kFree);
    last_steps_.assign(size, kNoStep);
    free_.resize(size);
    std::iota(free_.rbegin(), free_.rend(), 0);  // page 0 on top
}

size_t PagePool::checked(int64_t page, const char* operation) const {
    if (page < 0 || page >= num_pages()) {
        throw PoolError(std::string(operation) + ": page " + std::to_string(page) +
                        " is not of this pool, whose pages are [0, " + std::to_string(num_pages()) +
                        ")");
    }
    return static_cast<size_t>(page);
}

std::string PagePool::state_name(int64_t page) const {
    const auto index = static_cast<size_t>(page);
    switch (states_[index]) {
        case PageState::kFree: return "free";
        case PageState::kFenced: return "fenced until step " + std::to_string(last_steps_[index]);
        case PageState::kHeld: return "held";
    }
    return "in no valid state";
}

void PagePool::refuse(const char* operation, Page page) const {
    checked(page, operation);
    const auto index = static_cast<size_t>(page);
    if (states_[index] == PageState::kHeld) {
        throw PoolError(std::string(operation) + ": page " + std::to_string(page) +
                        " is named more often in one call than it has references (" +
                        std::to_string(others(index)) +
                        (is_group_page(page) ? " beside that of its owner)" : ")"));
    }
    throw PoolError(std::string(operation) + ": page " + std::to_string(page) +
                    " is not held, it is " + state_name(page));
}

void PagePool::acquire(std::span<Page> out) {
    if (out.size() > free_.size()) {
        throw PoolError("acquire: " + std::to_string(out.size()) + " pages of " +
                        std::to_string(free_.size()) + " free");
    }
    for (Page& page : out) {
        page = free_.back();
        free_.pop_back();
        const auto index = static_cast<size_t>(page);
        states_[index] = PageState::kHeld;
        counts_[index] = 1;
    }
}

void PagePool::retain(std::span<const Page> pages) {
    for (const Page page : pages) {
        if (page < 0 || page >= num_pages() ||
            states_[static_cast<size_t>(page)] != PageState::kHeld) {
            refuse("retain", page);
        }
    }
    for (const Page page : pages) {
        ++counts_[static_cast<size_t>(page)];
        count_user(static_cast<size_t>(page), 1);
    }
}

// A page may be named twice in one call, so the check is the counting down itself, undone when
// one of the pages doesn't have the reference. Counts of free and fenced pages are 0.
void PagePool::count_down(std::span<const Page> pages, const char* operation) {
    for (size_t i = 0; i < pages.size(); ++i) {
        const Page page = pages[i];
        if (page < 0 || page >= num_pages() || others(static_cast<size_t>(page)) == 0) {
            for (size_t j = 0; j < i; ++j) ++counts_[static_cast<size_t>(pages[j])];
            refuse(operation, page);
        }
        --counts_[static_cast<size_t>(page)];
    }
}

void PagePool::release(std::span<const Page> pages, Step last_step) {
    count_down(pages, "release");
    // Backwards, so that the next acquire gets them in the order in which they were given.
    for (size_t i = pages.size(); i-- > 0;) {
        count_user(static_cast<size_t>(pages[i]), -1);
        let_go(pages[i], last_step);
    }
}

void PagePool::unretain(std::span<const Page> pages) {
    count_down(pages, "unretain");
    for (size_t i = pages.size(); i-- > 0;) {
        count_user(static_cast<size_t>(pages[i]), -1, false);
        let_go(pages[i], kNoStep);
    }
}

// A reference to a page has gone, and was counted.
void PagePool::let_go(Page page, Step last_step) {
    const auto index = static_cast<size_t>(page);
    // The last holder to let go need not be the last whose step touches the page.
    last_steps_[index] = std::max(last_steps_[index], last_step);
    if (counts_[index] > 0 || states_[index] != PageState::kHeld) return;
    if (has_group_pages(page)) detach(page, last_steps_[index]);
    if (last_steps_[index] <= done_) {
        states_[index] = PageState::kFree;
        free_.push_back(page);
    } else {
        states_[index] = PageState::kFenced;
        fences_[last_steps_[index]].push_back(page);
        ++num_fenced_;
    }
}

void PagePool::complete(Step step) {
    if (step < done_) {
        throw PoolError("complete: step " + std::to_string(step) + " comes after step " +
                        std::to_string(done_) + " was done");
    }
    done_ = step;
    while (!fences_.empty() && fences_.begin()->first <= step) {
        const std::vector<Page>& pages = fences_.begin()->second;
        for (const Page page : pages) states_[static_cast<size_t>(page)] = PageState::kFree;
        free_.insert(free_.end(), pages.begin(), pages.end());
        num_fenced_ -= static_cast<int64_t>(pages.size());
        fences_.erase(fences_.begin());
    }
}

int64_t PagePool::num_unshared(std::span<const Page> pages) const {
    return std::count_if(pages.begin(), pages.end(), [this](Page page) {
        return others(checked(page, "num_unshared")) == 1;
    });
}

void PagePool::sanity_check() const {
    std::ostringstream wrong;
    std::vector<int32_t> listed(counts_.size(), 0);
    const auto list = [&](Page page, PageState state, const char* where) {
        if (page < 0 || page >= num_pages()) {
            wrong << "; foreign page " << page << " " << where;
            return;
        }
        const auto index = static_cast<size_t>(page);
        if (++listed[index] > 1) wrong << "; page " << page << " listed again " << where;
        if (states_[index] != state) wrong << "; page " << page << " " << where << " is "
                                           << state_name(page);
    };
    for (const Page page : free_) list(page, PageState::kFree, "in the free list");
    int64_t fenced = 0;
    for (const auto& [step, pages] : fences_) {
        if (step <= done_) wrong << "; a fence waits for step " << step << ", which is done";
        if (pages.empty()) wrong << "; the fence of step " << step << " is empty";
        for (const Page page : pages) list(page, PageState::kFenced, "behind a fence");
        fenced += static_cast<int64_t>(pages.size());
    }
    int64_t held = 0;
    for (size_t index = 0; index < counts_.size(); ++index) {
        const bool is_held = states_[index] == PageState::kHeld;
        held += is_held ? 1 : 0;
        if (is_held != (counts_[index] > 0)) {
            wrong << "; page " << index << " is " << state_name(static_cast<int64_t>(index))
                  << " with " << counts_[index] << " references";
        }
        if (is_held == (listed[index] > 0)) {
            wrong << "; page " << index << " is " << state_name(static_cast<int64_t>(index))
                  << " and is listed " << listed[index] << " times";
        }
    }
    if (fenced != num_fenced_) wrong << "; num_fenced is " << num_fenced_;
    if (num_free() + fenced + held != num_pages()) wrong << "; the sum is off";
    if (num_group_pages_ > 0) check_group_pages(wrong);
    const std::string text = wrong.str();
    if (text.empty()) return;
    std::ostringstream message;
    message << "the page pool doesn't balance: " << num_pages() << " pages, " << num_free()
            << " in the free list + " << fenced << " behind fences + " << held << " held, done step "
            << done_ << text;
    throw PoolError(message.str());
}

}  // namespace aioserve
