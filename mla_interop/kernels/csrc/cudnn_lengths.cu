// From cumulative lengths on the device to what cuDNN reads: where the rows of each sequence start in each tensor, in elements, and how
// many there are. One small launch for all of them, so that neither the host nor a framework has to know the lengths.
#include <cuda_runtime.h>
#include <tvm/ffi/extra/cuda/base.h>

#include "cudnn_lengths.h"

namespace mla {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) lengths_kernel(const CudnnLengths p) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i <= p.planned; i += int64_t{gridDim.x} * kThreads) {
    const CudnnRows rows = VisibleRows(p.cu_q, p.cu_k, p.sequences, i, p.causal);
    p.start_q[i] = rows.first_q * p.stride_q;
    p.start_k[i] = rows.first_k * p.stride_k;
    p.start_v[i] = rows.first_k * p.stride_v;
    p.start_out[i] = rows.first_q * p.stride_out;
    p.start_stats[i] = rows.first_q * p.stride_stats;
    if (i < p.planned) {
      p.len_q[i] = rows.len_q;
      p.len_k[i] = rows.len_k;
    }
  }
}

}  // namespace

void LaunchLengths(const CudnnLengths& lengths, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((lengths.planned + kThreads) / kThreads);
  lengths_kernel<<<blocks, kThreads, 0, stream>>>(lengths);
  TVM_FFI_CHECK_CUDA_ERROR(cudaGetLastError());
}

}  // namespace mla
