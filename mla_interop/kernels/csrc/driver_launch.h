// A kernel launched by the driver itself.  Every library here has a CUDA runtime of its own, which finds the kernel's function in the current
// context anew in every launch, and whose code and state no cache holds any more when the next call comes.
#pragma once

#include <dlfcn.h>

#include <optional>

namespace mla {

// What is used of the driver's interface.  Its header comes with the CUDA toolkit, which the machine that links a library need not have.
class Driver {
 public:
  int (*context_id)(void* context, unsigned long long* id);  // of null: the current one
  int (*context_device)(int* device);
  int (*kernel_function)(void** function, void* kernel);  // in the current context
  int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                unsigned shared_bytes, void* stream, void** arguments, void** extra);

  // Null where there is no driver, or it has no such function.
  static void* symbol(const char* name) {
    static void* const library = dlopen("libcuda.so.1", RTLD_NOW);  // never closed
    return library == nullptr ? nullptr : dlsym(library, name);
  }

  // Null where there is no driver of CUDA 12.
  static const Driver* get() {
    static const Driver driver;
    return driver.found_ ? &driver : nullptr;
  }

 private:
  Driver() {
    found_ = find("cuCtxGetId", context_id) && find("cuCtxGetDevice", context_device) && find("cuKernelGetFunction", kernel_function) &&
             find("cuLaunchKernel", launch);
  }

  template <typename Pointer>
  static bool find(const char* name, Pointer& pointer) {
    pointer = reinterpret_cast<Pointer>(symbol(name));
    return pointer != nullptr;
  }

  bool found_;
};

// The device of the current context, which is the runtime's current device too; -1 where there is none.
inline int current_device() {
  const Driver* driver = Driver::get();
  int device = -1;
  return driver != nullptr && driver->context_device(&device) == 0 ? device : -1;
}

struct LaunchShape {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
};

// The function of a `cudaKernel_t` in the current context, or null. Contexts are told apart by their ids: a destroyed one's address may come again.
inline void* function_of(const Driver& driver, unsigned long long context, void* kernel) {
  struct Known {
    unsigned long long context;
    void *kernel, *function;
  };
  thread_local Known known[4];  // a library has no more kernels; for a second context they are looked up again
  thread_local unsigned oldest = 0;
  for (const Known& each : known) {
    if (each.kernel == kernel && each.context == context) return each.function;
  }
  void* function = nullptr;
  if (driver.kernel_function(&function, kernel) != 0) return nullptr;
  known[oldest++ % 4] = {context, kernel, function};
  return function;
}

// Launches `kernel`, a `cudaKernel_t`, and returns the CUDA error; or nothing, and then the runtime has to do it: without a current context, say,
// which it makes.
inline std::optional<int> launch_by_driver(void* kernel, const LaunchShape& shape, void** arguments) {
  const Driver* driver = Driver::get();
  unsigned long long context = 0;
  if (driver == nullptr || driver->context_id(nullptr, &context) != 0) return std::nullopt;
  void* function = function_of(*driver, context, kernel);
  if (function == nullptr) return std::nullopt;
  const auto& [grid, block, shared_bytes, stream] = shape;
  return driver->launch(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], shared_bytes, stream, arguments, nullptr);
}

}  // namespace mla
