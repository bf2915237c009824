// A simulated NPU for torch, for tests: the device "npu" (PrivateUse1), whose memory is host RAM and whose operators are
// torch's CPU kernels on the same memory. See tests/simnpu/__init__.py.

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace simnpu {
namespace {

using at::Tensor;
using torch::jit::Stack;

bool on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

Tensor wrap(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// A CPU tensor over the memory of a device tensor, which it keeps alive, but not as the tensor's.
Tensor host_view(const Tensor& tensor) {
  using Kept = std::shared_ptr<Memory>;
  const auto& storage = tensor.storage();
  const auto* block = Allocator::block_of(storage);
  c10::DataPtr data(storage.mutable_data(), new Kept(block == nullptr ? Kept() : block->memory),
                    [](void* kept) { delete static_cast<Kept*>(kept); }, c10::DeviceType::CPU);
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                    c10::GetAllocator(c10::DeviceType::CPU), true);
  return wrap(std::move(host), tensor, c10::DispatchKey::CPU);
}

Tensor new_tensor(const Tensor& like) {
  const size_t count = at::detail::computeStorageNbytes(like.sizes(), like.strides(), like.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), count, allocator().allocate(count), &allocator(), true);
  auto tensor = wrap(std::move(storage), like, c10::DispatchKey::PrivateUse1);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), 0);
  return tensor;
}

// A tensor without memory of the shape of a device tensor.
Tensor shape_of(const Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       c10::DataPtr(nullptr, c10::DeviceType::Meta), c10::GetAllocator(c10::DeviceType::Meta), true);
  return wrap(std::move(storage), tensor, c10::DispatchKey::Meta);
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>);

// The arguments of one operator: what was given, and the tensors that its kernel for the CPU, or for shapes alone, gets
// instead.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const Stack& given, c10::DeviceType target = c10::DeviceType::CPU)
      : name_(op.schema().name()), target_(target), device_(current_device) {
    for (size_t i = 0; i < given.size(); ++i) {
      host.push_back(convert(given[i], op.schema().arguments().at(i)));
    }
    const bool indexing = name_.find("index") != std::string::npos;
    TORCH_CHECK(strangers_ == 0 || pairs_.empty() || indexing, "simnpu: ", name_, " got tensors of the CPU and of npu:",
                static_cast<int>(current_device), "; all must be on the same device");
    if (strangers_ != 0 && indexing) {
      refuse_in_capture(name_ + " by indices on the CPU");
    }
  }

  bool has_strangers() const {
    return strangers_ != 0;
  }

  // The device tensor that stands for a result of the CPU kernel, and whether it is a new one.
  std::pair<Tensor, bool> result(const Tensor& found) const {
    for (const auto& [given, view] : pairs_) {
      if (view.is_same(found)) {
        if (!given.sizes().equals(found.sizes())) {  // an `out` that the kernel resized
          given.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides(), found.storage_offset());
        }
        if (given.storage().data() != found.storage().data()) {
          given.storage().set_data_ptr_noswap(allocator().adopt(found.storage()));
          given.storage().set_nbytes(found.storage().nbytes());
        }
        return {given, false};
      }
      if (found.defined() && view.storage().is_alias_of(found.storage())) {
        return {wrap(given.storage(), found, c10::DispatchKey::PrivateUse1), false};
      }
    }
    if (!found.defined()) {
      return {found, false};
    }
    const auto& storage = found.storage();
    c10::Storage device(c10::Storage::use_byte_size_t(), storage.nbytes(), allocator().adopt(storage), &allocator(), true);
    return {wrap(std::move(device), found, c10::DispatchKey::PrivateUse1), true};
  }

  // The same for a result of the kernel for shapes, in memory that was not written.
  std::pair<Tensor, bool> shaped(const Tensor& found) const {
    for (const auto& [given, shape] : pairs_) {
      if (shape.is_same(found)) {
        if (!given.sizes().equals(found.sizes())) {
          resize(given, found.sizes(), std::nullopt);
        }
        return {given, false};
      }
      if (found.defined() && shape.storage().is_alias_of(found.storage())) {
        return {wrap(given.storage(), found, c10::DispatchKey::PrivateUse1), false};
      }
    }
    return found.defined() ? std::pair(new_tensor(found), true) : std::pair(found, false);
  }

  Stack host;

 private:
  c10::IValue convert(const c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) {
      return convert(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(convert(tensor));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList()) {
        list.push_back(tensor.has_value() ? std::optional<Tensor>(convert(*tensor)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice()) {
      return c10::Device(target_);
    }
    static const auto kGenerator = c10::getTypePtr<std::optional<at::Generator>>();
    if (value.isGenerator() || (value.isNone() && *argument.type() == *kGenerator)) {
      auto generator = value.isNone() ? default_generator(current_device) : value.toGenerator();
      return generator.device().type() == kType ? at::check_generator<Generator>(generator)->host : generator;
    }
    return value;
  }

  Tensor convert(const Tensor& tensor) {
    if (!on_device(tensor)) {
      strangers_ += tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(tensor.device().index() == device_, "simnpu: ", name_, " got tensors of npu:", static_cast<int>(device_),
                " and of ", tensor.device(), "; all must be on the same device");
    pairs_.emplace_back(tensor, target_ == c10::DeviceType::CPU ? host_view(tensor) : shape_of(tensor));
    return pairs_.back().second;
  }

  std::string name_;
  c10::DeviceType target_;
  c10::DeviceIndex device_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  int strangers_ = 0;
};

// Operators whose result's size depends on values: a device has to hand them to the host.
void refuse_host_reads(const std::string& name, const Stack& given) {
  static const std::set<std::string> kReads = {
      "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::is_nonzero", "aten::bincount"};
  if (capturing == nullptr) {
    return;
  }
  const bool unsized = name == "aten::repeat_interleave" && given.back().isNone();  // the sum of the repeats
  if (kReads.count(name) != 0 || unsized) {
    refuse_in_capture(name);
  }
  if (name == "aten::index") {
    for (const std::optional<Tensor>& index : given.at(1).toOptionalTensorList()) {
      if (index.has_value() && index->scalar_type() == at::kBool) {
        refuse_in_capture("indexing by a mask");
      }
    }
  }
}

// The device of an operator: that of its first device tensor, or the one it is asked for; else the thread's.
c10::DeviceIndex device_of(const Stack& given) {
  std::vector<c10::Device> devices;
  for (const c10::IValue& value : given) {
    if (value.isDevice()) {
      devices.push_back(value.toDevice());
    } else if (value.isTensor() && on_device(value.toTensor())) {
      devices.push_back(value.toTensor().device());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) {
        devices.push_back(tensor.device());
      }
    }
  }
  for (const c10::Device& device : devices) {
    if (device.type() == kType && device.has_index()) {
      return device.index();
    }
  }
  return current_device;
}

void call(const c10::OperatorHandle& op, Stack& stack, c10::DispatchKey key = c10::DispatchKey::CPU) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
}

// All tensors among the results of an operator.
std::vector<Tensor> flat(const Stack& results) {
  std::vector<Tensor> found;
  for (const c10::IValue& value : results) {
    if (value.isTensor()) {
      found.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      const auto list = value.toTensorVector();
      found.insert(found.end(), list.begin(), list.end());
    }
  }
  return found;
}

// Results that are new tensors: their number among all results, and the memory that they are to be in.
using Fresh = std::vector<std::pair<size_t, Tensor>>;

Work repeat(const c10::OperatorHandle& op, Stack host, Fresh fresh) {
  return [op, host = std::move(host), fresh = std::move(fresh)] {
    Stack again = host;
    call(op, again);
    const auto made = flat(again);
    at::AutoDispatchBelowADInplaceOrView guard;
    for (const auto& [number, target] : fresh) {
      Tensor(target).copy_(made.at(number));
    }
  };
}

// `results` with each tensor replaced.
template <typename Replace>
void push(Stack* stack, const Stack& results, const Replace& replace) {
  for (const c10::IValue& value : results) {
    if (value.isTensor()) {
      stack->emplace_back(replace(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(replace(tensor));
      }
      stack->emplace_back(std::move(list));
    } else {
      stack->push_back(value);
    }
  }
}

// Give an operator to its stream without running it: what it results in is known from its kernel for meta tensors.
// False where it is not, as for a size that depends on values: then a device, too, makes the host wait.
bool give(const c10::OperatorHandle& op, const Stack& given, Stack* stack) {
  if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    return false;
  }
  for (const c10::Argument& result : op.schema().returns()) {
    const auto& type = *result.type();
    if (type.kind() != c10::TypeKind::TensorType && type != *c10::ListType::ofTensors()) {
      return false;
    }
  }
  Arguments shapes(op, given, c10::DeviceType::Meta);
  if (shapes.has_strangers()) {
    return false;
  }
  Stack results = shapes.host;
  try {
    call(op, results, c10::DispatchKey::Meta);
  } catch (const std::exception&) {
    return false;
  }
  std::vector<Tensor> all;
  std::vector<size_t> fresh;
  push(stack, results, [&](const Tensor& found) {
    auto [tensor, is_new] = shapes.shaped(found);
    if (is_new) {
      fresh.push_back(all.size());
    }
    all.push_back(tensor);
    return tensor;
  });
  Fresh targets;
  for (const size_t number : fresh) {
    targets.emplace_back(number, host_view(all[number]));
  }
  submit(repeat(op, Arguments(op, given).host, std::move(targets)));
  return true;
}

// Every operator that is not registered below: its CPU kernel, on the device's memory.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& name = op.schema().name();
  TORCH_CHECK_NOT_IMPLEMENTED(name.rfind("aten::", 0) == 0, "simnpu: operator ", name, " has no kernel for npu");
  const Stack given = torch::jit::pop(*stack, op.schema().arguments().size());
  const c10::DeviceGuard guard({kType, device_of(given)});
  refuse_host_reads(name, given);
  if (deferring()) {
    if (give(op, given, stack)) {
      return;
    }
    finish_stream();
  }
  const Arguments arguments(op, given);
  Stack results = arguments.host;
  call(op, results);
  Fresh fresh;
  size_t number = 0;
  push(stack, results, [&](const Tensor& found) {
    auto [tensor, is_new] = arguments.result(found);
    if (is_new) {
      fresh.emplace_back(number, found);
    }
    ++number;
    return tensor;
  });
  record(repeat(op, arguments.host, std::move(fresh)));
}

Tensor empty(at::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// Copies between host and device are like CUDA's: those of memory that is not pinned, and blocking ones, make the host
// wait, which it cannot while a graph is captured.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  const c10::DeviceGuard guard(on_device(to) ? to.device() : from.device());
  bool waits = false;
  for (const Tensor& host : {from, to}) {
    if (!on_device(host) && !(non_blocking && pinned().owns(host.const_data_ptr()))) {
      refuse_in_capture(non_blocking ? "a copy of memory that is not pinned" : "a blocking copy");
      waits = true;
    }
  }
  const auto source = on_device(from) ? host_view(from) : from;
  const auto target = on_device(to) ? host_view(to) : to;
  const auto copy = [source, target] {
    at::AutoDispatchBelowADInplaceOrView guard;
    Tensor(target).copy_(source);
  };
  if (!deferring()) {
    copy();
    record(copy);
    return to;
  }
  submit(copy);
  if (waits) {
    finish_stream();
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  refuse_in_capture("reading a value on the host (.item())");
  const c10::DeviceGuard guard(tensor.device());
  finish_stream();
  return host_view(tensor).item();
}

const Tensor& resize(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  if (needed > tensor.storage().nbytes()) {
    resize_storage(tensor.storage(), needed);
  }
  return tensor;
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

// Runs work that is Python's, by its number; 0 where it did not fail.
using Python = int (*)(int64_t);
Python python = nullptr;

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("resize_", resize);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    return at::native::set_(self, source);
  });
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("record_stream", [](Tensor& tensor, c10::Stream) {
    if (auto* block = Allocator::block_of(tensor.storage())) {
      block->used_elsewhere = true;
    }
  });
}

TORCH_LIBRARY(simnpu, m) {
  m.def("host(Tensor tensor) -> Tensor", [](const Tensor& tensor) {
    TORCH_CHECK(on_device(tensor), "simnpu: host() takes a tensor of npu, got one of ", tensor.device());
    return host_view(tensor);
  });
  m.def("generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(static_cast<c10::DeviceIndex>(device));
  });
  m.def("capturing() -> bool", [] { return capturing != nullptr; });
  m.def("deferring() -> bool", deferring);
  m.def("set_order(str late) -> ()", [](std::string late) { set_order(late); });
  m.def("set_python(int address) -> ()", [](int64_t address) { python = reinterpret_cast<Python>(address); });
  m.def("submit(int number) -> ()", [](int64_t number) {
    submit([number] { TORCH_CHECK(python(number) == 0, "simnpu: work of the device failed, see above"); });
  });
  m.def("graph_new() -> int", graph_new);
  m.def("graph_begin(int graph) -> ()", graph_begin);
  m.def("graph_end() -> ()", graph_end);
  m.def("graph_replay(int graph) -> ()", graph_replay);
  m.def("graph_free(int graph) -> ()", [](int64_t graph) { graphs().erase(graph); });
  m.def("set_limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    allocator().set_limit(static_cast<c10::DeviceIndex>(device), static_cast<size_t>(bytes));
  });
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kType, &allocator())
[[maybe_unused]] const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace simnpu
