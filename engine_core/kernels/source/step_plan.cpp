// What one step will do: checked, sized and cut into items before any thread starts.
#include <algorithm>

#include "model.h"

namespace nj {

bool Model::valid(const nj_batch& batch) const {
  for (int i = 0; i < batch.num_tokens; i++)
    if (batch.tokens[i] < 0 || batch.tokens[i] >= shape_.vocab_size) return false;
  for (int s = 0; s < batch.num_sequences; s++) {
    const int tokens = batch.first_token[s + 1] - batch.first_token[s], start = batch.start[s];
    const int blocks = batch.first_block[s + 1] - batch.first_block[s];
    if (tokens <= 0 || start < 0 || start + tokens > shape_.max_positions) return false;
    if (static_cast<int64_t>(blocks) * shape_.block_size < start + tokens) return false;
  }
  for (int i = 0; batch.num_sequences > 0 && i < batch.first_block[batch.num_sequences]; i++)
    if (batch.blocks[i] < 0 || batch.blocks[i] >= shape_.num_blocks) return false;
  for (int i = 0; i < batch.num_outputs; i++)
    if (batch.output_tokens[i] < 0 || batch.output_tokens[i] >= batch.num_tokens) return false;
  return batch.num_sequences == 0 ? batch.num_tokens == 0 : batch.first_token[batch.num_sequences] == batch.num_tokens;
}

void Model::plan(const nj_batch& batch) {
  batch_ = batch;
  step_number_++;
  rows_ = RowBlocks::of(batch.num_tokens);
  tail_rows_ = RowBlocks::of(batch.num_outputs);
  reserve_rows(batch.num_tokens, batch.num_outputs);
  positions_.resize(batch.num_tokens);
  sequence_of_.resize(batch.num_tokens);
  slice_of_.resize(batch.num_tokens);
  for (int s = 0; s < batch.num_sequences; s++)
    for (int t = batch.first_token[s]; t < batch.first_token[s + 1]; t++) {
      positions_[t] = batch.start[s] + t - batch.first_token[s];
      sequence_of_[t] = s;
      slice_of_[t] = cache_shape_.slice_offset(batch.blocks + batch.first_block[s], positions_[t], 0);
    }
  plan_attention(batch);
  plan_phases();
}

void Model::plan_attention(const nj_batch& batch) {
  attention_items_.clear();
  tail_attention_items_.clear();
  // A group of query heads too large for one item is cut evenly.
  const int pieces = (group_size() + kMaxQueries - 1) / kMaxQueries, shared = (group_size() + pieces - 1) / pieces;
  const int together = kMaxQueries / shared;
  const auto add = [&](std::vector<AttentionItem>* items, int sequence, int token, int tokens, int out_row) {
    for (int kv = 0; kv < shape_.num_kv_heads; kv++)
      for (int h = 0; h < group_size(); h += shared)
        items->push_back(
            {sequence, token, tokens, kv, kv * group_size() + h, std::min(shared, group_size() - h), out_row});
  };
  for (int s = 0; s < batch.num_sequences; s++)
    for (int t = batch.first_token[s]; t < batch.first_token[s + 1]; t += together)
      add(&attention_items_, s, t, std::min(together, batch.first_token[s + 1] - t), t);
  for (int i = 0; i < batch.num_outputs; i++)
    add(&tail_attention_items_, sequence_of_[batch.output_tokens[i]], batch.output_tokens[i], 1, i);
}

// Sizes of the phases, in the order in which forward() runs them. The last layer computes only what the outputs need.
void Model::plan_phases() {
  phase_items_.clear();
  phase_items_.push_back(rows_.rows);
  for (int i = 0; i < shape_.num_layers; i++) {
    const Layer& layer = layers_[i];
    const bool tail = i + 1 == shape_.num_layers;
    const int blocks = tail ? tail_rows_.count : rows_.count;
    phase_items_.push_back(layer.qkv.pairs * rows_.count);
    phase_items_.push_back(static_cast<int>(tail ? tail_attention_items_.size() : attention_items_.size()));
    phase_items_.push_back(layer.output.pairs * blocks);
    phase_items_.push_back(layer.gate_up.pairs / 2 * blocks);
    phase_items_.push_back(layer.down.pairs * blocks);
  }
  phase_items_.push_back(batch_.hidden != nullptr ? 0 : embedding_.pairs * tail_rows_.count);
}

void Model::reserve_rows(int rows, int outputs) {
  const int width = shape_.width;
  if (rows > row_capacity_ || outputs > row_capacity_) {
    row_capacity_ = std::max({rows, outputs, 2 * row_capacity_, 64});
    x_ = allocate<float>(static_cast<size_t>(row_capacity_) * width);
    queries_ = allocate<float>(static_cast<size_t>(row_capacity_) * q_width());
    // Sixteen rows at a time are read when the norm is finished.
    square_sums_ = allocate<float>(static_cast<size_t>(row_capacity_ + 16) * (width / kBlock));
    norm_factor_ = allocate<float>(row_capacity_ + 16);
    hidden_.reserve(row_capacity_, width / kBlock);
    attended_.reserve(row_capacity_, q_width() / kBlock);
    ffn_.reserve(row_capacity_, shape_.ffn_width / kBlock);
  }
  if (outputs > output_capacity_) {
    output_capacity_ = std::max({outputs, 2 * output_capacity_, 64});
    tail_x_ = allocate<float>(static_cast<size_t>(output_capacity_) * width);
    for (ThreadScratch& scratch : scratch_) {
      scratch.best = allocate<float>(static_cast<size_t>(output_capacity_) * kGroup);
      scratch.best_index = allocate<int32_t>(static_cast<size_t>(output_capacity_) * kGroup);
    }
  }
}

}  // namespace nj
