// What is left to do after a kernel that writes its log-sum-exp as [rows, heads], in base 2 or e: the natural logarithm as
// [heads, rows], and the fills that the ABI promises (docs/architecture.md, `finish`). One launch, one pass over lse; out is
// written only where a row is filled, and read nowhere. A kernel that writes into lse itself has only the fills left.
#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <atomic>

namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

constexpr int kSide = 32;  // a block owns kSide rows of kSide heads
constexpr int kWarps = 8;
constexpr int64_t kTail = 1, kBlindRows = 2;
constexpr float kLn2 = 0.693147180559945309f;

struct Problem {
  const int32_t* cu_q;
  const int32_t* cu_k;
  const float* native_lse;  // [rows, heads], or null where the kernel has written lse
  float to_natural;         // factor of the native logarithm
  float* lse;               // [heads, rows], base e, or null
  uint4* out;               // [rows, heads, words of 16 bytes]
  int64_t rows, heads, words;
  int batch;
  bool tail, blind_rows, causal;
};

// Whether a row gets out 0 and lse -inf whatever the kernel left there: it is past the last sequence, or it sees no key.
__device__ bool is_filled(const Problem& p, int64_t row) {
  if (row >= p.cu_q[p.batch]) return p.tail;
  if (!p.blind_rows) return false;
  int sequence = 0, end = p.batch;  // the last sequence that starts at or before the row; empty ones start there too
  while (end - sequence > 1) {
    const int middle = (sequence + end) / 2;
    if (p.cu_q[middle] <= row) sequence = middle;
    else end = middle;
  }
  const int64_t q_len = p.cu_q[sequence + 1] - p.cu_q[sequence], k_len = p.cu_k[sequence + 1] - p.cu_k[sequence];
  return k_len <= 0 || (p.causal && row - p.cu_q[sequence] + k_len - q_len < 0);
}

__global__ void __launch_bounds__(kSide* kWarps) finish_kernel(const Problem p) {
  __shared__ float tile[kSide][kSide + 1];  // the odd pitch keeps reads down a column free of bank conflicts
  __shared__ bool filled[kSide];
  const int lane = threadIdx.x, warp = threadIdx.y;
  const int64_t first_row = int64_t{blockIdx.x} * kSide, first_head = int64_t{blockIdx.y} * kSide;
  if (warp == 0) filled[lane] = (p.tail || p.blind_rows) && first_row + lane < p.rows && is_filled(p, first_row + lane);
  if (p.native_lse != nullptr) {
    for (int row = warp; row < kSide; row += kWarps) {
      if (first_row + row < p.rows && first_head + lane < p.heads) tile[row][lane] = p.native_lse[(first_row + row) * p.heads + first_head + lane];
    }
  }
  __syncthreads();
  if (p.lse != nullptr && first_row + lane < p.rows && (p.native_lse != nullptr || filled[lane])) {
    for (int head = warp; head < kSide && first_head + head < p.heads; head += kWarps)
      p.lse[(first_head + head) * p.rows + first_row + lane] = filled[lane] ? -INFINITY : tile[lane][head] * p.to_natural;
  }
  const int64_t words = min(int64_t{kSide}, p.heads - first_head) * p.words;
  for (int row = 0; row < kSide; ++row) {
    if (!filled[row]) continue;
    uint4* const out = p.out + ((first_row + row) * p.heads + first_head) * p.words;
    for (int64_t word = warp * kSide + lane; word < words; word += kSide * kWarps) out[word] = uint4{0, 0, 0, 0};
  }
}

void launch(TensorView cu_q, TensorView cu_k, Optional<TensorView> native_lse, float to_natural, TensorView out, Optional<TensorView> lse, int64_t bits,
            bool causal) {
  Problem p{};
  p.to_natural = to_natural;
  p.cu_q = static_cast<const int32_t*>(cu_q.data_ptr());
  p.cu_k = static_cast<const int32_t*>(cu_k.data_ptr());
  p.batch = static_cast<int>(cu_q.size(0) - 1);
  p.rows = out.size(0);
  p.heads = out.size(1);
  p.tail = (bits & kTail) != 0;
  p.blind_rows = (bits & kBlindRows) != 0;
  p.causal = causal;
  if (lse.has_value()) p.lse = static_cast<float*>(lse.value().data_ptr());
  if (lse.has_value() && native_lse.has_value()) p.native_lse = static_cast<const float*>(native_lse.value().data_ptr());
  const int64_t head_bytes = out.size(2) * out.dtype().bits / 8;
  if (head_bytes % sizeof(uint4) != 0 || reinterpret_cast<uintptr_t>(out.data_ptr()) % sizeof(uint4) != 0)
    TVM_FFI_THROW(RuntimeError) << "out: heads of " << head_bytes << " bytes; allowed: multiples of 16 bytes, aligned to 16";
  p.out = static_cast<uint4*>(out.data_ptr());
  p.words = head_bytes / sizeof(uint4);

  const tvm::ffi::CUDADeviceGuard guard(out.device().device_id);
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(out.device().device_type, out.device().device_id));
  const dim3 grid((p.rows + kSide - 1) / kSide, (p.heads + kSide - 1) / kSide);
  finish_kernel<<<grid, dim3(kSide, kWarps), 0, stream>>>(p);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

// After a kernel whose log-sum-exp is in base 2.
void finish(TensorView cu_q, TensorView cu_k, Optional<TensorView> native_lse, TensorView out, Optional<TensorView> lse, int64_t bits, bool causal) {
  if (lse.has_value() && !native_lse.has_value()) TVM_FFI_THROW(RuntimeError) << "lse is wanted, but there is none to convert";
  launch(cu_q, cu_k, native_lse, kLn2, out, lse, bits, causal);
}

// After a kernel whose log-sum-exp is natural, and is in lse already where there is no native one.
void finish_natural(TensorView cu_q, TensorView cu_k, Optional<TensorView> native_lse, TensorView out, Optional<TensorView> lse, int64_t bits, bool causal) {
  launch(cu_q, cu_k, native_lse, 1.0f, out, lse, bits, causal);
}

// Asked in every launch, so that what is known is kept.
int64_t num_sms(int64_t device_id) {
  constexpr int64_t kDevices = 64;
  static std::atomic<int> known[kDevices];
  const bool kept = device_id >= 0 && device_id < kDevices;
  int count = kept ? known[device_id].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    TVM_FFI_CHECK_CUDA_ERROR(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, static_cast<int>(device_id)));
    if (kept) known[device_id].store(count, std::memory_order_relaxed);
  }
  return count;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(finish, finish);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(finish_natural, finish_natural);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(num_sms, num_sms);
