// A weight of floats, multiplied as the numbers that it is stored in.

#pragma once

#include "linear/packing.h"
#include "linear/panels.h"

namespace aioserve::linear {

class PackedWeight : public PanelKernel {
  public:
    // Copies `weight` [out, in] and `bias` [out] (of the weight's dtype, contiguous; or null).
    PackedWeight(const Matrix& weight, const char* bias, bool bfloat16);
    // Zeros without a bias, for `set_rows` and `set_bias` to fill.
    PackedWeight(int64_t out_features, int64_t in_features, bool bfloat16);

    // Copies the rows from 32 * panel on, dense in the weight's dtype: 32, or as many as are left.
    void set_rows(int64_t panel, const char* rows);

    void row(int64_t id, char* out) const override;

  protected:
    PanelLayout layout(int64_t rows) const override;
};

}  // namespace aioserve::linear
