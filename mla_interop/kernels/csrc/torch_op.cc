// The operators of torch_side.op without Python: a call like one that was served before allocates its outputs and launches its kernel, and that is all.
// Whatever else there is (the first call of a kind, a wrong argument, a kernel that is Python, a launch that fails) goes to the operators'
// implementation in Python, which serves it or refuses it in words, and tells this file what it may do by itself the next time.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <ATen/DLConvertor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace {

using c10::IValue;
using torch::jit::Stack;
using tvm::ffi::AnyView;
using tvm::ffi::Function;
using tvm::ffi::Optional;

// The arguments, in the order of torch_side.op's schema; an operator with `out` has it last.
enum Argument : size_t { kQ, kK, kV, kCuQ, kCuK, kPlan, kNumQ, kNumK, kMaxQ, kMaxK, kScale, kOptions, kOut };

constexpr size_t kMaxEntries = 8192;

// What calls of one key share. Lengths are here where the call has none of its own: sequences of equal lengths.
struct Prepared {
  Function kernel;
  at::ScalarType out_dtype;
  int64_t scratch_floats;
  double scale;
  int64_t max_seqlen_q, max_seqlen_k, finish;
  Optional<tvm::ffi::Tensor> cu_seqlens_q, cu_seqlens_k, plan;
};

// Of a call, all that decides what runs, as bytes: layouts, dtypes and devices, and whatever is not a tensor.
class Key {
 public:
  void add(int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }

  void add(const at::Tensor& x) {
    const auto index = static_cast<uint8_t>(x.device().index());  // -1 for the CPU, whose sign must not spread over the rest
    add(static_cast<int64_t>(x.scalar_type()) | static_cast<int64_t>(x.device().type()) << 8 | int64_t{index} << 16 | x.dim() << 32);
    for (const int64_t extent : x.sizes()) add(extent);
    for (const int64_t stride : x.strides()) add(stride);
    const auto place = reinterpret_cast<uintptr_t>(x.const_data_ptr());
    add(static_cast<int64_t>(place == 0 ? 16 : place & 15));  // a storage that was freed is aligned too
  }

  void add(const IValue& value) {
    add(static_cast<int64_t>(value.isNone()));
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isDouble()) {
      const double number = value.toDouble();
      bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
    } else if (value.isString()) {
      add(static_cast<int64_t>(value.toStringRef().size()));
      bytes_.append(value.toStringRef());
    } else if (!value.isNone()) {
      add(value.toSymInt().guard_int(__FILE__, __LINE__));
    }
  }

  std::string& bytes() { return bytes_; }

 private:
  std::string bytes_;
};

class Calls {
 public:
  // Never destroyed: threads may outlive static destruction.
  static Calls& get() {
    static auto* calls = new Calls;
    return *calls;
  }

  std::shared_ptr<const Prepared> find(const std::string& key) {
    std::shared_lock lock(mutex_);
    const auto found = calls_.find(key);
    return found == calls_.end() ? nullptr : found->second;
  }

  void add(const std::string& key, std::shared_ptr<const Prepared> call) {
    Map dropped;  // destroyed without the lock: what goes may wait for the GIL, which may be held by a thread that waits for the lock
    std::unique_lock lock(mutex_);
    if (calls_.size() >= kMaxEntries) calls_.swap(dropped);
    calls_[key].swap(call);
  }

  size_t size() {
    std::shared_lock lock(mutex_);
    return calls_.size();
  }

  void clear() {
    Map dropped;
    std::unique_lock lock(mutex_);
    calls_.swap(dropped);
  }

  // No call is looked up while this runs.
  template <typename F>
  void pausing(F run) {
    std::unique_lock lock(mutex_);
    run();
  }

 private:
  using Map = std::unordered_map<std::string, std::shared_ptr<const Prepared>>;

  std::shared_mutex mutex_;
  Map calls_;
};

// The key of the call that Python serves for this thread now; null for one that it always has to serve.
thread_local const std::string* served_by_python = nullptr;

void serve_by_python(const c10::OperatorHandle& op, Stack* stack, const std::string* key) {
  struct Scope {
    const std::string* before = served_by_python;
    ~Scope() { served_by_python = before; }
  } scope;
  served_by_python = key;
  op.callBoxedForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd, *stack);
}

// A tensor as a kernel takes it; a dense batch [B, T, N, D] as its rows, [B * T, N, D].
struct View {
  DLTensor tensor;
  std::array<int64_t, 3> shape, strides;

  // False for a batch whose rows are not evenly spaced: that needs a copy.
  static bool can_be_of(const at::Tensor& x) {
    if (x.dim() != 4) return x.dim() < 4;
    return x.size(0) <= 1 || x.size(1) <= 1 || x.stride(0) == x.size(1) * x.stride(1);
  }

  void set(const at::Tensor& x, void* data) {
    const size_t batch = x.dim() == 4, dims = x.dim() - batch;
    for (size_t i = 0; i < dims; ++i) {
      shape[i] = x.size(batch + i);
      strides[i] = x.stride(batch + i);
    }
    if (batch && x.size(0) > 1 && x.size(1) == 1) strides[0] = x.stride(0);
    if (batch) shape[0] *= x.size(0);
    const DLDevice device{x.is_cuda() ? kDLCUDA : kDLCPU, x.is_cuda() ? x.device().index() : 0};
    tensor = DLTensor{data, device, static_cast<int32_t>(dims), at::getDLDataType(x), shape.data(), strides.data(), 0};
  }

  View() = default;
  View(const View&) = delete;
};

// The stream of torch is that of TVM FFI's kernels while this lives.
class StreamScope {
 public:
  explicit StreamScope(c10::Device device) : device_{kDLCUDA, device.index()}, on_(device.is_cuda()) {
    if (!on_) return;
    const c10::impl::VirtualGuardImpl guard(device.type());
    void* const stream = guard.getStreamNativeHandle(guard.getStream(device));
    TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvSetStream(device_.device_type, device_.device_id, stream, &before_));
  }
  ~StreamScope() {
    if (on_) TVMFFIEnvSetStream(device_.device_type, device_.device_id, before_, nullptr);
  }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  DLDevice device_;
  bool on_;
  TVMFFIStreamHandle before_ = nullptr;
};

bool overlap(const at::Tensor& x, const at::Tensor& out) {
  int64_t last = 0;
  for (int64_t i = 0; i < x.dim(); ++i) last += (x.size(i) - 1) * x.stride(i);
  const auto first = reinterpret_cast<uintptr_t>(x.const_data_ptr()), start = reinterpret_cast<uintptr_t>(out.const_data_ptr());
  return first < start + out.nbytes() && start < first + (last + 1) * x.itemsize();
}

// False where the kernel refuses.
bool launch(const Prepared& call, c10::ArrayRef<IValue> arguments, const at::Tensor& out, const at::Tensor& lse) {
  const at::Tensor& q = arguments[kQ].toTensor();
  std::array<View, 9> views;
  size_t count = 0;
  const auto place = [&](const at::Tensor& x, void* data) {
    views[count].set(x, data);
    return AnyView(&views[count++].tensor);
  };
  const auto view = [&](const at::Tensor& x) { return place(x, const_cast<void*>(x.const_data_ptr())); };
  const bool own_lengths = !arguments[kCuQ].isNone();  // as in Python, what else is given counts only beside cu_seqlens_q
  const auto lengths = [&](size_t at, const Optional<tvm::ffi::Tensor>& kept) {
    if (own_lengths) return arguments[at].isNone() ? AnyView(nullptr) : view(arguments[at].toTensor());
    return kept.has_value() ? AnyView(kept.value()) : AnyView(nullptr);
  };
  const at::Tensor scratch = call.scratch_floats ? at::empty_strided({call.scratch_floats}, {1}, q.options().dtype(at::kFloat)) : at::Tensor();
  const AnyView cu_seqlens_q = lengths(kCuQ, call.cu_seqlens_q);
  const bool same = own_lengths && arguments[kCuK].isNone();
  std::array<AnyView, 13> passed = {
      view(q), view(arguments[kK].toTensor()), view(arguments[kV].toTensor()),
      cu_seqlens_q, same ? cu_seqlens_q : lengths(kCuK, call.cu_seqlens_k), lengths(kPlan, call.plan),
      scratch.defined() ? view(scratch) : AnyView(nullptr), place(out, out.mutable_data_ptr()), AnyView(nullptr),
      AnyView(call.scale), AnyView(call.max_seqlen_q), AnyView(call.max_seqlen_k), AnyView(call.finish)};
  View lse_view;  // [N, rows] whatever out is
  if (lse.defined()) {
    lse_view.set(lse, lse.mutable_data_ptr());
    if (lse.dim() == 3) {
      lse_view.shape = {lse.size(1), lse.size(0) * lse.size(2), 0};
      lse_view.strides = {lse_view.shape[1], 1, 0};
      lse_view.tensor.ndim = 2;
    }
    passed[8] = AnyView(&lse_view.tensor);
  }
  const c10::DeviceGuard guard(q.device());
  const StreamScope stream(q.device());
  try {
    tvm::ffi::Any ignored;
    call.kernel.CallPacked(passed.data(), passed.size(), &ignored);
  } catch (const tvm::ffi::Error&) {
    return false;  // Python launches it again, and raises what it raises there
  }
  return true;
}

at::Tensor new_lse(const at::Tensor& q) {
  const auto options = q.options().dtype(at::kFloat);
  if (q.dim() == 3) return at::empty_strided({q.size(1), q.size(0)}, {q.size(0), 1}, options);
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2);
  return at::empty_strided({batch, heads, tokens}, {tokens, batch * tokens, 1}, options);
}

at::Tensor new_out(const at::Tensor& q, const at::Tensor& v, at::ScalarType dtype) {
  std::array<int64_t, 4> shape, strides;
  int64_t stride = 1;
  for (int64_t i = q.dim(); i-- > 0; stride *= shape[i]) {
    shape[i] = i == q.dim() - 1 ? v.size(i) : q.size(i);
    strides[i] = stride;
  }
  const size_t dims = q.dim();
  return at::empty_strided({shape.data(), dims}, {strides.data(), dims}, q.options().dtype(dtype));
}

template <bool kReturnLse, bool kHasOut>
void call(const c10::OperatorHandle& op, Stack* stack) {
  constexpr size_t kArguments = kHasOut ? kOut + 1 : kOut;
  const c10::ArrayRef<IValue> arguments(stack->data() + stack->size() - kArguments, kArguments);
  thread_local Key key;  // for its memory
  key.bytes().clear();
  key.add(kReturnLse + 2 * kHasOut);
  for (const IValue& argument : arguments) key.add(argument);
  const std::shared_ptr<const Prepared> found = Calls::get().find(key.bytes());
  if (found != nullptr) {
    const at::Tensor &q = arguments[kQ].toTensor(), &k = arguments[kK].toTensor(), &v = arguments[kV].toTensor();
    const at::Tensor out = kHasOut ? arguments[kArguments - 1].toTensor() : new_out(q, v, found->out_dtype);
    const at::Tensor lse = kReturnLse ? new_lse(q) : at::Tensor();
    const bool refused = kHasOut && ((out.requires_grad() && c10::GradMode::is_enabled()) || overlap(q, out) || overlap(k, out) || overlap(v, out));
    if (!refused && launch(*found, arguments, out, lse)) {
      stack->resize(stack->size() - kArguments);
      if (!kHasOut) stack->emplace_back(out);
      if (kReturnLse) stack->emplace_back(lse);
      return;
    }
  }
  const std::string bytes = key.bytes();  // Python may call an operator itself
  // A kernel that did not launch may have called one too, and the key is that call's.
  const bool can = found == nullptr && std::all_of(arguments.begin(), arguments.end(), [](const IValue& x) { return !x.isTensor() || View::can_be_of(x.toTensor()); });
  serve_by_python(op, stack, can ? &bytes : nullptr);
}

// Called by Python while it serves a call: calls with the same key are served here from now on, with these arguments of the kernel.
void remember(Function kernel, DLDataType out_dtype, int64_t scratch_floats, double scale, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t finish,
              Optional<tvm::ffi::Tensor> cu_seqlens_q, Optional<tvm::ffi::Tensor> cu_seqlens_k, Optional<tvm::ffi::Tensor> plan) {
  if (served_by_python == nullptr) return;
  Calls::get().add(*served_by_python, std::make_shared<const Prepared>(Prepared{std::move(kernel), at::toScalarType(out_dtype), scratch_floats, scale,
                                                                                max_seqlen_q, max_seqlen_k, finish, std::move(cu_seqlens_q),
                                                                                std::move(cu_seqlens_k), std::move(plan)}));
}

// Puts these functions before Python's, for CPU and CUDA tensors, once in a process. Other threads may call the operators meanwhile: what they find
// here waits for the end, since on its way to Python it would read tables that are written.
void register_operators() {
  Calls::get().pausing([] {
    static bool done = false;
    if (std::exchange(done, true)) return;
    for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::CUDA}) {
      auto* library = new torch::Library(torch::Library::IMPL, "mla_interop", key, __FILE__, __LINE__);
      library->impl("prefill", torch::CppFunction::makeFromBoxedFunction<&call<false, false>>());
      library->impl("prefill_lse", torch::CppFunction::makeFromBoxedFunction<&call<true, false>>());
      library->impl("prefill_out", torch::CppFunction::makeFromBoxedFunction<&call<false, true>>());
      library->impl("prefill_lse_out", torch::CppFunction::makeFromBoxedFunction<&call<true, true>>());
    }
  });
}

int64_t remembered() { return static_cast<int64_t>(Calls::get().size()); }
void forget() { Calls::get().clear(); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(register_operators, register_operators);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(remember, remember);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(remembered, remembered);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(forget, forget);
