// Quantised matrix product: rows of a row block times one pair (32 columns) of a packed matrix.
#pragma once
#include "packed.h"
#include "quantise.h"

namespace nj {

constexpr int kMaxRowBlock = 96;  // rows that one work item handles: their quantised values stay in the L2 cache
constexpr int kPanelBlocks = 18;  // k-blocks of a pair that are unpacked at a time: 23 kB, stays in the L1 cache

// Scratch of one thread: unpacked weights of one pair.
constexpr size_t kPanelBytes = size_t{kPanelBlocks} * (2 * kQ8Values + 4 * kGroup * 4);

// y[row * 32 + column] = sum over k of x[row][k] * w[k][column], for rows 0..num_rows-1 of the row block.
//
// Integer products are exact; per k-block, in ascending order, the float accumulator takes
// fma(d * scale, isum, fma(m, scaled_sum, y)) (Q4) or fma(d * scale, isum, y) (Q8). A row's bits therefore depend on
// nothing but the row and the weights: not on num_rows, the tile it falls in, or whether weights went through a panel.
void multiply_pair(const PackedMatrix& weights, int pair, const QuantisedRows& x, int num_rows, float* y,
                   uint8_t* panel);

}  // namespace nj
