#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mlxserve;

NB_MODULE(MODULE_NAME, m) {
  m.def("set_threads", &set_threads, "threads"_a);
  m.def("threads", &threads);
  m.def("set_level", [](const std::string& name) { return set_level(name.c_str()); }, "name"_a);
  m.def("level", [] { return kernels().name; });
  bind_append(m);
  bind_attention(m);
  bind_matmul(m);
  bind_program(m);
  bind_quantize(m);
  bind_rows(m);
  bind_select(m);
}
