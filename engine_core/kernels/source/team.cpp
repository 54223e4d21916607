#include "team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

namespace nj {

namespace {

constexpr int kSpins = 600;  // about 20 to 30 microseconds of pause instructions

bool reached(uint32_t value, uint32_t round) { return static_cast<int32_t>(value - round) >= 0; }

}  // namespace

void futex_sleep(std::atomic<uint32_t>* word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

void wait_for_round(std::atomic<uint32_t>* word, std::atomic<int>* sleepers, uint32_t round) {
  for (int i = 0; i < kSpins; i++) {
    if (reached(word->load(std::memory_order_acquire), round)) return;
    _mm_pause();
  }
  sleepers->fetch_add(1, std::memory_order_seq_cst);
  for (uint32_t seen; !reached(seen = word->load(std::memory_order_seq_cst), round);) futex_sleep(word, seen);
  sleepers->fetch_sub(1, std::memory_order_relaxed);
}

void publish_round(std::atomic<uint32_t>* word, std::atomic<int>* sleepers, uint32_t round) {
  word->store(round, std::memory_order_seq_cst);
  if (sleepers->load(std::memory_order_seq_cst) > 0) futex_wake_all(word);
}

Team::Team(int num_threads, int max_phases) : num_threads_(num_threads), phases_(max_phases) {
  for (Phase& phase : phases_) phase.ranges = std::vector<ItemRange>(num_threads);
  for (int id = 1; id < num_threads; id++) threads_.emplace_back(&Team::work, this, id);
}

Team::~Team() {
  stopping_.store(true);
  publish_round(&round_, &sleepers_, round_.load() + 1);
  for (std::thread& thread : threads_) thread.join();
}

void Team::open_round(const int* items, int num_phases) {
  const uint32_t round = round_.load(std::memory_order_relaxed) + 1;
  for (int i = 0; i < num_phases; i++) {
    Phase& phase = phases_[i];
    phase.items.store(items[i], std::memory_order_relaxed);
    phase.done.store(0, std::memory_order_relaxed);
    for (int t = 0; t < num_threads_; t++) {
      const int64_t first = static_cast<int64_t>(items[i]) * t / num_threads_;
      const int64_t end = static_cast<int64_t>(items[i]) * (t + 1) / num_threads_;
      phase.ranges[t].end.store(static_cast<int32_t>(end), std::memory_order_relaxed);
      phase.ranges[t].next.store(static_cast<uint64_t>(round) << 32 | static_cast<uint64_t>(first),
                                 std::memory_order_release);
    }
    if (items[i] == 0) publish_round(&phase.over, &phase.sleepers, round);
  }
}

void Team::run(Program program, void* context, const int* items, int num_phases) {
  open_round(items, num_phases);
  program_.store(program, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  const uint32_t round = round_.load(std::memory_order_relaxed) + 1;
  publish_round(&round_, &sleepers_, round);
  RoundingScope scope;
  Member member(this, 0, round);
  program(context, member);
}

void Team::work(int id) {
  RoundingScope scope;
  uint32_t round = 0;
  for (;;) {
    wait_for_round(&round_, &sleepers_, round + 1);
    round = round_.load(std::memory_order_acquire);
    if (stopping_.load()) return;
    Member member(this, id, round);
    program_.load(std::memory_order_relaxed)(context_.load(std::memory_order_relaxed), member);
  }
}

}  // namespace nj
