// Threads that walk through one step together: each phase's items are taken one by one, and a phase ends for
// all at once. The caller is one of the threads. Between steps the others sleep.
#pragma once

#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

class Team {
public:
  explicit Team(int num_threads) : num_threads_(num_threads) {
    try {
      for (int index = 1; index < num_threads; ++index)
        threads_.emplace_back([this] { work(); });
    } catch (...) { // the system gives no more threads
      close();
      throw;
    }
  }

  ~Team() { close(); }

  // Every thread runs `body`, which calls `phase` the same number of times in each of them.
  void run(const std::function<void()> &body) {
    if (num_threads_ > 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      body_ = &body;
      ++num_runs_;
    }
    wake_.notify_all();
    body();
    meet();
  }

  // Calls visit(0) .. visit(count - 1), each in one of the threads; returns when all have returned.
  template <class Visit> void phase(int64_t count, Visit visit) {
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < count;)
      visit(item);
    meet();
  }

private:
  void close() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_closing_ = true;
    }
    wake_.notify_all();
    for (std::thread &thread : threads_)
      thread.join();
  }

  void work() {
    for (uint64_t seen = 0;;) {
      const std::function<void()> *body;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return is_closing_ || num_runs_ != seen; });
        if (is_closing_)
          return;
        seen = num_runs_;
        body = body_;
      }
      (*body)();
      meet();
    }
  }

  // The last to arrive resets the items and lets everybody go on.
  void meet() {
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
      num_arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
      if (spins < kSpins)
        __builtin_ia32_pause();
      else
        sched_yield(); // somebody else may need this core to arrive
    }
  }

  static constexpr int kSpins = 4000;
  const int num_threads_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  const std::function<void()> *body_ = nullptr;
  uint64_t num_runs_ = 0;
  bool is_closing_ = false;
  std::vector<std::thread> threads_;
};

} // namespace tandem
