// Graphs: the work that one thread gives a device while it captures, run again by a replay.
#pragma once

#include "memory.h"

#include <functional>
#include <unordered_map>
#include <vector>

namespace simnpu {

// An empty function is a mark: there Python runs a kernel launch of its own before the replay goes on.
using Graph = std::vector<std::function<void()>>;

inline thread_local Graph* capturing = nullptr;

inline std::unordered_map<int64_t, Graph>& graphs() {
  static auto* instance = new std::unordered_map<int64_t, Graph>();
  return *instance;
}

inline void refuse_in_capture(const std::string& what) {
  TORCH_CHECK(capturing == nullptr, "simnpu: ", what, " is not permitted while a graph is captured");
}

inline void record(std::function<void()> work) {
  if (capturing != nullptr) {
    capturing->push_back(std::move(work));
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
  refuse_in_capture("beginning a capture");
  graphs().at(graph).clear();
  capturing = &graphs().at(graph);
}

inline void graph_end() {
  TORCH_CHECK(capturing != nullptr, "simnpu: no graph is captured");
  capturing = nullptr;
}

// Run from work item `start` up to the next mark; what follows it, or the number of items at the end.
inline int64_t graph_run(int64_t graph, int64_t start) {
  refuse_in_capture("replaying a graph");
  const auto& work = graphs().at(graph);
  auto item = static_cast<size_t>(start);
  while (item < work.size() && work[item]) {
    work[item++]();
  }
  return static_cast<int64_t>(std::min(item + 1, work.size()));
}

}  // namespace simnpu
