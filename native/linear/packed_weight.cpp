#include "linear/packed_weight.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

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
constexpr double kNanosecondsPerPlainByte = 1.0 / 16;
constexpr double kNanosecondsPerMadeByte = 1.0 / 4;  // norms, activations
constexpr double kPackingWorthSharing_ns = 2'000;    // the threads are awake for the product

std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// A thread's own, kept between calls.
class AlignedMemory {
  public:
    char* at_least(std::size_t bytes) {
        if (size_ < bytes) {
            memory_.reset();
            size_ = 0;
            memory_.reset(static_cast<char*>(::operator new[](bytes, kAlignment)));
            size_ = bytes;
        }
        return memory_.get();
    }

  private:
    static constexpr std::align_val_t kAlignment{64};
    struct Free {
        void operator()(char* p) const { ::operator delete[](p, kAlignment); }
    };
    std::unique_ptr<char[], Free> memory_;
    std::size_t size_ = 0;
};

}  // namespace

// A pass over the panels: consecutive rows of x, cut into blocks of nearly equal size.
struct PackedWeight::Pass {
    const char* x;  // packed blocks, one after the other; or, if `is_plain`, one row as it stands
    bool is_plain;
    char* y;
    int64_t first_row;
    int64_t count;
    int64_t unit;  // of rows in a block
    int64_t units;
    int64_t num_blocks;
    std::size_t packed_row_bytes;
    std::ptrdiff_t y_row_bytes;
    bool y_is_float32;

    int64_t first_of(int64_t block) const { return units * block / num_blocks * unit; }
    int64_t room_of(int64_t block) const { return first_of(block + 1) - first_of(block); }
    int64_t size_of(int64_t block) const {
        return std::min(room_of(block), count - first_of(block));
    }
    int64_t block_of(int64_t row) const { return ((row / unit + 1) * num_blocks - 1) / units; }
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

std::size_t PackedWeight::packed_row_bytes(const TileSet& tiles) const {
    return round_up(static_cast<std::size_t>(steps_ * tiles.packed_step_bytes), kChunkBytes);
}

int64_t PackedWeight::most_rows_of_a_pass(const TileSet& tiles) const {
    const auto fitting = static_cast<int64_t>(kRowCacheBytes / packed_row_bytes(tiles));
    return std::max<int64_t>(1, fitting / tiles.max_rows) * tiles.max_rows;
}

std::size_t PackedWeight::packed_bytes(int64_t rows) const {
    const TileSet& tiles = tiles_in_use(element_bytes_ == 2);
    const int64_t most = most_rows_of_a_pass(tiles);
    return round_up(static_cast<std::size_t>(std::min(rows, most)),
                    static_cast<std::size_t>(tiles.row_unit)) *
           packed_row_bytes(tiles);
}

void PackedWeight::apply(const char* x, int64_t rows, std::ptrdiff_t x_row_bytes, char* y,
                         bool y_is_float32) const {
    thread_local Phases phases;
    thread_local AlignedMemory packed;
    phases.clear();
    append(phases, RowSource::plain(x, x_row_bytes), rows, packed.at_least(packed_bytes(rows)), y,
           y_is_float32);
    phases.run();
}

void PackedWeight::append(Phases& phases, const RowSource& x, int64_t rows, char* packed, char* y,
                          bool y_is_float32) const {
    const TileSet& tiles = tiles_in_use(element_bytes_ == 2);
    Pass pass{};
    pass.x = packed;
    pass.y_row_bytes = out_features_ * (y_is_float32 ? 4 : 2);
    pass.y_is_float32 = y_is_float32;
    pass.packed_row_bytes = packed_row_bytes(tiles);

    pass.unit = tiles.row_unit;

    const bool whole_units = in_features_ * element_bytes_ % tiles.plain_unit_bytes == 0;
    if (rows == 1 && whole_units && !x.row) {  // a row is a block of one as it stands
        pass.x = x.at(0, nullptr);
        pass.is_plain = true;
        pass.y = y;
        pass.count = pass.units = pass.num_blocks = 1;
        append_product(phases, tiles, pass);
        return;
    }

    const int64_t passes = divide_up(rows, most_rows_of_a_pass(tiles));
    for (int64_t i = 0; i < passes; ++i) {
        pass.first_row = rows * i / passes;
        pass.count = rows * (i + 1) / passes - pass.first_row;
        pass.units = divide_up(pass.count, pass.unit);
        pass.num_blocks = divide_up(pass.units * pass.unit, tiles.max_rows);
        pass.y = y + pass.first_row * pass.y_row_bytes;
        append_packing(phases, tiles, x, pass, packed);
        append_product(phases, tiles, pass);
    }
}

bool PackedWeight::is_worth_sharing(int64_t rows) const {
    const double bytes = static_cast<double>(num_bytes());
    const double multiplies = bytes / element_bytes_ * static_cast<double>(rows);
    return std::max(bytes / kBytesPerNanosecond, multiplies / kMultipliesPerNanosecond) >=
           kWorthSharing_ns;
}

// A piece is some rows, wherever blocks begin: few rows give work to many threads too.
void PackedWeight::append_packing(Phases& phases, const TileSet& tiles, const RowSource& x,
                                  const Pass& pass, char* packed) const {
    const std::size_t bytes = static_cast<std::size_t>(pass.count) * pass.packed_row_bytes;
    const double per_byte = x.row ? kNanosecondsPerMadeByte : kNanosecondsPerPlainByte;
    const bool alone = !is_worth_sharing(pass.count) ||
                       static_cast<double>(bytes) * per_byte < kPackingWorthSharing_ns;
    const int64_t pieces = std::min<int64_t>(pass.count, alone ? 1 : 2 * num_threads());
    phases.add(pieces, [this, &tiles, x, pass, packed, pieces](int64_t piece) {
        thread_local AlignedMemory made;
        const auto row_bytes = static_cast<std::size_t>(in_features_ * element_bytes_);
        char* memory = x.row ? made.at_least(row_bytes) : nullptr;
        const int64_t end = pass.count * (piece + 1) / pieces;
        for (int64_t row = pass.count * piece / pieces; row < end; ++row) {
            const int64_t block = pass.block_of(row);
            const int64_t top = pass.first_of(block);
            const int room = static_cast<int>(pass.room_of(block));
            char* to = packed + static_cast<std::size_t>(top) * pass.packed_row_bytes;
            tiles.pack_row(x.at(pass.first_row + row, memory), row_bytes,
                           to + (row - top) * kChunkBytes, room);
        }
    });
}

void PackedWeight::append_product(Phases& phases, const TileSet& tiles, const Pass& pass) const {
    const int64_t threads = is_worth_sharing(pass.count) ? num_threads() : 1;

    // A task is a few neighbouring panels, which stay in the cache while blocks of rows pass, and
    // all blocks; or, where there are many threads for few panels, some of the blocks. One thread
    // alone takes them all.
    int64_t together = kMaxPanelsPerTask;
    if (pass.num_blocks > 1) {
        const auto fitting = static_cast<int64_t>(kPanelCacheBytes / panel_bytes_);
        together = std::clamp<int64_t>(fitting, 1, kMaxPanelsPerTask);
    }
    while (together > 1 && num_panels_ < 2 * threads * together) together /= 2;
    const int64_t groups = divide_up(num_panels_, together);
    const int64_t slices = std::min(pass.num_blocks, divide_up(2 * threads, groups));

    const auto task = [this, &tiles, pass, together, slices](int64_t index) {
        const int64_t first_panel = index / slices * together;
        const int64_t end_panel = std::min(first_panel + together, num_panels_);
        const int64_t slice = index % slices;
        const int64_t end_block = pass.num_blocks * (slice + 1) / slices;
        if (tiles.begin) tiles.begin();
        for (int64_t block = pass.num_blocks * slice / slices; block < end_block; ++block) {
            const int64_t top = pass.first_of(block);
            Tile tile;
            tile.rows = static_cast<int>(pass.size_of(block));
            tile.x = pass.x + static_cast<std::size_t>(top) * pass.packed_row_bytes;
            tile.steps = steps_;
            tile.y_row_bytes = pass.y_row_bytes;
            tile.y_is_float32 = pass.y_is_float32;
            const TileFunction multiply =
                pass.is_plain ? tiles.plain : tiles.functions[tile.rows - 1];
            for (int64_t panel = first_panel; panel < end_panel; ++panel) {
                const int64_t column = panel * kPanelColumns;
                tile.panel = panels_.get() + static_cast<std::size_t>(panel) * panel_bytes_;
                tile.bias = bias_.empty() ? nullptr : bias_.data() + column;
                tile.y = pass.y + top * pass.y_row_bytes + column * (pass.y_is_float32 ? 4 : 2);
                tile.columns =
                    static_cast<int>(std::min<int64_t>(kPanelColumns, out_features_ - column));
                multiply(tile);
            }
        }
        if (tiles.end) tiles.end();
    };
    const int64_t num_tasks = groups * slices;
    if (threads > 1) {
        phases.add(num_tasks, task);
    } else {
        phases.add(1, [task, num_tasks](int64_t) {
            for (int64_t index = 0; index < num_tasks; ++index) task(index);
        });
    }
}

}  // namespace aioserve::linear
