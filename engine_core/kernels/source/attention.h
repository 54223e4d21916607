// Paged attention: keys and values in blocks, written and read in one place.
//
// The cache of a layer is [block][16-token slice of the block][KV head]; cache_kinds.h has the layout of a slice.
// Sixteen tokens of one dimension fill a register, so scores need no horizontal sums.
//
// A query's result is an online softmax over tiles of 32 keys aligned to absolute positions, every sum in ascending
// order, so its bits depend on the query, the keys and its position alone.
#pragma once
#include "packed.h"
#include "simd.h"

namespace nj {

enum class CacheKind : int32_t { kF32 = 0, kF16 = 1, kBF16 = 2, kInt8 = 3 };

constexpr int kSlice = 16;
constexpr int kMaxQueries = 6;   // queries that share the loads of keys and values: what the registers hold
constexpr int kMaxHeadDim = 256;
constexpr int kDimBlock = 32;    // dimensions that share a scale in an int8 cache; head_dim is a multiple of it

// Bytes of one slice: 16 tokens' keys and values of one head.
size_t cache_slice_bytes(CacheKind kind, int head_dim);

struct CacheShape {
  CacheKind kind;
  int kv_heads, head_dim, block_size;
  size_t slice_bytes;

  CacheShape(CacheKind kind, int kv_heads, int head_dim, int block_size)
      : kind(kind), kv_heads(kv_heads), head_dim(head_dim), block_size(block_size),
        slice_bytes(cache_slice_bytes(kind, head_dim)) {}
  size_t block_bytes() const { return slice_bytes * kv_heads * (block_size / kSlice); }
  // Byte offset, within a layer, of the slice of `head` that holds position `position` of a sequence with this table.
  size_t slice_offset(const int32_t* table, int position, int head) const {
    const size_t block = table[position / block_size], slice = position % block_size / kSlice;
    return ((block * (block_size / kSlice) + slice) * kv_heads + head) * slice_bytes;
  }
};

// 32 dimensions of one token's key or value, from dimension `dim` on; `lane` is the token's place in its slice.
struct KeyOrValue {
  bool is_value;
  int lane, dim;
  F32x16 low, high;
};
void write_cache(const CacheShape& shape, uint8_t* slice, const KeyOrValue& from);

// Some queries of one sequence and one KV head. Queries are scaled by log2(e) / sqrt(head_dim).
struct QueryGroup {
  const uint8_t* layer;   // cache of the layer
  const int32_t* table;
  int kv_head;
  int num_queries;        // 1..kMaxQueries
  const float* query[kMaxQueries];
  int position[kMaxQueries];  // ascending
  const uint8_t* upcoming[2];  // slices that will be needed after this group
};

// out[query * head_dim + d], for queries that see the keys of positions 0..position[query].
void attend(const CacheShape& shape, const QueryGroup& group, float* out);

}  // namespace nj
