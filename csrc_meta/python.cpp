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

// Python has already checked the arguments.
namespace xent {
const bool CHECKED = false;
}

// The hash of the sources that this was built from. xent_ops/_extension.py searches the file for it.
[[gnu::used]] static const char sources[] = XENT_OPS_SOURCES;

// The instruction set that the kernels use on this processor. Called by ctypes.
extern "C" [[gnu::visibility("default")]] const char* xent_ops_instruction_set() {
  return xent::cpu::instruction_set();
}

// Importing the module runs the registrations above; it holds nothing else.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&definition);
}
