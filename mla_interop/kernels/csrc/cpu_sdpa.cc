// CPU_SDPA: ragged attention on the host by torch's CPU flash kernel, under the kernel ABI of docs/architecture.md.
//
// The aten kernel serves one dense batch with equal head dimensions and a top-left causal mask.  What is added here is
// the ragged loop, head dimensions that differ, the bottom-right mask, and rows that see no key.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>

#include "torch_shim.h"

namespace mla_interop {
namespace {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// The aten kernel's largest query tile, in rows.
constexpr int64_t kTile = 256;
// What one launch may spend on a mask, in bytes, unless kTile rows alone need more.
constexpr int64_t kMaskBytes = 16 << 20;
// The aten kernel packs its operands for the matrix units only from this many heads per batch entry on.
constexpr int64_t kHeadsToPack = 4;

// `view`, or a copy where no GEMM can read it or it has fewer than `cols` columns (zeros then follow).  A head's rows are
// adjacent in the copy, which the aten kernel reads faster.
View Readable(const View& view, int64_t cols, Tensor* owner) {
  if (view.cols == cols && view.FitsGemm(cols)) return view;
  const int64_t sizes[] = {view.heads, view.rows, cols}, strides[] = {view.rows * cols, cols, 1};
  *owner = Tensor::Uninitialised(3, sizes, strides, view.dtype);
  if (view.cols < cols) std::memset(owner->data(), 0, view.rows * view.heads * cols * view.itemsize);
  const View copy = {owner->data(), view.rows, view.heads, cols, cols, view.rows * cols, view.itemsize, view.dtype};
  copy.Cols(0, view.cols).CopyFrom(view);
  return copy;
}

// Whether V can be read with `cols` > v.cols columns where it lies: the first half of the heads with the excess to the
// right, the second half with it to the left.  Both stay between the array's first and last element; what lies there
// (another head, another array) only reaches output columns that are dropped.  That saves a padded copy of V: memory, and
// up to a seventh of the time.
bool WideInPlace(const View& v, int64_t cols) {
  const int64_t half = v.heads / 2;
  return v.heads % 2 == 0 && half >= kHeadsToPack && half * v.head_stride >= cols - v.cols && v.FitsGemm(cols);
}

// The additive bottom-right mask of a block of query rows: row i of the last r rows hides the last r - 1 - i columns.
// A block of r rows that sees c keys takes the last r rows and c columns: one mask serves all blocks of all sequences.
// It has no more rows than columns, or row 0 would hide columns that lie before its memory.
class Mask {
 public:
  Mask(int64_t rows, int64_t cols, const View& like) : rows_(rows), cols_(cols), itemsize_(like.itemsize), dtype_(like.dtype) {
    const int64_t sizes[] = {rows, cols}, strides[] = {cols, 1};
    tensor_ = Tensor::Uninitialised(2, sizes, strides, dtype_);
    std::memset(tensor_.data(), 0, rows * cols * itemsize_);
    for (int64_t row = 0; row < rows; ++row) Hide((row + 1) * cols - (rows - 1 - row), (row + 1) * cols);
  }
  int64_t rows() const { return rows_; }
  Tensor Last(int64_t rows, int64_t cols) const {
    const int64_t sizes[] = {rows, cols}, strides[] = {cols_, 1};
    return Tensor::Over(tensor_.data() + ((rows_ - rows) * cols_ + cols_ - cols) * itemsize_, 2, sizes, strides, dtype_);
  }

 private:
  void Hide(int64_t first, int64_t end) {
    char* data = tensor_.data();
    if (dtype_ == aoti_torch_dtype_float32()) {
      std::fill(reinterpret_cast<float*>(data) + first, reinterpret_cast<float*>(data) + end, -std::numeric_limits<float>::infinity());
    } else {
      const uint16_t minus_inf = dtype_ == aoti_torch_dtype_float16() ? 0xFC00 : 0xFF80;
      std::fill(reinterpret_cast<uint16_t*>(data) + first, reinterpret_cast<uint16_t*>(data) + end, minus_inf);
    }
  }

  Tensor tensor_;
  int64_t rows_, cols_, itemsize_;
  int32_t dtype_;
};

struct Results {
  View out;
  float* lse;  // [N, T], or nullptr when nobody asked
  int64_t tokens;

  // Rows that see no key.
  void Blank(int64_t first, int64_t end) const {
    if (first >= end) return;
    std::memset(out.Rows(first, 0).data, 0, (end - first) * out.row_stride * out.itemsize);
    if (lse == nullptr) return;
    for (int64_t head = 0; head < out.heads; ++head) {
      std::fill(lse + head * tokens + first, lse + head * tokens + end, -std::numeric_limits<float>::infinity());
    }
  }

  // The aten kernel's results for `groups` batch entries, to rows [first, first + rows).
  void Store(const Tensor& dense, const Tensor& dense_lse, int64_t groups, int64_t shift, int64_t first, int64_t rows) const {
    const int64_t heads = out.heads / groups;
    const int64_t* from = dense.strides();
    for (int64_t group = 0; group < groups; ++group) {
      char* data = dense.data() + (group * from[0] + group * shift) * out.itemsize;
      out.Rows(first, rows).Heads(group * heads, heads).CopyFrom({data, rows, heads, out.cols, from[2], from[1], out.itemsize, out.dtype});
    }
    if (lse == nullptr) return;
    const int64_t sizes[] = {groups, heads, rows}, strides[] = {heads * tokens, tokens, 1};
    const Tensor to = Tensor::Over(lse + first, 3, sizes, strides, aoti_torch_dtype_float32());
    Check(aoti_torch_copy_(to.get(), dense_lse.get(), 0), "copy_");
  }
};

// One sequence, or a block of its query rows, that has queries and keys.
struct Sequence {
  View q, k, v;
  int64_t groups, shift;
  double scale;

  Sequence(const View& queries, const View& keys, const View& values, double scale, Tensor (&owners)[3])
      : q(Readable(queries, queries.cols, &owners[0])), k(Readable(keys, queries.cols, &owners[1])), v(values), groups(1), shift(0), scale(scale) {
    if (v.cols < q.cols && WideInPlace(v, q.cols)) {
      groups = 2, shift = q.cols - v.cols, v.cols = q.cols;
    } else {
      v = Readable(v, q.cols, &owners[2]);
    }
  }

  // Query rows [row, row + rows) over the first `keys` keys; the results go to rows from `first` on.
  void Attend(int64_t row, int64_t rows, int64_t keys, bool is_causal, const Tensor* mask, const Results& results, int64_t first) const {
    const Tensor tq = q.Rows(row, rows).Batched(groups), tk = k.Rows(0, keys).Batched(groups), tv = v.Rows(0, keys).Batched(groups, shift);
    AtenTensorHandle mask_handle = mask == nullptr ? nullptr : mask->get();
    double used_scale = scale;
    Tensor dense, dense_lse;
    const AOTITorchError code = aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(
        tq.get(), tk.get(), tv.get(), 0.0, is_causal, mask == nullptr ? nullptr : &mask_handle, &used_scale, dense.put(), dense_lse.put());
    Check(code, "_scaled_dot_product_flash_attention_for_cpu");
    results.Store(dense, dense_lse, groups, shift, first, rows);
  }
};

// cu_seqlens on the host: checked (a wrong one would read or write elsewhere), with the longest sequence's length.
struct Offsets {
  const int32_t* at;
  int64_t count, longest = 0;

  Offsets(const TensorView& cu, int64_t rows, const char* name) : at(Data<int32_t>(cu)), count(cu.size(0) - 1) {
    bool good = count >= 0 && at[0] == 0;
    for (int64_t b = 0; good && b < count; ++b) {
      good = at[b] <= at[b + 1] && at[b + 1] <= rows;
      longest = std::max<int64_t>(longest, at[b + 1] - at[b]);
    }
    if (!good) TVM_FFI_THROW(ValueError) << name << ": got offsets that do not rise from 0; allowed: 0 first, never falling, at most " << rows << ".";
  }
};

// The kernel.  max_seqlen_* and finish are bounds for devices whose offsets the host cannot see; here it sees them.
template <bool kCausal>
void Launch(TensorView q, TensorView k, TensorView v, TensorView cu_seqlens_q, TensorView cu_seqlens_k, Optional<TensorView>, Optional<TensorView>,
            TensorView out, Optional<TensorView> lse, double scale, int64_t, int64_t, int64_t) {
  const View queries = View::Of(q), keys = View::Of(k), values = View::Of(v);
  if (values.cols > queries.cols) TVM_FFI_THROW(ValueError) << "head_dim_v: got " << values.cols << "; allowed: at most " << queries.cols << ".";
  const Results results = {View::Of(out), lse.has_value() ? Data<float>(lse.value()) : nullptr, queries.rows};
  const Offsets cu_q(cu_seqlens_q, queries.rows, "cu_seqlens_q"), cu_k(cu_seqlens_k, keys.rows, "cu_seqlens_k");
  std::optional<Mask> mask;
  for (int64_t b = 0; b < cu_q.count; ++b) {
    int64_t first = cu_q.at[b], len_q = cu_q.at[b + 1] - first;
    const int64_t len_k = cu_k.at[b + 1] - cu_k.at[b];
    // Also keeps empty operands from the aten kernel, which divides by their tile count (SIGFPE).
    const int64_t blind = len_k == 0 ? len_q : kCausal ? std::max<int64_t>(len_q - len_k, 0) : 0;
    results.Blank(first, first + blind);
    first += blind, len_q -= blind;
    if (len_q == 0) continue;
    Tensor owners[3];
    const Sequence sequence(queries.Rows(first, len_q), keys.Rows(cu_k.at[b], len_k), values.Rows(cu_k.at[b], len_k), scale, owners);
    // The aten kernel's own mask is top-left (pytorch/pytorch#108108), the same thing on a square; and it is -inf before
    // the scale is applied, so that only a positive scale keeps it.
    const bool square = len_q == len_k && static_cast<float>(scale) > 0;
    if (!kCausal || square || len_q == 1) {
      sequence.Attend(0, len_q, len_k, kCausal && square, nullptr, results, first);
      continue;
    }
    if (!mask) {
      const int64_t afford = kMaskBytes / (cu_k.longest * queries.itemsize) / kTile * kTile;
      // Rows that see no key are gone, so that no block has more rows than keys, although a sequence may have more queries
      // than any has keys (Dao-AILab/flash-attention#1778 is such a batch).
      mask.emplace(std::min({cu_q.longest, cu_k.longest, std::max(afford, kTile)}), cu_k.longest, queries);
    }
    for (int64_t row = 0; row < len_q; row += mask->rows()) {
      const int64_t rows = std::min(mask->rows(), len_q - row), seen = len_k - len_q + row + rows;
      const Tensor block = mask->Last(rows, seen);
      sequence.Attend(row, rows, seen, false, &block, results, first + row);
    }
  }
  results.Blank(cu_q.at[cu_q.count], queries.rows);
}

}  // namespace
}  // namespace mla_interop

TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_causal, mla_interop::Launch<true>);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch_full, mla_interop::Launch<false>);
