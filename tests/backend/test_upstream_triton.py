"""Names of Triton that vLLM imports: added where they are missing, left alone where they are not."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.language import core
from triton.runtime.jit import JITFunction

from dsv4_triton.backend import upstream_triton

GLUON = "triton.experimental.gluon"


@pytest.fixture(autouse=True)
def _as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton without what another test has added; the same afterwards."""
    for name in upstream_triton.MODULES:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    for owner, name in ((triton, "experimental"), (core, "_aggregate")):
        monkeypatch.setattr(owner, name, None, raising=False)
        monkeypatch.delattr(owner, name)


def test_what_is_missing_is_added() -> None:
    """What vLLM imports is there, and using it says what is missing."""
    with pytest.raises(ModuleNotFoundError, match=r"triton\.experimental"):
        import_module(GLUON)
    upstream_triton.complete()
    names: dict[str, Any] = {}
    exec(
        "from triton.experimental import gluon\n"
        "from triton.experimental.gluon import language as gl\n"
        "from triton.language.core import _aggregate as aggregate",
        names,
    )
    assert names["gluon"].language is names["gl"]
    with pytest.raises(NotImplementedError, match=r"SimpleNamespace needs triton\.language\.core\._aggregate"):
        names["aggregate"](SimpleNamespace)


def experimental(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A Triton that has the modules; `text` is the last one."""
    package = folder / "experimental" / "gluon"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / "language.py").write_text(text)
    monkeypatch.setattr(triton, "__path__", [*triton.__path__, str(folder)])


def test_what_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experimental(tmp_path, monkeypatch, "jit = 'its own'")
    monkeypatch.setattr(core, "_aggregate", "its own", raising=False)
    upstream_triton.complete()
    assert import_module(f"{GLUON}.language").jit == core._aggregate == "its own"


def test_what_does_not_load_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experimental(tmp_path, monkeypatch, "import triton.no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        upstream_triton.complete()


def test_the_former_hook_is_called_too(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setattr(JITFunction, "compiled_hook", lambda **what: calls.append(("former", what)))
    upstream_triton.watch_compilation(lambda name, what: calls.append((name, what)))
    what = {"fn": SimpleNamespace(name="some_kernel"), "key": "a key"}
    JITFunction.compiled_hook(**what)
    assert calls == [("some_kernel", what), ("former", what)]


def test_tuning_is_printed_unless_it_was_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in (("0", "0"), (None, "1")):
        if before is None:
            monkeypatch.delenv("TRITON_PRINT_AUTOTUNING")
        else:
            monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", before)
        upstream_triton.print_tuning()
        assert os.environ["TRITON_PRINT_AUTOTUNING"] == after
