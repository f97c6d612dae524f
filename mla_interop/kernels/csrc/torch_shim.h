// torch tensors on the host through torch's stable C shim: ownership, strided views over foreign memory, copies.
//
// The shim is C and light to compile, so one source serves every torch that exports the functions used here, whatever
// C++ ABI it was built with, and nothing here touches Python or the GIL.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace mla_interop {

inline void Check(AOTITorchError code, const char* what) {
  if (code != 0) TVM_FFI_THROW(RuntimeError) << "torch failed in " << what << "; torch wrote the cause to stderr.";
}

// Owns one reference to a torch tensor.
class Tensor {
 public:
  Tensor() = default;
  Tensor(Tensor&& other) noexcept : raw_(std::exchange(other.raw_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(raw_, other.raw_);
    return *this;
  }
  ~Tensor() {
    if (raw_ != nullptr) aoti_torch_delete_tensor_object(raw_);
  }

  AtenTensorHandle get() const { return raw_; }
  // Where a shim function writes the reference that it returns.
  AtenTensorHandle* put() { return &raw_; }
  char* data() const {
    void* pointer = nullptr;
    Check(aoti_torch_get_data_ptr(raw_, &pointer), "get_data_ptr");
    return static_cast<char*>(pointer);
  }
  const int64_t* strides() const {
    int64_t* values = nullptr;
    Check(aoti_torch_get_strides(raw_, &values), "get_strides");
    return values;
  }

  // Over memory that somebody else owns.
  static Tensor Over(void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
    Tensor made;
    const AOTITorchError code =
        aoti_torch_create_tensor_from_blob(data, ndim, sizes, strides, 0, dtype, aoti_torch_device_type_cpu(), 0, made.put());
    Check(code, "create_tensor_from_blob");
    return made;
  }
  static Tensor Uninitialised(int64_t ndim, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
    Tensor made;
    Check(aoti_torch_empty_strided(ndim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, made.put()), "empty_strided");
    return made;
  }

 private:
  AtenTensorHandle raw_ = nullptr;
};

inline int32_t TorchType(DLDataType type) {
  if (type.lanes == 1 && type.code == kDLFloat && type.bits == 32) return aoti_torch_dtype_float32();
  if (type.lanes == 1 && type.code == kDLFloat && type.bits == 16) return aoti_torch_dtype_float16();
  if (type.lanes == 1 && type.code == kDLBfloat && type.bits == 16) return aoti_torch_dtype_bfloat16();
  TVM_FFI_THROW(TypeError) << "dtype: got " << tvm::ffi::DLDataTypeToString(type) << "; allowed: float32, bfloat16, float16.";
  TVM_FFI_UNREACHABLE();
}

template <typename T>
T* Data(const tvm::ffi::TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

// A [rows, heads, cols] array; strides in elements, the last dimension's is 1.
struct View {
  char* data;
  int64_t rows, heads, cols, row_stride, head_stride, itemsize;
  int32_t dtype;

  static View Of(const tvm::ffi::TensorView& t) {
    return {Data<char>(t), t.size(0), t.size(1), t.size(2), t.stride(0), t.stride(1), t.dtype().bits / 8, TorchType(t.dtype())};
  }
  View Rows(int64_t first, int64_t count) const {
    return {data + first * row_stride * itemsize, count, heads, cols, row_stride, head_stride, itemsize, dtype};
  }
  View Heads(int64_t first, int64_t count) const {
    return {data + first * head_stride * itemsize, rows, count, cols, row_stride, head_stride, itemsize, dtype};
  }
  View Cols(int64_t first, int64_t count) const {
    return {data + first * itemsize, rows, heads, count, row_stride, head_stride, itemsize, dtype};
  }
  // A GEMM insists on a leading dimension of at least `width`, even for the single row that never uses it.
  bool FitsGemm(int64_t width) const { return rows == 1 || row_stride >= width; }
  // torch's [groups, heads / groups, rows, cols] over this memory, each group after the first starting `shift` columns
  // to the left of its first head.
  Tensor Batched(int64_t groups, int64_t shift = 0) const {
    const int64_t step = rows == 1 ? std::max(row_stride, cols) : row_stride;
    const int64_t sizes[] = {groups, heads / groups, rows, cols};
    const int64_t strides[] = {heads / groups * head_stride - shift, head_stride, step, 1};
    return Tensor::Over(data, 4, sizes, strides, dtype);
  }
  void CopyFrom(const View& source) const { Check(aoti_torch_copy_(Batched(1).get(), source.Batched(1).get(), 0), "copy_"); }
};

}  // namespace mla_interop
