// One step of the model as a program of phases: embedding; per layer QKV, attention, output, gate and up, down; head.
//
// RMSNorm costs no pass of its own: whoever writes 32 values of the residual stream also quantises them times the
// norm's weights (the scale of a block does not care about the row's factor) and notes their sum of squares; the row's
// factor 1/rms is applied to what the next matrix yields.
#include <algorithm>

#include "model.h"

namespace nj {

void Model::run_forward(void* model, Member& member) { static_cast<Model*>(model)->forward(member); }

void Model::forward(Member& member) {
  const int num_layers = shape_.num_layers;
  member.phase([this](int item, int) { embed(item); }, [this] { finish_norm(rows_.rows); });
  for (int i = 0; i < num_layers; i++) {
    const Layer& layer = layers_[i];
    const bool tail = i + 1 == num_layers;
    const RowBlocks& rows = tail ? tail_rows_ : rows_;
    const std::vector<AttentionItem>& items = tail ? tail_attention_items_ : attention_items_;
    const float* next_norm = tail ? final_norm_.get() : layers_[i + 1].attention_norm.get();
    member.phase([&](int item, int thread) { project_qkv(layer, i, item, thread); });
    member.phase([&](int item, int thread) { attention(i, items, item, rows, thread); });
    member.phase([&](int item, int thread) { project_output(layer, tail, item, thread); },
                 [&] { finish_norm(rows.rows); });
    member.phase([&](int item, int thread) { gate_up(layer, rows, item, thread); });
    member.phase([&](int item, int thread) { project_down(layer, next_norm, tail, item, thread); },
                 [&] { finish_norm(rows.rows); });
  }
  member.phase([this](int item, int thread) { head(item, thread); }, [this] { finish_head(); });
}

// Note the sum of squares of 32 values of the residual stream and quantise them times the next norm's weights.
void Model::keep_hidden(F32x16 low, F32x16 high, int row, int kb, const float* norm, const QuantisedRows& to,
                        int within) {
  square_sums_[static_cast<size_t>(kb) * (row_capacity_ + 16) + row] = reduce_add(fma(high, high, mul(low, low)));
  norm += kb * kBlock;
  quantise_block(mul(low, load(norm)), mul(high, load(norm + 16)), to, kb, within);
}

void Model::finish_norm(int rows) {
  const F32x16 width = set1(static_cast<float>(shape_.width)), epsilon = set1(shape_.norm_epsilon);
  for (int row = 0; row < rows; row += 16) {
    F32x16 sum = zero();
    for (int kb = 0; kb < shape_.width / kBlock; kb++)
      sum = add(sum, load(square_sums_.get() + static_cast<size_t>(kb) * (row_capacity_ + 16) + row));
    store(norm_factor_.get() + row, div(set1(1.0f), sqrt_lanes(add(div(sum, width), epsilon))));
  }
}

void Model::embed(int row) {
  float* x = x_.get() + static_cast<size_t>(row) * shape_.width;
  unpack_column(embedding_, batch_.tokens[row], x);
  int within;
  const QuantisedRows to = hidden_.view_of_row(rows_, row, &within);
  const float* norm = layers_[0].attention_norm.get();
  for (int kb = 0; kb < shape_.width / kBlock; kb++, x += kBlock)
    keep_hidden(load(x), load(x + 16), row, kb, norm, to, within);
}

void Model::project_qkv(const Layer& layer, int layer_index, int item, int thread) {
  ThreadScratch& scratch = scratch_[thread];
  const int block = item / layer.qkv.pairs, pair = item % layer.qkv.pairs;
  const int begin = rows_.begin(block), size = rows_.size(block);
  multiply_pair(layer.qkv, pair, hidden_.view(rows_, block), size, scratch.y.get(), scratch.panel.get());
  for (int r = 0; r < size; r++) {
    const F32x16 factor = set1(norm_factor_[begin + r]);
    const float* y = scratch.y.get() + r * kPair;
    store_rotated(layer_index, pair * kPair, begin + r, mul(load(y), factor), mul(load(y + 16), factor));
  }
}

// Columns [column, column + 32) of a token's queries, keys or values: rotate, then store where attention finds them.
void Model::store_rotated(int layer_index, int column, int token, F32x16 low, F32x16 high) {
  const int head_dim = shape_.head_dim, position = positions_[token];
  const bool is_value = column >= q_width() + kv_width();
  if (!is_value) {
    const float* cosines = rope_.get() + static_cast<size_t>(position) * 2 * head_dim + column % head_dim;
    const float* sines = cosines + head_dim;
    low = fma(low, load(cosines), mul(swap_pairs(low), load(sines)));
    high = fma(high, load(cosines + 16), mul(swap_pairs(high), load(sines + 16)));
  }
  if (column < q_width()) {
    const F32x16 scale = set1(query_scale_);
    float* q = queries_.get() + static_cast<size_t>(token) * q_width() + column;
    store(q, mul(low, scale));
    store(q + 16, mul(high, scale));
    return;
  }
  const int kv_column = column - q_width() - (is_value ? kv_width() : 0);
  uint8_t* slice = cache_layer(layer_index) + slice_of_[token] + kv_column / head_dim * cache_shape_.slice_bytes;
  write_cache(cache_shape_, slice, {is_value, position % kSlice, kv_column % head_dim, low, high});
}

void Model::attention(int layer_index, const std::vector<AttentionItem>& items, int index, const RowBlocks& out_rows,
                      int thread) {
  const int last = static_cast<int>(items.size()) - 1;
  const AttentionItem &item = items[index], &next = items[std::min(index + 1, last)];
  QueryGroup group;
  const int32_t* next_table = batch_.blocks + batch_.first_block[next.sequence];
  const int next_length = positions_[next.first_token] + 1;
  for (int i = 0; i < 2; i++)
    group.upcoming[i] = cache_layer(layer_index) +
                        cache_shape_.slice_offset(next_table, std::min(i * kSlice, next_length - 1), next.kv_head);
  group.layer = cache_layer(layer_index);
  group.table = batch_.blocks + batch_.first_block[item.sequence];
  group.kv_head = item.kv_head;
  group.num_queries = 0;
  const int head_dim = shape_.head_dim;
  for (int t = item.first_token; t < item.first_token + item.num_tokens; t++)
    for (int h = item.first_head; h < item.first_head + item.num_heads; h++) {
      group.query[group.num_queries] = queries_.get() + static_cast<size_t>(t) * q_width() + h * head_dim;
      group.position[group.num_queries++] = positions_[t];
    }
  float* out = scratch_[thread].attended.get();
  attend(cache_shape_, group, out);
  for (int t = 0; t < item.num_tokens; t++) {
    int within;
    const QuantisedRows to = attended_.view_of_row(out_rows, item.out_row + t, &within);
    for (int h = 0; h < item.num_heads; h++, out += head_dim)
      for (int d = 0; d < head_dim; d += kBlock)
        quantise_block(load(out + d), load(out + d + 16), to, ((item.first_head + h) * head_dim + d) / kBlock, within);
  }
}

void Model::add_residual(const float* y, const float* x_from, float* x_to, int row, int kb, const float* norm,
                         const QuantisedRows& to, int within) {
  const F32x16 low = add(load(x_from), load(y)), high = add(load(x_from + 16), load(y + 16));
  store(x_to, low);
  store(x_to + 16, high);
  keep_hidden(low, high, row, kb, norm, to, within);
}

// In the last layer only the outputs' rows go on, gathered from the residual stream of all rows.
void Model::project_output(const Layer& layer, bool tail, int item, int thread) {
  ThreadScratch& scratch = scratch_[thread];
  const RowBlocks& rows = tail ? tail_rows_ : rows_;
  const int block = item / layer.output.pairs, pair = item % layer.output.pairs, width = shape_.width;
  const int begin = rows.begin(block), size = rows.size(block);
  multiply_pair(layer.output, pair, attended_.view(rows, block), size, scratch.y.get(), scratch.panel.get());
  const QuantisedRows to = hidden_.view(rows, block);
  for (int r = 0; r < size; r++) {
    const int row = begin + r, from = tail ? batch_.output_tokens[row] : row;
    float* x_to = (tail ? tail_x_ : x_).get() + static_cast<size_t>(row) * width + pair * kPair;
    const float* x_from = x_.get() + static_cast<size_t>(from) * width + pair * kPair;
    add_residual(scratch.y.get() + r * kPair, x_from, x_to, row, pair, layer.ffn_norm.get(), to, r);
  }
}

// Two pairs of (16 gate, 16 up) columns make one block of 32 values for the down projection.
void Model::gate_up(const Layer& layer, const RowBlocks& rows, int item, int thread) {
  ThreadScratch& scratch = scratch_[thread];
  const int columns = layer.gate_up.pairs / 2, block = item / columns, kb = item % columns;
  const int begin = rows.begin(block), size = rows.size(block);
  const QuantisedRows x = hidden_.view(rows, block), to = ffn_.view(rows, block);
  multiply_pair(layer.gate_up, 2 * kb, x, size, scratch.y.get(), scratch.panel.get());
  multiply_pair(layer.gate_up, 2 * kb + 1, x, size, scratch.y_second.get(), scratch.panel.get());
  for (int r = 0; r < size; r++) {
    const F32x16 factor = set1(norm_factor_[begin + r]);
    const float *a = scratch.y.get() + r * kPair, *b = scratch.y_second.get() + r * kPair;
    const F32x16 low = mul(silu_lanes(mul(load(a), factor)), mul(load(a + 16), factor));
    const F32x16 high = mul(silu_lanes(mul(load(b), factor)), mul(load(b + 16), factor));
    quantise_block(low, high, to, kb, r);
  }
}

void Model::project_down(const Layer& layer, const float* next_norm, bool tail, int item, int thread) {
  ThreadScratch& scratch = scratch_[thread];
  const RowBlocks& rows = tail ? tail_rows_ : rows_;
  const int block = item / layer.down.pairs, pair = item % layer.down.pairs;
  const int begin = rows.begin(block), size = rows.size(block);
  multiply_pair(layer.down, pair, ffn_.view(rows, block), size, scratch.y.get(), scratch.panel.get());
  const QuantisedRows to = hidden_.view(rows, block);
  for (int r = 0; r < size; r++) {
    float* x = (tail ? tail_x_ : x_).get() + static_cast<size_t>(begin + r) * shape_.width + pair * kPair;
    add_residual(scratch.y.get() + r * kPair, x, x, begin + r, pair, next_norm, to, r);
  }
}

void Model::head(int item, int thread) {
  ThreadScratch& scratch = scratch_[thread];
  const PackedMatrix& matrix = separate_head_.kind == WeightKind::kNone ? embedding_ : separate_head_;
  const int block = item / matrix.pairs, pair = item % matrix.pairs;
  const int begin = tail_rows_.begin(block), size = tail_rows_.size(block);
  if (scratch.best_step != step_number_) {
    scratch.best_step = step_number_;
    std::fill(scratch.best.get(), scratch.best.get() + tail_rows_.rows * kGroup, -kInfinity);
    std::fill(scratch.best_index.get(), scratch.best_index.get() + tail_rows_.rows * kGroup, INT32_MAX);
  }
  multiply_pair(matrix, pair, hidden_.view(tail_rows_, block), size, scratch.y.get(), scratch.panel.get());
  int32_t lanes[kGroup];
  for (int i = 0; i < kGroup; i++) lanes[i] = pair * kPair + i;
  const int columns = std::min(kPair, shape_.vocab_size - pair * kPair);
  for (int r = 0; r < size; r++) {
    const int row = begin + r;
    const F32x16 factor = set1(norm_factor_[row]);
    float* y = scratch.y.get() + r * kPair;
    const F32x16 low = mul(load(y), factor), high = mul(load(y + 16), factor);
    if (batch_.logits_row[row] >= 0) {
      store(y, low), store(y + 16, high);
      float* logits = batch_.logits + static_cast<size_t>(batch_.logits_row[row]) * shape_.vocab_size + pair * kPair;
      std::copy(y, y + columns, logits);
    }
    F32x16 best = load(scratch.best.get() + row * kGroup);
    I32x16 best_index = load_int(scratch.best_index.get() + row * kGroup);
    const I32x16 index = load_int(lanes);
    keep_larger(keep_first(low, columns), index, &best, &best_index);
    keep_larger(keep_first(high, columns - kGroup), add_int(index, set1_int(kGroup)), &best, &best_index);
    store(scratch.best.get() + row * kGroup, best);
    store_int(scratch.best_index.get() + row * kGroup, best_index);
  }
}

// What the head would read, in float: the outputs' residual stream, normed.
void Model::write_hidden(float* hidden) {
  RoundingScope scope;
  const size_t width = shape_.width;
  for (int row = 0; row < tail_rows_.rows; row++)
    for (size_t i = 0; i < width; i++)
      hidden[row * width + i] = tail_x_[row * width + i] * norm_factor_[row] * final_norm_[i];
}

void Model::finish_head() {
  for (int row = 0; row < tail_rows_.rows; row++) {
    float best = -kInfinity;
    int32_t index = INT32_MAX;
    for (const ThreadScratch& scratch : scratch_) {
      if (scratch.best_step != step_number_) continue;
      for (int i = row * kGroup; i < (row + 1) * kGroup; i++)
        if (scratch.best[i] > best || (scratch.best[i] == best && scratch.best_index[i] < index))
          best = scratch.best[i], index = scratch.best_index[i];
    }
    batch_.best[row] = best == -kInfinity || best == kInfinity ? -1 : index;
  }
}

}  // namespace nj
