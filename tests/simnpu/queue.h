// The order of work on streams. By itself work is done when it is given. With SIMNPU_LATE it waits in the queue of its
// stream, and which queue goes on is chosen such that work that nothing orders changes places:
//   side      work on other streams than the default one is done as late as events and waiting allow
//   default   the default stream's is
//   a number  any stream goes on at any time: the number seeds the choice
// Memory whose tensor is gone may be used again by the next work on the stream that it was allocated on, as from a
// caching allocator: there it is filled with the pattern.
#pragma once

#include "memory.h"

#include <deque>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

namespace simnpu {

using Work = std::function<void()>;

struct Order {
  std::string late;  // as SIMNPU_LATE; empty: in the order in which work is given
  std::mt19937 choice;

  explicit Order(const std::string& text) : late(text) {
    if (!late.empty() && late != "side" && late != "default") {
      TORCH_CHECK(late.find_first_not_of("0123456789") == std::string::npos, "simnpu: SIMNPU_LATE is ", late,
                  ", it takes side, default or a number");
      choice.seed(std::stoul(late));
    }
  }
};

inline Order& order() {
  static auto* instance = [] {
    const char* given = std::getenv("SIMNPU_LATE");
    return new Order(given == nullptr ? "" : given);
  }();
  return *instance;
}

inline bool deferring() {
  return !order().late.empty();
}

struct Queue {
  c10::StreamId stream = 0;
  std::deque<Work> waiting;
  uint64_t given = 0;
  uint64_t done = 0;
  std::vector<std::shared_ptr<Memory>> freed;
};

// Queues are changed under one lock, and work is done under another one, since it may call Python: a thread that holds
// Python's lock must not wait for one that runs work.
class Queues {
 public:
  Queue& of(c10::DeviceIndex device, c10::StreamId stream) {
    std::lock_guard lock(change_);
    auto& queue = all_[{device, stream}];
    queue.stream = stream;
    return queue;
  }

  // A place in the queue that is reached when all that was given so far is done.
  uint64_t mark(Queue& queue) {
    std::lock_guard lock(change_);
    return queue.given;
  }

  // Give work that waits until the stream goes on.
  void give(Queue& queue, Work work) {
    std::lock_guard lock(change_);
    add(queue, std::move(work));
  }

  // Give work that uses memory: what is free by now on its stream may be overwritten from here on.
  void give_user(Queue& queue, Work work) {
    std::lock_guard lock(change_);
    for (auto& memory : queue.freed) {
      add(queue, [memory = std::move(memory)] {
        std::memset(memory->address, static_cast<int>(allocator().pattern), memory->bytes);
      });
    }
    queue.freed.clear();
    add(queue, std::move(work));
  }

  void free(Queue& queue, std::shared_ptr<Memory> memory) {
    std::lock_guard lock(change_);
    queue.freed.push_back(std::move(memory));
  }

  // Do what waits in a queue up to a mark.
  void run(Queue& queue, uint64_t mark) {
    std::lock_guard running(run_);
    Work work;
    while (take(queue, mark, work)) {
      work();
      work = nullptr;  // outside of the other lock: what it held may be Python's
    }
  }

  void run(Queue& queue) {
    run(queue, mark(queue));
  }

  void run_device(c10::DeviceIndex device) {
    for (auto* queue : on(device)) {
      run(*queue);
    }
  }

  // The same, unless another thread runs work: whether it was done.
  bool try_run(Queue& queue, uint64_t mark) {
    std::unique_lock running(run_, std::try_to_lock);
    if (running.owns_lock()) {
      run(queue, mark);
    }
    return running.owns_lock();
  }

  // Let streams go on after work was given to one.
  void go_on(c10::DeviceIndex device, Queue& queue) {
    const auto& late = order().late;
    if (late == "side" || late == "default") {
      if ((queue.stream == 0) != (late == "default")) {
        run(queue);
      }
      return;
    }
    std::lock_guard running(run_);
    auto& choice = order().choice;
    for (auto steps = choice() % 3; steps > 0; --steps) {
      const auto queues = on(device);
      auto& chosen = *queues[choice() % queues.size()];
      const auto most = mark(chosen);
      run(chosen, std::min(most, chosen.done + choice() % 4));
    }
  }

 private:
  static void add(Queue& queue, Work work) {
    queue.waiting.push_back(std::move(work));
    ++queue.given;
  }

  bool take(Queue& queue, uint64_t mark, Work& work) {
    std::lock_guard lock(change_);
    if (queue.done >= mark || queue.waiting.empty()) {
      return false;
    }
    work = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.done;
    return true;
  }

  std::vector<Queue*> on(c10::DeviceIndex device) {
    std::lock_guard lock(change_);
    std::vector<Queue*> found;
    for (auto& [key, queue] : all_) {
      if (key.first == device) {
        found.push_back(&queue);
      }
    }
    return found;
  }

  std::mutex change_;
  std::recursive_mutex run_;
  std::map<std::pair<c10::DeviceIndex, c10::StreamId>, Queue> all_;
};

inline Queues& queues() {
  static auto* instance = new Queues();
  return *instance;
}

inline Queue& current_queue() {
  return queues().of(current_device, current_streams.at(current_device));
}

// Change the order from here on, after all work that was given to the thread's device.
inline void set_order(const std::string& late) {
  queues().run_device(current_device);
  order() = Order(late);
}

// What the host does where it waits for its stream.
inline void finish_stream() {
  if (deferring()) {
    queues().run(current_queue());
  }
}

}  // namespace simnpu
