#include "api.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <vector>

#include "model.h"

struct nj_model {
  nj::Model model;
};

int32_t nj_abi_version(void) { return NJ_ABI_VERSION; }

const char* nj_instruction_set(void) { return nj::kInstructionSet; }

nj_model* nj_model_create(const nj_shape* shape, const float* rope_frequencies) {
  try {
    return new nj_model{{*shape, rope_frequencies}};
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void nj_model_destroy(nj_model* model) { delete model; }

int32_t nj_model_set_matrix(nj_model* model, int32_t role, int32_t layer, int32_t file_type, int32_t num_rows,
                            int32_t num_columns, const uint8_t* data) {
  return model->model.set_matrix(role, layer, file_type, num_rows, num_columns, data) ? 0 : -1;
}

int32_t nj_model_set_norm(nj_model* model, int32_t norm, int32_t layer, const float* weights) {
  return model->model.set_norm(norm, layer, weights) ? 0 : -1;
}

int32_t nj_model_step(nj_model* model, const nj_batch* batch) { return model->model.step(*batch) ? 0 : -1; }

int64_t nj_model_block_bytes(const nj_model* model) { return static_cast<int64_t>(model->model.block_bytes()); }

int32_t nj_model_copy_block(nj_model* model, int32_t block, int32_t to_cache, uint8_t* host) {
  return model->model.copy_block(block, to_cache != 0, host) ? 0 : -1;
}

int32_t nj_multiply(int32_t file_type, int32_t m, int32_t n, int32_t k, const uint8_t* tensor, const float* x, float* y,
                    int32_t num_threads) {
  using namespace nj;
  if (kind_of(file_type) == WeightKind::kNone || k % kBlock != 0) return -1;
  RoundingScope scope;
  const int blocks = k / kBlock;
  Arena arena;
  PackedMatrix matrix;
  matrix.reserve(kind_of(file_type), blocks, (n + kPair - 1) / kPair, &arena);
  for (int group = 0; group * kGroup < n; group++)
    pack_group(&matrix, group / 2, group % 2, file_type, tensor, group * kGroup, n);
  Activations activations;
  activations.reserve(m, blocks);
  const RowBlocks rows = RowBlocks::of(m);
  for (int row = 0; row < m; row++) {
    int within;
    const QuantisedRows to = activations.view_of_row(rows, row, &within);
    for (int kb = 0; kb < blocks; kb++) {
      const float* from = x + static_cast<size_t>(row) * k + kb * kBlock;
      quantise_block(load(from), load(from + 16), to, kb, within);
    }
  }
  Team team(num_threads, 1);
  team.for_each(matrix.pairs * rows.count, [&](int item, int) {
    const int block = item / matrix.pairs, pair = item % matrix.pairs, columns = std::min(kPair, n - pair * kPair);
    std::vector<float> out(kMaxRowBlock * kPair);
    Buffer<uint8_t> panel = allocate<uint8_t>(kPanelBytes);
    multiply_pair(matrix, pair, activations.view(rows, block), rows.size(block), out.data(), panel.get());
    for (int r = 0; r < rows.size(block); r++)
      std::copy_n(out.data() + r * kPair, columns, y + static_cast<size_t>(rows.begin(block) + r) * n + pair * kPair);
  });
  return 0;
}

void nj_quantise(int32_t m, int32_t k, const float* x, int8_t* q, float* scale) {
  nj::RoundingScope scope;
  float scaled_sum;
  int32_t correction;
  for (int64_t at = 0; at < static_cast<int64_t>(m) * (k / nj::kBlock); at++)
    nj::quantise_block(nj::load(x + at * nj::kBlock), nj::load(x + at * nj::kBlock + 16),
                       {q + at * nj::kBlock, scale + at, &scaled_sum, &correction, 1}, 0, 0);
}

void nj_exp2(int32_t count, const float* x, float* y) {
  nj::RoundingScope scope;
  for (int32_t i = 0; i + 16 <= count; i += 16) nj::store(y + i, nj::exp2_lanes(nj::load(x + i)));
}

void nj_silu(int32_t count, const float* x, float* y) {
  nj::RoundingScope scope;
  for (int32_t i = 0; i + 16 <= count; i += 16) nj::store(y + i, nj::silu_lanes(nj::load(x + i)));
}

int32_t nj_attend(int32_t cache_kind, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                  int32_t num_tokens, int32_t first_query, int32_t group, const int32_t* table, int32_t num_blocks,
                  const float* q, const float* k, const float* v, float* out) {
  using namespace nj;
  const int shared = num_heads / num_kv_heads;
  if (shared * group > kMaxQueries || head_dim > kMaxHeadDim || block_size % kSlice != 0 ||
      head_dim % kDimBlock != 0)
    return -1;
  RoundingScope scope;
  const CacheShape shape{static_cast<CacheKind>(cache_kind), num_kv_heads, head_dim, block_size};
  Buffer<uint8_t> cache = allocate<uint8_t>(shape.block_bytes() * num_blocks);
  std::memset(cache.get(), 0xFF, shape.block_bytes() * num_blocks);
  for (int t = 0; t < num_tokens; t++)
    for (int h = 0; h < num_kv_heads; h++)
      for (int d = 0; d < head_dim; d += kDimBlock)
        for (bool is_value : {false, true}) {
          const float* from = (is_value ? v : k) + (static_cast<size_t>(t) * num_kv_heads + h) * head_dim + d;
          write_cache(shape, cache.get() + shape.slice_offset(table, t, h),
                      {is_value, t % kSlice, d, load(from), load(from + 16)});
        }
  const float scale = 1.44269504088896341f / std::sqrt(static_cast<float>(head_dim));
  std::vector<float> scaled(q, q + static_cast<size_t>(num_tokens) * num_heads * head_dim);
  for (float& value : scaled) value *= scale;
  Buffer<float> attended = allocate<float>(kMaxQueries * head_dim);
  for (int t = first_query; t < num_tokens; t += group)
    for (int h = 0; h < num_kv_heads; h++) {
      QueryGroup queries{cache.get(), table, h, 0, {}, {}, {cache.get(), cache.get()}};
      for (int i = t; i < std::min(t + group, num_tokens); i++)
        for (int s = 0; s < shared; s++) {
          const size_t head = static_cast<size_t>(i) * num_heads + h * shared + s;
          queries.query[queries.num_queries] = scaled.data() + head * head_dim;
          queries.position[queries.num_queries++] = i;
        }
      attend(shape, queries, attended.get());
      for (int j = 0; j < queries.num_queries; j++)
        std::copy_n(attended.get() + j * head_dim, head_dim,
                    out + (static_cast<size_t>(queries.position[j]) * num_heads + h * shared + j % shared) * head_dim);
    }
  return 0;
}
