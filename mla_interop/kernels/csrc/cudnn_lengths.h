// The launch that derives cuDNN's offsets and lengths on the device.
#pragma once

#include <cuda_runtime_api.h>

#include "cudnn_layout.h"

namespace mla {

// All pointers are device memory. `sequences` are those of cu_q and cu_k; `planned` those of the plan, at least as many.
struct CudnnLengths {
  const int32_t* cu_q;
  const int32_t* cu_k;
  int64_t sequences, planned;
  bool causal;
  int64_t stride_q, stride_k, stride_v, stride_out, stride_stats;            // elements from row to row
  int64_t *start_q, *start_k, *start_v, *start_out, *start_stats;            // [planned + 1]
  int32_t *len_q, *len_k;                                                    // [planned]
};

void LaunchLengths(const CudnnLengths& lengths, cudaStream_t stream);

}  // namespace mla
