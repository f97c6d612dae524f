// Makes FlashInfer's work lists on the host, in plain C++: no CUDA, no FlashInfer, no device memory.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "flashinfer_plan.h"

namespace {

using mla::ceil_div;
using tvm::ffi::TensorView;

// The SM with the least work, by a winner tree. A node holds (load, SM) in one number, so that a game is one min() and
// ties go to the lower SM; giving work to an SM replays log2(SMs) games.
class LeastLoaded {
 public:
  explicit LeastLoaded(int64_t num_sms) : leaves_(num_sms), nodes_(2 * num_sms) {
    for (int64_t sm = 0; sm < leaves_; ++sm) nodes_[leaves_ + sm] = sm;
    for (int64_t node = leaves_ - 1; node > 0; --node) nodes_[node] = std::min(nodes_[2 * node], nodes_[2 * node + 1]);
  }

  // Adds `cost` to the least loaded SM and returns that SM.
  uint32_t give(uint64_t cost) {
    uint64_t value = nodes_[1];
    const uint32_t sm = value & kSmMask;
    value += cost << kSmBits;
    uint64_t* const nodes = nodes_.data();
    size_t node = leaves_ + sm;
    nodes[node] = value;
    for (; node > 1; node >>= 1) {
      const uint64_t other = nodes[node ^ 1];
      value = other < value ? other : value;
      nodes[node >> 1] = value;
    }
    return sm;
  }

  static constexpr int kSmBits = 16;
  static constexpr uint64_t kSmMask = (uint64_t{1} << kSmBits) - 1;

 private:
  int64_t leaves_;
  std::vector<uint64_t> nodes_;  // node 1 is the winner; the children of i are 2i and 2i + 1
};

struct Lengths {
  const int32_t* cu_q;
  const int32_t* cu_k;
  int64_t batch;

  Lengths(TensorView q, TensorView k, int64_t rows) : batch(q.numel() - 1) {
    for (const TensorView& cu : {q, k}) {
      if (cu.ndim() != 1 || cu.dtype().code != kDLInt || cu.dtype().bits != 32 || cu.device().device_type != kDLCPU || !cu.IsContiguous())
        TVM_FFI_THROW(ValueError) << "the planner takes contiguous one-dimensional int32 lengths on the host";
    }
    if (batch < 1 || k.numel() != batch + 1) TVM_FFI_THROW(ValueError) << "cu_q and cu_k hold " << q.numel() << " and " << k.numel() << " numbers";
    cu_q = static_cast<const int32_t*>(q.data_ptr());
    cu_k = static_cast<const int32_t*>(k.data_ptr());
    bool sound = cu_q[0] == 0 && cu_k[0] == 0 && cu_q[batch] <= rows;
    for (int64_t i = 0; i < batch; ++i) sound = sound && q_len(i) >= 0 && k_len(i) >= 0;
    if (!sound) TVM_FFI_THROW(ValueError) << "cu_q and cu_k must start at 0 and never fall, and cu_q must end at or before row " << rows;
  }

  int64_t q_len(int64_t i) const { return int64_t{cu_q[i + 1]} - cu_q[i]; }
  int64_t k_len(int64_t i) const { return int64_t{cu_k[i + 1]} - cu_k[i]; }
};

// What one entry says, whichever head it is for.
struct Tile {
  int32_t tile, batch, q_start, k_start, q_len, k_len;
  uint64_t cost;
};

// The query tiles of one head in the order in which they are dealt: sequences by falling key count, and within one from
// the last tile, which under a causal mask sees the most keys, to the first. Tiles without a key are left out: they
// would cost a turn, and `finish` fills their rows. (FlashInfer's own epilogue, 0.6.14 to 0.7.4, which is not used here, stores the LSE
// of such a tile into 256 rows where it has 128, over rows of the next tile that do see keys.)
std::vector<Tile> tiles_of_one_head(const Lengths& lengths, bool causal) {
  std::vector<int32_t> order(lengths.batch);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return lengths.k_len(a) > lengths.k_len(b); });
  constexpr int64_t kTile = mla::Fa3Layout::kTile;
  std::vector<Tile> tiles;
  tiles.reserve(lengths.cu_q[lengths.batch] / kTile + lengths.batch);
  for (const int32_t i : order) {
    const int64_t q_len = lengths.q_len(i), k_len = lengths.k_len(i), last = ceil_div(q_len, kTile) - 1;
    for (int64_t tile = last; tile >= 0; --tile) {
      // Upstream's measure: the keys that the tile sees, and a fixed price for loading and storing its rows.
      const int64_t seen = causal && tile < last ? std::clamp<int64_t>(k_len - q_len + (tile + 1) * kTile, 0, k_len) : k_len;
      if (seen == 0) continue;
      tiles.push_back({static_cast<int32_t>(tile), i, lengths.cu_q[i], lengths.cu_k[i], static_cast<int32_t>(q_len),
                       static_cast<int32_t>(k_len), static_cast<uint64_t>(2 * kTile + seen)});
    }
  }
  return tiles;
}

// The order in which all work is dealt: heads in groups that give each SM about two tiles, and in a group the costliest tiles first, of all its
// heads. Dealt head after head, as FlashInfer's planner does, an SM may get a long tile last, when nothing is left to fill the others: by this
// file's costs the busiest has 57 % more than the mean at 16 heads and 2048 tokens, 20 % at 128 and 512, 3 % at 128 and 4096. Larger groups balance a
// little better, but what runs at one time should share keys that fit into the L2 cache.
class Order {
 public:
  Order(const std::vector<Tile>& tiles, int64_t heads, int64_t num_sms) : heads_(heads), by_cost_(tiles.size()) {
    const int64_t count = std::max<int64_t>(1, tiles.size());
    group_ = std::max<int64_t>(1, std::min(heads, ceil_div(kTilesOfAGroup * num_sms, count)));
    std::iota(by_cost_.begin(), by_cost_.end(), 0);
    std::stable_sort(by_cost_.begin(), by_cost_.end(), [&](int32_t a, int32_t b) { return tiles[a].cost > tiles[b].cost; });
  }

  // Calls f(head, index of the tile). A group that is not full comes first: the last one evens out what the others left.
  template <typename F>
  void each(F f) const {
    for (int64_t first = 0, last = (heads_ - 1) % group_ + 1; first < heads_; first = last, last += group_) {
      for (const int32_t tile : by_cost_) {
        for (int64_t head = first; head < last; ++head) f(head, tile);
      }
    }
  }

 private:
  static constexpr int64_t kTilesOfAGroup = 2;  // for each SM

  int64_t heads_, group_;
  std::vector<int32_t> by_cost_;
};

int32_t* at(uint8_t* base, int64_t offset) { return reinterpret_cast<int32_t*>(base + offset); }

uint8_t* checked(TensorView out, int64_t bytes) {
  if (out.numel() != bytes || out.dtype().bits != 8 || out.device().device_type != kDLCPU || !out.IsContiguous())
    TVM_FFI_THROW(ValueError) << "the work list needs a contiguous host buffer of " << bytes << " bytes, got " << out.numel();
  return static_cast<uint8_t*>(out.data_ptr());
}

void fa3_plan(TensorView cu_q, TensorView cu_k, int64_t rows, int64_t heads, bool causal, int64_t num_sms, TensorView out) {
  const Lengths lengths(cu_q, cu_k, rows);
  const mla::Fa3Layout layout(rows, lengths.batch, heads, num_sms);
  if (num_sms < 1 || num_sms > static_cast<int64_t>(LeastLoaded::kSmMask)) TVM_FFI_THROW(ValueError) << "num_sms is " << num_sms;
  if (layout.entries > INT32_MAX / 4) TVM_FFI_THROW(ValueError) << "the work list would hold " << layout.entries << " entries";
  uint8_t* const base = checked(out, layout.bytes);
  const std::vector<Tile> tiles = tiles_of_one_head(lengths, causal);
  const int64_t listed_heads = layout.shared ? 1 : heads, works = static_cast<int64_t>(tiles.size()) * listed_heads;

  // Deal: who works on what, and how much each SM gets.
  std::vector<uint16_t> dealt(works);
  std::vector<int32_t> next(num_sms + 1, 0);
  LeastLoaded least(num_sms);
  const Order order(tiles, listed_heads, num_sms);
  uint16_t* owner = dealt.data();
  order.each([&](int64_t, int64_t tile) {
    const uint32_t sm = least.give(tiles[tile].cost);
    *owner++ = static_cast<uint16_t>(sm);
    ++next[sm + 1];
  });
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::copy(next.begin(), next.end(), at(base, layout.work_indptr));

  // Group by SM: only two numbers of an entry are scattered; the rest is then filled in from front to back.
  int32_t* const heads_out = at(base, layout.head);
  int32_t* const batch_out = at(base, layout.batch);
  owner = dealt.data();
  order.each([&](int64_t head, int64_t tile) {
    const int32_t entry = next[*owner++]++;
    heads_out[entry] = static_cast<int32_t>(head);
    batch_out[entry] = static_cast<int32_t>(tile);
  });
  int32_t *const tile_out = at(base, layout.tile), *const q_start = at(base, layout.q_start), *const k_start = at(base, layout.k_start);
  int32_t *const q_len = at(base, layout.q_len), *const k_len = at(base, layout.k_len);
  for (int64_t entry = 0; entry < works; ++entry) {
    const Tile& tile = tiles[batch_out[entry]];
    tile_out[entry] = tile.tile;
    q_start[entry] = tile.q_start;
    k_start[entry] = tile.k_start;
    q_len[entry] = tile.q_len;
    k_len[entry] = tile.k_len;
    batch_out[entry] = tile.batch;
  }
  // The unused room and the gaps between the parts are read by nobody, but equal lengths must give equal bytes.
  const int64_t ends[][2] = {{layout.tile + 4 * works, layout.q_start}, {layout.q_start + 4 * works, layout.k_start},
                             {layout.k_start + 4 * works, layout.q_len}, {layout.q_len + 4 * works, layout.k_len},
                             {layout.k_len + 4 * works, layout.head}, {layout.head + 4 * works, layout.work_indptr},
                             {layout.work_indptr + 4 * (num_sms + 1), layout.batch}, {layout.batch + 4 * works, layout.bytes}};
  for (const auto& [used, end] : ends) std::memset(base + used, 0, end - used);
}

// An entry for CTAs that have nothing to do. A grid has one size, and without split keys FlashInfer 0.6.14 does not look at
// the mask of valid entries (0.7.4 does), so a spare CTA must be told of a tile that stores nothing and costs little. Past the last row of a sequence
// the kernel starts at key tile * tile_rows - q_len; where that is at most the key count it meets less than one tile of
// keys. Where no sequence offers such a tile, every sequence is short, and doing a real tile twice writes equal bytes.
std::pair<int32_t, int32_t> spare_entry(const Lengths& lengths, int64_t tile_rows) {
  int64_t best = tile_rows;
  std::pair<int32_t, int32_t> entry{-1, 0};
  for (int64_t i = 0; i < lengths.batch; ++i) {
    const int64_t both = lengths.q_len(i) + lengths.k_len(i), tile = both / tile_rows, keys = both % tile_rows;
    if (tile * tile_rows >= lengths.q_len(i) && keys < best) {
      best = keys;
      entry = {static_cast<int32_t>(i), static_cast<int32_t>(tile)};
    }
  }
  for (int64_t i = 0; entry.first < 0; ++i) {
    if (lengths.q_len(i) > 0) entry = {static_cast<int32_t>(i), 0};
  }
  return entry;
}

void fa2_plan(TensorView cu_q, TensorView cu_k, int64_t rows, TensorView out) {
  const Lengths lengths(cu_q, cu_k, rows);
  const mla::Fa2Layout layout(rows, lengths.batch);
  uint8_t* const base = checked(out, layout.bytes);
  std::memset(base, 0, layout.bytes);
  int32_t *request = at(base, layout.request), *tile_out = at(base, layout.tile);
  int32_t* const request_end = request + layout.entries;
  for (int64_t i = 0; i < lengths.batch; ++i) {
    for (int64_t tile = 0; tile < ceil_div(lengths.q_len(i), layout.tile_rows); ++tile) {
      *request++ = static_cast<int32_t>(i);
      *tile_out++ = static_cast<int32_t>(tile);
    }
  }
  std::fill_n(base + layout.valid, layout.entries - (request_end - request), uint8_t{1});
  if (request < request_end) {
    const auto [spare_request, spare_tile] = spare_entry(lengths, layout.tile_rows);
    std::fill_n(tile_out, request_end - request, spare_tile);
    std::fill(request, request_end, spare_request);
  }
  std::copy(lengths.cu_q, lengths.cu_q + lengths.batch + 1, at(base, layout.o_indptr));
  *at(base, layout.kv_chunk) = -1;  // read as unsigned: no bound on the keys of a chunk
  *at(base, layout.total_rows) = lengths.cu_q[lengths.batch];
}

int64_t plan_bytes(int64_t generation, int64_t rows, int64_t batch, int64_t heads, int64_t num_sms) {
  return generation == 3 ? mla::Fa3Layout(rows, batch, heads, num_sms).bytes : mla::Fa2Layout(rows, batch).bytes;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fa3_plan, fa3_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fa2_plan, fa2_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(plan_bytes, plan_bytes);
