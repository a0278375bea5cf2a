// A weight of integers with scales in groups, or of codes of floats, multiplied as the floats that it stands
// for: `decoded/tile.h` says how.

#pragma once

#include <atomic>

#include "linear/decoded/tile.h"
#include "linear/grouped/weight.h"

namespace aioserve::linear {

// All results, and rows, are those of a `PackedWeight` of these floats, bit for bit.
class DecodedWeight : public GroupedWeight {
  public:
    // Zeros. Throws std::invalid_argument for sizes and forms that there are not.
    DecodedWeight(int64_t out_features, int64_t in_features, const IntegerForm& form,
                  bool bfloat16);

    // As that of `GroupedWeight`. Of minimums that are zero points each weight is
    // (value - zero point) * scale.
    void set_rows(int64_t first, int64_t count, const int8_t* values, const float* scales,
                  const float* minimums);

  protected:
    PanelLayout layout(int64_t rows) const override;
    void dequantize(const char* header, int in_span, int column, const uint8_t* integers,
                    int64_t count, float* to) const override;

  private:
    WeightShape unpacked_;
    float least_number_;  // the smallest magnitude of a code that isn't 0
    std::atomic<bool> has_small_{false};  // whether weights may be below the normal numbers
};

}  // namespace aioserve::linear
