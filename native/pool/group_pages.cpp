// Pages that belong to another page, and are given up with it or, while nobody else uses them,
// before it.

#include <algorithm>

#include "pool/page_pool.h"

namespace aioserve {

std::span<const PagePool::Page> PagePool::group_pages(Page owner) const {
    checked(owner, "group pages");
    if (!has_group_pages(owner)) return {};
    return {&group_pages_[first_group_page(owner)], static_cast<size_t>(num_group_pages_)};
}

void PagePool::attach(Page owner, std::span<const Page> pages) {
    checked(owner, "attach");
    const std::string what = "attach: page " + std::to_string(owner);
    if (num_group_pages_ == 0 || static_cast<int64_t>(pages.size()) != num_group_pages_) {
        throw PoolError(what + " gets " + std::to_string(pages.size()) + " group pages of " +
                        std::to_string(num_group_pages_));
    }
    if (states_[static_cast<size_t>(owner)] != PageState::kHeld) refuse("attach", owner);
    if (has_group_pages(owner)) throw PoolError(what + " has group pages already");
    if (is_group_page(owner)) throw PoolError(what + " is a group page itself");
    for (size_t i = 0; i < pages.size(); ++i) {
        const Page page = pages[i];
        const size_t index = checked(page, "attach");
        if (states_[index] != PageState::kHeld) refuse("attach", page);
        const bool is_twice = std::count(pages.begin(), pages.end(), page) > 1;
        if (page == owner || is_twice || is_group_page(page) || has_group_pages(page)) {
            throw PoolError(what + " can't have page " + std::to_string(page) +
                            " for a group page: it belongs to another, or is named twice");
        }
    }
    int64_t users = 0;
    for (const Page page : pages) {
        users += counts_[static_cast<size_t>(page)]++;
        owners_[static_cast<size_t>(page)] = owner;
    }
    users_[static_cast<size_t>(owner)] = users;
    last_idle_[static_cast<size_t>(owner)] = {now_, num_listed_++, owner};  // for `unretain`
    std::copy(pages.begin(), pages.end(),
              group_pages_.begin() + static_cast<std::ptrdiff_t>(first_group_page(owner)));
}

void PagePool::detach(Page owner, Step last_step) {
    const std::span<const Page> pages = group_pages(owner);
    if (pages.empty()) {
        throw PoolError("detach: page " + std::to_string(owner) + " has no group pages");
    }
    const auto index = static_cast<size_t>(owner);
    if (users_[index] == 0) idle_.erase(last_idle_[index]);
    users_[index] = 0;
    const size_t first = first_group_page(owner);
    for (size_t i = pages.size(); i-- > 0;) {
        const Page page = group_pages_[first + i];
        group_pages_[first + i] = kNoPage;
        owners_[static_cast<size_t>(page)] = kNoPage;
        --counts_[static_cast<size_t>(page)];
        let_go(page, last_step);
    }
}

// References of others than the owner to a page that may be a group page: so many more.
void PagePool::count_user(size_t index, int64_t change, bool is_used) {
    if (num_group_pages_ == 0 || owners_[index] == kNoPage) return;
    const Page owner = owners_[index];
    int64_t& users = users_[static_cast<size_t>(owner)];
    Idle& listing = last_idle_[static_cast<size_t>(owner)];
    if (users == 0) idle_.erase(listing);
    users += change;
    if (users > 0) return;
    if (is_used) listing = {now_, num_listed_++, owner};
    idle_.insert(listing);
}

void PagePool::check_group_pages(std::ostream& wrong) const {
    std::vector<Page> owners(counts_.size(), kNoPage);
    std::vector<uint8_t> idle(counts_.size(), 0);
    int64_t num_idle = 0;
    for (Page owner = 0; owner < num_pages(); ++owner) {
        if (!has_group_pages(owner)) continue;
        int64_t users = 0;
        for (const Page page : group_pages(owner)) {
            const auto index = static_cast<size_t>(page);
            if (owners[index] != kNoPage) wrong << "; group page " << page << " has two owners";
            owners[index] = owner;
            users += counts_[index] - 1;
        }
        const auto index = static_cast<size_t>(owner);
        if (states_[index] != PageState::kHeld) {
            wrong << "; page " << owner << " with group pages is " << state_name(owner);
        }
        if (users != users_[index]) {
            wrong << "; group pages of page " << owner << " have " << users << " users, "
                  << users_[index] << " are counted";
        }
        idle[index] = users == 0 ? 1 : 0;
        num_idle += users == 0 ? 1 : 0;
    }
    if (owners != owners_) wrong << "; the owners of group pages are off";
    for (const Idle& one : idle_) {
        const auto index = static_cast<size_t>(one.owner);
        if (idle[index] == 0) {
            wrong << "; group pages of page " << one.owner << " are listed as idle";
        }
        if (one != last_idle_[index]) {
            wrong << "; group pages of page " << one.owner << " are listed under another time";
        }
    }
    if (static_cast<int64_t>(idle_.size()) != num_idle) {
        wrong << "; " << num_idle << " pages have idle group pages, " << idle_.size()
              << " are listed";
    }
}

}  // namespace aioserve
