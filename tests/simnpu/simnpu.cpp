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

// A CPU tensor over the memory of a device tensor, which it keeps alive.
Tensor host_view(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage),
                    [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::DeviceType::CPU);
  c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                    c10::GetAllocator(c10::DeviceType::CPU), true);
  return wrap(std::move(host), tensor, c10::DispatchKey::CPU);
}

// The arguments of one operator: what was given, and the CPU tensors that its CPU kernel gets instead.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, Stack given) : name_(op.schema().name()) {
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

  // The device tensor that stands for a result of the CPU kernel; `fresh` gets it when it is a new one.
  Tensor result(const Tensor& found, std::vector<Tensor>& fresh) const {
    for (const auto& [given, view] : pairs_) {
      if (view.is_same(found)) {
        if (!given.sizes().equals(found.sizes())) {  // an `out` that the kernel resized
          given.unsafeGetTensorImpl()->set_sizes_and_strides(found.sizes(), found.strides(), found.storage_offset());
        }
        if (given.storage().data() != found.storage().data()) {
          given.storage().set_data_ptr_noswap(allocator().adopt(found.storage()));
          given.storage().set_nbytes(found.storage().nbytes());
        }
        return given;
      }
      if (found.defined() && view.storage().is_alias_of(found.storage())) {
        return wrap(given.storage(), found, c10::DispatchKey::PrivateUse1);
      }
    }
    if (!found.defined()) {
      return found;
    }
    const auto& storage = found.storage();
    c10::Storage device(c10::Storage::use_byte_size_t(), storage.nbytes(), allocator().adopt(storage), &allocator(), true);
    fresh.push_back(found);
    return wrap(std::move(device), found, c10::DispatchKey::PrivateUse1);
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
      return c10::Device(c10::DeviceType::CPU);
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
    pairs_.emplace_back(tensor, host_view(tensor));
    return pairs_.back().second;
  }

  std::string name_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
  int strangers_ = 0;
};

// Operators whose result's size depends on values: a device has to hand them to the host.
void refuse_host_reads(const std::string& name, const Stack& host) {
  static const std::set<std::string> kReads = {
      "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::is_nonzero", "aten::bincount"};
  if (capturing == nullptr) {
    return;
  }
  const bool unsized = name == "aten::repeat_interleave" && host.back().isNone();  // the sum of the repeats
  if (kReads.count(name) != 0 || unsized) {
    refuse_in_capture(name);
  }
  if (name == "aten::index") {
    for (const std::optional<Tensor>& index : host.at(1).toOptionalTensorList()) {
      if (index.has_value() && index->scalar_type() == at::kBool) {
        refuse_in_capture("indexing by a mask");
      }
    }
  }
}

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

// Every operator that is not registered below: its CPU kernel, on the device's memory.
void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& name = op.schema().name();
  TORCH_CHECK_NOT_IMPLEMENTED(name.rfind("aten::", 0) == 0, "simnpu: operator ", name, " has no kernel for npu");
  const size_t count = op.schema().arguments().size();
  const Arguments arguments(op, torch::jit::pop(*stack, count));
  refuse_host_reads(name, arguments.host);
  Stack results = arguments.host;
  call(op, results);
  std::vector<Tensor> fresh;
  for (const c10::IValue& value : results) {
    if (value.isTensor()) {
      stack->emplace_back(arguments.result(value.toTensor(), fresh));
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(arguments.result(tensor, fresh));
      }
      stack->emplace_back(std::move(list));
    } else {
      stack->push_back(value);
    }
  }
  record([op, host = arguments.host, fresh] {
    Stack again = host;
    call(op, again);
    std::vector<Tensor> made;
    for (const c10::IValue& value : again) {
      for (const Tensor& tensor : value.isTensor() ? std::vector{value.toTensor()} : value.toTensorVector()) {
        made.push_back(tensor);
      }
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    for (size_t i = 0; i < fresh.size(); ++i) {
      fresh[i].copy_(made.at(i));
    }
  });
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

// Copies between host and device are like CUDA's: while a graph is captured only asynchronous ones of pinned memory.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  for (const Tensor& host : {from, to}) {
    if (!on_device(host) && !(non_blocking && pinned().owns(host.const_data_ptr()))) {
      refuse_in_capture(non_blocking ? "a copy of memory that is not pinned" : "a blocking copy");
    }
  }
  const auto source = on_device(from) ? host_view(from) : from;
  const auto target = on_device(to) ? host_view(to) : to;
  const auto copy = [source, target] {
    at::AutoDispatchBelowADInplaceOrView guard;
    Tensor(target).copy_(source);
  };
  copy();
  record(copy);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  refuse_in_capture("reading a value on the host (.item())");
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
  m.impl("record_stream", [](Tensor&, c10::Stream) {});
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
  m.def("graph_new() -> int", graph_new);
  m.def("graph_begin(int graph) -> ()", graph_begin);
  m.def("graph_end() -> ()", graph_end);
  m.def("graph_mark() -> ()", [] { record({}); });
  m.def("graph_run(int graph, int start) -> int", graph_run);
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
