// What a launch through cuDNN agrees on before and during it: the words of a plan's key, the rounding that keeps the number of plans
// small, and where things lie in the scratch buffer.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MLA_HOST_DEVICE __host__ __device__
#else
#define MLA_HOST_DEVICE
#endif

namespace mla {

// The part of a sequence that cuDNN is given.
struct CudnnRows {
  int64_t first_q, first_k;  // rows of q and of k
  int32_t len_q, len_k;
};

// A sequence without its query rows that see no key: those rows came out as NaN before cuDNN 9.25 (NVIDIA/cudnn-frontend#943), and are
// filled by the finishing launch. Under the bottom-right causal mask they are the first len_q - len_k. `index` may be past the last
// sequence: empty, at the end.
MLA_HOST_DEVICE inline CudnnRows VisibleRows(const int32_t* cu_q, const int32_t* cu_k, int64_t sequences, int64_t index, bool causal) {
  if (index >= sequences) return {cu_q[sequences], cu_k[sequences], 0, 0};
  CudnnRows rows{cu_q[index], cu_k[index], cu_q[index + 1] - cu_q[index], cu_k[index + 1] - cu_k[index]};
  if (causal && rows.len_q > rows.len_k) {
    rows.first_q += rows.len_q - rows.len_k;
    rows.len_q = rows.len_k;
  }
  if (rows.len_q == 0 || rows.len_k == 0) rows.len_q = rows.len_k = 0;
  return rows;
}

// One plan serves every call with equal words. kernels/cudnn_graph.py makes the same list, in this order.
struct CudnnKey {
  enum Word {
    kDevice,
    kBfloat16,
    kCausal,
    kStats,
    kStatsStride,  // rows of lse for kHeadMajor, else 0
    kSequences,
    kMaxQ,
    kMaxK,
    kHeads,
    kDim,
    kDimV,
    kRowQ,
    kHeadQ,
    kRowK,
    kHeadK,
    kRowV,
    kHeadV,
    kWords
  };
  // Where the log-sum-exp goes: nowhere, straight into lse [N, T], or into scratch as [T, N].
  enum Stats : int64_t { kNone, kHeadMajor, kTokenMajor };
};

// Lengths up to 128, and four steps in each octave above: at most a quarter of the tiles of a plan start past the longest sequence.
inline int64_t RoundLength(int64_t length) {
  int64_t step = 32;
  while (8 * step < length) step *= 2;
  return length <= 128 ? 128 : (length + step - 1) / step * step;
}

// Sequences are rounded up to a power of two; the ones added are empty.
inline int64_t RoundSequences(int64_t sequences) {
  int64_t rounded = 1;
  while (rounded < sequences) rounded *= 2;
  return rounded;
}

// A plan has the stride between the heads of the log-sum-exp in it. Where T is itself a rounded length, few such strides are
// possible, and cuDNN writes into lse; else it writes rows of heads into scratch, whose strides do not depend on T.
inline CudnnKey::Stats StatsPlace(bool wanted, int64_t rows) {
  if (!wanted) return CudnnKey::kNone;
  return RoundLength(rows) == rows ? CudnnKey::kHeadMajor : CudnnKey::kTokenMajor;
}

// Byte offsets into scratch, from its first address that is a multiple of kAlign.
struct CudnnScratch {
  static constexpr int64_t kAlign = 256;
  // int64 [sequences + 1] each: where the rows of a sequence start, in elements.
  int64_t start_q, start_k, start_v, start_out, start_stats;
  int64_t len_q, len_k;  // int32 [sequences]
  int64_t stats;         // float32 [T, N]
  int64_t workspace;
  int64_t bytes;  // of the whole buffer, whatever address it begins at

  CudnnScratch(int64_t sequences, int64_t stats_floats, int64_t workspace_bytes) {
    int64_t end = 0;
    const auto take = [&end](int64_t size) {
      const int64_t begin = end;
      end += (size + kAlign - 1) / kAlign * kAlign;
      return begin;
    };
    for (int64_t* start : {&start_q, &start_k, &start_v, &start_out, &start_stats}) *start = take(8 * (sequences + 1));
    for (int64_t* length : {&len_q, &len_k}) *length = take(4 * sequences);
    stats = take(4 * stats_floats);
    workspace = take(workspace_bytes);
    bytes = end + kAlign;
  }

  static char* Base(void* buffer) { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(buffer) + kAlign - 1) / kAlign * kAlign); }
};

}  // namespace mla
