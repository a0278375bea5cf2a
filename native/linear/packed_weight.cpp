#include "linear/packed_weight.h"

#include <algorithm>
#include <cstring>

#include "common/thread_pool.h"
#include "dispatch.h"

namespace aioserve::linear {

PackedWeight::PackedWeight(int64_t out_features, int64_t in_features, bool bfloat16)
    : PanelKernel(out_features, shape_of_floats(in_features, bfloat16)) {}

PackedWeight::PackedWeight(const Matrix& weight, const char* bias, bool bfloat16)
    : PackedWeight(weight.rows, weight.columns, bfloat16) {
    parallel_for(num_panels(), [&](int64_t panel) {
        Matrix rows = weight;
        rows.data += panel * kPanelColumns * weight.row_bytes;
        rows.rows = std::min<int64_t>(kPanelColumns, weight.rows - panel * kPanelColumns);
        pack_panel(rows, element_bytes(), panel_at(panel));
    });
    if (bias) set_bias(bias);
}

void PackedWeight::set_rows(int64_t panel, const char* rows) {
    pack_panel({.data = rows,
                .rows = std::min<int64_t>(kPanelColumns, out_features() - panel * kPanelColumns),
                .columns = in_features(),
                .row_bytes = in_features() * element_bytes(),
                .column_bytes = element_bytes()},
               element_bytes(), panel_at(panel));
}

void PackedWeight::row(int64_t id, char* out) const {
    const auto row_bytes = static_cast<std::size_t>(in_features() * element_bytes());
    const char* from = panel_at(id / kPanelColumns) + id % kPanelColumns * kStepBytes;
    const std::size_t whole = row_bytes / kStepBytes;
    for (std::size_t step = 0; step < whole; ++step, from += kStepPanelBytes)
        std::memcpy(out + step * kStepBytes, from, kStepBytes);
    std::memcpy(out + whole * kStepBytes, from, row_bytes % kStepBytes);
}

PanelLayout PackedWeight::layout(int64_t) const {
    return {&shape(), &tiles_in_use(bfloat16()), nullptr};
}

}  // namespace aioserve::linear
