// xent_ops._C: the CPU kernels for the Python package, as operators of the namespace `xent_cpu`. Python owns the namespace
// `xent` with its checks, fakes and autograd formulas; its CPU kernels call these (xent_ops/kernels/cpu.py). Only tests call
// those of linear cross entropy: one chunk loop in Python serves all devices.
#include "operators.h"

#include <Python.h>

STABLE_TORCH_LIBRARY(xent_cpu, library) {
#define XENT_DEFINE(name, schema) library.def(schema);
  XENT_OPERATORS(XENT_DEFINE)
#undef XENT_DEFINE
}

STABLE_TORCH_LIBRARY_IMPL(xent_cpu, CPU, library) {
#define XENT_IMPLEMENT(name, schema) library.impl(#name, &xent::boxed<&xent::operators::name, false>);
  XENT_OPERATORS(XENT_IMPLEMENT)
#undef XENT_IMPLEMENT
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
