// Compiled kernels of the package's ABI for tests: one reports what it sees, one writes on a GPU, one counts another's calls, the others do nothing.
#include <dlfcn.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <atomic>
#include <cstring>

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Whether the calling thread holds Python's GIL; -1 in a process without Python.
int HoldsGil() {
  auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check == nullptr ? -1 : check();
}

// out[0, 0, :] = (GIL held, rows of k, environment stream, max_seqlen_q, max_seqlen_k, finish, scale, has plan)
void Report(TensorView q, TensorView k, TensorView v, TensorView, TensorView, Optional<TensorView> plan, Optional<TensorView>, TensorView out,
            Optional<TensorView>, double scale, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t finish) {
  DLDevice device = q.device();
  double seen[] = {static_cast<double>(HoldsGil()),
                   static_cast<double>(k.size(0)),
                   static_cast<double>(reinterpret_cast<intptr_t>(TVMFFIEnvGetStream(device.device_type, device.device_id))),
                   static_cast<double>(max_seqlen_q),
                   static_cast<double>(max_seqlen_k),
                   static_cast<double>(finish),
                   scale,
                   plan.has_value() ? 1.0 : 0.0};
  auto* data = static_cast<double*>(out.data_ptr());
  for (int64_t i = 0; i < out.numel(); ++i) data[i] = seen[i % 8];
}

std::atomic<int64_t> fills{0};

// Fills out, float32 on a GPU, with `scale`, by the driver's asynchronous memset on the environment stream.
void FillOnGpu(TensorView, TensorView, TensorView, TensorView, TensorView, Optional<TensorView>, Optional<TensorView>, TensorView out,
               Optional<TensorView>, double scale, int64_t, int64_t, int64_t) {
  static auto memset_async =
      reinterpret_cast<int (*)(uint64_t, uint32_t, size_t, void*)>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemsetD32Async"));
  DLDevice device = out.device();
  void* stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
  if (stream == nullptr) TVM_FFI_THROW(RuntimeError) << "no stream";
  if (HoldsGil() != 0) TVM_FFI_THROW(RuntimeError) << "the GIL is held";
  auto value = static_cast<float>(scale);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  int code = memset_async(reinterpret_cast<uint64_t>(out.data_ptr()), bits, out.numel(), stream);
  if (code != 0) TVM_FFI_THROW(RuntimeError) << "cuMemsetD32Async: " << code;
  ++fills;
}

int64_t Fills() { return fills; }

std::atomic<int64_t> counted_calls{0};

// `kernel` itself, with its calls counted: fewer calls than launches means that they were captured and replayed.
tvm::ffi::Function Counted(tvm::ffi::Function kernel) {
  return tvm::ffi::Function::FromPacked([kernel](const tvm::ffi::AnyView* args, int32_t count, tvm::ffi::Any* result) {
    ++counted_calls;
    kernel.CallPacked(args, count, result);
  });
}

int64_t CountedCalls() { return counted_calls; }

void Nothing(TensorView, TensorView, TensorView, TensorView, TensorView, Optional<TensorView>, Optional<TensorView>, TensorView, Optional<TensorView>,
             double, int64_t, int64_t, int64_t) {}

// The same eight buffers in the order of XLA's operands and results, for jax-tvm-ffi.
void NothingOfEight(TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView) {}
void NothingOfEightAndFive(TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, TensorView, double, int64_t, int64_t,
                           int64_t, int64_t) {}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(report, Report);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fill_on_gpu, FillOnGpu);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fills, Fills);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(counted, Counted);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(counted_calls, CountedCalls);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nothing, Nothing);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nothing_of_eight, NothingOfEight);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nothing_of_eight_and_five, NothingOfEightAndFive);
