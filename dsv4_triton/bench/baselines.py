"""Other implementations of the registry's jobs. Each runs on the same inputs and is held to the same reference.

The registry names them: `eager` is the reference itself. `vllm` is what upstream vLLM runs for the job on this machine,
where it has something. Native NPU ops are in `native`. `interpreter` is Triton's, of the same kernels, in a process of
its own.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from types import TracebackType
from typing import Any

import torch

from dsv4_triton.bench.registry import Case
from dsv4_triton.bench.registry.case import EAGER, Converted

INTERPRETER = "interpreter"
VLLM = "vllm"

Run = Callable[..., Any]
"""An implementation: takes the launcher's arguments by name and returns what the launcher returns."""


class UnavailableError(RuntimeError):
    """This machine does not have the baseline; the message says what is missing."""


def by_expert(weights: torch.Tensor, ids: torch.Tensor) -> Converted:
    """Weights and ids [T, k] in ascending order of the ids."""

    def convert() -> tuple[torch.Tensor, torch.Tensor]:
        order = ids.sort(dim=1)
        return weights.gather(1, order.indices), order.values

    return Converted(convert)


def _hc_pre(arguments: dict[str, Any]) -> Run:
    """vLLM's fallback for devices without TileLang, and PyTorch's norm behind it, as vLLM composes them."""
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_torch

    fn = arguments["fn_parts"].float().sum(0)

    def run(**a: Any) -> Any:
        x, eps = a["x"], a["norm_eps"]
        post, comb, y = mhc_pre_torch(
            x, fn, a["scale"], a["base"], eps, a["hc_eps"], a["hc_eps"], 2.0, a["sinkhorn_iters"]
        )
        normed = torch.nn.functional.rms_norm(y.float(), y.shape[-1:], a["norm_weight"].float(), eps).to(y.dtype)
        return normed, post.squeeze(-1), comb

    return run


def _hc_post(arguments: dict[str, Any]) -> Run:
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch

    return lambda **a: mhc_post_torch(a["y"], a["x"], a["post"][..., None], a["comb"])


def _hc_post_pre(arguments: dict[str, Any]) -> Run:
    """One after the other: vLLM has no op for both."""
    post, pre = _hc_post(arguments), _hc_pre(arguments)

    def run(**a: Any) -> Any:
        streams = post(**a)
        return streams, *pre(**{**a, "x": streams})

    return run


def _moe_router(arguments: dict[str, Any]) -> Run:
    """vLLM's fallback for devices without its own op."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import _topk_softplus_sqrt_torch

    logits, k = arguments["logits"], arguments["k"]
    shape, device = (len(logits), k), logits.device
    weights, ids = torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device)

    def run(**a: Any) -> Any:
        tokens = a.get("input_ids")
        _topk_softplus_sqrt_torch(
            weights, ids, ids, a["logits"], True, a.get("bias"), None if tokens is None else tokens.clamp(min=0),
            a.get("tid2eid"), a["routed_scaling_factor"],
        )  # fmt: skip
        return by_expert(weights, ids) if tokens is None else (weights, ids)

    return run


def _topk(arguments: dict[str, Any]) -> Run:
    """PyTorch's choice with the same order of results; its rule for equal scores is not fixed."""

    def run(**a: Any) -> torch.Tensor:
        scores, visible, k = a["scores"], a["n_vis"], a["k"]
        entries = scores.shape[1]
        hidden = torch.arange(entries, device=scores.device) >= visible[:, None]
        best = scores.masked_fill(hidden, -torch.inf).topk(min(k, entries), dim=1, sorted=False).indices
        last = torch.where(best < visible[:, None], best, entries).sort(dim=1).values
        result = torch.full((len(scores), k), -1, dtype=torch.int32, device=scores.device)
        result[:, : last.shape[1]] = torch.where(last < entries, last, -1).to(torch.int32)
        return result

    return run


_MAKERS: dict[tuple[str, str], Callable[[dict[str, Any]], Run]] = {
    ("hc_pre", VLLM): _hc_pre,
    ("hc_post", VLLM): _hc_post,
    ("hc_post_pre", VLLM): _hc_post_pre,
    ("moe_router", VLLM): _moe_router,
    ("indexer_topk", "torch.topk"): _topk,
}
"""By op and name of the baseline."""


def names(case: Case) -> list[str]:
    """The baselines of a case that run in this process, `eager` first."""
    found = list(case.baselines)
    if (case.op, VLLM) in _MAKERS:
        found.append(VLLM)
    return found


def implementation(case: Case, name: str, arguments: dict[str, Any]) -> Run:
    """The baseline `name` of a case, prepared for `arguments`; `UnavailableError` where it cannot run here."""
    if name == EAGER:
        return case.reference
    if name == VLLM:
        with suppress(ModuleNotFoundError):  # of a parent package
            if find_spec(VLLM) is None:
                raise UnavailableError("vllm is not installed")
    from dsv4_triton.bench import native

    job = case.op, name
    if job in native.NOT_THE_SAME:
        raise UnavailableError(native.NOT_THE_SAME[job])
    return (_MAKERS | native.MAKERS)[job](arguments)


class Interpreter:
    """A process in which Triton interprets kernels. It takes case after case, and is ended and started again where one
    takes longer than `seconds`, its check against the reference included."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Interpreter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def measure(self, case: Case) -> float:
        """Seconds of one run; `UnavailableError` says why there are none."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([case.op, case.name]) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], self.seconds)[0]:
                self._end()
                raise UnavailableError(f"not done after {self.seconds:g} s")
            answer = json.loads(process.stdout.readline())
        except (OSError, ValueError):
            self._end()
            raise UnavailableError("its process ended") from None
        if "error" in answer:
            raise UnavailableError(answer["error"])
        return float(answer["seconds"])

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsv4_triton.bench.interpreted"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "TRITON_INTERPRET": "1"}, start_new_session=True,  # Ctrl-C is for this process
        )  # fmt: skip
        assert process.stdout is not None
        process.stdout.readline()  # imports are done
        return process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
