// Python's view of the kernels of linear layers. Arrays cross as addresses: `aioserve/ops/linear.py`, the only
// caller, checks shapes, dtypes and layout, so that a call costs little more than its product.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "linear/decoded/weight.h"
#include "linear/grouped/weight.h"
#include "linear/joined.h"
#include "linear/packed_weight.h"
#include "linear/per_head.h"
#include "linear/permuted.h"

namespace nb = nanobind;
using namespace nb::literals;
using aioserve::linear::DecodedWeight;
using aioserve::linear::GroupedWeight;
using aioserve::linear::JoinedKernel;
using aioserve::linear::LinearKernel;
using aioserve::linear::PackedWeight;
using aioserve::linear::PerHeadKernel;
using aioserve::linear::PermutedKernel;

namespace {

using Address = std::uintptr_t;
using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

void pack(PackedWeight* self, Address weight, int64_t out_features, int64_t in_features,
          int64_t row_bytes, int64_t column_bytes, Address bias, bool bfloat16) {
    new (self) PackedWeight({.data = reinterpret_cast<const char*>(weight),
                             .rows = out_features,
                             .columns = in_features,
                             .row_bytes = row_bytes,
                             .column_bytes = column_bytes},
                            reinterpret_cast<const char*>(bias), bfloat16);
}

void apply(const LinearKernel& self, Address x, int64_t rows, int64_t x_row_bytes, Address y,
           bool y_is_float32) {
    self.apply(reinterpret_cast<const char*>(x), rows, x_row_bytes, reinterpret_cast<char*>(y),
               y_is_float32);
}

void argmax(const LinearKernel& self, Address x, int64_t rows, int64_t x_row_bytes, Address y,
            Address kept, Address largest, Address columns) {
    self.argmax(reinterpret_cast<const char*>(x), rows, x_row_bytes,
                {reinterpret_cast<float*>(y), self.out_features() * 4,
                 reinterpret_cast<const uint8_t*>(kept)},
                {reinterpret_cast<float*>(largest), reinterpret_cast<int64_t*>(columns)});
}

void gather(const LinearKernel& self, Address ids, int64_t count, Address out) {
    self.gather(reinterpret_cast<const int64_t*>(ids), count, reinterpret_cast<char*>(out));
}

namespace grouped = aioserve::linear::grouped;

grouped::Scales scales_of(const std::string& name) {
    if (name == "float32") return grouped::kFloat32;
    if (name == "float16") return grouped::kFloat16;
    if (name == "bfloat16") return grouped::kBfloat16;
    if (name == "multiples") return grouped::kMultiples;
    throw nb::value_error("scales must be float32, float16, bfloat16 or multiples");
}

template <class Weight>
void make_grouped(Weight* self, int64_t out_features, int64_t in_features, int64_t group_size,
                  int bits, bool has_minimums, const std::string& scales, bool has_zero_points,
                  const nb::bytes& table, bool bfloat16) {
    if (table.size() != 0 && table.size() != 16)
        throw nb::value_error("table must have 16 bytes, or none");
    new (self) Weight(out_features, in_features,
                      {.group_size = group_size,
                       .bits = bits,
                       .has_minimums = has_minimums,
                       .scales = scales_of(scales),
                       .has_zero_points = has_zero_points,
                       .table = table.size() ? static_cast<const int8_t*>(table.data()) : nullptr},
                      bfloat16);
}

// Without numbers codes are E4M3.
void make_decoded(DecodedWeight* self, int64_t out_features, int64_t in_features,
                  int64_t group_size, const std::string& scales, const nb::bytes& numbers,
                  bool bfloat16) {
    float of[16];
    const bool is_e4m3 = numbers.size() == 0;
    if (!is_e4m3 && numbers.size() != sizeof(of))
        throw nb::value_error("numbers must be 16 float32, or none");
    std::memcpy(of, numbers.data(), numbers.size());
    new (self) DecodedWeight(out_features, in_features,
                             {.group_size = group_size,
                              .bits = is_e4m3 ? 8 : 4,
                              .has_minimums = false,
                              .scales = scales_of(scales),
                              .has_zero_points = false,
                              .table = nullptr,
                              .numbers = is_e4m3 ? nullptr : of,
                              .is_e4m3 = is_e4m3},
                             bfloat16);
}

template <class Weight>
void set_rows(Weight& self, int64_t first, int64_t count, Address values, Address scales,
              Address minimums) {
    self.set_rows(first, count, reinterpret_cast<const int8_t*>(values),
                  reinterpret_cast<const float*>(scales), reinterpret_cast<const float*>(minimums));
}

void set_bias(GroupedWeight& self, Address bias) {
    self.set_bias(reinterpret_cast<const char*>(bias));
}

void join(JoinedKernel* self, const nb::tuple& parts) {
    std::vector<const LinearKernel*> kernels;
    for (nb::handle part : parts) kernels.push_back(&nb::cast<const LinearKernel&>(part));
    new (self) JoinedKernel(std::move(kernels));
}

// (outputs, bytes) of each.
std::vector<std::pair<int64_t, std::size_t>> sizes_of_parts(const JoinedKernel& self) {
    std::vector<std::pair<int64_t, std::size_t>> sizes;
    for (const LinearKernel* part : self.parts())
        sizes.emplace_back(part->out_features(), part->num_bytes());
    return sizes;
}

void permute(PermutedKernel* self, const LinearKernel& kernel, const nb::bytes& order) {
    std::vector<int32_t> inputs(order.size() / sizeof(int32_t));
    std::memcpy(inputs.data(), order.data(), inputs.size() * sizeof(int32_t));
    new (self) PermutedKernel(kernel, std::move(inputs));
}

void make_per_head(PerHeadKernel* self, const nb::tuple& heads, int64_t passed) {
    std::vector<const LinearKernel*> kernels;
    for (nb::handle head : heads) kernels.push_back(&nb::cast<const LinearKernel&>(head));
    new (self) PerHeadKernel(std::move(kernels), passed);
}

void apply_per_head(const PerHeadKernel& self, Address x, int64_t rows, int64_t x_row_bytes,
                    Address y, int64_t y_row_bytes) {
    aioserve::run_now([&](aioserve::Phases& phases) {
        self.append(phases, {reinterpret_cast<char*>(x), x_row_bytes}, rows,
                    {reinterpret_cast<char*>(y), y_row_bytes});
    });
}

}  // namespace

void bind_linear(nb::module_& m) {
    nb::class_<LinearKernel>(m, "LinearKernel", "How one linear layer is multiplied.")
        .def("apply", &apply, ReleaseGil())
        .def("argmax", &argmax, ReleaseGil())
        .def("gather", &gather, ReleaseGil())
        .def_prop_ro("out_features", &LinearKernel::out_features)
        .def_prop_ro("in_features", &LinearKernel::in_features)
        .def_prop_ro("bfloat16", &LinearKernel::bfloat16)
        .def_prop_ro("num_bytes", &LinearKernel::num_bytes);
    nb::class_<PackedWeight, LinearKernel>(m, "PackedWeight", "A weight of floats, and a bias.")
        .def("__init__", &pack, "weight"_a, "out_features"_a, "in_features"_a, "row_bytes"_a,
             "column_bytes"_a, "bias"_a, "bfloat16"_a, ReleaseGil());
    nb::class_<GroupedWeight, LinearKernel>(m, "GroupedWeight",
                                            "A weight of integers with scales in groups.")
        .def("__init__", &make_grouped<GroupedWeight>, "out_features"_a, "in_features"_a, "group_size"_a,
             "bits"_a, "has_minimums"_a, "scales"_a, "has_zero_points"_a, "table"_a,
             "bfloat16"_a)
        .def("set_rows", &set_rows<GroupedWeight>, "first"_a, "count"_a, "values"_a, "scales"_a, "minimums"_a,
             ReleaseGil())
        .def("set_bias", &set_bias, "bias"_a)
        .def_prop_ro("group_size", &GroupedWeight::group_size)
        .def_prop_ro("groups", &GroupedWeight::groups)
        .def_prop_ro("bits", &GroupedWeight::bits)
        .def_prop_ro("has_minimums", &GroupedWeight::has_minimums);
    nb::class_<DecodedWeight, GroupedWeight>(m, "DecodedWeight",
                                             "The same, or codes of floats, as floats.")
        .def("__init__", &make_grouped<DecodedWeight>, "out_features"_a, "in_features"_a,
             "group_size"_a, "bits"_a, "has_minimums"_a, "scales"_a, "has_zero_points"_a, "table"_a,
             "bfloat16"_a)
        .def("__init__", &make_decoded, "out_features"_a, "in_features"_a, "group_size"_a,
             "scales"_a, "numbers"_a, "bfloat16"_a)
        .def("set_rows", &set_rows<DecodedWeight>, "first"_a, "count"_a, "values"_a, "scales"_a,
             "minimums"_a, ReleaseGil());
    nb::class_<JoinedKernel, LinearKernel>(m, "JoinedKernel", "Several kernels as one layer.")
        .def("__init__", &join, "parts"_a, nb::keep_alive<1, 2>())
        .def_prop_ro("sizes", &sizes_of_parts);
    nb::class_<PerHeadKernel>(m, "PerHeadKernel", "A product for each head of a row.")
        .def("__init__", &make_per_head, "heads"_a, "passed"_a, nb::keep_alive<1, 2>())
        .def("apply", &apply_per_head, ReleaseGil())
        .def_prop_ro("in_columns", &PerHeadKernel::in_columns)
        .def_prop_ro("out_columns", &PerHeadKernel::out_columns)
        .def_prop_ro("bfloat16", &PerHeadKernel::bfloat16)
        .def_prop_ro("num_bytes", &PerHeadKernel::num_bytes);
    m.attr("PANEL_OUTPUTS") = aioserve::linear::kPanelColumns;
    nb::class_<PermutedKernel, LinearKernel>(m, "PermutedKernel", "A kernel with sorted inputs.")
        .def("__init__", &permute, "kernel"_a, "order"_a, nb::keep_alive<1, 2>());
}
