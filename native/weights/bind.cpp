// Python's view of reading weights: `aioserve/models/reading.py`, the only caller, plans what is
// read and knows that files, offsets and sizes fit.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "weights/reader.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace aioserve::weights;

static Stored stored(const std::string& dtype) {
    if (dtype == "float32") return Stored::float32;
    if (dtype == "bfloat16") return Stored::bfloat16;
    if (dtype == "float16") return Stored::float16;
    throw nb::value_error("dtype is not of a weight file");
}

void bind_weights(nb::module_& m) {
    using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

    nb::class_<Source>(m, "WeightSource", "A tensor in an open file.")
        .def("__init__",
             [](Source* self, int file, int64_t offset, int64_t rows, const std::string& dtype,
                const std::string& label) {
                 new (self) Source{file, offset, rows, stored(dtype), label};
             },
             "file"_a, "offset"_a, "rows"_a, "dtype"_a, "label"_a);

    nb::class_<WeightReader>(m, "WeightReader", "Reads and packs tensors, one after the other.")
        .def("__init__",
             [](WeightReader* self, const std::string& dtype) {
                 new (self) WeightReader(stored(dtype));
             },
             "dtype"_a)
        .def("add_packed", &WeightReader::add_packed, "sources"_a, "columns"_a, "biases"_a)
        .def("add_transposed", &WeightReader::add_transposed, "source"_a, "columns"_a, "biases"_a)
        .def("add_plain",
             [](WeightReader& self, std::vector<Source> sources, int64_t columns,
                std::uintptr_t to) {
                 return self.add_plain(std::move(sources), columns, reinterpret_cast<char*>(to));
             },
             "sources"_a, "columns"_a, "to"_a)
        .def("run", &WeightReader::run, ReleaseGil())
        .def("stop", &WeightReader::stop)
        .def("wait", &WeightReader::wait, "done"_a, ReleaseGil())
        .def("take", [](WeightReader& self, int64_t number) {
                 nb::gil_scoped_release release;
                 return self.take(number).release();
             },
             "number"_a, nb::rv_policy::take_ownership);
    m.def("same_bytes", &same_bytes, "one"_a, "other"_a, "count"_a, ReleaseGil());
}
