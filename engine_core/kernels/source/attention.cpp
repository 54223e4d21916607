#include "attention.h"

#include <algorithm>

#include "cache_kinds.h"
#include "int8_slice.h"

namespace nj {

namespace {

constexpr int kTile = 2 * kSlice;

// The slices of a group's keys one after another; after the last, what is needed after the group.
class SliceWalk {
 public:
  SliceWalk(const CacheShape& shape, const QueryGroup& group, int last)
      : table_(group.table),
        head_(group.layer + group.kv_head * shape.slice_bytes),
        upcoming_{group.upcoming[0], group.upcoming[1]},
        slice_bytes_(shape.slice_bytes * shape.kv_heads),
        per_block_(shape.block_size / kSlice),
        left_(last / kSlice + 1) {}

  const uint8_t* next() {
    if (left_-- <= 0) return upcoming_[after_++ % 2];
    const uint8_t* slice = head_ + (static_cast<size_t>(*table_) * per_block_ + within_) * slice_bytes_;
    if (++within_ == per_block_) within_ = 0, table_++;
    return slice;
  }

 private:
  const int32_t* table_;
  const uint8_t *head_, *upcoming_[2];
  size_t slice_bytes_;  // of all heads
  int per_block_, within_ = 0, left_, after_ = 0;
};

// Running softmax of N queries: the largest score so far, the sum of weights (by key lane), weights of the tile.
template <int N>
struct Softmax {
  float largest[N];
  F32x16 total[N];
  F32x16 weight[N][2];
};

// Turn scores into weights, and rescale what was accumulated so far where the largest score has grown.
template <int N>
void weigh(F32x16 (*scores)[2], const int* num_visible, Softmax<N>* softmax, int head_dim, float* out) {
  for (int j = 0; j < N; j++) {
    const F32x16 a = keep_first(scores[j][0], num_visible[j]), b = keep_first(scores[j][1], num_visible[j] - kSlice);
    const float largest = reduce_max(max_keep_nan(a, b));
    if (largest > softmax->largest[j]) {
      float factor[16];
      store(factor, exp2_lanes(set1(softmax->largest[j] - largest)));
      const F32x16 f = set1(factor[0]);
      softmax->largest[j] = largest;
      softmax->total[j] = mul(softmax->total[j], f);
      for (int d = 0; d < head_dim; d += 16) store(out + j * head_dim + d, mul(load(out + j * head_dim + d), f));
    }
    const F32x16 m = set1(softmax->largest[j]);
    softmax->weight[j][0] = exp2_lanes(sub(a, m)), softmax->weight[j][1] = exp2_lanes(sub(b, m));
    softmax->total[j] = add(softmax->total[j], add(softmax->weight[j][0], softmax->weight[j][1]));
  }
}

template <class Slice, int N>
void score_tile(const uint8_t* const* slices, int num_slices, const typename Slice::template Queries<N>& queries,
                int head_dim, UpcomingLines* upcoming, F32x16 (*scores)[2]) {
  // Two slices at once fill the pipeline where queries are few; with many there may not be the registers for it.
  if (N <= Slice::kQueriesForTwo && num_slices == 2)
    return Slice::template score<N, 2>(slices, queries, head_dim, upcoming, scores);
  for (int s = 0; s < num_slices; s++) {
    F32x16 of_slice[N][2];
    Slice::template score<N, 1>(slices + s, queries, head_dim, upcoming, of_slice);
    for (int j = 0; j < N; j++) scores[j][s] = of_slice[j][0];
  }
}

template <class Slice, int N>
void attend_queries(const CacheShape& shape, const QueryGroup& group, float* out) {
  const int head_dim = shape.head_dim, last = group.position[N - 1];
  const typename Slice::template Queries<N> queries(group.query, head_dim);
  Softmax<N> softmax;
  for (int j = 0; j < N; j++) softmax.largest[j] = -kInfinity, softmax.total[j] = zero();
  std::fill(out, out + N * head_dim, 0.0f);
  SliceWalk walk(shape, group, last);
  const uint8_t *slices[2], *following[2] = {walk.next(), walk.next()};
  for (int first = 0; first <= last; first += kTile) {
    const int num_keys = std::min(kTile, last + 1 - first), num_slices = (num_keys + kSlice - 1) / kSlice;
    UpcomingLines upcoming[2];
    for (int i = 0; i < 2; i++) {
      slices[i] = following[i];
      following[i] = walk.next();
      upcoming[i] = {following[i], following[i] + shape.slice_bytes};
    }
    int num_visible[N];
    for (int j = 0; j < N; j++) num_visible[j] = group.position[j] + 1 - first;
    F32x16 scores[N][2];
    for (int j = 0; j < N; j++) scores[j][1] = zero();
    score_tile<Slice, N>(slices, num_slices, queries, head_dim, &upcoming[0], scores);
    weigh<N>(scores, num_visible, &softmax, head_dim, out);
    const WeightedTile<N> weighted{slices, num_keys, softmax.weight};
    for (int dim = 0; dim < head_dim; dim += kDimBlock)
      Slice::template accumulate<N>(weighted, head_dim, dim, &upcoming[1], out);
    for (UpcomingLines& lines : upcoming) lines.request_rest();
  }
  for (int j = 0; j < N; j++) {
    const F32x16 inverse = set1(1.0f / reduce_add(softmax.total[j]));
    for (int d = 0; d < head_dim; d += 16) store(out + j * head_dim + d, mul(load(out + j * head_dim + d), inverse));
  }
}

template <class Slice>
void attend_in(const CacheShape& shape, const QueryGroup& group, float* out) {
  switch (group.num_queries) {
    case 1: return attend_queries<Slice, 1>(shape, group, out);
    case 2: return attend_queries<Slice, 2>(shape, group, out);
    case 3: return attend_queries<Slice, 3>(shape, group, out);
    case 4: return attend_queries<Slice, 4>(shape, group, out);
    case 5: return attend_queries<Slice, 5>(shape, group, out);
    case 6: return attend_queries<Slice, 6>(shape, group, out);
  }
}

}  // namespace

size_t cache_slice_bytes(CacheKind kind, int head_dim) {
  switch (kind) {
    case CacheKind::kF32: return FloatSlice<F32Element>::bytes(head_dim);
    case CacheKind::kF16: return FloatSlice<F16Element>::bytes(head_dim);
    case CacheKind::kBF16: return FloatSlice<BF16Element>::bytes(head_dim);
    case CacheKind::kInt8: return Int8Slice::bytes(head_dim);
  }
  return 0;
}

void write_cache(const CacheShape& shape, uint8_t* slice, const KeyOrValue& from) {
  switch (shape.kind) {
    case CacheKind::kF32: return FloatSlice<F32Element>::write(slice, shape.head_dim, from);
    case CacheKind::kF16: return FloatSlice<F16Element>::write(slice, shape.head_dim, from);
    case CacheKind::kBF16: return FloatSlice<BF16Element>::write(slice, shape.head_dim, from);
    case CacheKind::kInt8: return Int8Slice::write(slice, shape.head_dim, from);
  }
}

void attend(const CacheShape& shape, const QueryGroup& group, float* out) {
  switch (shape.kind) {
    case CacheKind::kF32: return attend_in<FloatSlice<F32Element>>(shape, group, out);
    case CacheKind::kF16: return attend_in<FloatSlice<F16Element>>(shape, group, out);
    case CacheKind::kBF16: return attend_in<FloatSlice<BF16Element>>(shape, group, out);
    case CacheKind::kInt8: return attend_in<Int8Slice>(shape, group, out);
  }
}

}  // namespace nj
