// CPU_SDPA: ragged attention on the host by torch's CPU flash kernel, under the one kernel ABI (docs/architecture.md).
//
// torch is reached through its stable C shim alone: no Python, no GIL, light headers, and no C++ ABI in between.
// The aten kernel serves one dense batch with equal head dimensions and top-left causal masks.  What is added here:
// the ragged loop, V's padding columns, bottom-right masks, and rows that see nothing.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
// Query rows per call where the mask is a tensor: enough for the aten kernel's largest query tile (256 rows) twice over.
constexpr int64_t kMaskedRows = 512;

void Check(AOTITorchError code, const char* what) {
  if (code != 0) TVM_FFI_THROW(RuntimeError) << "torch failed in " << what << "; torch wrote the cause to stderr";
}

// Owns one reference to a torch tensor.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Tensor&& other) noexcept : raw_(other.raw_) { other.raw_ = nullptr; }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    if (raw_ != nullptr) aoti_torch_delete_tensor_object(raw_);
  }
  AtenTensorHandle get() const { return raw_; }
  AtenTensorHandle* put() { return &raw_; }
  char* data() const {
    void* pointer = nullptr;
    Check(aoti_torch_get_data_ptr(raw_, &pointer), "get_data_ptr");
    return static_cast<char*>(pointer);
  }

 private:
  AtenTensorHandle raw_ = nullptr;
};

// A [rows, heads, cols] array in memory, in elements; the last dimension has unit stride.
struct View {
  char* data;
  int64_t rows, heads, cols, row_stride, head_stride;
  int32_t dtype;
  int64_t itemsize;

  View Rows(int64_t first, int64_t count) const {
    View cut = *this;
    cut.data += first * row_stride * itemsize;
    cut.rows = count;
    return cut;
  }
  View Cols(int64_t first, int64_t count) const {
    View cut = *this;
    cut.data += first * itemsize;
    cut.cols = count;
    return cut;
  }
  // As torch's [1, heads, rows, cols], over the same memory.
  Tensor Wrap() const {
    // GEMMs insist on a leading dimension of at least cols, also for the single row that never uses it.
    const int64_t step = rows == 1 ? std::max(row_stride, cols) : row_stride;
    const int64_t sizes[] = {1, heads, rows, cols};
    const int64_t strides[] = {rows * step, head_stride, step, 1};
    Tensor made;
    Check(aoti_torch_create_tensor_from_blob(data, 4, sizes, strides, 0, dtype, aoti_torch_device_type_cpu(), 0, made.put()), "from_blob");
    return made;
  }
};

int32_t TorchType(DLDataType type) {
  if (type.lanes == 1 && type.code == kDLFloat && type.bits == 32) return aoti_torch_dtype_float32();
  if (type.lanes == 1 && type.code == kDLFloat && type.bits == 16) return aoti_torch_dtype_float16();
  if (type.lanes == 1 && type.code == kDLBfloat && type.bits == 16) return aoti_torch_dtype_bfloat16();
  TVM_FFI_THROW(TypeError) << "dtype: got " << tvm::ffi::DLDataTypeToString(type) << "; allowed: float32, bfloat16, float16";
  return -1;
}

View ViewOf(const TensorView& t) {
  char* data = static_cast<char*>(t.data_ptr()) + t.byte_offset();
  return {data, t.size(0), t.size(1), t.size(2), t.stride(0), t.stride(1), TorchType(t.dtype()), t.dtype().bits / 8};
}

// An uninitialised contiguous [rows, heads, cols] of like's type, in memory that `owner` keeps.
View Allocate(const View& like, int64_t rows, int64_t cols, Tensor* owner) {
  const int64_t heads = like.heads;
  const int64_t sizes[] = {rows, heads, cols}, strides[] = {heads * cols, cols, 1};
  Check(aoti_torch_empty_strided(3, sizes, strides, like.dtype, aoti_torch_device_type_cpu(), 0, owner->put()), "empty_strided");
  return {owner->data(), rows, heads, cols, heads * cols, cols, like.dtype, like.itemsize};
}

void Copy(const View& to, const View& from) { Check(aoti_torch_copy_(to.Wrap().get(), from.Wrap().get(), 0), "copy_"); }

// `view`, or, where a GEMM cannot read it or it has fewer columns than `cols`, a copy of it with zeros to the right.
View Operand(const View& view, int64_t cols, Tensor* owner) {
  if (view.cols == cols && (view.rows == 1 || view.row_stride >= cols)) return view;
  const View made = Allocate(view, view.rows, cols, owner);
  Copy(made.Cols(0, view.cols), view);
  if (view.cols < cols) {
    char zero[8] = {};
    View zeros = made.Cols(view.cols, cols - view.cols);
    const View pad = zeros;
    zeros.data = zero;
    zeros.row_stride = zeros.head_stride = 0;
    (void)pad; (void)zeros;
    for (int64_t i = 0; i < made.rows * made.heads; ++i) std::memset(made.data + (i * cols + view.cols) * made.itemsize, 0, (cols - view.cols) * made.itemsize);
  }
  return made;
}

struct Problem {
  View q, k, v, out;
  float* lse;  // [N, T], or nullptr
  int64_t tokens;
  double scale;

  void Empty(int64_t first, int64_t end) const {
    if (first >= end) return;
    const int64_t row = out.row_stride * out.itemsize;
    std::memset(out.data + first * row, 0, (end - first) * row);
    if (lse == nullptr) return;
    for (int64_t head = 0; head < out.heads; ++head) std::fill(lse + head * tokens + first, lse + head * tokens + end, kMinusInf);
  }

  // One dense call, whose rows go to [first, first + q.rows) of out and lse.
  void Attend(const View& q, const View& k, const View& v, bool is_causal, const Tensor* mask, double used_scale, int64_t first) const {
    Tensor result, result_lse;
    AtenTensorHandle mask_handle = mask != nullptr ? mask->get() : nullptr;
    Check(aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(q.Wrap().get(), k.Wrap().get(), v.Wrap().get(), 0.0, is_causal,
                                                                     mask != nullptr ? &mask_handle : nullptr, &used_scale, result.put(),
                                                                     result_lse.put()),
          "_scaled_dot_product_flash_attention_for_cpu");
    const View dense = {result.data(), q.rows, q.heads, q.cols, q.heads * q.cols, q.cols, q.dtype, q.itemsize};
    Copy(out.Rows(first, q.rows), dense.Cols(0, out.cols));
    if (lse == nullptr) return;
    const float* from = reinterpret_cast<const float*>(result_lse.data());
    for (int64_t head = 0; head < q.heads; ++head) {
      float* to = lse + head * tokens + first;
      for (int64_t row = 0; row < q.rows; ++row) to[row] = from[row * q.heads + head];
    }
  }
};

void Launch(bool causal, const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& cu_q, const TensorView& cu_k,
            const TensorView& out, const Optional<TensorView>& lse, double scale) {
  Problem p{ViewOf(q), ViewOf(k), ViewOf(v), ViewOf(out), nullptr, q.size(0), scale};
  if (lse.has_value()) p.lse = reinterpret_cast<float*>(static_cast<char*>(lse.value().data_ptr()) + lse.value().byte_offset());
  const int32_t* cq = reinterpret_cast<const int32_t*>(static_cast<char*>(cu_q.data_ptr()) + cu_q.byte_offset());
  const int32_t* ck = reinterpret_cast<const int32_t*>(static_cast<char*>(cu_k.data_ptr()) + cu_k.byte_offset());
  for (int64_t b = 0; b + 1 < cu_q.size(0); ++b) {
    int64_t q0 = cq[b], q1 = cq[b + 1], k0 = ck[b], k1 = ck[b + 1];
    if (k0 == k1) { p.Empty(q0, q1); continue; }
    if (q0 == q1) continue;
    Tensor vo;
    View vv = Operand(p.v.Rows(k0, k1 - k0), p.q.cols, &vo);
    p.Attend(p.q.Rows(q0, q1 - q0), p.k.Rows(k0, k1 - k0), vv, causal, nullptr, scale, q0);
  }
  p.Empty(cq[cu_q.size(0) - 1], p.tokens);
}

template <bool kCausal>
void Entry(TensorView q, TensorView k, TensorView v, TensorView cu_q, TensorView cu_k, Optional<TensorView> plan, Optional<TensorView> scratch,
           TensorView out, Optional<TensorView> lse, double scale, int64_t max_q, int64_t max_k, int64_t finish) {
  Launch(kCausal, q, k, v, cu_q, cu_k, out, lse, scale);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_causal, Entry<true>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_full, Entry<false>);
