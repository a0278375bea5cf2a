// The product with a weight in panels, as phases: rows are packed, then tiles multiply.

#include <algorithm>
#include <cstring>

#include "common/thread_pool.h"
#include "linear/panels.h"
#include "linear/weight_memory.h"

namespace aioserve::linear {
namespace {

// Panels, as tiles read them, that a task's blocks of rows find in the second cache, beside a
// pass's rows.
constexpr std::size_t kPanelCacheBytes = 256 * 1024;
constexpr int64_t kMaxPanelsPerTask = kMaxPanels;
constexpr std::ptrdiff_t kOutputsRowBytes = kMaxPanels * kPanelColumns * sizeof(float);

// One thread's estimate, to see whether waking another pays.
constexpr double kBytesPerNanosecond = 40;
constexpr double kMultipliesPerNanosecond = 60;
constexpr double kWorthSharing_ns = 6'000;
constexpr double kMadeByte_ns = 1.0 / 4;           // of norms, activations
constexpr double kPackingWorthSharing_ns = 2'000;  // the threads are awake for the product

std::size_t round_up(std::size_t value, std::size_t unit) {
    return (value + unit - 1) / unit * unit;
}

int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

std::size_t packed_row_bytes(const PanelLayout& layout) {
    const int64_t bytes = int64_t{layout.shape->steps} * layout.tiles->packed_step_bytes +
                          int64_t{layout.shape->groups} * layout.tiles->packed_group_bytes;
    return round_up(static_cast<std::size_t>(bytes), kChunkBytes);
}

int64_t most_rows_of_a_pass(const PanelLayout& layout) {
    const TileSet& tiles = *layout.tiles;
    const auto bytes = static_cast<std::size_t>(tiles.pass_bytes);
    const auto fitting = static_cast<int64_t>(bytes / packed_row_bytes(layout));
    return std::max<int64_t>(tiles.min_pass_rows, fitting / tiles.block_rows * tiles.block_rows);
}

}  // namespace

PanelKernel::PanelKernel(int64_t out_features, const WeightShape& shape)
    : LinearKernel(out_features, shape.in_features, shape.bfloat16),
      shape_(shape),
      num_panels_(divide_up(out_features, kPanelColumns)),
      panels_(allocate_weights(shape.panel_bytes * static_cast<std::size_t>(num_panels_))) {}

void PanelKernel::set_bias(const char* bias) {
    bias_.resize(static_cast<std::size_t>(num_panels_ * kPanelColumns));
    for (int64_t i = 0; i < out_features(); ++i) {
        std::uint32_t bits = 0;
        if (bfloat16()) {
            std::uint16_t half;
            std::memcpy(&half, bias + 2 * i, 2);
            bits = static_cast<std::uint32_t>(half) << 16;
        } else {
            std::memcpy(&bits, bias + 4 * i, 4);
        }
        std::memcpy(&bias_[static_cast<std::size_t>(i)], &bits, 4);
    }
}

// How the tasks of a pass share its work.
struct PanelKernel::Split {
    int64_t threads;
    int64_t panels;  // of a task
    int64_t groups;  // of so many panels
    int64_t slices;  // of the blocks, for each group
};

// Some neighbouring panels and consecutive blocks of a pass.
struct PanelKernel::Task {
    int64_t group, num_groups;  // of panels
    int64_t first_panel, end_panel;
    const char* panels;  // from the first on
    int64_t first_block, end_block;
};

// A pass over the panels: consecutive rows of x, cut into blocks of nearly equal size.
struct PanelKernel::Pass {
    PanelLayout layout;
    const char* x;  // packed blocks, one after the other; or, if `is_plain`, one row as it stands
    bool is_plain;
    Rows y;      // from its first row on; a task's own where the largest are kept in `best`
    Best* best;  // [rows][groups of panels]
    KeptRows kept;  // beside `best`, of all passes
    int64_t first_row;
    int64_t count;
    int64_t unit;  // of rows in a block
    int64_t units;
    int64_t num_blocks;
    std::size_t packed_row_bytes;

    int64_t first_of(int64_t block) const { return units * block / num_blocks * unit; }
    int64_t room_of(int64_t block) const { return first_of(block + 1) - first_of(block); }
    int64_t size_of(int64_t block) const {
        return std::min(room_of(block), count - first_of(block));
    }
    int64_t block_of(int64_t row) const { return ((row / unit + 1) * num_blocks - 1) / units; }
};

// Without results and x, which have no place yet.
PanelKernel::Pass PanelKernel::pass_of(const PanelLayout& layout, int64_t rows, int64_t index,
                                       int64_t passes) {
    const TileSet& tiles = *layout.tiles;
    Pass pass{};
    pass.layout = layout;
    pass.unit = tiles.row_unit;
    pass.packed_row_bytes = packed_row_bytes(layout);
    pass.first_row = rows * index / passes;
    pass.count = rows * (index + 1) / passes - pass.first_row;
    pass.units = divide_up(pass.count, pass.unit);
    const int64_t room = pass.units * pass.unit;
    pass.num_blocks = room <= tiles.max_rows ? 1 : divide_up(room, tiles.block_rows);
    return pass;
}

// Tasks have as many rows as the layout for one would give them.
PanelLayout PanelKernel::layout_for(int64_t rows) const {
    const PanelLayout first = layout(1);
    const int64_t passes = std::max<int64_t>(1, divide_up(rows, most_rows_of_a_pass(first)));
    const Pass pass = pass_of(first, rows, 0, passes);
    return layout(pass.count / split(pass).slices);
}

std::size_t PanelKernel::packed_bytes(int64_t rows) const {
    const PanelLayout layout = layout_for(rows);
    const int64_t most = most_rows_of_a_pass(layout);
    return round_up(static_cast<std::size_t>(std::min(rows, most)),
                    static_cast<std::size_t>(layout.tiles->row_unit)) *
           packed_row_bytes(layout);
}

// `fn(pass)` for passes whose results have no place yet. One row that needs no padding is a block
// as it stands.
template <class Fn>
void PanelKernel::for_each_pass(int64_t rows, const RowSource& x, char* packed,
                                const Fn& fn) const {
    const PanelLayout layout = layout_for(rows);
    const TileSet& tiles = *layout.tiles;
    const int64_t passes = divide_up(rows, most_rows_of_a_pass(layout));
    const bool may_be_plain =
        tiles.plain && in_features() * element_bytes() % tiles.plain_unit_bytes == 0;
    for (int64_t i = 0; i < passes; ++i) {
        Pass pass = pass_of(layout, rows, i, passes);
        pass.is_plain = rows == 1 && may_be_plain && !x.row;
        pass.x = pass.is_plain ? x.at(0, nullptr) : packed;
        fn(pass);
    }
}

void PanelKernel::append(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                         const Rows& y) const {
    for_each_pass(rows, x, packed, [&](Pass& pass) {
        pass.y = y;
        pass.y.data += pass.first_row * y.row_bytes;
        if (!pass.is_plain) append_packing(phases, x, pass, packed);
        append_product(phases, pass);
    });
}

void PanelKernel::append_argmax(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                                char* partial, const KeptRows& kept,
                                const Largest& largest) const {
    for_each_pass(rows, x, packed, [&](Pass& pass) {
        pass.best = reinterpret_cast<Best*>(partial);
        pass.kept = kept;
        pass.y = {nullptr, kOutputsRowBytes, true};
        if (!pass.is_plain) append_packing(phases, x, pass, packed);
        append_product(phases, pass);
        const int64_t groups = split(pass).groups;
        const double nanoseconds = static_cast<double>(pass.count * groups);
        const bool alone = nanoseconds < kPackingWorthSharing_ns;
        const int64_t pieces = alone ? 1 : std::min<int64_t>(pass.count, num_threads());
        phases.add(pieces, [pass, groups, pieces, largest](int64_t piece) {
            const int64_t end = pass.count * (piece + 1) / pieces;
            for (int64_t row = pass.count * piece / pieces; row < end; ++row) {
                Best best = pass.best[row * groups];
                for (int64_t group = 1; group < groups; ++group)
                    best.take(pass.best[row * groups + group]);
                largest.values[pass.first_row + row] = best.value;
                largest.columns[pass.first_row + row] = best.column;
            }
        });
    });
}

std::size_t PanelKernel::argmax_bytes(int64_t rows) const {
    int64_t most = 0;
    for_each_pass(rows, RowSource{}, nullptr, [&](Pass& pass) {
        most = std::max(most, pass.count * split(pass).groups);
    });
    return static_cast<std::size_t>(most) * sizeof(Best);
}

bool PanelKernel::is_worth_sharing(int64_t rows) const {
    const double bytes = static_cast<double>(num_bytes());
    const double multiplies = static_cast<double>(out_features() * in_features() * rows);
    return std::max(bytes / kBytesPerNanosecond, multiplies / kMultipliesPerNanosecond) >=
           kWorthSharing_ns;
}

// A piece is some rows, wherever blocks begin: few rows give work to many threads too.
void PanelKernel::append_packing(Phases& phases, const RowSource& x, const Pass& pass,
                                 char* packed) const {
    const TileSet& tiles = *pass.layout.tiles;
    const std::size_t bytes = static_cast<std::size_t>(pass.count) * pass.packed_row_bytes;
    const double per_byte = tiles.packing_byte_ns + (x.row ? kMadeByte_ns : 0);
    const bool alone = !is_worth_sharing(pass.count) ||
                       static_cast<double>(bytes) * per_byte < kPackingWorthSharing_ns;
    const int64_t pieces = std::min<int64_t>(pass.count, alone ? 1 : 2 * num_threads());
    phases.add(pieces, [this, &tiles, x, pass, packed, pieces](int64_t piece) {
        thread_local AlignedMemory made;
        const auto row_bytes = static_cast<std::size_t>(in_features() * element_bytes());
        char* memory = x.row ? made.at_least(row_bytes) : nullptr;
        const int64_t end = pass.count * (piece + 1) / pieces;
        for (int64_t row = pass.count * piece / pieces; row < end; ++row) {
            const int64_t block = pass.block_of(row);
            const int64_t top = pass.first_of(block);
            const int room = static_cast<int>(pass.room_of(block));
            tiles.pack_row(*pass.layout.shape, x.at(pass.first_row + row, memory),
                           packed + static_cast<std::size_t>(top) * pass.packed_row_bytes,
                           static_cast<int>(row - top), room);
        }
    });
}

// A task is a few neighbouring panels, which stay in the cache while blocks of rows pass, and all
// blocks; or, where there are many threads for few panels, some of the blocks. One thread alone
// takes them all.
PanelKernel::Split PanelKernel::split(const Pass& pass) const {
    Split split{};
    split.threads = is_worth_sharing(pass.count) ? num_threads() : 1;
    split.panels = kMaxPanelsPerTask;
    if (pass.num_blocks > 1 || pass.layout.unpack) {
        const std::size_t panel_bytes = pass.layout.shape->panel_bytes;
        const auto fitting = static_cast<int64_t>(kPanelCacheBytes / panel_bytes);
        split.panels = std::clamp<int64_t>(fitting, 1, kMaxPanelsPerTask);
    }
    while (split.panels > 1 && num_panels_ < 2 * split.threads * split.panels) split.panels /= 2;
    split.groups = divide_up(num_panels_, split.panels);
    split.slices = std::min(pass.num_blocks, divide_up(2 * split.threads, split.groups));
    return split;
}

void PanelKernel::append_product(Phases& phases, const Pass& pass) const {
    const Split split = this->split(pass);
    const auto run = [this, pass, split](int64_t index) {
        const TileSet& tiles = *pass.layout.tiles;
        const Task task = task_of(pass, split, index);
        if (tiles.begin) tiles.begin();
        for (int64_t block = task.first_block; block < task.end_block; ++block)
            multiply_block(pass, task, block);
        if (tiles.end) tiles.end();
    };
    const int64_t num_tasks = split.groups * split.slices;
    if (split.threads > 1) {
        phases.add(num_tasks, run);
    } else {
        phases.add(1, [run, num_tasks](int64_t) {
            for (int64_t index = 0; index < num_tasks; ++index) run(index);
        });
    }
}

PanelKernel::Task PanelKernel::task_of(const Pass& pass, const Split& split,
                                       int64_t index) const {
    const int64_t slice = index % split.slices;
    Task task{};
    task.group = index / split.slices;
    task.num_groups = split.groups;
    task.first_panel = task.group * split.panels;
    task.end_panel = std::min(task.first_panel + split.panels, num_panels_);
    task.panels = panels_of(pass.layout, task.first_panel, task.end_panel);
    task.first_block = pass.num_blocks * slice / split.slices;
    task.end_block = pass.num_blocks * (slice + 1) / split.slices;
    return task;
}

// Those that were unpacked stay until the calling thread asks again.
const char* PanelKernel::panels_of(const PanelLayout& layout, int64_t first, int64_t end) const {
    if (!layout.unpack) return panel_at(first);
    thread_local AlignedMemory unpacked;
    const std::size_t panel_bytes = layout.shape->panel_bytes;
    char* memory = unpacked.at_least(static_cast<std::size_t>(end - first) * panel_bytes);
    char* to = memory;
    for (int64_t panel = first; panel < end; ++panel, to += panel_bytes)
        layout.unpack(shape_, panel_at(panel), to);
    return memory;
}

void PanelKernel::multiply_block(const Pass& pass, const Task& task, int64_t block) const {
    const TileSet& tiles = *pass.layout.tiles;
    const WeightShape& shape = *pass.layout.shape;
    alignas(64) float outputs[kMaxRows][kMaxPanels * kPanelColumns];
    Best best[kMaxRows];
    const int64_t top = pass.first_of(block);
    Tile tile{.weight = shape};
    tile.rows = static_cast<int>(pass.size_of(block));
    tile.x = pass.x + static_cast<std::size_t>(top) * pass.packed_row_bytes;
    tile.y_row_bytes = pass.y.row_bytes;
    tile.y_is_float32 = pass.y.float32;
    const TileFunction multiply = pass.is_plain ? tiles.plain : tiles.functions[tile.rows - 1];
    tile.panel = task.panels;
    for (int64_t panel = task.first_panel; panel < task.end_panel; panel += tile.panels) {
        tile.panels = static_cast<int>(std::min<int64_t>(tiles.max_panels, task.end_panel - panel));
        const int64_t column = panel * kPanelColumns;
        tile.bias = bias_.empty() ? nullptr : bias_.data() + column;
        tile.columns = static_cast<int>(
            std::min<int64_t>(tile.panels * kPanelColumns, out_features() - column));
        const std::ptrdiff_t from_y = top * pass.y.row_bytes + column * (pass.y.float32 ? 4 : 2);
        tile.y = pass.best ? reinterpret_cast<char*>(outputs) : pass.y.data + from_y;
        multiply(tile);
        tile.panel += static_cast<std::size_t>(tile.panels) * shape.panel_bytes;
        if (!pass.best) continue;
        for (int row = 0; row < tile.rows; ++row) {
            if (panel == task.first_panel)
                best[row] = {outputs[row][0], static_cast<int32_t>(column)};
            best[row].take(outputs[row], tile.columns, static_cast<int32_t>(column));
            const int64_t at = pass.first_row + top + row;
            if (pass.kept.has(at))
                std::memcpy(pass.kept.at(at) + column * 4, outputs[row],
                            static_cast<std::size_t>(tile.columns) * sizeof(float));
        }
    }
    if (!pass.best) return;
    for (int row = 0; row < tile.rows; ++row)
        pass.best[(top + row) * task.num_groups + task.group] = best[row];
}

}  // namespace aioserve::linear
