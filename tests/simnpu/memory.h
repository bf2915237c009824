// Memory of the simulated devices: host RAM, counted against a limit per device, filled with a pattern when handed out.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>

namespace simnpu {

constexpr int kMaxDevices = 8;
constexpr auto kType = c10::DeviceType::PrivateUse1;

inline size_t setting(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

inline c10::DeviceIndex device_count() {
  static const auto count = static_cast<c10::DeviceIndex>(setting("SIMNPU_DEVICES", 1));
  return count;
}

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, kMaxDevices> current_streams{};
inline thread_local int64_t current_capture = 0;  // 0 where no graph is captured

// Device memory: its own, or a CPU result that became a device tensor without a copy. Tensors hold it, and so does work
// that is still to be done.
struct Memory {
  void* address;
  c10::Storage adopted;
  size_t bytes;
  c10::DeviceIndex device;
  ~Memory();
};

// What a storage holds: memory, and where its allocator may hand it out again when the storage is gone.
struct Block {
  std::shared_ptr<Memory> memory;
  c10::StreamId stream;
  int64_t capture;
  bool used_elsewhere;  // `record_stream` was called
};

// Called with a block whose storage is gone while work may still use its memory.
void reuse(const Block& block);

class Allocator final : public c10::DeviceAllocator {
 public:
  Allocator() {
    limits_.fill(setting("SIMNPU_MEMORY_MB", 4096) << 20);
  }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kType, current_device);
    if (bytes == 0) {
      return {nullptr, device};
    }
    take(bytes, device.index());
    void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
    TORCH_CHECK(memory != nullptr, "simnpu: the host has no ", bytes, " bytes left");
    std::memset(memory, static_cast<int>(pattern), bytes);
    return hold(new Memory{memory, {}, bytes, device.index()});
  }

  // The memory of `host` as the device's; `host` is kept.
  c10::DataPtr adopt(const c10::Storage& host) {
    take(host.nbytes(), current_device);
    return hold(new Memory{host.mutable_data(), host, host.nbytes(), current_device});
  }

  // The block of a storage; none where it has no memory.
  static Block* block_of(const c10::Storage& storage) {
    const auto& data = storage.data_ptr();
    return data.get_deleter() == &release ? static_cast<Block*>(data.get_context()) : nullptr;
  }

  void give_back(const Memory& memory) {
    each(memory.device, [&memory](auto& stat) { stat.decrease(memory.bytes); });
  }

  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override;
  void recordStream(const c10::DataPtr&, c10::Stream) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return stats_.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    each(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return {limits_.at(device) - used(device), limits_.at(device)};
  }

  void set_limit(c10::DeviceIndex device, size_t bytes) {
    std::lock_guard lock(mutex_);
    limits_.at(device) = bytes;
  }
  size_t pattern = setting("SIMNPU_FILL", 0xFF);

 private:
  static constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

  static c10::DataPtr hold(Memory* memory) {
    const c10::Device device(kType, memory->device);
    const auto stream = current_streams.at(device.index());
    auto* block = new Block{std::shared_ptr<Memory>(memory), stream, current_capture, false};
    return {memory->address, block, &release, device};
  }

  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    if (block->memory.use_count() > 1 && !block->used_elsewhere) {
      reuse(*block);
    }
  }

  size_t used(c10::DeviceIndex device) {
    return stats_.at(device).allocated_bytes[kAll].current;
  }

  template <typename Change>
  void each(c10::DeviceIndex device, const Change& change) {
    std::lock_guard lock(mutex_);
    auto& stats = stats_.at(device);
    for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      change((*stat)[kAll]);
    }
  }

  void take(size_t bytes, c10::DeviceIndex device) {
    auto [free, total] = getMemoryInfo(device);
    TORCH_CHECK_WITH(OutOfMemoryError, bytes <= free, "simnpu: NPU out of memory. Tried to allocate ", bytes,
                     " bytes; NPU ", static_cast<int>(device), " has ", total, ", of which ", free, " are free");
    each(device, [bytes](auto& stat) { stat.increase(bytes); });
  }

  std::mutex mutex_;
  std::array<size_t, kMaxDevices> limits_{};
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices> stats_{};
};

inline Allocator& allocator() {
  static auto* instance = new Allocator();  // lives until the process ends: tensors may outlive static objects
  return *instance;
}

inline Memory::~Memory() {
  allocator().give_back(*this);
  if (!adopted) {
    std::free(address);
  }
}

// Pinned host memory: ordinary memory whose address ranges are known.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::lock_guard lock(mutex_);
    ranges_.emplace(static_cast<char*>(memory), bytes);
    return {memory, memory, &release, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    default_copy_data(to, from, count);
  }
  bool owns(const void* address) {
    std::lock_guard lock(mutex_);
    auto after = ranges_.upper_bound({static_cast<char*>(const_cast<void*>(address)), SIZE_MAX});
    if (after == ranges_.begin()) {
      return false;
    }
    const auto& [start, bytes] = *std::prev(after);
    return static_cast<const char*>(address) < start + std::max<size_t>(bytes, 1);
  }

 private:
  static void release(void* memory);

  std::mutex mutex_;
  std::set<std::pair<char*, size_t>> ranges_;
};

inline PinnedAllocator& pinned() {
  static auto* instance = new PinnedAllocator();
  return *instance;
}

inline void PinnedAllocator::release(void* memory) {
  std::lock_guard lock(pinned().mutex_);
  pinned().ranges_.erase(pinned().ranges_.lower_bound({static_cast<char*>(memory), 0}));
  std::free(memory);
}

}  // namespace simnpu
