// The shape of the work lists that FlashInfer's two prefill kernels read, as one integer function of (rows, batch,
// heads, SMs). The planner writes a list by it, and the launch closure finds the list's parts by it again, so that no
// offset is ever stored in device memory, read back, or passed along.
//
// Both follow FlashInfer's CUDA graph flavour: sizes come from the padded row count, never from the lengths themselves.
#pragma once

#include <algorithm>
#include <cstdint>

namespace mla {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Hands out byte offsets one after the other, each aligned to 16 unless told otherwise.
class Offsets {
 public:
  int64_t take(int64_t bytes, int64_t alignment = 16) {
    const int64_t start = ceil_div(end_, alignment) * alignment;
    end_ = start + bytes;
    return start;
  }
  int64_t end() const { return end_; }

 private:
  int64_t end_ = 0;
};

// Generation 3 (Hopper): one entry per (query tile of 128 rows, head), grouped by the CTA that works on it.
struct Fa3Layout {
  static constexpr int64_t kTile = 128;  // of all head sizes but 64, which the package does not offer here
  static constexpr int64_t kMostTilesPerHead = 4096;

  int64_t entries;  // room for this many; how many are used stands in the last element of work_indptr
  bool shared;      // the list is for one head, and every head walks it
  int64_t tile, q_start, k_start, q_len, k_len, head, work_indptr, batch;  // byte offsets of int32 arrays
  int64_t bytes;

  Fa3Layout(int64_t rows, int64_t batch_size, int64_t heads, int64_t num_sms) {
    const int64_t per_head = ceil_div(rows, kTile) + batch_size - 1;
    shared = per_head > kMostTilesPerHead;
    entries = shared ? per_head : per_head * heads;
    Offsets offsets;
    for (int64_t* part : {&tile, &q_start, &k_start, &q_len, &k_len, &head}) *part = offsets.take(4 * entries);
    work_indptr = offsets.take(4 * (num_sms + 1));
    batch = offsets.take(4 * entries);
    bytes = offsets.end();
  }
};

// Generation 2: one entry per query tile; every head walks the list, and no tile's keys are split over CTAs.
struct Fa2Layout {
  int64_t tile_rows;
  int64_t entries;  // the grid's size: the spare ones do next to nothing (see spare_entry)
  int64_t request, tile, kv_tile, o_indptr, kv_chunk, total_rows;  // byte offsets of int32 arrays
  int64_t valid;                                                   // and of one byte for each entry
  int64_t bytes;

  Fa2Layout(int64_t rows, int64_t batch_size) {
    // Upstream's rule for heads under 256 wide. The subtraction is of 32 bits there, so that more sequences than rows
    // wrap around and take the largest tile.
    const int64_t longest = static_cast<uint32_t>(rows - batch_size + 1);
    tile_rows = longest > 64 ? 128 : longest > 16 ? 64 : 16;
    entries = ceil_div(rows, tile_rows) + batch_size - 1;
    Offsets offsets;
    for (int64_t* part : {&request, &tile, &kv_tile}) *part = offsets.take(4 * entries);
    o_indptr = offsets.take(4 * (batch_size + 1));
    kv_chunk = offsets.take(4, 1);
    total_rows = offsets.take(4);
    valid = offsets.take(entries);
    bytes = offsets.end();
  }
};

}  // namespace mla
