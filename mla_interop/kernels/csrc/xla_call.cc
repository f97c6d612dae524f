// One XLA FFI handler that calls any kernel of this package's ABI (docs/architecture.md) from inside an XLA program.
//
// A call of a compiled kernel runs no Python, takes no GIL and allocates nothing: DLTensors live on the stack and are
// lent to the kernel.  A python kernel gets owned tensors instead: Python receives a lent DLTensor* as a tvm_ffi.Tensor
// without a handle, whose __dlpack__ crashes the process.
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace {

namespace xf = xla::ffi;
using tvm::ffi::AnyView;
using tvm::ffi::Function;
using tvm::ffi::Tensor;

constexpr size_t kOperands = 5;    // q, k, v, cu_seqlens_q, cu_seqlens_k; a plan may follow
constexpr size_t kMaxBuffers = 9;  // with plan, scratch, out and lse
constexpr size_t kMaxRank = 4;

// Names of kernels that this process has called, and how to find the others.  TVM FFI's own table of global functions is
// not safe to read on one thread while another registers; so it is read by Python, under the GIL, once for each name.
class Kernels {
 public:
  // Never destroyed: XLA's threads may outlive static destruction.
  static Kernels& Get() {
    static auto* kernels = new Kernels;
    return *kernels;
  }

  void SetPython(Function resolve, Function collect_garbage) {
    std::unique_lock lock(mutex_);
    resolve_ = std::move(resolve);
    collect_garbage_ = std::move(collect_garbage);
  }

  // The pointer stays valid for the life of the process.
  const Function* Find(std::string_view name) {
    Function resolve;
    {
      std::shared_lock lock(mutex_);
      auto it = found_.find(name);
      if (it != found_.end()) return &it->second;
      resolve = resolve_;
    }
    // Not under the lock: Python may load a kernel here, for seconds, and other kernels shall run meanwhile.
    auto function = resolve(std::string(name)).cast<Function>();  // of None: a null function
    if (function == nullptr) return nullptr;
    std::unique_lock lock(mutex_);
    return &found_.emplace(std::string(name), std::move(function)).first->second;
  }

  void CollectGarbage() {
    Function collect;
    {
      std::shared_lock lock(mutex_);
      collect = collect_garbage_;
    }
    collect();
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::string, Function, std::less<>> found_;
  Function resolve_;
  Function collect_garbage_;
};

[[noreturn]] void Refuse(const char* text) { throw std::invalid_argument(text); }

// Sets TVM FFI's environment stream of this thread, and puts back what was there, null included.
class StreamScope {
 public:
  StreamScope(DLDevice device, void* stream) : device_(device) {
    TVM_FFI_CHECK_SAFE_CALL(TVMFFIEnvSetStream(device_.device_type, device_.device_id, stream, &previous_));
  }
  ~StreamScope() { TVMFFIEnvSetStream(device_.device_type, device_.device_id, previous_, nullptr); }
  StreamScope(const StreamScope&) = delete;
  StreamScope& operator=(const StreamScope&) = delete;

 private:
  DLDevice device_;
  TVMFFIStreamHandle previous_ = nullptr;
};

std::optional<DLDataType> ToDLDataType(xf::DataType type) {
  switch (type) {
    case xf::F16:
      return DLDataType{kDLFloat, 16, 1};
    case xf::BF16:
      return DLDataType{kDLBfloat, 16, 1};
    case xf::F32:
      return DLDataType{kDLFloat, 32, 1};
    case xf::F64:
      return DLDataType{kDLFloat, 64, 1};
    case xf::S32:
      return DLDataType{kDLInt, 32, 1};
    case xf::U8:
      return DLDataType{kDLUInt, 8, 1};
    case xf::F8E4M3FN:
      return DLDataType{kDLFloat8_e4m3fn, 8, 1};
    case xf::F8E5M2:
      return DLDataType{kDLFloat8_e5m2, 8, 1};
    default:
      return std::nullopt;
  }
}

struct XlaMemory {
  void AllocData(DLTensor* tensor, void* data) { tensor->data = data; }
  void FreeData(DLTensor*) {}
};

// The tensors of one call, lent or owned.
template <bool kOwned>
class CallTensors {
 public:
  explicit CallTensors(DLDevice device) : device_(device) {}

  // Adds a buffer, with its first dimension cut to `rows` if that is not negative.
  void Add(xf::AnyBuffer buffer, int64_t rows = -1) {
    auto dims = buffer.dimensions();
    auto dtype = ToDLDataType(buffer.element_type());
    if (!dtype.has_value()) Refuse("a buffer has a dtype that no kernel takes");
    if (dims.size() < 1 || dims.size() > kMaxRank) Refuse("a buffer has a rank that no kernel takes");
    if (rows > dims[0]) Refuse("num_k is more than the rows of k or v");
    Slot& slot = slots_[count_];
    slot.view = DLTensor{buffer.untyped_data(), device_, static_cast<int32_t>(dims.size()), *dtype, slot.shape, slot.strides, 0};
    int64_t stride = 1;
    for (size_t i = dims.size(); i-- > 0;) {
      slot.shape[i] = dims[i];
      slot.strides[i] = stride;
      stride *= dims[i];
    }
    if (rows >= 0) slot.shape[0] = rows;
    if constexpr (kOwned) {
      owned_[count_] = Tensor::FromNDAlloc(XlaMemory{}, tvm::ffi::ShapeView(slot.shape, dims.size()), *dtype, device_, slot.view.data);
    }
    ++count_;
  }

  AnyView operator[](size_t index) {
    if constexpr (kOwned) {
      return AnyView(owned_[index]);
    } else {
      return AnyView(&slots_[index].view);
    }
  }

  bool Kept() const {
    for (const Tensor& tensor : owned_) {
      if (tensor.use_count() > 1) return true;
    }
    return false;
  }

 private:
  struct Slot {
    DLTensor view;
    int64_t shape[kMaxRank];
    int64_t strides[kMaxRank];
  };

  DLDevice device_;
  size_t count_ = 0;
  std::array<Slot, kMaxBuffers> slots_;
  std::array<Tensor, kOwned ? kMaxBuffers : 0> owned_;
};

struct Attributes {
  std::string_view kernel;
  double scale;
  int64_t max_seqlen_q, max_seqlen_k, finish, num_q, num_k;
  bool has_plan, has_lse, has_scratch;
};

template <bool kOwned>
void Launch(const Function& kernel, DLDevice device, void* stream, xf::RemainingArgs args, xf::RemainingRets rets, const Attributes& attrs) {
  const size_t num_args = kOperands + attrs.has_plan;
  const size_t num_rets = size_t{1} + attrs.has_lse + attrs.has_scratch;
  if (args.size() != num_args || rets.size() != num_rets) Refuse("the number of operands or results does not match has_plan, has_lse, has_scratch");
  if (attrs.num_q > args.get<xf::AnyBuffer>(0).value().dimensions()[0]) Refuse("num_q is more than the rows of q");
  CallTensors<kOwned> tensors(device);
  for (size_t i = 0; i < num_args; ++i) {
    const bool is_key_or_value = i == 1 || i == 2;
    tensors.Add(args.get<xf::AnyBuffer>(i).value(), is_key_or_value ? attrs.num_k : -1);
  }
  for (size_t i = 0; i < num_rets; ++i) tensors.Add(*rets.get<xf::AnyBuffer>(i).value());

  const AnyView none(nullptr);
  const size_t out = num_args, lse = out + 1, scratch = out + attrs.has_lse + 1;
  const AnyView launch_args[] = {
      tensors[0],                                 // q
      tensors[1],                                 // k
      tensors[2],                                 // v
      tensors[3],                                 // cu_seqlens_q
      tensors[4],                                 // cu_seqlens_k
      attrs.has_plan ? tensors[5] : none,         // plan
      attrs.has_scratch ? tensors[scratch] : none,
      tensors[out],
      attrs.has_lse ? tensors[lse] : none,
      AnyView(attrs.scale),
      AnyView(attrs.max_seqlen_q),
      AnyView(attrs.max_seqlen_k),
      AnyView(attrs.finish),
  };
  {
    StreamScope scope(device, stream);
    tvm::ffi::Any ignored;
    kernel.CallPacked(launch_args, std::size(launch_args), &ignored);
  }
  // XLA reuses the memory as soon as the call returns.  What a cycle of dead Python objects holds is no fault.
  if (kOwned && tensors.Kept()) {
    Kernels::Get().CollectGarbage();
    if (tensors.Kept()) throw std::runtime_error("it kept a tensor of the call, whose memory is XLA's and is valid during the call only");
  }
}

std::string Text(const Attributes& attrs, const std::string& text) { return "kernel " + std::string(attrs.kernel) + ": " + text; }

// Runs the call and turns every exception into an XLA error that names the kernel.
template <bool kOwned>
xf::Error Call(DLDevice device, void* stream, xf::RemainingArgs args, xf::RemainingRets rets, const Attributes& attrs) {
  try {
    const Function* kernel = Kernels::Get().Find(attrs.kernel);
    if (kernel == nullptr) {
      return xf::Error(xf::ErrorCode::kNotFound, Text(attrs, "no such function is registered with TVM FFI in this process"));
    }
    Launch<kOwned>(*kernel, device, stream, args, rets, attrs);
    return xf::Error::Success();
  } catch (const tvm::ffi::Error& error) {
    const std::string kind = error.kind();
    const std::string text = Text(attrs, kind + ": " + error.message());
    const bool bad_argument = kind == "ValueError" || kind == "TypeError" || kind == "MLAInputError";
    return bad_argument ? xf::Error::InvalidArgument(text) : xf::Error::Internal(text);
  } catch (const std::invalid_argument& error) {
    return xf::Error::InvalidArgument(Text(attrs, error.what()));
  } catch (const std::exception& error) {
    return xf::Error::Internal(Text(attrs, error.what()));
  }
}

template <bool kOwned>
struct CallOnCpu {
  template <typename... Attrs>
  xf::Error operator()(xf::RemainingArgs args, xf::RemainingRets rets, Attrs... attrs) const {
    return Call<kOwned>(DLDevice{kDLCPU, 0}, nullptr, args, rets, Attributes{attrs...});
  }
};

template <bool kOwned>
struct CallOnGpu {
  template <typename... Attrs>
  xf::Error operator()(void* stream, int32_t ordinal, xf::RemainingArgs args, xf::RemainingRets rets, Attrs... attrs) const {
    return Call<kOwned>(DLDevice{kDLCUDA, ordinal}, stream, args, rets, Attributes{attrs...});
  }
};

// The order is that of the members of Attributes.
template <typename Binding>
auto BindBuffersAndAttributes(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<std::string_view>("kernel")
      .template Attr<double>("scale")
      .template Attr<int64_t>("max_seqlen_q")
      .template Attr<int64_t>("max_seqlen_k")
      .template Attr<int64_t>("finish")
      .template Attr<int64_t>("num_q")
      .template Attr<int64_t>("num_k")
      .template Attr<bool>("has_plan")
      .template Attr<bool>("has_lse")
      .template Attr<bool>("has_scratch");
}

auto BindCpu() { return BindBuffersAndAttributes(xf::Ffi::Bind()); }
auto BindGpu() { return BindBuffersAndAttributes(xf::Ffi::Bind().Ctx<xf::PlatformStream<void*>>().Ctx<xf::DeviceOrdinal>()); }

// Called by Python once: how to find a kernel by its name (a Function, or None), and how to free dead cycles.
void SetPython(Function resolve, Function collect_garbage) { Kernels::Get().SetPython(std::move(resolve), std::move(collect_garbage)); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_python, SetPython);

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(mla_interop_xla_call_cpu, CallOnCpu<false>{}, BindCpu());
XLA_FFI_DEFINE_HANDLER_SYMBOL(mla_interop_xla_call_cpu_python, CallOnCpu<true>{}, BindCpu());
// A compiled kernel only launches on the stream it is given, so XLA may capture it into a CUDA graph.  A captured python
// kernel would run once and never again: it does not claim that trait.
XLA_FFI_DEFINE_HANDLER_SYMBOL(mla_interop_xla_call_gpu, CallOnGpu<false>{}, BindGpu(), {xf::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(mla_interop_xla_call_gpu_python, CallOnGpu<true>{}, BindGpu());
#pragma GCC visibility pop
