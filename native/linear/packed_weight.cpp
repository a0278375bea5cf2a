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

PackedWeight::PackedWeight(int64_t out_features, int64_t in_features, bool bfloat16)
    : out_features_(out_features),
      in_features_(in_features),
      element_bytes_(bfloat16 ? 2 : 4),
      steps_(static_cast<int>(divide_up(in_features * element_bytes_, kStepBytes))),
      num_panels_(divide_up(out_features, kPanelColumns)),
      panel_bytes_(static_cast<std::size_t>(steps_) * kStepPanelBytes),
      panels_(allocate_weights(num_bytes())) {}

PackedWeight::PackedWeight(const Matrix& weight, const char* bias, bool bfloat16)
    : PackedWeight(weight.rows, weight.columns, bfloat16) {
    parallel_for(num_panels_, [&](int64_t panel) {
        Matrix rows = weight;
        rows.data += panel * kPanelColumns * weight.row_bytes;
        rows.rows = std::min<int64_t>(kPanelColumns, weight.rows - panel * kPanelColumns);
        pack_panel(rows, element_bytes_, panel_at(panel));
    });
    if (bias) set_bias(bias);
}

// Fresh memory is zero: columns past the last and the odd half of a last pair stay so.
char* PackedWeight::panel_at(int64_t panel) const {
    return panels_.get() + static_cast<std::size_t>(panel) * panel_bytes_;
}

void PackedWeight::set_rows(int64_t panel, const char* rows) {
    pack_panel({.data = rows,
                .rows = std::min<int64_t>(kPanelColumns, out_features_ - panel * kPanelColumns),
                .columns = in_features_,
                .row_bytes = in_features_ * element_bytes_,
                .column_bytes = element_bytes_},
               element_bytes_, panel_at(panel));
}

void PackedWeight::set_bias(const char* bias) {
    bias_.resize(static_cast<std::size_t>(num_panels_ * kPanelColumns));
    for (int64_t i = 0; i < out_features_; ++i) {
        std::uint32_t bits = 0;
        if (element_bytes_ == 2) {
            std::uint16_t half;
            std::memcpy(&half, bias + 2 * i, 2);
            bits = static_cast<std::uint32_t>(half) << 16;
        } else {
            std::memcpy(&bits, bias + 4 * i, 4);
        }
        std::memcpy(&bias_[static_cast<std::size_t>(i)], &bits, 4);
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
