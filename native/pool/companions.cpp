// Pages that belong to another page, and are given up with it or, while nobody else uses them,
// before it.

#include <algorithm>

#include "pool/page_pool.h"

namespace aioserve {

std::span<const PagePool::Page> PagePool::companions(Page owner) const {
    checked(owner, "companions");
    if (!has_companions(owner)) return {};
    return {&companions_[first_companion(owner)], static_cast<size_t>(num_companions_)};
}

void PagePool::attach(Page owner, std::span<const Page> pages) {
    checked(owner, "attach");
    const std::string what = "attach: page " + std::to_string(owner);
    if (num_companions_ == 0 || static_cast<int64_t>(pages.size()) != num_companions_) {
        throw PoolError(what + " gets " + std::to_string(pages.size()) + " companions of " +
                        std::to_string(num_companions_));
    }
    if (states_[static_cast<size_t>(owner)] != PageState::kHeld) refuse("attach", owner);
    if (has_companions(owner)) throw PoolError(what + " has companions already");
    if (is_companion(owner)) throw PoolError(what + " is a companion itself");
    for (size_t i = 0; i < pages.size(); ++i) {
        const Page page = pages[i];
        const size_t index = checked(page, "attach");
        if (states_[index] != PageState::kHeld) refuse("attach", page);
        const bool is_twice = std::count(pages.begin(), pages.end(), page) > 1;
        if (page == owner || is_twice || is_companion(page) || has_companions(page)) {
            throw PoolError(what + " can't have page " + std::to_string(page) +
                            " for a companion: it belongs to another, or is named twice");
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
              companions_.begin() + static_cast<std::ptrdiff_t>(first_companion(owner)));
}

void PagePool::detach(Page owner, Step last_step) {
    const std::span<const Page> pages = companions(owner);
    if (pages.empty()) {
        throw PoolError("detach: page " + std::to_string(owner) + " has no companions");
    }
    const auto index = static_cast<size_t>(owner);
    if (users_[index] == 0) idle_.erase(last_idle_[index]);
    users_[index] = 0;
    const size_t first = first_companion(owner);
    for (size_t i = pages.size(); i-- > 0;) {
        const Page page = companions_[first + i];
        companions_[first + i] = kNoPage;
        owners_[static_cast<size_t>(page)] = kNoPage;
        --counts_[static_cast<size_t>(page)];
        let_go(page, last_step);
    }
}

// References of others than the owner to a page that may be a companion: so many more.
void PagePool::count_user(size_t index, int64_t change, bool is_used) {
    if (num_companions_ == 0 || owners_[index] == kNoPage) return;
    const Page owner = owners_[index];
    int64_t& users = users_[static_cast<size_t>(owner)];
    Idle& listing = last_idle_[static_cast<size_t>(owner)];
    if (users == 0) idle_.erase(listing);
    users += change;
    if (users > 0) return;
    if (is_used) listing = {now_, num_listed_++, owner};
    idle_.insert(listing);
}

void PagePool::check_companions(std::ostream& wrong) const {
    std::vector<Page> owners(counts_.size(), kNoPage);
    std::vector<uint8_t> idle(counts_.size(), 0);
    int64_t num_idle = 0;
    for (Page owner = 0; owner < num_pages(); ++owner) {
        if (!has_companions(owner)) continue;
        int64_t users = 0;
        for (const Page page : companions(owner)) {
            const auto index = static_cast<size_t>(page);
            if (owners[index] != kNoPage) wrong << "; companion " << page << " has two owners";
            owners[index] = owner;
            users += counts_[index] - 1;
        }
        const auto index = static_cast<size_t>(owner);
        if (states_[index] != PageState::kHeld) {
            wrong << "; page " << owner << " with companions is " << state_name(owner);
        }
        if (users != users_[index]) {
            wrong << "; companions of page " << owner << " have " << users << " users, "
                  << users_[index] << " are counted";
        }
        idle[index] = users == 0 ? 1 : 0;
        num_idle += users == 0 ? 1 : 0;
    }
    if (owners != owners_) wrong << "; the owners of companions are off";
    for (const Idle& one : idle_) {
        const auto index = static_cast<size_t>(one.owner);
        if (idle[index] == 0) {
            wrong << "; companions of page " << one.owner << " are listed as idle";
        }
        if (one != last_idle_[index]) {
            wrong << "; companions of page " << one.owner << " are listed under another time";
        }
    }
    if (static_cast<int64_t>(idle_.size()) != num_idle) {
        wrong << "; " << num_idle << " pages have idle companions, " << idle_.size()
              << " are listed";
    }
}

}  // namespace aioserve
