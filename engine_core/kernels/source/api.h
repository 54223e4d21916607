// The plain C interface of the kernels. Every pointer is the caller's and must outlive the call only.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define NJ_ABI_VERSION 3

typedef struct nj_model nj_model;

typedef struct {
  int32_t num_layers, width, num_heads, num_kv_heads, head_dim, ffn_width, vocab_size;
  int32_t max_positions;   // rows of the rotary table
  int32_t block_size;      // tokens per cache block, a multiple of 16
  int32_t num_blocks;
  int32_t cache_kind;      // 0 f32, 1 f16, 2 bf16, 3 int8
  int32_t num_threads;
  float norm_epsilon;
} nj_shape;

// Which matrix of a layer (or of the model) a tensor is.
enum nj_role { NJ_QUERY, NJ_KEY, NJ_VALUE, NJ_OUTPUT, NJ_GATE, NJ_UP, NJ_DOWN, NJ_EMBEDDING, NJ_HEAD };
// Which norm's weights a vector is.
enum nj_norm { NJ_ATTENTION_NORM, NJ_FFN_NORM, NJ_FINAL_NORM };

typedef struct {
  int32_t num_tokens;
  const int32_t* tokens;          // [num_tokens]
  int32_t num_sequences;
  const int32_t* first_token;     // [num_sequences + 1]: sequence i has tokens first_token[i]..first_token[i+1]-1
  const int32_t* start;           // [num_sequences]: position of its first token here
  const int32_t* first_block;     // [num_sequences + 1]: into `blocks`
  const int32_t* blocks;          // block tables, one after the other
  int32_t num_outputs;
  const int32_t* output_tokens;   // [num_outputs]: which tokens' successors are wanted, ascending
  const int32_t* logits_row;      // [num_outputs]: row of `logits` to fill, or -1
  float* logits;                  // [rows][vocab_size]
  int32_t* best;                  // [num_outputs]: likeliest token, the lowest of equals; -1: logits not finite
  float* hidden;                  // NULL, or [num_outputs][width] to fill with the final normed states: no head then
} nj_batch;

int32_t nj_abi_version(void);
const char* nj_instruction_set(void);

// NULL when memory is short. Matrices are set before the first step; -1: type not supported or kinds mixed.
nj_model* nj_model_create(const nj_shape* shape, const float* rope_frequencies);
void nj_model_destroy(nj_model* model);
int32_t nj_model_set_matrix(nj_model* model, int32_t role, int32_t layer, int32_t file_type, int32_t num_rows,
                            int32_t num_columns, const uint8_t* data);
int32_t nj_model_set_norm(nj_model* model, int32_t norm, int32_t layer, const float* weights);
// 0, or -1 for a token, position or block out of range (nothing was computed then).
int32_t nj_model_step(nj_model* model, const nj_batch* batch);
// What one cache block takes in host memory, over all layers.
int64_t nj_model_block_bytes(const nj_model* model);
// Copy a cache block from `host` (to_cache 1) or to it (0); -1: no such block.
int32_t nj_model_copy_block(nj_model* model, int32_t block, int32_t to_cache, uint8_t* host);

// --- single kernels, for tests and benchmarks ---
// y[m][n] = x[m][k] times the transposed tensor [n][k]; -1: type not supported.
int32_t nj_multiply(int32_t file_type, int32_t m, int32_t n, int32_t k, const uint8_t* tensor, const float* x, float* y,
                    int32_t num_threads);
// q[m][k], scale[m][k/32] of x[m][k].
void nj_quantise(int32_t m, int32_t k, const float* x, int8_t* q, float* scale);
void nj_exp2(int32_t count, const float* x, float* y);
void nj_silu(int32_t count, const float* x, float* y);
// Write num_tokens keys and values [num_tokens][kv_heads][head_dim] at positions 0.. of one sequence in a cache of
// `num_blocks` blocks that is filled with NaN before; attend with queries [num_tokens][heads][head_dim] (scaled here)
// from position `first_query` on, `group` positions at a time.
int32_t nj_attend(int32_t cache_kind, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t block_size,
                  int32_t num_tokens, int32_t first_query, int32_t group, const int32_t* table, int32_t num_blocks,
                  const float* q, const float* k, const float* v, float* out);
// Bytes per second when num_threads threads read `size_bytes`; multiply-accumulates per second of pure dot products.
double nj_measure_bandwidth(int32_t num_threads, int64_t size_bytes);
double nj_measure_dot_products(int32_t num_threads);

#ifdef __cplusplus
}
#endif
