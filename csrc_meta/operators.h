// The operators of schemas.h, which the build makes from xent_ops/ops/schemas.py.
#pragma once

#include "schemas.h"
#include "stack.h"

namespace xent::operators {

#define XENT_DECLARE(name, schema) void name(Stack& stack);
// Kernels for the CPU and for meta tensors. On Linux the linker names one that is missing.
XENT_OPERATORS(XENT_DECLARE)
// Composites: they call other operators, on any device.
XENT_COMPOSITES(XENT_DECLARE)
#undef XENT_DECLARE

}  // namespace xent::operators
