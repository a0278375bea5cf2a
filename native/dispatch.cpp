#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "linear/tile.h"
#include "ops/types.h"

namespace aioserve {

// Defined in `ops/kernels_*.cpp` and `linear/tile_*.cpp`.
namespace ops {
extern const Table kPortable, kAvx2, kAvx512, kAvx512Bf16;
}
namespace linear {
extern const TileSet kPortableFloat32, kPortableBfloat16, kAvx2Float32, kAvx2Bfloat16,
    kAvx512Float32, kAvx512Bfloat16, kAvx512Bf16Bfloat16;
}

namespace {

struct Isa {
    const char* name;
    bool supported;
    const ops::Table* ops;
    const linear::TileSet* float32_tiles;
    const linear::TileSet* bfloat16_tiles;
};

std::vector<Isa> isas_of_this_machine() {
    using namespace ops;
    using namespace linear;
    std::vector<Isa> all{{"portable", true, &kPortable, &kPortableFloat32, &kPortableBfloat16}};
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
    const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    all.push_back({"avx2", avx2, &kAvx2, &kAvx2Float32, &kAvx2Bfloat16});
    all.push_back({"avx512", avx512, &kAvx512, &kAvx512Float32, &kAvx512Bfloat16});
    all.push_back({"avx512_bf16", avx512_bf16, &kAvx512Bf16, &kAvx512Float32, &kAvx512Bf16Bfloat16});
#endif
    return all;
}

// From the plainest to the best.
const std::vector<Isa>& isas() {
    static const std::vector<Isa> all = isas_of_this_machine();
    return all;
}

const Isa& find(const std::string& source, const std::string& name) {
    for (const Isa& isa : isas()) {
        if (name != isa.name) continue;
        if (isa.supported) return isa;
        throw std::invalid_argument(source + "='" + name + "' is not supported by this CPU");
    }
    std::string names;
    for (const Isa& isa : isas()) names += std::string(names.empty() ? "" : ", ") + isa.name;
    throw std::invalid_argument(source + " must be one of " + names + "; got '" + name + "'");
}

std::atomic<const Isa*> g_used{nullptr};

const Isa& used() {
    if (const Isa* isa = g_used.load(std::memory_order_acquire)) return *isa;
    const Isa* chosen = nullptr;
    if (const char* name = std::getenv("AIOSERVE_ISA"); name && *name) {
        chosen = &find("AIOSERVE_ISA", name);
    } else {
        for (const Isa& isa : isas())
            if (isa.supported) chosen = &isa;
    }
    g_used.store(chosen, std::memory_order_release);
    return *chosen;
}

}  // namespace

const ops::Kernels& kernels(ops::DType dtype) {
    const ops::Table& table = *used().ops;
    return dtype == ops::DType::bfloat16 ? table.bfloat16 : table.float32;
}

const linear::TileSet& tiles_in_use(bool bfloat16) {
    return bfloat16 ? *used().bfloat16_tiles : *used().float32_tiles;
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas())
        if (isa.supported) names.push_back(isa.name);
    return names;
}

std::string used_isa() { return used().name; }

void set_isa(const std::string& name) { g_used.store(&find("isa", name)); }

}  // namespace aioserve
