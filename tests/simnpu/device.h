// What torch asks of a device besides memory and operators: streams, events, generators, hooks.
#pragma once

#include "graph.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

namespace simnpu {

struct Event {
  std::chrono::steady_clock::time_point time;
  Place place;
};

inline c10::Stream stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, {kType, device < 0 ? current_device : device}, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device getDevice() const override {
    return {kType, current_device};
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count(), "simnpu: there is no device ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      current_device = device.index();
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = device.index() < 0 ? current_device : device.index();
    return stream(index, current_streams.at(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(device.index(), 0);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(device.index(), ++last);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_streams.at(stream.device_index()) = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() + 1);
  }
  bool queryStream(const c10::Stream& stream) const override {
    refuse_in_capture("asking a stream");
    auto& queue = queue_of(stream);
    return queues().try_run(queue, queues().mark(queue));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    refuse_in_capture("waiting for a stream");
    queues().run(queue_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    refuse_in_capture("waiting for the device");
    queues().run_device(device < 0 ? current_device : device);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return capturing != nullptr && capturing->holds(stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event();
    }
    const auto place = isStreamCapturing(stream)
        ? capturing->mark(stream.id())
        : Place{0, stream.device_index(), stream.id(), queues().mark(queue_of(stream))};
    *static_cast<Event*>(*event) = {std::chrono::steady_clock::now(), place};
  }
  // Waiting for an event that was not recorded is no operation.
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) {
      return;
    }
    const auto place = static_cast<Event*>(event)->place;
    if (isStreamCapturing(stream) || (place.capture != 0 && place.capture == current_capture)) {
      capturing->wait(stream.id(), place);
      return;
    }
    refuse_captured(place);
    if (deferring()) {
      queues().give(queue_of(stream), [place] { queues().run(queues().of(place.device, place.stream), place.mark); });
    }
  }
  bool queryEvent(void* event) const override {
    refuse_in_capture("asking an event");
    if (event == nullptr) {
      return true;
    }
    const auto place = static_cast<Event*>(event)->place;
    refuse_captured(place);
    return queues().try_run(queues().of(place.device, place.stream), place.mark);
  }
  void synchronizeEvent(void* event) const override {
    refuse_in_capture("waiting for an event");
    if (event != nullptr) {
      const auto place = static_cast<Event*>(event)->place;
      refuse_captured(place);
      queues().run(queues().of(place.device, place.stream), place.mark);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin != nullptr && end != nullptr, "simnpu: an event was not recorded");
    const auto time = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }

 private:
  static Queue& queue_of(const c10::Stream& stream) {
    return queues().of(stream.device_index(), stream.id());
  }
  static void refuse_captured(const Place& place) {
    TORCH_CHECK(place.capture == 0, "simnpu: an event that was recorded in a capture means nothing outside of it");
  }
};

// A generator of the device, which draws from a CPU generator of its own when work is done: its state is the host's
// after all work.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index, at::Generator source = at::detail::createCPUGenerator())
      : GeneratorImpl({kType, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(source)) {}
  static c10::DeviceType device_type() {
    return kType;
  }
  void set_current_seed(uint64_t seed) override {
    queues().run_device(device().index());
    host.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return host.current_seed();
  }
  uint64_t seed() override {
    queues().run_device(device().index());
    return host.seed();
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override {
    return 0;
  }
  void set_state(const c10::TensorImpl& state) override {
    queues().run_device(device().index());
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    queues().run_device(device().index());
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    return new Generator(device().index(), host.clone());
  }
  at::Generator host;
};

inline const at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
      made->push_back(at::make_generator<Generator>(device));
    }
    return made;
  }();
  return all->at(index < 0 ? current_device : index);
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto memory = allocator().allocate(bytes);
  std::memcpy(memory.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    Guard().setDevice({kType, device});
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override {
    return pinned().owns(address);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return {kType, current_device};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current_device : index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace simnpu
