"""Launch parameters of a kernel: what may be chosen, the choice when nobody tuned, and the choice that is used.

Beside a kernel stands one `Space`, and its launcher asks it for the parameters of every launch:

    SPACE = Space("muls_add", default=_default, candidates=_candidates, fits=_fits)

    config = SPACE(family, tokens=n, dtype=x.dtype)
    _muls_add_kernel[grid](x, y, out, n, BLOCK=config["BLOCK"], **config.options)

The answer is that of a config file (`store`) for these sizes' bucket, else for the next smaller bucket, else the
computed default. It is found once for each key and from then on read from a dictionary. Names in capitals are constants
of the kernel or of its launcher, other names are options of the NPU's compiler (`compiler.ascend.options`), where None
leaves the option out.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dsv4_triton.autotune.store import ConfigWarning, lookup, source
from dsv4_triton.device import Family

Key = Mapping[str, Any]
"""Sizes and dtypes of a launch by name."""
Choices = Mapping[str, Sequence[Any]]
"""Values to try, by parameter."""


class Config(dict[str, Any]):
    """Launch parameters by name; `options` are those of them that go to the NPU's compiler."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.options = {name: v for name, v in values.items() if not name.isupper() and v is not None}


def bucket(size: int) -> int:
    """The smallest power of two that is at least `size`: sizes of one bucket share their parameters."""
    return 1 << max(0, size - 1).bit_length()


def readable(value: Any) -> Any:
    """A value of a key as files have it: numbers, truths and strings as they are, dtypes by their name."""
    return value if isinstance(value, (int, str)) else str(value).removeprefix("torch.")


class Asked(NamedTuple):
    """One question of a launcher."""

    space: Space
    family: Family
    key: dict[str, Any]


@dataclass
class Trial:
    """What an active trial answers with, and what was asked of it, each question once."""

    configs: Mapping[str, Mapping[str, Any]]
    only: Mapping[str, Any] | None
    asked: list[Asked] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    answers: dict[tuple[Any, ...], Config] = field(default_factory=dict)


UNCOUNTED = frozenset({"unit_flag", "set_workspace_multibuffer"})
"""Options that only time can judge: how the cube's stores wait, and how many results may wait in global memory. The
cost model counts the same work with every value of them, so that an estimate ranks none before another."""


def buffering(family: Family) -> Choices:
    """Whether local memory is double-buffered: by the compiler's default for the family, or the other way."""
    return {"multibuffer": (None, family.vector_registers)} if family.arch else {}


MIXED: dict[str, Any] = {
    "tile_mix_vector_loop": 1, "multibuffer": None, "unit_flag": None, "set_workspace_multibuffer": None,
}  # fmt: skip
"""The default of the options of `mixing`."""


def mixing(family: Family) -> Choices:
    """Options of a kernel on cube and vector cores: its vector loops in 1 tile or 2, double buffers, whether the cube's
    stores wait by unit, and of A2 and A3, where results of the cube pass through global memory, how many may wait there
    (the compiler's default is 4). Of the dozen options that there are two more change such kernels here, for the worse:
    `enable_auto_bind_sub_block` and `limit_auto_multi_buffer_only_for_local_buffer`."""
    if not family.arch:
        return {}
    waiting = {} if family.vector_registers else {"set_workspace_multibuffer": (None, 2, 8)}
    return {"tile_mix_vector_loop": (1, 2), **buffering(family), "unit_flag": (None, True), **waiting}


def products(family: Family) -> Choices:
    """Options of a kernel of matrix products alone: whether the cube's stores wait by unit, and double buffers where
    they are not the default. Without them the cube waits for its operands, which the cost model does not see."""
    if not family.arch:
        return {}
    return {"unit_flag": (None, True), **({"multibuffer": (None, True)} if family.vector_registers else {})}


_MOST_KNOWN = 1 << 14
"""Answers that are kept: sizes such as the longest context grow with every step of a server that runs for months."""


_trial: Trial | None = None
_lock = threading.Lock()
DECLARED: dict[str, Space] = {}
"""Spaces of the kernels that are imported so far, by name."""


class Space:
    """The launch parameters of one kernel, or of several that are chosen together.

    default(family, key): the parameters when nobody tuned; it is asked with the sizes of the bucket, and with the key
        itself only where what it then says does not fit.
    candidates(family, key): values to try for each parameter. Parameters that only change the order of a sum belong in
        it for NPU families alone: on the host equal rows get equal results whatever the batch.
    fits(family, key, config): "" or why these parameters cannot work for these sizes: a divisor that is none, memory by
        arithmetic. Pure and cheap, it decides before anything is compiled and guards what files say.
    buckets: names of the key's sizes that are looked up by bucket; the other parts of a key must be equal.
    """

    def __init__(
        self,
        name: str,
        *,
        default: Callable[[Family, Key], Mapping[str, Any]],
        candidates: Callable[[Family, Key], Choices],
        fits: Callable[[Family, Key, Mapping[str, Any]], str] | None = None,
        buckets: Sequence[str] = ("tokens",),
    ):
        self.name = name
        self.default = default
        self.candidates = candidates
        self.buckets = tuple(buckets)
        self._fits = fits
        self._known: dict[tuple[Any, ...], Config] = {}
        self._warned: set[str] = set()
        DECLARED[name] = self

    def __call__(self, family: Family, **key: Any) -> Config:
        """The parameters of a launch. The names of the key are always given in the same order."""
        if _trial is not None:
            return self._tried(_trial, family, key)
        at = (family, *key.values())
        known = self._known.get(at)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[at] = self._found(family, key)
        return known

    def computed(self, family: Family, key: Key) -> dict[str, Any]:
        """The default of the key's bucket, so that few different ones are compiled; where that does not fit, that of
        the key itself."""
        config = dict(self.default(family, self._rounded(key)))
        return dict(self.default(family, key)) if self.fits(family, key, config) else config

    def _rounded(self, key: Key) -> dict[str, Any]:
        """The largest key of the bucket."""
        return {name: bucket(v) if name in self.buckets else v for name, v in key.items()}

    def fits(self, family: Family, key: Key, config: Mapping[str, Any]) -> str:
        """ "" or why `config` cannot be used for these sizes."""
        return "" if self._fits is None else self._fits(family, key, config)

    def unlike(self, family: Family, key: Key, config: Mapping[str, Any]) -> str:
        """ "" or what `config` has that no search for these sizes chooses: other names, types or values. A default of
        None says nothing of a type, options of the compiler may be left out, and of two truths either may be told."""
        default = self.computed(family, key)
        lacking = [name for name in default if name not in config]
        unknown = [name for name in config if name not in default]
        if lacking or unknown:
            names = {"lacks": ", ".join(lacking), "has unknown": ", ".join(unknown)}
            return " and ".join(f"{verb} {which}" for verb, which in names.items() if which)
        choices = self.candidates(family, key)
        for name, value in config.items():
            usual = default[name]
            if value is None and not name.isupper():
                continue
            if usual is not None and type(value) is not type(usual):
                return f"has {name} {value!r}, expected the kind of {usual!r}"
            told = [one for one in (usual, *choices.get(name, ())) if type(one) is type(value)]
            if value not in told and not (told and isinstance(value, bool)):
                expected = ", ".join(map(repr, dict.fromkeys((usual, *choices.get(name, ())))))
                return f"has {name} {value!r}, expected one of {expected}"
        return ""

    def completed(self, family: Family, key: Key, config: Mapping[str, Any]) -> dict[str, Any]:
        """A file's `config` with the options of the compiler that it does not name: an option that the space got later
        is left out, as it was when the file was made."""
        absent = [name for name in self.computed(family, key) if name not in config and not name.isupper()]
        return {**config, **dict.fromkeys(absent)}

    def bucketed(self, key: Key) -> dict[str, Any]:
        """The key of a file's entry for these sizes."""
        return {name: bucket(v) if name in self.buckets else readable(v) for name, v in key.items()}

    def configs(self, family: Family, key: Key, fixed: Container[str] = ()) -> Iterator[tuple[dict[str, Any], str]]:
        """Every combination of the candidates, or for `fixed` of the default's, with why it cannot be used, or ""."""
        choices = {name: (value,) for name, value in self.computed(family, key).items()}
        choices |= {name: tuple(v) for name, v in self.candidates(family, key).items() if name not in fixed}
        for values in itertools.product(*choices.values()):
            config = dict(zip(choices, values))
            yield config, self.fits(family, key, config)

    def forget(self) -> None:
        """Look everything up again: config files have changed."""
        self._known.clear()

    def _found(self, family: Family, key: Key) -> Config:
        default = self.computed(family, key)
        for at in self._buckets_of(key):
            config = lookup(family.name, self.name, at)
            if config is not None:
                sized = {**key, **{name: at[name] for name in self.buckets if name in at}}
                if config:
                    config = self.completed(family, sized, config)
                    if problem := self.unlike(family, sized, config):  # before `fits`, which counts on it
                        self._warn(family, at, problem)
                        return Config(default)
                usable = config and not self.fits(family, key, config)
                if usable and at != self.bucketed(key):  # for the whole bucket or not at all, as the warm-up expects
                    usable = not self.fits(family, self._rounded(key), config)
                return Config(config if usable else default)  # {} is the default too
        return Config(default)

    def _warn(self, family: Family, at: Key, problem: str) -> None:
        """Once for each kernel and family: its entry `at` is of another time."""
        if family.name not in self._warned:
            self._warned.add(family.name)
            file = source(family.name, self.name, at)
            warnings.warn(f"{file}: config of {dict(at)} {problem}; it is left out", ConfigWarning, stacklevel=4)

    def _buckets_of(self, key: Key) -> Iterator[dict[str, Any]]:
        """The key of the bucket, then those of the next smaller one of each size."""
        exact = self.bucketed(key)
        names = [name for name in self.buckets if name in exact]
        for halved in itertools.product((1, 2), repeat=len(names)):
            if all(exact[name] >= by for name, by in zip(names, halved)):
                yield exact | {name: exact[name] // by for name, by in zip(names, halved)}

    def _tried(self, trial: Trial, family: Family, key: dict[str, Any]) -> Config:
        """Answers are kept as those of files are, so that a timed launch does not wait longer for them."""
        at = (self, family, *key.values())
        known = trial.answers.get(at)
        if known is None:
            known = trial.answers[at] = self._answered(trial, family, key)
        return known

    def _answered(self, trial: Trial, family: Family, key: dict[str, Any]) -> Config:
        trial.asked.append(Asked(self, family, key))
        wanted = trial.configs.get(self.name)
        default = self.computed(family, key)
        if wanted is None or (trial.only is not None and trial.only != self.bucketed(key)):
            return Config(default)
        config = {**default, **wanted}
        if self.fits(family, key, config):
            return Config(default)
        trial.used.add(self.name)
        return Config(config)


def trial(
    configs: Mapping[str, Mapping[str, Any]] | None = None, only: Mapping[str, Any] | None = None
) -> AbstractContextManager[Trial]:
    """While active, spaces answer with `configs` by their name where these fit, others with their computed default, and
    no file counts; `only` for launches whose bucketed key this is.

    Yields what was `asked`, and the names of the spaces whose configuration was `used`. Holds for all threads of the
    process; does not nest.
    """
    return active(Trial(configs or {}, only))


@contextmanager
def active(trial: Trial) -> Iterator[Trial]:
    """`trial`, of one that can be active several times, with what it has answered already."""
    global _trial
    with _lock:
        if _trial is not None:
            raise RuntimeError("a trial is active already")
        _trial = trial
    try:
        yield trial
    finally:
        _trial = None
