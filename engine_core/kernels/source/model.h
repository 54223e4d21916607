// A Llama-architecture model: weights, cache, workspace, and the program of one step.
#pragma once
#include <memory>
#include <vector>

#include "api.h"
#include "attention.h"
#include "linear.h"
#include "team.h"

namespace nj {

struct Layer {
  PackedMatrix qkv, output, gate_up, down;
  Buffer<float> attention_norm, ffn_norm;
};

// How M rows are cut into row blocks of at most kMaxRowBlock.
struct RowBlocks {
  int rows = 0, block_rows = 1, count = 0;
  static RowBlocks of(int rows);
  int begin(int block) const { return block * block_rows; }
  int size(int block) const { return std::min(block_rows, rows - begin(block)); }
};

// Quantised activations of all rows, K values each, row block by row block.
class Activations {
 public:
  void reserve(int rows, int blocks);
  QuantisedRows view(const RowBlocks& rows, int block);
  // The view and the row within it that hold row `row`.
  QuantisedRows view_of_row(const RowBlocks& rows, int row, int* within);

 private:
  int blocks_ = 0;
  Buffer<int8_t> q_;
  Buffer<float> scale_, scaled_sum_;
  Buffer<int32_t> correction_;
};

struct AttentionItem {
  int32_t sequence, first_token, num_tokens;  // tokens are numbered within the batch
  int32_t kv_head, first_head, num_heads;
  int32_t out_row;  // where the first token's result goes
};

struct ThreadScratch {
  Buffer<float> y, y_second, attended;
  Buffer<uint8_t> panel;
  Buffer<float> best;
  Buffer<int32_t> best_index;
  int best_capacity = 0;
  uint32_t best_step = 0;
};

class Model {
 public:
  Model(const nj_shape& shape, const float* rope_frequencies);
  ~Model();
  bool set_matrix(int role, int layer, int32_t file_type, int num_rows, int num_columns, const uint8_t* data);
  bool set_norm(int norm, int layer, const float* weights);
  bool step(const nj_batch& batch);
  size_t block_bytes() const { return cache_shape_.block_bytes() * shape_.num_layers; }
  bool copy_block(int block, bool to_cache, uint8_t* host);

 private:
  struct Place {
    PackedMatrix* matrix;
    int first_group, group_stride, total_groups;
  };
  bool place_of(int role, int layer, int num_rows, int num_columns, Place* place);
  void fill_rope(const float* frequencies);

  // step_plan.cpp: what is known before the threads start
  bool valid(const nj_batch& batch) const;
  void plan(const nj_batch& batch);
  void plan_attention(const nj_batch& batch);
  void plan_phases();
  void reserve_rows(int rows, int outputs);

  // forward.cpp: the phases
  static void run_forward(void* model, Member& member);
  void forward(Member& member);
  void embed(int item);
  void project_qkv(const Layer& layer, int layer_index, int item, int thread);
  void attention(int layer_index, const std::vector<AttentionItem>& items, int index, const RowBlocks& out_rows,
                 int thread);
  void project_output(const Layer& layer, bool tail, int item, int thread);
  void gate_up(const Layer& layer, const RowBlocks& rows, int item, int thread);
  void project_down(const Layer& layer, const float* next_norm, bool tail, int item, int thread);
  void head(int item, int thread);
  void add_residual(const float* y, const float* x_from, float* x_to, int row, int kb, const float* norm,
                    const QuantisedRows& to, int within);
  void keep_hidden(F32x16 low, F32x16 high, int row, int kb, const float* norm, const QuantisedRows& to, int within);
  void store_rotated(int layer_index, int column, int token, F32x16 low, F32x16 high);
  void finish_norm(int rows);
  void finish_head();
  void write_hidden(float* hidden);

  int group_size() const { return shape_.num_heads / shape_.num_kv_heads; }
  int q_width() const { return shape_.num_heads * shape_.head_dim; }
  int kv_width() const { return shape_.num_kv_heads * shape_.head_dim; }
  uint8_t* cache_layer(int layer) const { return cache_ + cache_layer_bytes_ * layer; }

  const nj_shape shape_;
  const CacheShape cache_shape_;
  const float query_scale_;  // log2(e) / sqrt(head_dim): scores are exponents of 2
  Arena weights_;
  std::vector<Layer> layers_;
  PackedMatrix embedding_, separate_head_;
  Buffer<float> final_norm_;
  Buffer<float> rope_;  // [position][2][head_dim]: cosines, then sines with the sign of the pair's first or second
  uint8_t* cache_ = nullptr;
  size_t cache_layer_bytes_ = 0;
  Team packers_, team_;

  // of the current step
  nj_batch batch_{};
  RowBlocks rows_, tail_rows_;
  std::vector<int32_t> positions_, sequence_of_, phase_items_;
  std::vector<size_t> slice_of_;  // of each token: where its slice of the first KV head lies in a layer's cache
  std::vector<AttentionItem> attention_items_, tail_attention_items_;
  uint32_t step_number_ = 0;

  // workspace
  int row_capacity_ = 0, output_capacity_ = 0;
  Buffer<float> x_, tail_x_, queries_, square_sums_, norm_factor_;
  Activations hidden_, attended_, ffn_;
  std::vector<ThreadScratch> scratch_;
};

}  // namespace nj
