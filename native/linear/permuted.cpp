#include "linear/permuted.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace aioserve::linear {
namespace {

// The calling thread's memory for one row.
char* row_memory(std::size_t bytes) {
    thread_local AlignedMemory memory;
    return memory.at_least(bytes);
}

struct Inputs {
    RowSource x;
    const int32_t* order;
    std::size_t count;
};

// `T` has the size of an input.
template <class T>
const char* ordered_row(const void* context, int64_t row, char* memory) {
    const auto& inputs = *static_cast<const Inputs*>(context);
    const char* from = inputs.x.at(row, row_memory(inputs.count * sizeof(T)));
    for (std::size_t i = 0; i < inputs.count; ++i)
        std::memcpy(memory + i * sizeof(T),
                    from + static_cast<std::size_t>(inputs.order[i]) * sizeof(T), sizeof(T));
    return memory;
}

}  // namespace

PermutedKernel::PermutedKernel(const LinearKernel& kernel, std::vector<int32_t> order)
    : LinearKernel(kernel.out_features(), kernel.in_features(), kernel.bfloat16()),
      kernel_(kernel),
      order_(std::move(order)) {
    std::vector<bool> named(static_cast<std::size_t>(in_features()));
    bool each_once = order_.size() == named.size();
    for (const int32_t input : order_) {
        if (input < 0 || input >= in_features() || named[static_cast<std::size_t>(input)]) {
            each_once = false;
            break;
        }
        named[static_cast<std::size_t>(input)] = true;
    }
    if (!each_once)
        throw std::invalid_argument("order must name each of the " +
                                    std::to_string(in_features()) + " inputs once");
}

RowSource PermutedKernel::in_order(Phases& phases, const RowSource& x) const {
    const auto* inputs = phases.keep(Inputs{x, order_.data(), order_.size()});
    return {bfloat16() ? ordered_row<uint16_t> : ordered_row<uint32_t>, inputs, 0};
}

void PermutedKernel::append(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                            const Rows& y) const {
    kernel_.append(phases, in_order(phases, x), rows, packed, y);
}

void PermutedKernel::append_argmax(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                                   char* partial, const KeptRows& kept,
                                   const Largest& largest) const {
    kernel_.append_argmax(phases, in_order(phases, x), rows, packed, partial, kept, largest);
}

void PermutedKernel::row(int64_t id, char* out) const {
    const auto bytes = static_cast<std::size_t>(element_bytes());
    char* sorted = row_memory(order_.size() * bytes);
    kernel_.row(id, sorted);
    for (std::size_t i = 0; i < order_.size(); ++i)
        std::memcpy(out + static_cast<std::size_t>(order_[i]) * bytes, sorted + i * bytes, bytes);
}

}  // namespace aioserve::linear
