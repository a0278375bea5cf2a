// A one-dimensional int32 array of Python's, borrowed for the length of a call. The buffer protocol
// costs a tenth of a DLPack exchange.

#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace aioserve {

class Int32Buffer {
  public:
    // Throws TypeError for anything but a one-dimensional int32 array, ValueError unless it is
    // contiguous. `name` is the argument's, for the message.
    Int32Buffer(nanobind::handle object, bool writable, const char* name = "pages") {
        const int flags = PyBUF_FORMAT | PyBUF_STRIDES | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nanobind::python_error();
        if (view_.ndim != 1 || view_.itemsize != 4 || !is_int(view_.format)) {
            PyBuffer_Release(&view_);
            throw nanobind::type_error(
                (std::string(name) + " must be a one-dimensional int32 array").c_str());
        }
        if (view_.shape[0] > 1 && view_.strides[0] != 4) {
            PyBuffer_Release(&view_);
            throw nanobind::value_error((std::string(name) + " must be contiguous").c_str());
        }
    }
    ~Int32Buffer() { PyBuffer_Release(&view_); }
    Int32Buffer(const Int32Buffer&) = delete;
    Int32Buffer& operator=(const Int32Buffer&) = delete;

    std::span<int32_t> span() const {
        return {static_cast<int32_t*>(view_.buf), static_cast<size_t>(view_.len) / 4};
    }

  private:
    static bool is_int(const char* format) {
        return std::strcmp(format, "i") == 0 || std::strcmp(format, "l") == 0;
    }

    Py_buffer view_;
};

}  // namespace aioserve
