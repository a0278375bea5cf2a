// Which instruction set the kernels use: the best that the CPU and the build have, or the one that
// AIOSERVE_ISA names. One for the whole process.

#pragma once

#include <string>
#include <vector>

namespace aioserve {

namespace ops {
enum class DType : int;
struct Kernels;
}  // namespace ops

namespace linear {
struct TileSet;
namespace decoded {
struct Decoding;
}
namespace grouped {
struct StorageTiles;
}
}  // namespace linear

// The kernels in use. All throw std::invalid_argument where AIOSERVE_ISA is unknown or unsupported.
const ops::Kernels& kernels(ops::DType dtype);
const linear::TileSet& tiles_in_use(bool bfloat16);
const linear::grouped::StorageTiles& integer_tiles_in_use(int storage);  // a `Storage`
const linear::decoded::Decoding& decoding_in_use(bool bfloat16);

// Names that the build has kernels for, whatever this machine's CPU supports.
std::vector<std::string> compiled_isas();

// Names from the plainest to the best that this machine supports, and the one in use.
std::vector<std::string> supported_isas();
std::string used_isa();

// The plainest one whose tiles multiply the weights of integers, as several share them.
std::string used_integer_isa();

// Those that are another one's kernels over instructions emulated in software. Slow: for tests, and
// in use only if they are named.
std::vector<std::string> emulated_isas();

// Use another one from now on: a hook for tests and benchmarks, not while kernels run.
void set_isa(const std::string& name);

}  // namespace aioserve
