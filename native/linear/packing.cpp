#include "linear/packing.h"

#include <algorithm>
#include <cstring>

#include "linear/tile.h"

namespace aioserve::linear {
namespace {

constexpr int64_t kStepsAtOnce = 32;  // few lines of the panel at a time

void pack_whole_steps(const Matrix& weight, int64_t steps, char* panel) {
    for (int64_t begin = 0; begin < steps; begin += kStepsAtOnce) {
        const int64_t end = std::min(begin + kStepsAtOnce, steps);
        for (int64_t column = 0; column < weight.rows; ++column) {
            const char* from = weight.data + column * weight.row_bytes;
            char* to = panel + column * kStepBytes;
            for (int64_t step = begin; step < end; ++step)
                std::memcpy(to + step * kStepPanelBytes, from + step * kStepBytes, kStepBytes);
        }
    }
}

void pack_elements(const Matrix& weight, int element_bytes, char* panel) {
    const int64_t per_step = kStepBytes / element_bytes;
    for (int64_t begin = 0; begin < weight.columns; begin += kStepsAtOnce * per_step) {
        const int64_t end = std::min(begin + kStepsAtOnce * per_step, weight.columns);
        for (int64_t column = 0; column < weight.rows; ++column) {
            const char* row = weight.data + column * weight.row_bytes;
            for (int64_t k = begin; k < end; ++k) {
                char* to = panel + (k / per_step) * kStepPanelBytes + column * kStepBytes +
                           (k % per_step) * element_bytes;
                std::memcpy(to, row + k * weight.column_bytes,
                            static_cast<std::size_t>(element_bytes));
            }
        }
    }
}

}  // namespace

void pack_panel(const Matrix& weight, int element_bytes, char* panel) {
    const int64_t row_bytes = weight.columns * element_bytes;
    if (weight.column_bytes == element_bytes && row_bytes % kStepBytes == 0)
        pack_whole_steps(weight, row_bytes / kStepBytes, panel);
    else
        pack_elements(weight, element_bytes, panel);
}

}  // namespace aioserve::linear
