#include "ops/dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace aioserve::ops {
namespace {

struct Isa {
    const char* name;
    const Table* table;
    bool supported;
};

// From the plainest to the best.
const std::vector<Isa>& isas() {
#if defined(__x86_64__)
    static const std::vector<Isa> all = [] {
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512dq");
        const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
        return std::vector<Isa>{{"portable", &kPortable, true},
                                {"avx2", &kAvx2, avx2},
                                {"avx512", &kAvx512, avx512},
                                {"avx512_bf16", &kAvx512Bf16, avx512_bf16}};
    }();
#else
    static const std::vector<Isa> all = {{"portable", &kPortable, true},
                                         {"avx2", nullptr, false},
                                         {"avx512", nullptr, false},
                                         {"avx512_bf16", nullptr, false}};
#endif
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

const Kernels& kernels(DType dtype) {
    const Table& table = *used().table;
    return dtype == DType::bfloat16 ? table.bfloat16 : table.float32;
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (const Isa& isa : isas())
        if (isa.supported) names.push_back(isa.name);
    return names;
}

std::string used_isa() { return used().name; }

void set_isa(const std::string& name) { g_used.store(&find("isa", name)); }

}  // namespace aioserve::ops
