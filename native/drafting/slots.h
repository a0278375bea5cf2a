// What a drafter knows of its sequences, by slot.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "drafting/suffix_tree.h"

namespace aioserve::drafting {

using Slot = int64_t;

template <class Sequence>
class Slots {
  public:
    // Throws DraftingError where a sequence is in the slot.
    void check_free(Slot slot) const {
        if (sequences_.contains(slot))
            throw DraftingError("slot " + std::to_string(slot) + " has not ended");
    }
    // Throws DraftingError where none is.
    Sequence& operator[](Slot slot) const {
        const auto found = sequences_.find(slot);
        if (found == sequences_.end())
            throw DraftingError("slot " + std::to_string(slot) + " has not started");
        return *found->second;
    }
    void put(Slot slot, std::unique_ptr<Sequence> sequence) {
        sequences_.emplace(slot, std::move(sequence));
    }
    void erase(Slot slot) { sequences_.erase(slot); }
    size_t num_bytes() const {
        size_t bytes = 0;
        for (const auto& [slot, sequence] : sequences_) bytes += sequence->num_bytes();
        return bytes;
    }
    const auto& all() const { return sequences_; }

  private:
    std::unordered_map<Slot, std::unique_ptr<Sequence>> sequences_;
};

}  // namespace aioserve::drafting
