// FlashInfer's kernels behind the kernel ABI (docs/architecture.md), a closure for each generation. It takes every native function that it
// needs as an argument, so it is plain C++, and a test can give it fakes.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <optional>

#include "flashinfer_plan.h"

namespace {

using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Row-major float32 [rows, heads] over the scratch buffer: where the kernel leaves its log-sum-exp.
struct NativeLse {
  int64_t shape[2], strides[2];
  DLTensor tensor;

  NativeLse(TensorView scratch, int64_t rows, int64_t heads) : shape{rows, heads}, strides{heads, 1} {
    tensor = {scratch.data_ptr(), scratch.device(), 2, DLDataType{kDLFloat, 32, 1}, shape, strides, scratch.byte_offset()};
  }
  NativeLse(const NativeLse&) = delete;
};

struct Scales {
  double least, greatest;

  void check(double scale) const {
    if (!(scale >= least && scale <= greatest))
      TVM_FFI_THROW(ValueError) << "scale: got " << scale << "; allowed: " << least << " to " << greatest << " for FlashInfer's kernels";
  }
};

// A list made for other sizes would be read at wrong places.
void check_plan(TensorView plan, int64_t bytes, TensorView q, TensorView cu_q) {
  if (plan.ndim() != 1 || plan.size(0) != bytes || plan.dtype().bits != 8)
    TVM_FFI_THROW(RuntimeError) << "plan: got " << plan.size(0) << " bytes; allowed: the " << bytes << " bytes of a work list for " << q.size(0) << " rows, "
                                << cu_q.size(0) - 1 << " sequences and " << q.size(1) << " heads on this device";
}

// Generation 3: `run` is flashinfer_fa3.cu's, which writes lse as the ABI wants it.
class Fa3 {
 public:
  Fa3(Function run, Function finish, Function num_sms, bool causal, Scales scales)
      : run_(std::move(run)), finish_(std::move(finish)), num_sms_(std::move(num_sms)), causal_(causal), scales_(scales) {}

  void operator()(TensorView q, TensorView k, TensorView v, TensorView cu_q, TensorView cu_k, TensorView plan, Optional<TensorView> /*scratch*/,
                  TensorView out, Optional<TensorView> lse, double scale, int64_t /*max_q*/, int64_t /*max_k*/, int64_t finish) const {
    scales_.check(scale);
    const int64_t sequences = cu_q.size(0) - 1;
    const int64_t sms = num_sms_(static_cast<int64_t>(q.device().device_id)).cast<int64_t>();
    check_plan(plan, mla::Fa3Layout(q.size(0), sequences, q.size(1), sms).bytes, q, cu_q);
    run_(q, k, v, plan, sequences, causal_, scale, out, lse, sms);
    if (finish != 0) finish_(cu_q, cu_k, nullptr, out, lse, finish, causal_);
  }

 private:
  Function run_, finish_, num_sms_;
  bool causal_;
  Scales scales_;
};

// Generation 2: FlashInfer's raw `ragged_run`, which gets the constants, the absent tensors and the offsets of the work list.
class Fa2 {
 public:
  Fa2(Function ragged_run, Function finish, bool causal, Scales scales)
      : ragged_run_(std::move(ragged_run)), finish_(std::move(finish)), causal_(causal), scales_(scales) {}

  void operator()(TensorView q, TensorView k, TensorView v, TensorView cu_q, TensorView cu_k, TensorView plan, Optional<TensorView> scratch,
                  TensorView out, Optional<TensorView> lse, double scale, int64_t /*max_q*/, int64_t /*max_k*/, int64_t finish) const {
    const int64_t rows = q.size(0), heads = q.size(1);
    scales_.check(scale);
    const Array<int64_t> offsets = find_parts(q, k, v, cu_q, plan);
    std::optional<NativeLse> native;
    Optional<TensorView> native_lse;
    if (lse.has_value()) {
      if (!scratch.has_value() || scratch.value().numel() < rows * heads)
        TVM_FFI_THROW(RuntimeError) << "scratch: an lse of " << rows << " rows and " << heads << " heads needs " << rows * heads << " floats";
      native.emplace(scratch.value(), rows, heads);
      native_lse = TensorView(&native->tensor);
    }
    run(q, k, v, cu_q, cu_k, plan, offsets, out, native_lse, scale);
    if (lse.has_value() || finish != 0) finish_(cu_q, cu_k, native_lse, out, lse, finish, causal_);
  }

 private:
  // Of the float workspace only the device is read, and never the contents: the plan stands in for it.
  void run(TensorView q, TensorView k, TensorView v, TensorView cu_q, TensorView cu_k, TensorView plan, const Array<int64_t>& offsets,
           TensorView out, const Optional<TensorView>& lse, double scale) const {
    constexpr int64_t kTokensFirst = 0, kNoWindow = -1, kNoItems = 0;
    constexpr bool kOverlapLaunches = false;
    constexpr double kNoSoftCap = 0.0, kOne = 1.0;
    // Absent: mask and its offsets, ALiBi slopes, prefix lengths, token positions, item lengths, scales of K and V;
    // then the two reciprocals of a rotary embedding that is not applied.
    ragged_run_(plan, plan, offsets, q, k, v, cu_q, cu_k, out, lse, int64_t{causal_}, kTokensFirst, kNoWindow, kOverlapLaunches,  //
                nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, kNoSoftCap, scale, kOne, kOne, kNoItems);
  }

  static Array<int64_t> find_parts(TensorView q, TensorView k, TensorView v, TensorView cu_q, TensorView plan) {
    for (const TensorView& tensor : {q, k, v}) {
      // flashinfer-ai/flashinfer#596: this kernel computes element offsets in 32 bits.
      if (tensor.size(0) * tensor.stride(0) > int64_t{UINT32_MAX})
        TVM_FFI_THROW(RuntimeError) << "q, k or v spans " << tensor.size(0) * tensor.stride(0) << " elements; allowed: under 2**32 for this kernel";
    }
    const mla::Fa2Layout at(q.size(0), cu_q.size(0) - 1);
    check_plan(plan, at.bytes, q, cu_q);
    constexpr int64_t kUnused = 0, kGraph = 1, kSplit = 0;
    return {at.entries, q.size(0), at.total_rows, at.tile_rows, at.request, at.tile,   at.kv_tile, kUnused,
            at.o_indptr, at.kv_chunk, kUnused, kUnused, at.valid, kGraph, kSplit};
  }

  Function ragged_run_, finish_;
  bool causal_;
  Scales scales_;
};

// `finish(cu_q, cu_k, native_lse?, out, lse?, bits, causal)` is finish.cu's, the natural one for generation 3; `num_sms(device_id)` tells a device's SMs.
Function fa3(Function run, Function finish, Function num_sms, bool causal, double least_scale, double greatest_scale) {
  return Function::FromTyped(Fa3(std::move(run), std::move(finish), std::move(num_sms), causal, Scales{least_scale, greatest_scale}));
}

Function fa2(Function ragged_run, Function finish, bool causal, double least_scale, double greatest_scale) {
  return Function::FromTyped(Fa2(std::move(ragged_run), std::move(finish), causal, Scales{least_scale, greatest_scale}));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fa3, fa3);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fa2, fa2);
