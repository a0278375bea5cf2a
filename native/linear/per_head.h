// A product for each head of a row: head h of y is head h of x times the weight of head h.

#pragma once

#include <vector>

#include "linear/kernel.h"

namespace aioserve::linear {

// Rows of heads that lie side by side.
struct HeadRows {
    char* data;
    std::ptrdiff_t row_bytes;
};

class PerHeadKernel {
  public:
    // Takes kernels alike in all but their numbers, which outlive this. The last `passed` numbers of
    // each head of x stand behind its product in y, as they are.
    // Throws std::invalid_argument for kernels that differ, for none, and for a negative number.
    PerHeadKernel(std::vector<const LinearKernel*> heads, int64_t passed);

    // x [rows, heads * (in + passed)] to y [rows, heads * (out + passed)], in the kernels' dtype. The
    // result of a row depends on that row alone, to the bit. What both refer to must stay until the
    // phases ran.
    void append(Phases& phases, const HeadRows& x, int64_t rows, const HeadRows& y) const;

    int64_t in_columns() const { return count() * (heads_[0]->in_features() + passed_); }
    int64_t out_columns() const { return count() * (heads_[0]->out_features() + passed_); }
    bool bfloat16() const { return heads_[0]->bfloat16(); }
    std::size_t num_bytes() const;

  private:
    int64_t count() const { return static_cast<int64_t>(heads_.size()); }
    void multiply(int64_t head, const HeadRows& x, int64_t begin, int64_t end,
                  const HeadRows& y) const;

    std::vector<const LinearKernel*> heads_;
    int64_t passed_;
};

}  // namespace aioserve::linear
