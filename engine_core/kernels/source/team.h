// A small team of threads that runs a program of phases together.
//
// Every thread runs the same program. A phase is a number of items; each thread takes items from its own range first
// and from the others' ranges after, so a thread that was descheduled between items holds nobody up. A phase is over
// when all its items are done; a thread that waits for that spins briefly and then sleeps, which frees its core for
// whoever holds the last item. Results may not depend on who ran which item.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace nj {

constexpr int kMaxThreads = 64;

// Sleep while *word == value; wake all who sleep on word.
void futex_sleep(std::atomic<uint32_t>* word, uint32_t value);
void futex_wake_all(std::atomic<uint32_t>* word);
// Wait until *word has reached `round` (modulo 2^32): spin briefly, then sleep.
void wait_for_round(std::atomic<uint32_t>* word, std::atomic<int>* sleepers, uint32_t round);
void publish_round(std::atomic<uint32_t>* word, std::atomic<int>* sleepers, uint32_t round);

struct alignas(64) ItemRange {
  std::atomic<uint64_t> next{0};  // round << 32 | next item; a thread left over from an earlier round claims nothing
  std::atomic<int32_t> end{0};
};

struct alignas(64) Phase {
  std::atomic<uint32_t> over{0};  // the last round in which this phase was completed
  std::atomic<int> sleepers{0};
  std::atomic<int> done{0};
  std::atomic<int> items{0};
  std::vector<ItemRange> ranges;
};

class Team;

// One thread's place in the program of one round.
class Member {
 public:
  Member(Team* team, int id, uint32_t round) : id(id), team_(team), round_(round) {}

  // Run this thread's share of the next phase and wait for its end. `body(item, id)` runs once per item in all;
  // `finish()` runs once, after the last item and before anyone goes on.
  template <class Body, class Finish>
  void phase(Body&& body, Finish&& finish);
  template <class Body>
  void phase(Body&& body) { phase(body, [] {}); }

  const int id;

 private:
  int claim(Phase& phase, int range);
  Team* team_;
  uint32_t round_;
  int index_ = 0;
};

class Team {
 public:
  using Program = void (*)(void* context, Member& member);

  Team(int num_threads, int max_phases);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return num_threads_; }
  // Run `program` on all threads, the caller's included; `items[i]` is the size of phase i. One caller at a time.
  // A thread may arrive after the round is over, so outside of phase bodies a program may read from its context only
  // what is constant and the same for all programs of this team.
  void run(Program program, void* context, const int* items, int num_phases);

  // Run body(item, thread) for all items as a program of one phase.
  template <class Body>
  void for_each(int items, Body&& body) {
    run([](void* context, Member& member) { member.phase(*static_cast<std::remove_reference_t<Body>*>(context)); },
        &body, &items, 1);
  }

 private:
  friend class Member;
  void work(int id);
  void open_round(const int* items, int num_phases);

  const int num_threads_;
  std::vector<Phase> phases_;
  std::vector<std::thread> threads_;
  std::atomic<Program> program_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<uint32_t> round_{0};
  std::atomic<int> sleepers_{0};
};

inline int Member::claim(Phase& phase, int range) {
  ItemRange& items = phase.ranges[range];
  uint64_t next = items.next.load(std::memory_order_acquire);
  while (static_cast<uint32_t>(next >> 32) == round_) {
    int item = static_cast<int>(next & 0xFFFFFFFF);
    if (item >= items.end.load(std::memory_order_relaxed)) return -1;
    if (items.next.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) return item;
  }
  return -1;
}

template <class Body, class Finish>
void Member::phase(Body&& body, Finish&& finish) {
  Phase& phase = team_->phases_[index_++];
  const int threads = team_->size();
  for (int offset = 0; offset < threads; offset++) {
    const int range = id + offset < threads ? id + offset : id + offset - threads;
    for (int item; (item = claim(phase, range)) >= 0;) {
      body(item, id);
      if (phase.done.fetch_add(1, std::memory_order_acq_rel) + 1 == phase.items.load(std::memory_order_relaxed)) {
        finish();
        publish_round(&phase.over, &phase.sleepers, round_);
      }
    }
  }
  wait_for_round(&phase.over, &phase.sleepers, round_);
}

}  // namespace nj
