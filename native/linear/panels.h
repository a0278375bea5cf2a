// Kernels whose weight lies in panels that tiles multiply: what they share, whatever the numbers in
// the panels are. `tile.h` says how panels and rows lie; `product.cpp` cuts the work.

#pragma once

#include <memory>
#include <vector>

#include "linear/kernel.h"
#include "linear/tile.h"

namespace aioserve::linear {

// How panels lie where tiles multiply them.
struct PanelLayout {
    const WeightShape* shape;
    const TileSet* tiles;
    // Writes a panel to `to` in this layout, from where it lies as it is kept; null: it is kept so.
    void (*unpack)(const WeightShape& kept, const char* panel, char* to);
};

// A task of a product takes a few neighbouring panels and some blocks of rows. Where tiles read
// panels in another layout than they are kept in, it first unpacks its panels, once for all blocks.
class PanelKernel : public LinearKernel {
  public:
    int64_t num_panels() const { return num_panels_; }
    std::size_t num_bytes() const override {
        return shape_.panel_bytes * static_cast<std::size_t>(num_panels_) +
               bias_.size() * sizeof(float);
    }
    // Copies `bias` [out], dense in the kernel's dtype.
    void set_bias(const char* bias);

    void append(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                const Rows& y) const override;
    std::size_t packed_bytes(int64_t rows) const override;
    void append_argmax(Phases& phases, const RowSource& x, int64_t rows, char* packed,
                       char* partial, const KeptRows& kept, const Largest& largest) const override;
    std::size_t argmax_bytes(int64_t rows) const override;

  protected:
    // Zeros: columns past the last, and inputs that fill up a step, stay so.
    PanelKernel(int64_t out_features, const WeightShape& shape);

    // In which tasks of so many rows multiply, with the instruction set in use. What it points to
    // must live as long as the kernel.
    virtual PanelLayout layout(int64_t rows) const = 0;

    // As panels are kept.
    const WeightShape& shape() const { return shape_; }
    char* panel_at(int64_t panel) const {
        return panels_.get() + static_cast<std::size_t>(panel) * shape_.panel_bytes;
    }

  private:
    struct Pass;
    struct Split;
    struct Task;

    PanelLayout layout_for(int64_t rows) const;
    static Pass pass_of(const PanelLayout& layout, int64_t rows, int64_t index, int64_t passes);
    bool is_worth_sharing(int64_t rows) const;
    void append_packing(Phases& phases, const RowSource& x, const Pass& pass, char* packed) const;
    template <class Fn>
    void for_each_pass(int64_t rows, const RowSource& x, char* packed, const Fn& fn) const;
    Split split(const Pass& pass) const;
    void append_product(Phases& phases, const Pass& pass) const;
    Task task_of(const Pass& pass, const Split& split, int64_t index) const;
    const char* panels_of(const PanelLayout& layout, int64_t first, int64_t end) const;
    void multiply_block(const Pass& pass, const Task& task, int64_t block) const;

    WeightShape shape_;
    int64_t num_panels_;
    std::shared_ptr<char> panels_;
    std::vector<float> bias_;  // to the last panel's end; empty for none
};

}  // namespace aioserve::linear
