// What stands before and behind the host function that CuTe DSL made.
//
// Before: the door of a library whose kernel is wrong for small scales (fa4_kernels.py says why): such a scale is refused before anything is
// launched. The DSL checks every argument of `launch`, but can be told of no condition on a number. So its function has another name then, and
// the one that callers find looks at the scale first. What else is wrong with the arguments, the DSL's own checks say.
//
// Behind: what it asks of the CUDA runtime in every call comes here (the linker's --wrap), and the driver does it.
#include <tvm/ffi/c_api.h>

#include <cstdio>

#include "driver_launch.h"

namespace {

constexpr int32_t kScale = 9;  // among the arguments of the package's kernel ABI

// As cudaLaunchAttribute and cudaLaunchConfig_t.
struct Attribute {
  static constexpr int kCooperative = 2, kProgrammaticStreamSerialization = 6;
  int id, padding, value, more_of_value[15];
  bool is_default() const { return (id == kCooperative || id == kProgrammaticStreamSerialization) && value == 0; }
};
struct LaunchConfig {
  unsigned grid[3], block[3];
  size_t shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
};
static_assert(sizeof(Attribute) == 72 && sizeof(LaunchConfig) == 56);

bool is_plain(const LaunchConfig& config) {
  for (unsigned i = 0; i < config.num_attributes; ++i) {
    if (!config.attributes[i].is_default()) return false;
  }
  return true;
}

}  // namespace

extern "C" {

int __real__cudaLaunchKernelEx(const LaunchConfig* config, void* kernel, void** arguments);

int __wrap__cudaLaunchKernelEx(const LaunchConfig* config, void* kernel, void** arguments) {
  if (is_plain(*config)) {
    const auto& [grid, block, shared_bytes, stream, attributes, num_attributes] = *config;
    const mla::LaunchShape shape{{grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, static_cast<unsigned>(shared_bytes), stream};
    if (const std::optional<int> error = mla::launch_by_driver(kernel, shape, arguments)) return *error;
  }
  return __real__cudaLaunchKernelEx(config, kernel, arguments);
}

int __real__cudaGetDevice(int* device);

int __wrap__cudaGetDevice(int* device) {
  *device = mla::current_device();
  return *device >= 0 ? 0 : __real__cudaGetDevice(device);
}

#ifdef SMALLEST_SCALE
int __tvm_ffi_launch_unchecked(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result);

TVM_FFI_DLL_EXPORT int __tvm_ffi_launch(void* self, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result) {
  if (num_args > kScale) {
    const TVMFFIAny& given = args[kScale];
    const bool is_float = given.type_index == kTVMFFIFloat;
    const double scale = is_float ? given.v_float64 : static_cast<double>(given.v_int64);
    // In float32, as the kernel gets it; and so that a NaN is refused too.
    const bool is_number = is_float || given.type_index == kTVMFFIInt || given.type_index == kTVMFFIBool;
    if (is_number && !(static_cast<float>(scale) >= static_cast<float>(SMALLEST_SCALE))) {
      char text[200];
      snprintf(text, sizeof text, "launch: scale: got %g; allowed: at least %g. The library that is built for any scale serves others.", scale, SMALLEST_SCALE);
      TVMFFIErrorSetRaisedFromCStr("ValueError", text);
      return -1;
    }
  }
  return __tvm_ffi_launch_unchecked(self, args, num_args, result);
}
#endif

}  // extern "C"
