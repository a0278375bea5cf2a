// The extension module `aioserve._native`: one binding function per folder beside this file.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_pool(nb::module_& m);
void bind_tree(nb::module_& m);
void bind_ops(nb::module_& m);
void bind_linear(nb::module_& m);
void bind_experts(nb::module_& m);
void bind_weights(nb::module_& m);
void bind_measure(nb::module_& m);
void bind_program(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_drafting(nb::module_& m);
void bind_wake(nb::module_& m);
void bind_cuda(nb::module_& m);

NB_MODULE(_native, m) {
    // An engine that is alive at interpreter exit is no leak worth a report on the terminal.
    nb::set_leak_warnings(false);
    m.doc() =
        "Native parts of aioserve: page pool, prefix tree, CPU operations, packed linear layers, "
        "experts, step programs, draws, drafters, reading weights, measuring, waking an event loop, texts of CUDA kernels.";
    bind_pool(m);
    bind_tree(m);
    bind_ops(m);
    bind_linear(m);
    bind_experts(m);
    bind_weights(m);
    bind_measure(m);
    bind_program(m);
    bind_sampling(m);
    bind_drafting(m);
    bind_wake(m);
    bind_cuda(m);
}
