"""A tape of what a step does on the device, and vLLM's graph machinery around it: what captures are tested with.

A `Tape` holds every torch operation and every kernel launch of a step, in order. Recording raises `CaptureError` at
whatever a capture cannot hold; the tape of another step can be compared with it, and it can be replayed with other
contents of the tensors that it reads. `Graphs` puts a model behind vLLM's own padding and dispatch of decode graphs,
with tapes in place of CUDA graphs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.ascend.compiler import AscendAttrsDescriptor
from triton.runtime.jit import JITFunction

from dsv4_triton.backend.op import OP_NAME, dsa_forward
from dsv4_triton.compiler.binding import Binder
from dsv4_triton.device import Family, acting_as

TO_HOST = {
    "item", "tolist", "numpy", "cpu", "__array__", "__bool__", "__int__", "__float__", "__complex__", "__index__",
    "__contains__", "__format__", "__repr__",
}  # fmt: skip
"""Tensor methods that read values on the host; on a CPU most of them are no operation for a dispatch mode."""
FROM_HOST = {"tensor", "as_tensor", "asarray", "scalar_tensor"}
"""Functions that make tensors of host data, which a capture would keep as it was."""
HOST_OPERATIONS = {
    "_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "nonzero_numpy", "nonzero_static", "argwhere",
    "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount", "repeat_interleave",
    "allclose",
}  # fmt: skip
"""Operations that read values on the host, or whose result's size depends on them."""
UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class CaptureError(AssertionError):
    """A step does what a graph cannot hold."""


@dataclass
class Operation:
    """A torch operation; `made` are the tensors among its results whose memory is new."""

    function: Any
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    result: Any
    made: list[torch.Tensor]

    def replay(self) -> None:
        name = self.function._schema.name.split("::")[1]
        if name in UNWRITTEN or not (self.made or self.function._schema.is_mutable):
            return
        result = self.function(*self.arguments, **self.named)
        for old, new in zip(_tensors(self.result), _tensors(result), strict=True):
            if any(old is tensor for tensor in self.made):
                old.copy_(new)

    def describe(self, place: Callable[[torch.Tensor], Any]) -> Any:
        values = tree_leaves((self.arguments, self.named))
        made = [(tuple(tensor.shape), tensor.dtype) for tensor in self.made]
        return str(self.function), [place(v) if isinstance(v, torch.Tensor) else repr(v) for v in values], made


@dataclass
class Launch:
    """A kernel launch."""

    run: Callable[..., Any]
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def replay(self) -> None:
        self.run(self.kernel, *self.arguments, grid=self.grid, **self.named)

    def describe(self, place: Callable[[torch.Tensor], Any]) -> Any:
        """Kernel, grid, specialisation (constexprs and types), options, multiples of 16, and every argument."""
        binder = _binder(self.kernel)
        key, _, options = binder.bind(*self.arguments, **self.named)
        named = binder.named(*self.arguments, **self.named)
        attributes = AscendAttrsDescriptor(self.kernel.params, tuple(named.values()))
        values = {n: place(v) if isinstance(v, torch.Tensor) else v for n, v in named.items()}
        return binder.name, self.grid, repr(key), options, sorted(attributes.arg_properties.items()), values


class Tape:
    """What one step did: `entries` in order."""

    def __init__(self) -> None:
        self.entries: list[Operation | Launch] = []
        self._made: dict[int, int] = {}

    @property
    def made(self) -> list[torch.Tensor]:
        """The step's own memory."""
        return [tensor for entry in self.entries if isinstance(entry, Operation) for tensor in entry.made]

    def add_operation(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((arguments, named))}
        made = []
        for tensor in _tensors(result):
            address = tensor.untyped_storage().data_ptr()
            if address and address not in known:
                known.add(address)
                made.append(tensor)
                self._made[address] = len(self._made)
        self.entries.append(Operation(function, arguments, named, result, made))

    def describe(self) -> list[Any]:
        """All that a graph would bake: equal lists are equal graphs. Memory of the step itself is named by its order,
        all other memory by its address."""
        return [entry.describe(self._place) for entry in self.entries]

    def _place(self, tensor: torch.Tensor) -> Any:
        start = tensor.untyped_storage().data_ptr()
        index = self._made.get(start)
        where = tensor.data_ptr() if index is None else (index, tensor.data_ptr() - start)
        return where, tuple(tensor.shape), tensor.stride(), tensor.dtype

    def replay(self) -> None:
        """Do it all again, into the same memory, which is poisoned before."""
        for tensor in self.made:
            poison(tensor)
        for entry in self.entries:
            entry.replay()


@cache
def _binder(kernel: Any) -> Binder:
    return Binder(kernel)


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor's memory with ones: NaN, and -1."""
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0xFF)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class _Functions(TorchFunctionMode):
    """Refuses what leads to the host and from there."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in TO_HOST:
            raise CaptureError(f"Tensor.{name} reads values on the host")
        if name in FROM_HOST:
            raise CaptureError(f"torch.{name} copies from the host")
        devices = [a for a in (*args[1:], *named.values()) if isinstance(a, torch.device | str)]
        if name == "to" and devices:
            raise CaptureError(f"Tensor.to copies to device {devices[0]}")
        if name == OP_NAME:  # the op would be called without this mode
            with self:
                return dsa_forward(*args, **named)
        return function(*args, **named)


class _Operations(TorchDispatchMode):
    """Puts every operation on a tape, those inside the attention op included."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in HOST_OPERATIONS:
            raise CaptureError(f"{func} reads values on the host")
        if name.startswith("index") and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(list(args[1:2]))):
            raise CaptureError(f"{func} with a mask: the size depends on its values")
        if torch._C.DispatchKey.CompositeImplicitAutograd in func.py_kernels or func._can_decompose():
            with self:
                return func.decompose(*args, **named)
        result = func(*args, **named)
        if not func.is_view:
            self._tape.add_operation(func, args, named, result)
        return result


@contextlib.contextmanager
def recording() -> Iterator[Tape]:
    """A tape of what is done inside, views excepted; it is done, too."""
    tape, run = Tape(), JITFunction.run

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
        assert not warmup and isinstance(grid, tuple)
        tape.entries.append(Launch(run, kernel, grid, args, named))
        return run(kernel, *args, grid=grid, **named)

    def refused(*_: Any) -> Any:
        raise CaptureError("torch.from_numpy copies from the host")  # which is no function that a mode would see

    JITFunction.run = noted
    try:
        with patch.object(torch, "from_numpy", refused), _Functions(), _Operations(tape):
            yield tape
    finally:
        JITFunction.run = run


class Graphs:
    """In the place of a runner's model, as vLLM's wrapper for graphs: decode steps that vLLM dispatches to a graph are
    recorded when their shape is first met, and then replayed; or, where `again`, recorded each time with the launches
    of a capture and compared with the first tape. A replay is done within `around` of the step's metadata.

    `tapes` has the tape and the output of each shape, `steps` the shapes in the order of their replays.
    """

    def __init__(
        self,
        runner: Any,
        *,
        again: bool = False,
        around: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._inner = runner.model
        self._limit = runner.max_model_len
        self._again = again
        self._around = around
        self.tapes: dict[Any, tuple[Tape, Any]] = {}
        self.steps: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **named: Any) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return self._inner(*args, **named)
        shape = context.batch_descriptor
        if shape not in self.tapes:
            with recording() as tape:
                output = self._inner(*args, **named)
            self.tapes[shape] = tape, output
            return output
        self.steps.append(shape)
        tape, output = self.tapes[shape]
        with self._around(context.attn_metadata):
            poison(self._inner.model.workspace.memory)
            if self._again:
                context.attn_metadata = as_captured(context.attn_metadata, self._limit)
                with recording() as other:
                    output = self._inner(*args, **named)
                compare(tape, other)
            else:
                tape.replay()
        return output


def compare(captured: Tape, other: Tape) -> None:
    """CaptureError unless both tapes would make the same graph."""
    for one, two in itertools.zip_longest(captured.describe(), other.describe()):
        if one != two:
            raise CaptureError(f"the step is another one: {one} is now {two}")


def as_captured(metadata: dict[str, Any], max_model_len: int) -> dict[str, Any]:
    """The metadata of a step with the launch decisions of a capture."""
    return {name: replace(m, step=replace(m.step, max_seq_len=max_model_len)) for name, m in metadata.items()}


@contextlib.contextmanager
def graphs(runner: Any, sizes: list[int], family: Family, **options: Any) -> Iterator[Graphs]:
    """Let the runner serve decode steps from graphs of these numbers of tokens, which are captured first."""
    from vllm.config import CUDAGraphMode

    compilation, dispatcher = runner.compilation_config, runner.cudagraph_dispatcher
    saved = {name: getattr(compilation, name) for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")}
    usual = runner.model
    runner.model = wrapped = Graphs(runner, **options)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = sizes, max(sizes)
    try:
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, runner.uniform_decode_query_len)
        with acting_as(family):
            for mode, shapes in dispatcher.get_capture_descs():
                for shape in shapes:
                    runner._dummy_run(
                        shape.num_tokens, cudagraph_runtime_mode=mode, uniform_decode=True, is_graph_capturing=True
                    )
        yield wrapped
    finally:
        runner.model = usual
        for name, value in saved.items():
            setattr(compilation, name, value)
        for keys in dispatcher.cudagraph_keys.values():
            keys.clear()
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.NONE)
