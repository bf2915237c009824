// Graphs: the work that one thread gives a device while it captures, run again by a replay. A capture begins on one
// stream; another takes part as soon as it waits for an event of one that does, and has to be waited for at the end.
#pragma once

#include "queue.h"

#include <atomic>
#include <unordered_map>

namespace simnpu {

inline void refuse_in_capture(const std::string& what) {
  TORCH_CHECK(current_capture == 0, "simnpu: ", what, " is not permitted while a graph is captured");
}

// A place in a stream's queue, or in a captured stream's part of a graph.
struct Place {
  int64_t capture = 0;
  c10::DeviceIndex device = 0;
  c10::StreamId stream = 0;
  uint64_t mark = 0;
};

class Graph {
 public:
  void begin(int64_t capture, c10::StreamId stream) {
    capture_ = capture;
    origin_ = stream;
    nodes_.clear();
    streams_.clear();
    streams_[stream];
  }

  bool holds(c10::StreamId stream) const {
    return streams_.count(stream) != 0;
  }

  void add(c10::StreamId stream, Work work) {
    TORCH_CHECK(holds(stream), "simnpu: work was given to stream ", stream, ", which takes no part in the capture of ",
                "stream ", origin_, ": it did not wait for an event of the capture");
    auto& part = streams_[stream];
    for (auto& memory : part.freed) {
      append(stream, {[memory = std::move(memory)] {
                        std::memset(memory->address, static_cast<int>(allocator().pattern), memory->bytes);
                      },
                      {}});
    }
    part.freed.clear();
    append(stream, {std::move(work), {}});
  }

  Place mark(c10::StreamId stream) const {
    return {capture_, current_device, stream, streams_.at(stream).given};
  }

  // `stream` waits for an event, and so takes part from now on where it did not.
  void wait(c10::StreamId stream, const Place& place) {
    TORCH_CHECK(place.capture == capture_, "simnpu: stream ", stream,
                " waits for an event from outside of the graph that it is captured into");
    append(stream, {{}, place});
  }

  void free(const Block& block) {
    if (holds(block.stream)) {
      streams_[block.stream].freed.push_back(block.memory);
    }
  }

  // Error where a stream has work that the capture's own stream does not wait for.
  void end() const {
    std::map<c10::StreamId, uint64_t> reached{{origin_, streams_.at(origin_).given}};
    std::map<c10::StreamId, uint64_t> left;
    for (const auto& [stream, part] : streams_) {
      left[stream] = part.given;
    }
    for (auto node = nodes_.rbegin(); node != nodes_.rend(); ++node) {
      if (left[node->stream]-- <= reached[node->stream] && !node->work) {
        auto& other = reached[node->place.stream];
        other = std::max(other, node->place.mark);
      }
    }
    for (const auto& [stream, part] : streams_) {
      TORCH_CHECK(reached[stream] >= part.given, "simnpu: the capture of stream ", origin_, " ends before work of ",
                  "stream ", stream, ": it did not wait for an event of it");
    }
  }

  void replay() const {
    if (!deferring()) {
      for (const auto& node : nodes_) {
        if (node.work) {
          node.work();
        }
      }
      return;
    }
    const auto device = current_device;
    std::map<c10::StreamId, std::pair<Queue*, uint64_t>> targets;
    for (const auto& [stream, part] : streams_) {
      auto& queue = stream == origin_ ? current_queue() : queues().of(device, branch(stream));
      queues().give_user(queue, [] {});  // what was freed by now may be overwritten
      targets[stream] = {&queue, queues().mark(queue)};
    }
    for (const auto& node : nodes_) {
      auto& queue = *targets.at(node.stream).first;
      if (node.work) {
        queues().give(queue, node.work);
      } else {
        const auto [other, base] = targets.at(node.place.stream);
        const auto mark = base + node.place.mark;
        queues().give(queue, [other = other, mark] { queues().run(*other, mark); });
      }
      queues().go_on(device, queue);
    }
  }

 private:
  struct Node {
    Work work;  // none where the stream waits for `place`
    Place place;
    c10::StreamId stream = 0;
  };
  struct Part {
    uint64_t given = 0;
    std::vector<std::shared_ptr<Memory>> freed;
  };

  void append(c10::StreamId stream, Node node) {
    node.stream = stream;
    nodes_.push_back(std::move(node));
    ++streams_[stream].given;
  }

  // The stream on which a replay does what was captured from `stream`: no other work is there.
  c10::StreamId branch(c10::StreamId stream) const {
    return -(capture_ * 1024 + stream + 1);
  }

  int64_t capture_ = 0;
  c10::StreamId origin_ = 0;
  std::vector<Node> nodes_;
  std::map<c10::StreamId, Part> streams_;
};

inline thread_local Graph* capturing = nullptr;

inline std::unordered_map<int64_t, Graph>& graphs() {
  static auto* instance = new std::unordered_map<int64_t, Graph>();
  return *instance;
}

// Keep work that was done for replays.
inline void record(Work work) {
  if (capturing != nullptr) {
    capturing->add(current_streams.at(current_device), std::move(work));
  }
}

// Do work now, in its turn, or at replays.
inline void submit(Work work) {
  if (capturing != nullptr) {
    record(std::move(work));
  } else if (deferring()) {
    auto& queue = current_queue();
    queues().give_user(queue, std::move(work));
    queues().go_on(current_device, queue);
  } else {
    work();
  }
}

// Memory of a capture is used again within the capture alone.
inline void reuse(const Block& block) {
  if (!deferring()) {
    return;
  }
  if (block.capture == 0) {
    auto& device_queues = queues();
    device_queues.free(device_queues.of(block.memory->device, block.stream), block.memory);
  } else if (block.capture == current_capture) {
    capturing->free(block);
  }
}

inline void Allocator::emptyCache(c10::MempoolId_t) {
  refuse_in_capture("emptying the cache of device memory");
}

inline int64_t graph_new() {
  static int64_t count = 0;
  graphs()[++count];
  return count;
}

inline void graph_begin(int64_t graph) {
  static std::atomic<int64_t> count{0};
  refuse_in_capture("beginning a capture");
  current_capture = ++count;
  capturing = &graphs().at(graph);
  capturing->begin(current_capture, current_streams.at(current_device));
}

inline void graph_end() {
  TORCH_CHECK(capturing != nullptr, "simnpu: no graph is captured");
  const auto* ended = capturing;
  capturing = nullptr;
  current_capture = 0;
  ended->end();
}

inline void graph_replay(int64_t graph) {
  refuse_in_capture("replaying a graph");
  graphs().at(graph).replay();
}

}  // namespace simnpu
