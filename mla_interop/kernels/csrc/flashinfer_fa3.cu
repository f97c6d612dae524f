// FlashInfer's prefill kernel for Hopper (FlashAttention-3 by TMA and WGMMA), compiled for one dtype and head size without FlashInfer's
// generator: its main loop and its schedulers are used as they are, but for one correction (flashinfer_corrections.py); ours are
//
// - the softmax, which leaves O and the sums alone until a maximum has grown by more than kSlack, as FlashAttention-4 does. Its masked
//   scores are -inf, so that no normal scale is too small (flashinfer-ai/flashinfer#4451), and a row without keys is 0 with an LSE of -inf;
// - the epilogue, the end of a tile: each warp group stores its rows from registers. Upstream passes them through the memory of V, where both groups
//   and the next tile's loads wait for it. LSE goes straight to [heads, rows], in base e;
// - the launch.
//
// MLA_ELEMENT, MLA_HEAD_DIM_QK and MLA_HEAD_DIM_V are given by the command line.
#include <cutlass/cuda_host_adapter.hpp>

#include "driver_launch.h"

// CUTLASS asks the runtime for the driver's function whenever it calls it: three times a launch.
#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) mla::known_##function

namespace mla {
template <typename... Args>
CUresult known_cuTensorMapEncodeTiled(Args... args) {
  static const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(Driver::symbol("cuTensorMapEncodeTiled"));
  return encode == nullptr ? CUDA_ERROR_NOT_FOUND : encode(args...);
}
template <typename... Args>
CUresult known_cuTensorMapEncodeIm2col(Args...);  // of convolutions
}  // namespace mla

#include <cutlass/bfloat16.h>
#include <cutlass/half.h>
#include <cute/tensor.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>

// Two of FlashInfer's headers that are not needed here: one includes most of CUTLASS (two thirds of the time of a build), the other, for
// paged caches, a CCCL that is newer than a toolkit's.
#define FLASHINFER_CUTLASS_UTILS_CUH_
#define FLASHINFER_ATTENTION_HOPPER_SPARSE_MAINLOOP_CUH_
namespace flashinfer {
template <typename, typename, bool, bool>
struct SparseCollectiveMainloop;
}

#include <flashinfer/attention/hopper/named_barrier.cuh>
#include "mla_interop_corrected.cuh"  // before the original, which its guard keeps out
#include <flashinfer/attention/hopper/prefill_sm90.cuh>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

#include <atomic>
#include <optional>

#include "flashinfer_plan.h"

namespace mla {

using namespace cute;

// Probabilities may reach 2**kSlack before their row's maximum is taken anew: far from the limits of float16.
constexpr float kSlack = 8.0f;
constexpr float kLn2 = 0.693147180559945309f;

// Online softmax over the scores of one thread: kRows rows, each held by the four threads of a quad. The main loop (`mma_f16`) calls `update`
// for each tile of keys, `rescale_o` before the product of its probabilities with V is added to O, and at the end, while the last product is
// under way, `finalize`, then `rescale_o` once more, which divides by the sums. The `rescale_o` before the first product finds nothing in O yet.
template <int kRows>
struct Softmax {
  static constexpr float fill_value = -INFINITY;  // of masked scores
  float row_max[kRows], row_sum[kRows], scale;  // the scale of base 2, above 0
  float factor[kRows];                          // of O at the next `rescale_o`
  bool rescale = true;

  CUTLASS_DEVICE explicit Softmax(float scale_log2) : scale(scale_log2) {
    for (int row = 0; row < kRows; ++row) row_max[row] = -INFINITY, row_sum[row] = 0.0f, factor[row] = 0.0f;
  }

  // Turns scores into probabilities in place.
  template <bool kFirst, typename Scores>
  CUTLASS_DEVICE void update(Scores& fragment) {
    Tensor scores = by_row(fragment);
    float grown_to[kRows];  // this tile's maxima and those before, which count only if one of the warp has grown enough
    bool grown = kFirst;
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float most = row_max[row];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size<1>(scores); ++i) most = fmaxf(most, scores(row, i));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      grown_to[row] = most;
      grown |= (most - row_max[row]) * scale > kSlack;  // not so where both are -inf
    }
    rescale = kFirst || __any_sync(0xffffffffu, grown);  // one branch for a warp
    if (rescale) {
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < kRows; ++row) {
        if constexpr (!kFirst) factor[row] = grown_to[row] == row_max[row] ? 1.0f : exp2f((row_max[row] - grown_to[row]) * scale);
        row_max[row] = grown_to[row];
        row_sum[row] *= factor[row];
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      const float offset = row_max[row] == -INFINITY ? 0.0f : row_max[row] * scale;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size<1>(scores); ++i) {
        scores(row, i) = exp2f(scores(row, i) * scale - offset);
        row_sum[row] += scores(row, i);
      }
    }
  }

  // What is left to do for O, once the last probabilities are on their way into it.
  template <typename Scores>
  CUTLASS_DEVICE void finalize(Scores&, float /*scale_pv*/ = 1.0f) {
    rescale = true;
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      float sum = row_sum[row];
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      factor[row] = sum == 0.0f ? 0.0f : 1.0f / sum;
      row_sum[row] = (row_max[row] * scale + log2f(sum)) * kLn2;
    }
  }

  template <typename Output>
  CUTLASS_DEVICE void rescale_o(Output& fragment) const {
    if (!rescale) return;
    Tensor output = by_row(fragment);
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < kRows; ++row) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size<1>(output); ++i) output(row, i) *= factor[row];
    }
  }

  CUTLASS_DEVICE auto get_lse() const { return cute::array<float, kRows>{row_sum[0], row_sum[1]}; }

 private:
  static_assert(kRows == 2, "a warp group has 64 rows of a tile, a thread two of them");

  template <typename Fragment>
  static CUTLASS_DEVICE auto by_row(Fragment& fragment) {
    return make_tensor(fragment.data(), flashinfer::convert_layout_acc_rowcol(fragment.layout()));
  }
};

struct Variant {
  float scale_log2;

  template <typename Mainloop, typename Coordinates>
  CUTLASS_DEVICE Variant(const Mainloop& mainloop, const Coordinates&) : scale_log2(mainloop.additional_params.scale_log2) {}

  template <int kRows>
  CUTLASS_DEVICE auto GetAttentionUpdater() const {
    return Softmax<kRows>(scale_log2);
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, { return logits; })
};

struct AdditionalParams {
  float scale_log2;
};

// In place of `barrier_O`, which the main loop and the kernel use: V's memory is never O's, so nobody has to wait for it.
struct NothingToWaitFor {
  CUTLASS_DEVICE void init(uint32_t) const {}
  CUTLASS_DEVICE void wait(uint32_t) const {}
  CUTLASS_DEVICE void arrive(uint32_t, bool) const {}
};

template <bool kCausal>
constexpr auto kTiles = flashinfer::getCTATileSize<MLA_HEAD_DIM_QK, MLA_HEAD_DIM_V, kCausal>();

template <bool kCausal>
using UpstreamTraits = flashinfer::AttentionKernelTraits</*USE_TMA_LOAD_KV=*/true, MLA_HEAD_DIM_QK, MLA_HEAD_DIM_V, get<0>(kTiles<kCausal>),
                                                         get<1>(kTiles<kCausal>), /*NUM_STAGES=*/2, MLA_ELEMENT, MLA_ELEMENT, MLA_ELEMENT, int32_t, Variant>;

template <bool kCausal>
struct Traits : UpstreamTraits<kCausal> {
  using Upstream = UpstreamTraits<kCausal>;
  static_assert(Upstream::CTA_Q == Fa3Layout::kTile, "the work list is of other tiles");

  struct SharedStorage {
    array_aligned<MLA_ELEMENT, cosize_v<typename Upstream::SmemLayoutQ>> smem_q;
    array_aligned<MLA_ELEMENT, cosize_v<typename Upstream::SmemLayoutK>> smem_k;
    array_aligned<MLA_ELEMENT, cosize_v<typename Upstream::SmemLayoutV>> smem_v;
    cutlass::arch::ClusterTransactionBarrier barrier_Q;
    NothingToWaitFor barrier_O;
    typename Upstream::MainloopPipeline::SharedStorage pipeline_k, pipeline_v;
  };
};

}  // namespace mla

template <bool kCausal>
struct flashinfer::CollectiveEpilogue<mla::Traits<kCausal>> {
  struct Params {
    MLA_ELEMENT* out;
    int64_t row_stride, head_stride;
    float* lse;  // [heads, rows] or null
    int64_t rows;
  };
  using Upstream = mla::UpstreamTraits<kCausal>;
  static constexpr int kTile = Upstream::CTA_Q;
  static constexpr int kWordElements = 8;  // of 16 bytes
  static_assert(sizeof(MLA_ELEMENT) * kWordElements == sizeof(uint4));

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params&) {}
  CUTLASS_DEVICE void store_tail() const {}

  // A thread of a quad holds two neighbouring elements of every eight: after two exchanges it holds eight neighbours of every 32.
  template <typename Output, typename Lse, typename SharedStorage, typename TiledMma, typename Coordinates>
  CUTLASS_DEVICE void store(const Params& params, const Output& output, const Lse& lse, SharedStorage&, TiledMma tiled_mma, int thread,
                            const Coordinates& coordinates) const {
    static_assert(decltype(size<1>(output))::value == 1 && decltype(size<2>(output))::value == 1, "one instruction covers a warp group's rows of O");
    const Place place(params, coordinates);
    Tensor rounded = flashinfer::convert_type<MLA_ELEMENT>(output);
    Tensor pairs = recast<uint32_t>(rounded);
    Tensor positions = tiled_mma.get_thread_slice(thread).partition_C(make_identity_tensor(Shape<Int<kTile>, Int<Upstream::HEAD_DIM_VO>>{}));
    const int member = thread % 4;
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = get<0>(positions(make_coord(_0{}, half, _0{}), _0{}, _0{}));
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < Upstream::HEAD_DIM_VO / 32; ++block) {
        uint32_t word[4];
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) word[i] = pairs(make_coord(_0{}, half, 4 * block + i), _0{}, _0{});
        exchange(word[0], word[1], member & 1, 1);
        exchange(word[2], word[3], member & 1, 1);
        exchange(word[0], word[2], member & 2, 2);
        exchange(word[1], word[3], member & 2, 2);
        if (row < place.rows) reinterpret_cast<uint4*>(place.out + row * params.row_stride)[4 * block + member] = make_uint4(word[0], word[1], word[2], word[3]);
      }
      if (params.lse != nullptr && member == 0 && row < place.rows) place.lse[row] = lse[half];
    }
  }

  template <typename SharedStorage, typename Coordinates>
  CUTLASS_DEVICE void store_zero(const Params& params, SharedStorage&, int thread, const Coordinates& coordinates) const {
    const Place place(params, coordinates);
    constexpr int kWords = Upstream::HEAD_DIM_VO / kWordElements;
    for (int i = thread; i < min(place.rows, kTile) * kWords; i += Upstream::NUM_MMA_THREADS)
      reinterpret_cast<uint4*>(place.out + i / kWords * params.row_stride)[i % kWords] = uint4{0, 0, 0, 0};
    if (params.lse != nullptr && thread < min(place.rows, kTile)) place.lse[thread] = -INFINITY;
  }

 private:
  struct Place {
    MLA_ELEMENT* out;
    float* lse;
    int rows;  // of the sequence, from the tile's first on

    template <typename Coordinates>
    CUTLASS_DEVICE Place(const Params& params, const Coordinates& coordinates) {
      const auto [tile, head, kv_head, q_start, k_start, q_len, k_len, sequence] = coordinates;
      const int64_t first = q_start + int64_t{tile} * kTile;
      out = params.out + first * params.row_stride + head * params.head_stride;
      lse = params.lse + head * params.rows + first;
      rows = q_len - tile * kTile;
    }
  };

  // The upper thread of a pair keeps `high` and takes its partner's, the lower keeps `low`.
  static CUTLASS_DEVICE void exchange(uint32_t& low, uint32_t& high, bool upper, int distance) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
    (upper ? low : high) = other;
  }
};

namespace mla {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

template <bool kCausal, bool kShared>
class Launcher {
  using Mainloop = flashinfer::CollectiveMainloop<AdditionalParams, Traits<kCausal>, kCausal>;
  using Epilogue = flashinfer::CollectiveEpilogue<Traits<kCausal>>;
  using Scheduler = std::conditional_t<kShared, flashinfer::BatchPrefillTileScheduler<int32_t>, flashinfer::BatchPrefillPersistentTileScheduler<int32_t>>;

 public:
  static void launch(TensorView q, TensorView k, TensorView v, TensorView plan, const Fa3Layout& at, float scale_log2, TensorView out,
                     Optional<TensorView> lse, int num_sms) {
    const auto mainloop = Mainloop::to_underlying_arguments({elements(q), layout(q), elements(k), layout(k), elements(v), layout(v), -1, {scale_log2}});
    const typename Epilogue::Params epilogue{elements(out), out.stride(0), out.stride(1),
                                             lse.has_value() ? static_cast<float*>(lse.value().data_ptr()) : nullptr, q.size(0)};
    const auto part = [&](int64_t offset) { return reinterpret_cast<int32_t*>(static_cast<char*>(plan.data_ptr()) + offset); };
    const typename Scheduler::Arguments arguments{part(at.work_indptr), part(at.head),  part(at.tile),           part(at.q_start),
                                                  part(at.k_start),     part(at.q_len), part(at.k_len),          part(at.batch),
                                                  cutlass::FastDivmod(1), static_cast<int>(q.size(1))};
    const auto scheduler = Scheduler::to_underlying_arguments(arguments);
    constexpr auto kernel = flashinfer::PrefillWithKVCacheKernel<Mainloop, Epilogue, Traits<kCausal>, /*LEFT_SLIDING_WINDOW=*/false, kCausal, Scheduler>;
    constexpr int kSharedBytes = sizeof(typename Traits<kCausal>::SharedStorage);
    allow_shared_memory(reinterpret_cast<const void*>(kernel), kSharedBytes, q.device().device_id);
    const dim3 grid = Scheduler::get_grid_dim(arguments, num_sms);
    void* const stream = TVMFFIEnvGetStream(q.device().device_type, q.device().device_id);
    const void* values[] = {&mainloop, &epilogue, &scheduler};
    const LaunchShape shape{{grid.x, grid.y, grid.z}, {Traits<kCausal>::NUM_THREADS, 1, 1}, kSharedBytes, stream};
    start(reinterpret_cast<const void*>(kernel), shape, const_cast<void**>(values));
  }

 private:
  static void start(const void* kernel, const LaunchShape& shape, void** values) {
    static const cudaKernel_t handle = [kernel] {
      cudaKernel_t found = nullptr;
      TVM_FFI_CHECK_CUDA_ERROR(cudaGetKernel(&found, kernel));
      return found;
    }();
    if (const std::optional<int> error = launch_by_driver(handle, shape, values)) {
      TVM_FFI_CHECK_CUDA_ERROR(static_cast<cudaError_t>(*error));
      return;
    }
    const dim3 grid(shape.grid[0], shape.grid[1], shape.grid[2]), block(shape.block[0], shape.block[1], shape.block[2]);
    TVM_FFI_CHECK_CUDA_ERROR(cudaLaunchKernel(kernel, grid, block, values, shape.shared_bytes, static_cast<cudaStream_t>(shape.stream)));
  }

  static MLA_ELEMENT* elements(TensorView tensor) { return static_cast<MLA_ELEMENT*>(tensor.data_ptr()); }

  // The stride of an extent of 1 may be anything, and is not looked at before; TMA takes none that is not of whole 16 bytes.
  static auto layout(TensorView tensor) {
    const auto stride = [&](int dim) { return tensor.size(dim) > 1 ? tensor.stride(dim) : tensor.size(1) * tensor.size(2); };
    return make_layout(make_shape(static_cast<int>(tensor.size(0)), static_cast<int>(tensor.size(2)), static_cast<int>(tensor.size(1))),
                       make_stride(stride(0), _1{}, stride(1)));
  }

  // Once for each device: a driver call less in every launch. Two threads may both do it.
  static void allow_shared_memory(const void* kernel, int bytes, int device) {
    static std::atomic<uint64_t> allowed{0};
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (allowed.load(std::memory_order_acquire) & bit) return;
    TVM_FFI_CHECK_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    allowed.fetch_or(bit, std::memory_order_release);
  }
};

// CUTLASS prints what TMA refuses, and goes on.
void check(TensorView tensor, int64_t width, const char* name) {
  const DLDataType dtype = tensor.dtype();
  const bool known = dtype.bits == 16 && dtype.lanes == 1 && dtype.code == (std::is_same_v<MLA_ELEMENT, cutlass::half_t> ? kDLFloat : kDLBfloat);
  if (!known || tensor.size(2) != width) TVM_FFI_THROW(RuntimeError) << name << ": not of the dtype and head size that this kernel was compiled for";
  bool whole = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int dim = 0; dim < 2; ++dim) whole = whole && (tensor.size(dim) == 1 || tensor.stride(dim) % 8 == 0);
  if (!whole) TVM_FFI_THROW(RuntimeError) << name << ": address and strides must be of whole 16 bytes";
}

// `plan` is a work list of flashinfer_plan.h for these rows, `sequences` and heads, on a device of `num_sms`; `scale` is above 0.
void run(TensorView q, TensorView k, TensorView v, TensorView plan, int64_t sequences, bool causal, double scale, TensorView out, Optional<TensorView> lse,
         int64_t num_sms) {
  check(q, MLA_HEAD_DIM_QK, "q");
  check(k, MLA_HEAD_DIM_QK, "k");
  check(v, MLA_HEAD_DIM_V, "v");
  check(out, MLA_HEAD_DIM_V, "out");
  const Fa3Layout at(q.size(0), sequences, q.size(1), num_sms);
  std::optional<tvm::ffi::CUDADeviceGuard> guard;
  if (current_device() != q.device().device_id) guard.emplace(q.device().device_id);
  const auto launch = causal ? (at.shared ? Launcher<true, true>::launch : Launcher<true, false>::launch)
                             : (at.shared ? Launcher<false, true>::launch : Launcher<false, false>::launch);
  launch(q, k, v, plan, at, static_cast<float>(scale / kLn2), out, lse, static_cast<int>(num_sms));
}

}  // namespace mla

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, mla::run);
