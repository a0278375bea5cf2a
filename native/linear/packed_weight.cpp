#include "linear/packed_weight.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/thread_pool.h"
#include "linear/weight_memory.h"

namespace aioserve::linear {
namespace {

int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

}  // namespace

PackedWeight::PackedWeight(const Matrix& weight, const char* bias, bool bfloat16)
    : out_features_(weight.rows),
      in_features_(weight.columns),
      element_bytes_(bfloat16 ? 2 : 4),
      steps_(static_cast<int>(divide_up(weight.columns * element_bytes_, kStepBytes))),
      num_panels_(divide_up(weight.rows, kPanelColumns)),
      panel_bytes_(static_cast<std::size_t>(steps_) * kStepPanelBytes),
      panels_(allocate_weights(num_bytes())) {
    parallel_for(num_panels_, [&](int64_t panel) { pack_panel(weight, panel); });
    if (!bias) return;
    bias_.resize(static_cast<std::size_t>(num_panels_ * kPanelColumns));
    for (int64_t i = 0; i < out_features_; ++i) {
        std::uint32_t bits = 0;
        if (bfloat16) {
            std::uint16_t half;
            std::memcpy(&half, bias + 2 * i, 2);
            bits = static_cast<std::uint32_t>(half) << 16;
        } else {
            std::memcpy(&bits, bias + 4 * i, 4);
        }
        std::memcpy(&bias_[static_cast<std::size_t>(i)], &bits, 4);
    }
}

// Fresh memory is zero: columns past the last and the odd half of a last pair stay so.
void PackedWeight::pack_panel(const Matrix& weight, int64_t panel) {
    char* out = panels_.get() + static_cast<std::size_t>(panel) * panel_bytes_;
    const int64_t first = panel * kPanelColumns;
    const int64_t columns = std::min<int64_t>(kPanelColumns, out_features_ - first);
    const int per_step = kStepBytes / element_bytes_;
    if (weight.column_bytes == element_bytes_ && in_features_ % per_step == 0) {
        for (int64_t begin = 0; begin < steps_; begin += 32) {  // few lines of `out` at a time
            const int64_t end = std::min<int64_t>(begin + 32, steps_);
            for (int64_t column = 0; column < columns; ++column) {
                const char* from = weight.data + (first + column) * weight.row_bytes;
                char* to = out + column * kStepBytes;
                for (int64_t step = begin; step < end; ++step)
                    std::memcpy(to + step * kStepPanelBytes, from + step * kStepBytes, kStepBytes);
            }
        }
        return;
    }
    for (int64_t begin = 0; begin < in_features_; begin += 64) {  // few lines of `out` at a time
        const int64_t end = std::min<int64_t>(begin + 64, in_features_);
        for (int64_t column = 0; column < columns; ++column) {
            const char* row = weight.data + (first + column) * weight.row_bytes;
            for (int64_t k = begin; k < end; ++k) {
                char* to = out + (k / per_step) * kStepPanelBytes + column * kStepBytes +
                           (k % per_step) * element_bytes_;
                std::memcpy(to, row + k * weight.column_bytes,
                            static_cast<std::size_t>(element_bytes_));
            }
        }
    }
}

void PackedWeight::gather(const int64_t* ids, int64_t count, char* out) const {
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= out_features_)
            throw std::out_of_range("ids must be from 0 to " + std::to_string(out_features_ - 1) +
                                    ", got " + std::to_string(ids[i]));
    }
    const std::size_t row_bytes = static_cast<std::size_t>(in_features_ * element_bytes_);
    const double nanoseconds = static_cast<double>(count) * steps_ * 2;
    parallel_ranges(count, nanoseconds, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const char* from = panels_.get() +
                               static_cast<std::size_t>(ids[i] / kPanelColumns) * panel_bytes_ +
                               (ids[i] % kPanelColumns) * kStepBytes;
            char* to = out + static_cast<std::size_t>(i) * row_bytes;
            const std::size_t whole = row_bytes / kStepBytes;
            for (std::size_t step = 0; step < whole; ++step, from += kStepPanelBytes)
                std::memcpy(to + step * kStepBytes, from, kStepBytes);
            std::memcpy(to + whole * kStepBytes, from, row_bytes % kStepBytes);
        }
    });
}

}  // namespace aioserve::linear
