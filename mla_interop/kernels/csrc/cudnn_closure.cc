// cuDNN's attention behind the kernel ABI (docs/architecture.md): from the tensors of a call to the key of a plan, and what is left
// to do afterwards. It takes every function that needs a GPU as an argument, so it is plain C++, and a test can give it fakes.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <optional>

#include "cudnn_layout.h"

namespace {

using mla::CudnnKey;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// The stride of a dimension of one element says nothing, and must not make another plan.
int64_t RowStride(const TensorView& x) { return x.size(0) > 1 ? x.stride(0) : x.size(1) * x.size(2); }
int64_t HeadStride(const TensorView& x) { return x.size(1) > 1 ? x.stride(1) : x.size(2); }

// float32 [T, N] over the part of scratch where cuDNN leaves its log-sum-exp.
struct NativeLse {
  int64_t shape[2], strides[2];
  DLTensor tensor;

  NativeLse(const TensorView& scratch, int64_t rows, int64_t heads, int64_t sequences) : shape{rows, heads}, strides{heads, 1} {
    char* const buffer = static_cast<char*>(scratch.data_ptr()) + scratch.byte_offset();
    char* const data = mla::CudnnScratch::Base(buffer) + mla::CudnnScratch(sequences, rows * heads, 0).stats;
    tensor = {data, scratch.device(), 2, DLDataType{kDLFloat, 32, 1}, shape, strides, 0};
  }
  NativeLse(const NativeLse&) = delete;
};

class Launch {
 public:
  Launch(Function run, Function finish, bool causal) : run_(std::move(run)), finish_(std::move(finish)), causal_(causal) {}

  void operator()(TensorView q, TensorView k, TensorView v, TensorView cu_q, TensorView cu_k, Optional<TensorView> /*plan*/,
                  Optional<TensorView> scratch, TensorView out, Optional<TensorView> lse, double scale, int64_t max_q, int64_t max_k,
                  int64_t finish) const {
    if (!scratch.has_value()) TVM_FFI_THROW(ValueError) << "scratch: got None; allowed: the floats that were declared for this call";
    // Unproven for others: a kernel that takes its maxima before it scales is wrong for them.
    if (!(scale > 0)) TVM_FFI_THROW(ValueError) << "scale: got " << scale << "; allowed: > 0 for cuDNN's kernels";
    const int64_t rows = q.size(0), heads = q.size(1), sequences = mla::RoundSequences(cu_q.size(0) - 1);
    const CudnnKey::Stats stats = mla::StatsPlace(lse.has_value(), rows);
    const Array<int64_t> key{q.device().device_id, q.dtype().code == kDLBfloat, causal_, stats, stats == CudnnKey::kHeadMajor ? rows : 0,
                             sequences, mla::RoundLength(max_q), mla::RoundLength(max_k), heads, q.size(2), v.size(2),
                             RowStride(q), HeadStride(q), RowStride(k), HeadStride(k), RowStride(v), HeadStride(v)};
    run_(key, q, k, v, cu_q, cu_k, scratch.value(), out, lse, scale);
    if (stats == CudnnKey::kTokenMajor) {
      NativeLse native(scratch.value(), rows, heads, sequences);
      finish_(cu_q, cu_k, TensorView(&native.tensor), out, lse, finish, causal_);
    } else if (finish != 0) {
      finish_(cu_q, cu_k, nullptr, out, lse, finish, causal_);
    }
  }

 private:
  Function run_, finish_;
  bool causal_;
};

// `run` is cudnn_graph.cc's, `finish` finish.cu's `finish_natural`.
Function make(Function run, Function finish, bool causal) { return Function::FromTyped(Launch(std::move(run), std::move(finish), causal)); }

// Bytes of scratch of a call whose plan needs `workspace` bytes.
int64_t scratch_bytes(int64_t sequences, int64_t rows, int64_t heads, bool lse, int64_t workspace) {
  const bool native = mla::StatsPlace(lse, rows) == CudnnKey::kTokenMajor;
  return mla::CudnnScratch(mla::RoundSequences(sequences), native ? rows * heads : 0, workspace).bytes;
}

// first_q, first_k, len_q and len_k that cuDNN gets for a sequence; host arrays.
Array<int64_t> visible_rows(TensorView cu_q, TensorView cu_k, int64_t index, bool causal) {
  const auto* q = static_cast<const int32_t*>(cu_q.data_ptr());
  const mla::CudnnRows rows = mla::VisibleRows(q, static_cast<const int32_t*>(cu_k.data_ptr()), cu_q.size(0) - 1, index, causal);
  return {rows.first_q, rows.first_k, rows.len_q, rows.len_k};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make, make);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(scratch_bytes, scratch_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(round_length, mla::RoundLength);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(round_sequences, mla::RoundSequences);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(visible_rows, visible_rows);
