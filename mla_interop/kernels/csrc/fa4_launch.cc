// The door of a library whose kernel is wrong for small scales (fa4_kernels.py says why): such a scale is refused before anything is launched.
//
// CuTe DSL checks every argument of `launch`, but can be told of no condition on a number. So its function has another name here, and the one
// that callers find looks at the scale first. What else is wrong with the arguments, the DSL's own checks say.
#include <tvm/ffi/c_api.h>

#include <cstdio>

namespace {
constexpr int32_t kScale = 9;  // among the arguments of the package's kernel ABI
}

extern "C" {

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

}  // extern "C"
