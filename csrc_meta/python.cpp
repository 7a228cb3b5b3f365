// xent_ops._C: the CPU kernels for the Python package, as operators of the namespace `xent_cpu`. Python owns the
// namespace `xent` with its checks, fakes and autograd formulas; its CPU kernels call these (xent_ops/kernels/cpu.py).
#include "checks.h"
#include "operators/operators.h"
#include "schemas.h"

#include <Python.h>

STABLE_TORCH_LIBRARY(xent_cpu, library) {
  for (const char* schema : xent::SCHEMAS) {
    library.def(schema);
  }
}

STABLE_TORCH_LIBRARY_IMPL(xent_cpu, CPU, library) {
  xent::operators::add_kernels([&](const char* name, xent::operators::Kernel kernel) { library.impl(name, kernel); });
}

// Python has checked.
namespace xent {
const bool CHECKED = false;
}

// Which sources this was built from; xent_ops/_extension.py looks for it in the file.
[[gnu::used]] static const char sources[] = XENT_OPS_SOURCES;

// Which instructions the kernels use on this processor; ctypes calls it.
extern "C" [[gnu::visibility("default")]] const char* xent_ops_instruction_set() {
  return xent::cpu::instruction_set();
}

// Importing the module runs the registrations above; it holds nothing else.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
