// libxent_ops.so: the namespace `xent` for processes that never import the Python package. Schemas, meta kernels and
// CPU kernels of every operator, registered when the library is loaded.
#include "checks.h"
#include "operators/operators.h"
#include "schemas.h"

#include <dlfcn.h>

#include <cstdio>
#include <exception>

namespace xent {

const bool CHECKED = true;

namespace {

// One registration, for the life of the process: the dispatcher may still call into it while statics are destroyed.
class Registration {
 public:
  Registration(const char* key, const char* file) {
    ok_ = (key ? aoti_torch_library_init_impl("xent", key, file, 0, &library_)
               : aoti_torch_library_init_def("xent", file, 0, &library_)) == TORCH_SUCCESS;
  }

  bool ok() const { return ok_; }

  void define(const char* schema) { aten::succeed(aoti_torch_library_def(library_, schema), schema); }

  void implement(const char* name, operators::Kernel kernel) {
    aten::succeed(torch_library_impl(library_, name, kernel, TORCH_ABI_VERSION), name);
  }

 private:
  TorchLibraryHandle library_ = nullptr;
  bool ok_;
};

// This library's path. The dispatcher names it in the error of a later registration of the namespace.
const char* own_path() {
  Dl_info info{};
  return dladdr(reinterpret_cast<void*>(&own_path), &info) && info.dli_fname ? info.dli_fname : "libxent_ops.so";
}

// The hash of the sources that this was built from. xent_ops/_extension.py searches the file for it.
[[gnu::used]] const char sources[] = XENT_OPS_SOURCES;

void register_operators(const char* path) {
  // Claiming the namespace fails if it is taken, by the Python package or by a copy of this library. Both have
  // registered the same operators, so there is nothing to do. (STABLE_TORCH_LIBRARY would continue and crash.)
  Registration schemas(nullptr, path);
  if (!schemas.ok()) {
    return;
  }
  Registration cpu("CPU", path), meta("Meta", path), composite("CompositeImplicitAutograd", path);
  for (const char* schema : SCHEMAS) {
    schemas.define(schema);
  }
  operators::add_kernels([&](const char* name, operators::Kernel kernel) {
    cpu.implement(name, kernel);
    meta.implement(name, kernel);
  });
  operators::add_composite([&](const char* name, operators::Kernel kernel) { composite.implement(name, kernel); });
}

// An exception here would end the process. If an operator of the same name comes from elsewhere, half of the operators
// are missing, and the first call of one raises.
[[maybe_unused]] const bool loaded = [] {
  const char* path = own_path();
  try {
    register_operators(path);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: its operators could not be registered: %s\n", path, error.what());
    return false;
  }
  return true;
}();

}  // namespace
}  // namespace xent
