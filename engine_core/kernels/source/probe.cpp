// What the machine can do at best: the roofline that benchmarks are measured against.
#include <algorithm>
#include <chrono>

#include "api.h"
#include "packed.h"
#include "team.h"
#include "simd.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

double nj_measure_bandwidth(int32_t num_threads, int64_t size_bytes) {
  using namespace nj;
  constexpr int64_t kPiece = int64_t{1} << 18;
  const int pieces = static_cast<int>(size_bytes / kPiece);
  Buffer<uint8_t> memory = allocate<uint8_t>(static_cast<size_t>(pieces) * kPiece);
  std::atomic<int32_t> sink{0};
  Team team(num_threads, 1);
  double best = 0.0;
  for (int pass = 0; pass < 4; pass++) {
    const auto start = Clock::now();
    team.for_each(pieces, [&](int piece, int) {
      const int32_t* from = reinterpret_cast<const int32_t*>(memory.get() + piece * kPiece);
      I32x16 sum[4] = {set1_int(0), set1_int(0), set1_int(0), set1_int(0)};
      for (int64_t i = 0; i < kPiece / 4; i += 64)
        for (int j = 0; j < 4; j++) sum[j] = add_int(sum[j], load_int(from + i + j * 16));
      sink += reduce_add_int(add_int(add_int(sum[0], sum[1]), add_int(sum[2], sum[3])));
    });
    best = std::max(best, static_cast<double>(pieces) * kPiece / seconds_since(start));
  }
  return best;
}

double nj_measure_dot_products(int32_t num_threads) {
  using namespace nj;
  // Where a product and its sum are two instructions, chains need different operands, or a compiler would compute one
  // product for all; where they are one, more chains hide how long it takes.
  constexpr int kChains = kTileGroups == 1 ? 4 : 20, kOperands = kTileGroups == 1 ? kChains : 1, kRounds = 20000;
  std::atomic<int32_t> sink{0};
  Team team(num_threads, 1);
  double best = 0.0;
  const int items = 50 * num_threads;
  for (int pass = 0; pass < 4; pass++) {
    const auto start = Clock::now();
    team.for_each(items, [&](int item, int) {
      NibbleSum sum[kChains];
      I32x16 x[kOperands];
      uint8_t bytes[64];
      std::fill(bytes, bytes + 64, static_cast<uint8_t>(item % 15));
      const U8x64 w = load_bytes(bytes);
      // Different in each, or a compiler would keep one for all.
      unroll<kChains>([&](int j) NJ_INLINE { sum[j] = dot_nibbles(no_nibbles(), w, set1_int(item + j)); });
      unroll<kOperands>([&](int j) NJ_INLINE { x[j] = set1_int(0x01020304 + item * j); });
      for (int i = 0; i < kRounds; i++) {
        unroll<kChains>([&](int j) NJ_INLINE { sum[j] = dot_nibbles(sum[j], w, x[j % kOperands]); });
        // The activations change, or a compiler would compute the products once.
        unroll<kOperands>([&](int j) NJ_INLINE { x[j] = add_int(x[j], set1_int(1)); });
      }
      unroll<kChains>([&](int j) NJ_INLINE { sink += reduce_add_int(total(sum[j])); });
    });
    best = std::max(best, static_cast<double>(items) * kRounds * kChains * 64 / seconds_since(start));
  }
  return best;
}
