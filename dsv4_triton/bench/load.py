"""Serving under load: many clients for minutes, and every answer held to the one that its request got alone.

Prompts share heads of several lengths, so that prefixes hit; some clients go away in the middle of an answer; drafts of
the MTP block are on. First each request is asked alone, with a `cache_salt` of its own, so that it shares nothing.
Then all clients ask at once for some minutes. Greedy answers of fewer tokens are prefixes of longer ones, so one answer
alone serves all lengths.

    dsv4-triton bench load [--clients 64] [--minutes 10]
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
from httpx import Limits
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console
from rich.table import Table

from dsv4_triton.bench.serve import explained
from dsv4_triton.demo.checkpoint import DemoSettings, write_checkpoint
from dsv4_triton.demo.serve import (
    NAME,
    Interrupts,
    Server,
    ServerFailedError,
    free_port,
    server_command,
    wait_until_ready,
)

Progress = Callable[[int, int, str], None]
HEADS = (40, 130, 257, 520)
"""Lengths of shared heads: inside a window, just over one, just over a page, two pages."""
TAILS = (1, 3, 4, 31, 127, 128, 129)
ALONE = (1, 2, 5, 127, 128, 129, 255, 256, 257)
"""Lengths of prompts that share nothing."""
CONTEXT = 1024
TIE = 1e-4
"""Log-probabilities of two tokens that are so close can change places with the rounding of a matrix product, whose
order of sums depends on its number of rows: in fp32 they differ by less than 1e-5 between batches."""
SAMPLE_SECONDS = 5.0
LEAK = 48 << 10
"""Bytes by which memory may grow with each answer in the second half of a run; the first half is the warm-up. Without a
leak ten minutes gave 9 KiB (standard error 7); 100 KiB are to be found for sure."""
JUDGED = 250
"""Answers in the second half that it takes to tell growth from the memory of the steps that samples fall into."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(256 << 10)}
"""Blocks of this many bytes and more are mapped one by one by the C library (mallopt(3)), so that a tensor that is
freed is memory that is given back. By default the heap keeps the holes that tensors of every size leave behind, which
grow for many minutes and look like a leak, or hide one; docs/benchmarks.md has figures."""
METRICS = {
    "preemptions": "vllm:num_preemptions_total",
    "prefix tokens asked": "vllm:prefix_cache_queries_total",
    "prefix tokens found": "vllm:prefix_cache_hits_total",
    "drafts": "vllm:spec_decode_num_draft_tokens_total",
    "drafts accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "running at the end": "vllm:num_requests_running",
    "cache in use at the end": "vllm:kv_cache_usage_perc",
}


@dataclass(frozen=True)
class Plan:
    """clients: at once, for `minutes`. drafts: tokens of the MTP block, 0 for none. new_tokens: at most, of an answer.
    leaving: share of requests whose client goes away early. cache_mib: memory of the KV cache."""

    clients: int = 64
    minutes: float = 10.0
    drafts: int = 2
    new_tokens: int = 64
    leaving: float = 0.15
    cache_mib: int = 256
    seed: int = 0


@dataclass(frozen=True)
class Alone:
    """A request's answer without company: token ids, and by how much each one's log-probability led the next best."""

    tokens: list[int]
    leads: list[float]


class Sample(NamedTuple):
    """The server's memory: after so many seconds and requests that ended, bytes of each process by its name."""

    seconds: float
    ended: int
    sizes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.sizes.values())


@dataclass
class Report:
    """What came of it. `wrong` and `errors` say what was wrong; `ties` are answers that leave the expected one where
    two tokens were equally likely. `scheduling` is what the server's log says of it. `rate`: tokens per second under
    load. `memory`: what was looked at during the load."""

    plan: Plan
    scheduling: str = ""
    seconds: float = 0.0
    rate: float = 0.0
    answers: int = 0
    left: int = 0
    tokens: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def growth(self) -> float | None:
        """Bytes by which memory grew with each request that ended, in the second half of the time: the slope of a line
        through its samples (least squares). None where fewer than `JUDGED` requests ended in it."""
        late = [sample for sample in self.memory if sample.seconds >= self.seconds / 2]
        if len(late) < 2 or late[-1].ended - late[0].ended < JUDGED:
            return None
        return statistics.linear_regression([one.ended for one in late], [one.total for one in late]).slope

    @property
    def problems(self) -> list[str]:
        found = [*self.errors, *self.wrong]
        if self.growth is not None and self.growth > LEAK:
            found.append(f"memory grew by {self.growth / 1024:.0f} KiB with each answer in the second half")
        for name in ("running at the end", "cache in use at the end"):
            if self.metrics.get(name):
                found.append(f"{name}: {self.metrics[name]:g}")
        return found

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "growth": self.growth, "problems": self.problems}


def prompts(seed: int, vocab: int) -> list[list[int]]:
    """Random token ids: every head with every tail, and prompts alone."""
    chance = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [chance.randrange(3, vocab) for _ in range(length)]

    heads = [ids(length) for length in HEADS]
    return [[*head, *ids(tail)] for head in heads for tail in TAILS] + [ids(length) for length in ALONE]


def judge(report: Report, expected: Alone, got: Sequence[int], wanted: int, whole: bool, name: str) -> None:
    """Count an answer of `wanted` tokens, or of the part that a client waited for unless `whole`."""
    report.tokens += len(got)
    report.answers += whole
    report.left += not whole
    if whole and len(got) != wanted:
        report.errors.append(f"{name}: {len(got)} of {wanted} tokens came")
        return
    for place, (theirs, ours) in enumerate(zip(got, expected.tokens)):
        if theirs != ours:
            if expected.leads[place] < TIE:
                report.ties += 1
            else:
                report.wrong.append(
                    f"{name}: token {place} is {theirs}, alone it was {ours} with a lead of {expected.leads[place]:.2g}"
                )
            return


async def ask(client: AsyncOpenAI, prompt: list[int], tokens: int, leave_after: int | None = None) -> list[int]:
    """Stream an answer; with `leave_after` the connection is closed after so many tokens."""
    stream = await client.completions.create(
        model=NAME, prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    got: list[int] = []
    async for chunk in stream:
        for choice in chunk.choices:
            got += getattr(choice, "token_ids", None) or []
        if leave_after is not None and len(got) >= leave_after:
            await stream.close()
            break
    return got


async def alone(client: AsyncOpenAI, prompt: list[int], tokens: int, salt: str) -> Alone:
    """The answer while nothing else runs and nothing is shared."""
    answer = await client.completions.create(
        model=NAME, prompt=prompt, max_tokens=tokens, temperature=0, logprobs=2,
        extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt,
                    "return_tokens_as_token_ids": True},
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
    best = [sorted(one.values(), reverse=True) for one in choice.logprobs.top_logprobs]
    return Alone(list(getattr(choice, "token_ids", ())), [two[0] - two[1] for two in best])


async def drive(url: str, pid: int, report: Report, vocab: int, progress: Callable[[float, str], None]) -> None:
    """Ask each request alone, then all clients at once until the time is over, and once more alone. A server that has
    ended is a `ServerFailedError`; one that does not answer is an error of the client's library outside of the load."""
    plan = report.plan
    asked = prompts(plan.seed, vocab)
    # Without connections that are kept: one that the server closes while it is taken again would be an error.
    http = DefaultAsyncHttpxClient(limits=Limits(max_keepalive_connections=0))
    options: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "timeout": 600, "max_retries": 0}
    async with AsyncOpenAI(**options, http_client=http) as client:
        expected = []
        for number, prompt in enumerate(asked):
            progress(0.0, f"alone: {number} of {len(asked)} requests")
            expected.append(await alone(client, prompt, plan.new_tokens, f"alone-{number}"))
        begin = time.monotonic()
        end = begin + 60 * plan.minutes

        async def one_client(number: int) -> None:
            chance = random.Random(f"{plan.seed}-{number}")
            while time.monotonic() < end:
                which, wanted = chance.randrange(len(asked)), chance.randint(1, plan.new_tokens)
                leave = chance.randint(1, wanted) if chance.random() < plan.leaving else None
                name = f"prompt {which} ({len(asked[which])} tokens)"
                try:
                    got = await ask(client, asked[which], wanted, leave)
                except Exception as error:
                    report.errors.append(f"{name}: {type(error).__name__}: {error}")
                    await asyncio.sleep(1.0)  # a server that is gone is not asked as fast as possible
                else:
                    judge(report, expected[which], got, wanted, leave is None, name)

        async def watch() -> None:
            while time.monotonic() < end:
                report.seconds = time.monotonic() - begin
                if not (sizes := resident(pid)):
                    raise ServerFailedError("the server is gone")
                report.memory.append(Sample(report.seconds, report.answers + report.left, sizes))
                progress(
                    report.seconds / 60, f"{report.answers} answers, {report.left} left, {report.ties} ties, "
                    f"{len(report.wrong)} wrong, {len(report.errors)} errors",
                )  # fmt: skip
                await asyncio.sleep(SAMPLE_SECONDS)

        try:
            await asyncio.gather(watch(), *(one_client(number) for number in range(plan.clients)))
        finally:
            report.seconds = time.monotonic() - begin
            report.rate = report.tokens / report.seconds
        report.metrics = metrics(url)
        for number, prompt in enumerate(asked):
            progress(report.seconds / 60, f"alone again: {number} of {len(asked)} requests")
            got = await ask(client, prompt, plan.new_tokens)
            judge(report, expected[number], got, plan.new_tokens, True, f"prompt {number} after the load")
    report.metrics = metrics(url)


async def unless_interrupted(work: Coroutine[Any, Any, None], interrupts: Interrupts) -> None:
    """Do `work`, and cancel it once an interrupt is pending: raised inside the event loop, it would end nothing."""
    task = asyncio.create_task(work)
    while not task.done():
        await asyncio.wait({task}, timeout=0.2)
        if interrupts.pending:
            task.cancel()
    if not task.cancelled():
        task.result()


def resident(pid: int) -> dict[str, int]:
    """Bytes that `pid` and the processes below it have written and have to themselves, by name and number. Pages of
    files are left out: whether they count as a process's own depends on what else runs on the machine."""
    process = psutil.Process(pid)
    found = {}
    for one in (process, *process.children(recursive=True)):
        try:
            found[f"{one.name()} {one.pid}"] = sum(part.private_dirty for part in one.memory_maps())
        except psutil.NoSuchProcess:
            continue
    return found


def metrics(url: str) -> dict[str, float]:
    """What the server counted, by the names of `METRICS`; what it does not report is left out."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for name, metric in METRICS.items():
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == metric]
        if values:
            found[name] = sum(values)
    return found


def scheduling(log: str) -> str:
    """The line of a server's log that says whether it schedules a step while the one before is computed."""
    found = re.search(r"asynchronous scheduling .*", log)
    return found[0] if found else ""


def measure(
    report: Report, console: Console, interrupts: Interrupts, bar: Callable[[], AbstractContextManager[Progress]]
) -> None:
    """Serve the demo checkpoint in fp32 on 127.0.0.1, load it, stop it. Fills `report` while it goes on; `bar` opens
    what shows minutes, their total and what happens, once the server is ready."""
    plan = report.plan
    settings = DemoSettings(dtype="float32")
    with tempfile.TemporaryDirectory(prefix="dsv4-load-") as folder:
        directory = Path(folder) / "model"
        write_checkpoint(directory, settings)
        port = free_port()
        command = server_command(directory, dtype="float32", port=port)
        command += ["--max-model-len", str(CONTEXT), "--max-num-batched-tokens", "512", "--enable-prefix-caching"]
        command += ["--max-num-seqs", str(plan.clients), "--kv-cache-memory-bytes", str(plan.cache_mib << 20)]
        if plan.drafts:
            speculation = {"method": "mtp", "num_speculative_tokens": plan.drafts}
            command += ["--speculative-config", json.dumps(speculation)]
        interrupts.hold()
        # The first would decide on the cache's size, whatever the command says; the second would keep the log silent.
        unset = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_LOGGING_LEVEL")
        server = Server(command, port=port, log=Path(folder) / "server.log", defaults=ALLOCATOR, unset=unset)
        try:
            with explained(server):
                interrupts.release()
                wait_until_ready(server, console, interrupts)
                report.scheduling = scheduling(server.log.read_text(errors="replace"))
                interrupts.hold()
                with bar() as show:
                    work = drive(
                        server.url, server.process.pid, report, settings.vocab - 32,
                        lambda done, what: show(int(done), round(plan.minutes), what),
                    )  # fmt: skip
                    asyncio.run(unless_interrupted(work, interrupts))
                interrupts.release()
                server.ready()  # ServerFailedError where it has ended
        finally:
            interrupts.hold()
            server.stop()


def table(report: Report) -> Table:
    """What happened, line by line."""
    plan = report.plan
    title = f"demo checkpoint: {plan.clients} clients for {report.seconds:.0f} s; {report.scheduling}"
    result = Table(title=title, box=None, show_header=False)
    rows: dict[str, str] = {
        "answers, compared with those alone": f"{report.answers}",
        "clients that went away": f"{report.left}",
        "tokens per second": f"{report.rate:.1f}",
        "wrong answers": f"{len(report.wrong)}",
        "errors": f"{len(report.errors)}",
        "ended by a tie": f"{report.ties}",
    }
    if report.memory:
        first, last = (report.memory[at].total >> 20 for at in (0, -1))
        slope = f"too few answers for a judgement (fewer than {JUDGED} in the second half)"
        if report.growth is not None:
            slope = f"{report.growth / 1024:+.1f} KiB an answer in the second half (at most {LEAK >> 10})"
        rows["memory of the server"] = f"{first} to {last} MiB, {slope}"
    rows |= {name: f"{value:g}" for name, value in report.metrics.items()}
    for name, value in rows.items():
        result.add_row(name, value)
    return result
