#include "model.h"

#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <new>

namespace nj {

RowBlocks RowBlocks::of(int rows) {
  RowBlocks blocks;
  blocks.rows = rows;
  blocks.count = (rows + kMaxRowBlock - 1) / kMaxRowBlock;
  if (blocks.count == 0) return blocks;
  blocks.block_rows = (rows + blocks.count - 1) / blocks.count;
  if (blocks.count > 1) {
    blocks.block_rows = (blocks.block_rows + kTileRows - 1) / kTileRows * kTileRows;
    blocks.count = (rows + blocks.block_rows - 1) / blocks.block_rows;
  }
  return blocks;
}

void Activations::reserve(int rows, int blocks) {
  // The last row block may be partly empty.
  const size_t values = static_cast<size_t>(rows + kMaxRowBlock) * blocks;
  blocks_ = blocks;
  q_ = allocate<int8_t>(values * kBlock);
  scale_ = allocate<float>(values);
  scaled_sum_ = allocate<float>(values);
  correction_ = allocate<int32_t>(values);
}

QuantisedRows Activations::view(const RowBlocks& rows, int block) {
  const size_t at = static_cast<size_t>(block) * rows.block_rows * blocks_;
  return {q_.get() + at * kBlock, scale_.get() + at, scaled_sum_.get() + at, correction_.get() + at, rows.block_rows};
}

QuantisedRows Activations::view_of_row(const RowBlocks& rows, int row, int* within) {
  *within = row % rows.block_rows;
  return view(rows, row / rows.block_rows);
}

Model::Model(const nj_shape& shape, const float* rope_frequencies)
    : shape_(shape),
      cache_shape_(static_cast<CacheKind>(shape.cache_kind), shape.num_kv_heads, shape.head_dim, shape.block_size),
      query_scale_(1.44269504088896341f / std::sqrt(static_cast<float>(shape.head_dim))),
      layers_(shape.num_layers),
      packers_(shape.num_threads, 1),
      team_(shape.num_threads, 5 * shape.num_layers + 2),
      scratch_(shape.num_threads) {
  cache_layer_bytes_ = cache_shape_.block_bytes() * shape.num_blocks;
  // Not touched here: a block costs memory from its first use on.
  void* pool = mmap(nullptr, cache_layer_bytes_ * shape.num_layers, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pool == MAP_FAILED) throw std::bad_alloc();
  madvise(pool, cache_layer_bytes_ * shape.num_layers, MADV_HUGEPAGE);
  cache_ = static_cast<uint8_t*>(pool);
  for (ThreadScratch& scratch : scratch_) {
    scratch.y = allocate<float>(kMaxRowBlock * kPair);
    scratch.y_second = allocate<float>(kMaxRowBlock * kPair);
    scratch.attended = allocate<float>(kMaxQueries * kMaxHeadDim);
    scratch.panel = allocate<uint8_t>(kPanelBytes);
  }
  final_norm_ = allocate<float>(shape.width);
  for (Layer& layer : layers_) {
    layer.attention_norm = allocate<float>(shape.width);
    layer.ffn_norm = allocate<float>(shape.width);
  }
  fill_rope(rope_frequencies);
}

Model::~Model() { munmap(cache_, cache_layer_bytes_ * shape_.num_layers); }

void Model::fill_rope(const float* frequencies) {
  const int head_dim = shape_.head_dim;
  rope_ = allocate<float>(static_cast<size_t>(shape_.max_positions) * 2 * head_dim);
  packers_.for_each(shape_.max_positions, [&](int position, int) {
    float* cosines = rope_.get() + static_cast<size_t>(position) * 2 * head_dim;
    float* sines = cosines + head_dim;
    for (int i = 0; i < head_dim / 2; i++) {
      const double angle = static_cast<double>(position) * static_cast<double>(frequencies[i]);
      cosines[2 * i] = cosines[2 * i + 1] = static_cast<float>(std::cos(angle));
      sines[2 * i + 1] = static_cast<float>(std::sin(angle));
      sines[2 * i] = -sines[2 * i + 1];
    }
  });
}

bool Model::place_of(int role, int layer, int num_rows, int num_columns, Place* place) {
  const int q = q_width(), kv = kv_width(), width = shape_.width, ffn = shape_.ffn_width;
  const auto is = [&](int rows, int columns) { return num_rows == rows && num_columns == columns; };
  const int qkv_groups = (q + 2 * kv) / kGroup, vocab_groups = (shape_.vocab_size + kPair - 1) / kPair * 2;
  Layer& of = layers_[layer];
  switch (role) {
    case NJ_QUERY: *place = {&of.qkv, 0, 1, qkv_groups}; return is(q, width);
    case NJ_KEY: *place = {&of.qkv, q / kGroup, 1, qkv_groups}; return is(kv, width);
    case NJ_VALUE: *place = {&of.qkv, (q + kv) / kGroup, 1, qkv_groups}; return is(kv, width);
    case NJ_OUTPUT: *place = {&of.output, 0, 1, width / kGroup}; return is(width, q);
    case NJ_GATE: *place = {&of.gate_up, 0, 2, 2 * ffn / kGroup}; return is(ffn, width);
    case NJ_UP: *place = {&of.gate_up, 1, 2, 2 * ffn / kGroup}; return is(ffn, width);
    case NJ_DOWN: *place = {&of.down, 0, 1, width / kGroup}; return is(width, ffn);
    case NJ_EMBEDDING: *place = {&embedding_, 0, 1, vocab_groups}; return is(shape_.vocab_size, width);
    case NJ_HEAD: *place = {&separate_head_, 0, 1, vocab_groups}; return is(shape_.vocab_size, width);
  }
  return false;
}

bool Model::set_matrix(int role, int layer, int32_t file_type, int num_rows, int num_columns, const uint8_t* data) {
  Place place{};
  const WeightKind kind = kind_of(file_type);
  if (kind == WeightKind::kNone || layer < 0 || layer >= shape_.num_layers) return false;
  if (!place_of(role, layer, num_rows, num_columns, &place)) return false;
  PackedMatrix* matrix = place.matrix;
  if (matrix->kind == WeightKind::kNone) matrix->reserve(kind, num_columns / kBlock, place.total_groups / 2, &weights_);
  if (matrix->kind != kind) return false;
  packers_.for_each((num_rows + kGroup - 1) / kGroup, [&](int i, int) {
    const int group = place.first_group + i * place.group_stride;
    pack_group(matrix, group / 2, group % 2, file_type, data, i * kGroup, num_rows);
  });
  return true;
}

bool Model::set_norm(int norm, int layer, const float* weights) {
  if (layer < 0 || layer >= shape_.num_layers) return false;
  float* to = norm == NJ_FINAL_NORM       ? final_norm_.get()
              : norm == NJ_ATTENTION_NORM ? layers_[layer].attention_norm.get()
                                          : layers_[layer].ffn_norm.get();
  std::memcpy(to, weights, sizeof(float) * shape_.width);
  return true;
}

bool Model::step(const nj_batch& batch) {
  if (!valid(batch)) return false;
  if (batch.num_tokens == 0) return true;
  plan(batch);
  team_.run(&Model::run_forward, this, phase_items_.data(), static_cast<int>(phase_items_.size()));
  if (batch.hidden != nullptr) write_hidden(batch.hidden);
  return true;
}

// In host memory a block is contiguous: layer by layer.
bool Model::copy_block(int block, bool to_cache, uint8_t* host) {
  if (block < 0 || block >= shape_.num_blocks) return false;
  const size_t size = cache_shape_.block_bytes();
  for (int layer = 0; layer < shape_.num_layers; layer++, host += size) {
    uint8_t* in_cache = cache_layer(layer) + size * block;
    std::memcpy(to_cache ? in_cache : host, to_cache ? host : in_cache, size);
  }
  return true;
}

}  // namespace nj
