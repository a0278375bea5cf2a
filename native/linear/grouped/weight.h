// A weight of integers with scales in groups, multiplied as integers: `grouped/tile.h` says how.

#pragma once

#include <array>

#include "linear/grouped/scales.h"
#include "linear/panels.h"

namespace aioserve::linear {

struct IntegerForm {
    int64_t group_size;  // 16, 32, 64, a multiple of 128, or `in_features`
    // 8, for values from -128 to 127, or 4, 5 or 6: for values from -8 to 7, -16 to 15 or -32 to 31,
    // or from 0 on where there are minimums.
    int bits;
    bool has_minimums;
    grouped::Scales scales;
    // Whether each minimum is -(zero point * scale), with a zero point from -128 to 127. Not of
    // scales that are multiples.
    bool has_zero_points;
    // The 16 integers that values are among, which have 4 bits then; null: any.
    const int8_t* table;
    // Codes of floats, which `DecodedWeight` alone multiplies, without minimums: 16 numbers that 4 bits
    // choose from, or null; and whether 8 bits are E4M3. Values are the codes as they are.
    const float* numbers = nullptr;
    bool is_e4m3 = false;
};

class GroupedWeight : public PanelKernel {
  public:
    // Zeros. Throws std::invalid_argument for sizes and forms that there are not.
    GroupedWeight(int64_t out_features, int64_t in_features, const IntegerForm& form,
                  bool bfloat16);

    // w[i] = values[i] * scales[i / group_size] + minimums[i / group_size] for `count` rows from
    // `first` on: values [count, in], scales and minimums [count, groups], dense; minimums are null
    // unless there are some. Any thread may set any rows. Throws, before it writes anything,
    // std::out_of_range for rows that don't exist and std::invalid_argument for a value that doesn't
    // fit the bits, or scales or minimums that can't be kept exactly.
    void set_rows(int64_t first, int64_t count, const int8_t* values, const float* scales,
                  const float* minimums);

    void row(int64_t id, char* out) const override;

    int bits() const { return grouped::bits_of(storage_); }
    int64_t group_size() const { return group_size_; }
    int64_t groups() const { return (in_features() + group_size_ - 1) / group_size_; }
    bool has_minimums() const { return shape().has_minimums; }

  protected:
    // `in_floats`: whether rows that are multiplied stay floats.
    GroupedWeight(int64_t out_features, int64_t in_features, const IntegerForm& form,
                  bool bfloat16, bool in_floats);

    PanelLayout layout(int64_t rows) const override;

    // Of a group, `in_span` behind its header, what up to a unit of kept integers of a column stand for.
    virtual void dequantize(const char* header, int in_span, int column, const uint8_t* integers,
                            int64_t count, float* to) const;

    grouped::Storage storage() const { return storage_; }

  private:
    int code_of(int8_t value) const { return codes_[static_cast<uint8_t>(value)]; }
    void check_values(const int8_t* values, int64_t count) const;
    int units() const { return shape().group_size / grouped::kUnit; }  // of a group
    char* header_at(int64_t id, int group) const;
    char* unit_at(int64_t id, int group, int unit) const;
    void encode_row(const float* scales, const float* minimums, int which,
                    grouped::Encoded* encoded) const;
    void set_row(int64_t id, const int8_t* values);

    grouped::Storage storage_;
    WeightShape unpacked_shape_;
    std::array<int16_t, 256> codes_;  // of values as bytes: what is stored, or -1
    int64_t group_size_;  // as given; that of the panels is a part of it
};

}  // namespace aioserve::linear
