#include "linear/packed_weight.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "common/scratch.h"
#include "common/thread_pool.h"
#include "dispatch.h"
#include "linear/weight_memory.h"

namespace aioserve::linear {
namespace {

// What one pass over the panels keeps at hand in the L2 cache: packed rows of x, and panels.
constexpr std::size_t kRowCacheBytes = 512 * 1024;
constexpr std::size_t kPanelCacheBytes = 256 * 1024;
constexpr int64_t kMaxPanelsPerTask = 4;

// One thread's estimate, to see whether waking another pays.
constexpr double kBytesPerNanosecond = 40;
constexpr double kMultipliesPerNanosecond = 60;
constexpr double kWorthSharing_ns = 6'000;

std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

}  // namespace

// A pass over the panels: consecutive rows of x, cut into blocks of nearly equal size.
struct PackedWeight::Rows {
    const char* x;  // packed blocks, one after the other; or one plain row
    char* y;
    int64_t count;
    int64_t num_blocks;
    std::size_t packed_row_bytes;
    std::ptrdiff_t y_row_bytes;
    bool y_is_float32;

    int64_t first_of(int64_t block) const { return count * block / num_blocks; }
};

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

void PackedWeight::pack_row(const char* row, char* block, int rows_in_block) const {
    std::size_t left = static_cast<std::size_t>(in_features_ * element_bytes_);
    for (; left >= kChunkBytes; left -= kChunkBytes) {
        std::memcpy(block, row, kChunkBytes);
        block += rows_in_block * kChunkBytes;
        row += kChunkBytes;
    }
    if (!left) return;
    std::memset(block, 0, kChunkBytes);
    std::memcpy(block, row, left);
}

void PackedWeight::apply(const char* x, int64_t rows, std::ptrdiff_t x_row_bytes, char* y,
                         bool y_is_float32) const {
    const TileSet& tiles = tiles_in_use(element_bytes_ == 2);
    Rows pass{};
    pass.y_row_bytes = out_features_ * (y_is_float32 ? 4 : 2);
    pass.y_is_float32 = y_is_float32;
    pass.packed_row_bytes = round_up(static_cast<std::size_t>(steps_) * kStepBytes, kChunkBytes);

    const bool whole_steps = in_features_ * element_bytes_ % kStepBytes == 0;
    if (rows == 1 && whole_steps) {  // a row is a block of one as it stands
        pass.x = x;
        pass.y = y;
        pass.count = pass.num_blocks = 1;
        multiply(tiles, pass);
        return;
    }

    const int64_t fitting = static_cast<int64_t>(kRowCacheBytes / pass.packed_row_bytes);
    const int64_t most = std::max<int64_t>(1, fitting / tiles.max_rows) * tiles.max_rows;
    const int64_t passes = divide_up(rows, most);
    for (int64_t i = 0; i < passes; ++i) {
        const int64_t first = rows * i / passes;
        pass.count = rows * (i + 1) / passes - first;
        pass.num_blocks = divide_up(pass.count, tiles.max_rows);
        pass.y = y + first * pass.y_row_bytes;
        const auto packed_bytes = pass.count * static_cast<int64_t>(pass.packed_row_bytes);
        char* packed = reinterpret_cast<char*>(scratch(packed_bytes / 4));
        pass.x = packed;
        const double nanoseconds = static_cast<double>(packed_bytes) / 16;
        parallel_ranges(pass.num_blocks, nanoseconds, [&](int64_t begin, int64_t end) {
            for (int64_t block = begin; block < end; ++block) {
                const int64_t top = pass.first_of(block);
                const int size = static_cast<int>(pass.first_of(block + 1) - top);
                char* to = packed + static_cast<std::size_t>(top) * pass.packed_row_bytes;
                for (int r = 0; r < size; ++r)
                    pack_row(x + (first + top + r) * x_row_bytes, to + r * kChunkBytes, size);
            }
        });
        multiply(tiles, pass);
    }
}

void PackedWeight::multiply(const TileSet& tiles, const Rows& rows) const {
    const double bytes = static_cast<double>(num_bytes());
    const double multiplies = bytes / element_bytes_ * static_cast<double>(rows.count);
    const bool alone = std::max(bytes / kBytesPerNanosecond,
                                multiplies / kMultipliesPerNanosecond) < kWorthSharing_ns;
    const int64_t threads = alone ? 1 : num_threads();

    // A task is a few neighbouring panels, which stay in the cache while blocks of rows pass, and
    // all blocks; or, where there are many threads for few panels, some of the blocks.
    int64_t together = kMaxPanelsPerTask;
    if (rows.num_blocks > 1) {
        const auto fitting = static_cast<int64_t>(kPanelCacheBytes / panel_bytes_);
        together = std::clamp<int64_t>(fitting, 1, kMaxPanelsPerTask);
    }
    while (together > 1 && num_panels_ < 2 * threads * together) together /= 2;
    const int64_t groups = divide_up(num_panels_, together);
    const int64_t slices = std::min(rows.num_blocks, divide_up(2 * threads, groups));

    const auto task = [&](int64_t index) {
        const int64_t first_panel = index / slices * together;
        const int64_t end_panel = std::min(first_panel + together, num_panels_);
        const int64_t slice = index % slices;
        const int64_t end_block = rows.num_blocks * (slice + 1) / slices;
        for (int64_t block = rows.num_blocks * slice / slices; block < end_block; ++block) {
            const int64_t top = rows.first_of(block);
            const int size = static_cast<int>(rows.first_of(block + 1) - top);
            Tile tile;
            tile.x = rows.x + static_cast<std::size_t>(top) * rows.packed_row_bytes;
            tile.steps = steps_;
            tile.y_row_bytes = rows.y_row_bytes;
            tile.y_is_float32 = rows.y_is_float32;
            for (int64_t panel = first_panel; panel < end_panel; ++panel) {
                const int64_t column = panel * kPanelColumns;
                tile.panel = panels_.get() + static_cast<std::size_t>(panel) * panel_bytes_;
                tile.bias = bias_.empty() ? nullptr : bias_.data() + column;
                tile.y = rows.y + top * rows.y_row_bytes + column * (rows.y_is_float32 ? 4 : 2);
                tile.columns =
                    static_cast<int>(std::min<int64_t>(kPanelColumns, out_features_ - column));
                tiles.functions[size - 1](tile);
            }
        }
    };
    if (threads == 1) {
        for (int64_t index = 0; index < groups * slices; ++index) task(index);
    } else {
        parallel_for(groups * slices, task);
    }
}

}  // namespace aioserve::linear
