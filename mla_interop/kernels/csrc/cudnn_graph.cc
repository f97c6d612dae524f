// cuDNN's attention graph: described, built into a plan once for each key, and executed on the caller's stream.
//
// A plan is built by `prepare`, or by the first launch that needs it. Building allocates and may load code on the device; a launch with a
// plan that is there only launches. Any number of threads may launch: a cuDNN handle serves one call at a time, and each device has as
// many as there have ever been calls at once.
#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>
#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/base.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "cudnn_lengths.h"

// The library that cudnn_frontend calls, opened by `open`.
void* cudnn_frontend::cudnn_dlhandle = nullptr;

namespace {

namespace fe = cudnn_frontend;
using mla::CudnnKey;
using mla::CudnnScratch;
using tvm::ffi::Array;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;
using Key = std::array<int64_t, CudnnKey::kWords>;
using Attributes = fe::graph::Tensor_attributes;
using GraphTensor = std::shared_ptr<Attributes>;

enum Uid : int64_t { kQ = 1, kK, kV, kOut, kLse, kStartQ, kStartK, kStartV, kStartOut, kStartStats, kLenQ, kLenK, kScale };

Key ToKey(const Array<int64_t>& words) {
  if (words.size() != CudnnKey::kWords) TVM_FFI_THROW(ValueError) << "key: got " << words.size() << " words; allowed: " << int{CudnnKey::kWords};
  Key key;
  for (size_t i = 0; i < key.size(); ++i) key[i] = words[i];
  return key;
}

template <typename Status>
void Check(Status status, const char* what, const Key& key) {
  if (status.is_good()) return;
  TVM_FFI_THROW(RuntimeError) << "cuDNN " << fe::detail::get_backend_version_string() << " cannot " << what << " for " << key[CudnnKey::kSequences]
                              << " sequences of up to " << key[CudnnKey::kMaxQ] << " queries and " << key[CudnnKey::kMaxK] << " keys, "
                              << key[CudnnKey::kHeads] << " heads, head dims " << key[CudnnKey::kDim] << "/" << key[CudnnKey::kDimV] << ": "
                              << status.get_message();
}

// Makes `tensor` a [rows, heads, width] tensor of a ragged batch: cuDNN sees [sequences, heads, rows of the longest, width], and finds the
// rows of a sequence at its start, which is counted in elements.
void MakeRagged(Attributes& tensor, fe::graph::Graph& graph, const char* name, Uid uid, Uid start_uid, std::vector<int64_t> shape, int64_t head_stride,
                int64_t row_stride) {
  const GraphTensor starts = graph.tensor(Attributes()
                                              .set_name(std::string("starts of ") + name)
                                              .set_uid(start_uid)
                                              .set_dim({shape[0] + 1, 1, 1, 1})
                                              .set_stride({1, 1, 1, 1})
                                              .set_data_type(fe::DataType_t::INT64));
  // The starts stand in for the stride of a sequence: what is given must only look like one.
  const int64_t sequence_stride = std::max(shape[1] * head_stride, shape[2] * row_stride);
  tensor.set_name(name).set_uid(uid).set_stride({sequence_stride, head_stride, row_stride, 1}).set_dim(std::move(shape)).set_ragged_offset(starts);
}

GraphTensor Lengths(fe::graph::Graph& graph, const char* name, Uid uid, int64_t sequences) {
  return graph.tensor(
      Attributes().set_name(name).set_uid(uid).set_dim({sequences, 1, 1, 1}).set_stride({1, 1, 1, 1}).set_data_type(fe::DataType_t::INT32));
}

// `sm`: the architecture to check for, as in 90; 0: that of the current device.
std::shared_ptr<fe::graph::Graph> Describe(const Key& key, int32_t sm = 0) {
  const int64_t sequences = key[CudnnKey::kSequences], heads = key[CudnnKey::kHeads], max_q = key[CudnnKey::kMaxQ], max_k = key[CudnnKey::kMaxK];
  const int64_t dim = key[CudnnKey::kDim], dim_v = key[CudnnKey::kDimV];
  const fe::DataType_t io = key[CudnnKey::kBfloat16] ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF;
  auto graph = std::make_shared<fe::graph::Graph>();
  if (sm != 0) graph->set_sm_version(sm);
  graph->set_io_data_type(io).set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
  Attributes q, k, v;
  MakeRagged(q, *graph, "q", kQ, kStartQ, {sequences, heads, max_q, dim}, key[CudnnKey::kHeadQ], key[CudnnKey::kRowQ]);
  MakeRagged(k, *graph, "k", kK, kStartK, {sequences, heads, max_k, dim}, key[CudnnKey::kHeadK], key[CudnnKey::kRowK]);
  MakeRagged(v, *graph, "v", kV, kStartV, {sequences, heads, max_k, dim_v}, key[CudnnKey::kHeadV], key[CudnnKey::kRowV]);
  // An argument of every launch: no scale is built into a plan.
  const GraphTensor scale = graph->tensor(Attributes()
                                              .set_name("scale")
                                              .set_uid(kScale)
                                              .set_dim({1, 1, 1, 1})
                                              .set_stride({1, 1, 1, 1})
                                              .set_is_pass_by_value(true)
                                              .set_data_type(fe::DataType_t::FLOAT));
  auto options = fe::graph::SDPA_attributes().set_name("attention").set_attn_scale(scale).set_padding_mask(true);
  options.set_seq_len_q(Lengths(*graph, "len_q", kLenQ, sequences)).set_seq_len_kv(Lengths(*graph, "len_k", kLenK, sequences));
  options.set_generate_stats(key[CudnnKey::kStats] != CudnnKey::kNone);
  if (key[CudnnKey::kCausal]) {
    options.set_diagonal_alignment(fe::DiagonalAlignment_t::BOTTOM_RIGHT).set_diagonal_band_right_bound(0);
  }
  auto [out, stats] = graph->sdpa(graph->tensor(q), graph->tensor(k), graph->tensor(v), options);
  MakeRagged(*out, *graph, "out", kOut, kStartOut, {sequences, heads, max_q, dim_v}, dim_v, heads * dim_v);
  out->set_output(true).set_data_type(io);
  if (key[CudnnKey::kStats] != CudnnKey::kNone) {
    const bool head_major = key[CudnnKey::kStats] == CudnnKey::kHeadMajor;
    MakeRagged(*stats, *graph, "lse", kLse, kStartStats, {sequences, heads, max_q, 1}, head_major ? key[CudnnKey::kStatsStride] : 1, head_major ? 1 : heads);
    stats->set_output(true).set_data_type(fe::DataType_t::FLOAT);
  }
  return graph;
}

// Building allocates and loads code, which a stream capture elsewhere in this thread forbids unless it is relaxed for so long.
class RelaxedCapture {
 public:
  RelaxedCapture() { TVM_FFI_CHECK_CUDA_ERROR(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace = 0;
};

// Plans and idle handles of this process; never destroyed, since the library may be gone by then.
class Cudnn {
 public:
  static Cudnn& Get() {
    static auto* cudnn = new Cudnn;
    return *cudnn;
  }

  // The device of the key must be current. Plans are never dropped: rounding bounds their number.
  const Plan& Find(const Key& key) {
    {
      std::lock_guard lock(mutex_);
      const auto found = plans_.find(key);
      if (found != plans_.end()) return found->second;
    }
    // Not under the lock that launches take. Two threads may build the same plan; the first one is kept.
    Plan built = Build(key);
    std::lock_guard lock(mutex_);
    return plans_.emplace(key, std::move(built)).first->second;
  }

  size_t Count() {
    std::lock_guard lock(mutex_);
    return plans_.size();
  }

  // A handle of a device for the length of one call.
  class Handle {
   public:
    Handle(int64_t device, const Key& key) : device_(device), handle_(Get().Take(device, key)) {}
    ~Handle() { Get().PutBack(device_, handle_); }
    Handle(const Handle&) = delete;
    cudnnHandle_t get() const { return handle_; }

   private:
    int64_t device_;
    cudnnHandle_t handle_;
  };

 private:
  static Plan Build(const Key& key) {
    const RelaxedCapture relaxed;
    const Handle handle(key[CudnnKey::kDevice], key);
    Plan plan{Describe(key), 0};
    Check(plan.graph->validate(), "describe this attention", key);
    Check(plan.graph->build_operation_graph(handle.get()), "lower this attention", key);
    Check(plan.graph->create_execution_plans({fe::HeurMode_t::A}), "find an engine", key);
    Check(plan.graph->check_support(), "support this attention", key);
    Check(plan.graph->build_plans(), "build a plan", key);
    Check(plan.graph->get_workspace_size(plan.workspace), "size its workspace", key);
    return plan;
  }

  cudnnHandle_t Take(int64_t device, const Key& key) {
    {
      std::lock_guard lock(mutex_);
      std::vector<cudnnHandle_t>& idle = idle_[device];
      if (!idle.empty()) {
        const cudnnHandle_t handle = idle.back();
        idle.pop_back();
        return handle;
      }
    }
    const RelaxedCapture relaxed;
    cudnnHandle_t handle = nullptr;
    const cudnnStatus_t status = fe::detail::create_handle(&handle);
    if (status != CUDNN_STATUS_SUCCESS) {
      TVM_FFI_THROW(RuntimeError) << "cuDNN " << fe::detail::get_backend_version_string() << " does not start on device " << key[CudnnKey::kDevice] << ": "
                                  << fe::detail::get_error_string(status) << ". Where another cuDNN was loaded before, its parts may not fit this one.";
    }
    return handle;
  }

  void PutBack(int64_t device, cudnnHandle_t handle) {
    std::lock_guard lock(mutex_);
    idle_[device].push_back(handle);
  }

  std::mutex mutex_;
  std::map<Key, Plan> plans_;  // references stay valid while others are added
  std::map<int64_t, std::vector<cudnnHandle_t>> idle_;
};

template <typename T>
T* Data(const TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

// `scale` is float32 in the graph, whatever the ABI's double holds beyond that.
void run(Array<int64_t> words, TensorView q, TensorView k, TensorView v, TensorView cu_q, TensorView cu_k, TensorView scratch, TensorView out,
         Optional<TensorView> lse, double scale) {
  const Key key = ToKey(words);
  const tvm::ffi::CUDADeviceGuard guard(static_cast<int>(key[CudnnKey::kDevice]));
  const Plan& plan = Cudnn::Get().Find(key);
  const int64_t sequences = key[CudnnKey::kSequences], heads = key[CudnnKey::kHeads];
  const bool token_major = key[CudnnKey::kStats] == CudnnKey::kTokenMajor;
  const CudnnScratch at(sequences, token_major ? out.size(0) * heads : 0, plan.workspace);
  if (scratch.numel() * int64_t{sizeof(float)} < at.bytes) {
    TVM_FFI_THROW(RuntimeError) << "scratch: got " << scratch.numel() * sizeof(float) << " bytes; allowed: at least " << at.bytes
                                << ". It was declared for another device or another call; prepare the call on the device that runs it.";
  }
  char* const base = CudnnScratch::Base(Data<void>(scratch));
  const auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, static_cast<int32_t>(key[CudnnKey::kDevice])));
  const auto int64s = [base](int64_t offset) { return reinterpret_cast<int64_t*>(base + offset); };
  const auto int32s = [base](int64_t offset) { return reinterpret_cast<int32_t*>(base + offset); };
  mla::LaunchLengths({Data<int32_t>(cu_q), Data<int32_t>(cu_k), cu_q.size(0) - 1, sequences, key[CudnnKey::kCausal] != 0, key[CudnnKey::kRowQ],
                      key[CudnnKey::kRowK], key[CudnnKey::kRowV], heads * key[CudnnKey::kDimV], token_major ? heads : 1, int64s(at.start_q),
                      int64s(at.start_k), int64s(at.start_v), int64s(at.start_out), int64s(at.start_stats), int32s(at.len_q), int32s(at.len_k)},
                     stream);
  float factor = static_cast<float>(scale);
  std::unordered_map<int64_t, void*> pointers{
      {kQ, Data<void>(q)},           {kK, Data<void>(k)},           {kV, Data<void>(v)},           {kOut, Data<void>(out)},
      {kStartQ, base + at.start_q},  {kStartK, base + at.start_k},  {kStartV, base + at.start_v},  {kStartOut, base + at.start_out},
      {kLenQ, base + at.len_q},      {kLenK, base + at.len_k},      {kScale, &factor},
  };
  if (lse.has_value()) {
    pointers.emplace(kLse, token_major ? static_cast<void*>(base + at.stats) : Data<void>(lse.value()));
    pointers.emplace(kStartStats, base + at.start_stats);
  }
  const Cudnn::Handle handle(key[CudnnKey::kDevice], key);
  if (fe::detail::set_stream(handle.get(), stream) != CUDNN_STATUS_SUCCESS) TVM_FFI_THROW(RuntimeError) << "cuDNN does not take the stream of the caller";
  Check(plan.graph->execute(handle.get(), pointers, base + at.workspace), "run its plan", key);
}

// Builds the plan of a key, if it is not there yet; bytes of workspace that a launch of it needs.
int64_t prepare(Array<int64_t> words) {
  const Key key = ToKey(words);
  const tvm::ffi::CUDADeviceGuard guard(static_cast<int>(key[CudnnKey::kDevice]));
  return Cudnn::Get().Find(key).workspace;
}

// The graph of a key as JSON, checked by the frontend for an architecture such as 90; needs no GPU.
tvm::ffi::String describe(Array<int64_t> words, int64_t sm) {
  const Key key = ToKey(words);
  const auto graph = Describe(key, static_cast<int32_t>(sm));
  Check(graph->validate(), "describe this attention", key);
  return graph->print();
}

// Opens libcudnn; its version, as in 91900.
int64_t open(tvm::ffi::String path) {
  if (fe::cudnn_dlhandle == nullptr) fe::cudnn_dlhandle = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (fe::cudnn_dlhandle == nullptr) TVM_FFI_THROW(RuntimeError) << "cannot load " << path << ": " << dlerror();
  return static_cast<int64_t>(fe::detail::get_backend_version());
}

int64_t num_plans() { return static_cast<int64_t>(Cudnn::Get().Count()); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(prepare, prepare);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(describe, describe);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(open, open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(num_plans, num_plans);
