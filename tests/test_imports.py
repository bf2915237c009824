"""The structure of the package: who may import whom, what an import needs, how large a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dsv4_triton"
MODULES = sorted(PACKAGE.rglob("*.py"))

BASE = {"device", "config", "options"}
ALLOWED = {
    "device": set(),
    "hadamard": set(),
    "config": set(),
    "options": {"device", "config"},
    "reference": {"reference"},
    "compiler": BASE | {"compiler"},
    "parameters": {"device", "parameters"},
    "kernels": BASE | {"compiler", "parameters", "kernels"},
    "backend": BASE | {"compiler", "kernels", "backend"},
    "model": BASE | {"hadamard", "compiler", "kernels", "backend", "model"},
    "bench": BASE
    | {"console", "hadamard", "compiler", "parameters", "kernels", "reference", "backend", "model", "demo", "bench"},
    "demo": {"console", "demo"},
    "offline": BASE | {"compiler", "bench", "offline"},
    "autotune": BASE | {"console", "compiler", "parameters", "kernels", "bench", "offline", "autotune"},
    "doctor": {"console", "device", "compiler", "backend"},
    "console": set(),
    "cli_bench_serve": {"console", "bench", "demo"},
    "cli_bench": {"console", "parameters", "cli_bench_serve", "compiler", "bench", "demo", "offline", *BASE},
    "cli": {
        "console",
        "parameters",
        "cli_bench",
        "autotune",
        "doctor",
        "demo",
        "compiler",
        "kernels",
        "bench",
        "offline",
        *BASE,
    },
}
"""What each part of the package may import of the others; the package itself (its version) is open to all."""

EXTERNAL = {
    "vllm": {"backend", "model", "bench"},
    "transformers": {"backend", "model"},
    "triton": {"compiler", "kernels", "bench"},
    "torch_npu": set(),
}
"""Which parts may import a package when they are imported themselves; inside functions it is their own affair."""

NOWHERE = {
    "kernels": {"vllm", "torch_npu", "transformers"},
    "reference": {"triton", "vllm", "torch_npu", "transformers"},
}
"""What a part may not import even inside a function."""


PARAMETERS = {("autotune", "space"), ("autotune", "store")}
"""Launch parameters as kernels ask for them, below the kernels; the search for them stands above."""


def part_of(path: Path) -> str:
    """The part a file belongs to: its folder below the package, or its own name."""
    return part_named(path.relative_to(PACKAGE).with_suffix("").parts)


def part_named(names: Sequence[str]) -> str:
    """The part of a module below the package."""
    return "parameters" if tuple(names[:2]) in PARAMETERS else names[0]


def imports(nodes: Iterator[ast.AST], path: Path) -> Iterator[str]:
    """Absolute dotted names that these import statements name."""
    package = ["dsv4_triton", *path.relative_to(PACKAGE).parts[:-1]]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "dsv4_triton":
                yield from (f"{module}.{alias.name}" for alias in node.names)
            else:
                yield module


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: no function bodies, nothing only for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from at_import(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        assert not list(imports(ast.walk(ast.parse(path.read_text())), path)), "the package imports nothing"
        return
    tree = ast.parse(path.read_text())
    assert part in ALLOWED, f"{part} is a new part of the package: say here what it may import"
    for name in imports(ast.walk(tree), path):
        first, *rest = name.split(".")
        if first == "dsv4_triton" and rest and rest[0] != "__version__":
            assert part_named(rest) in ALLOWED[part], f"{path}: {part} must not import {name}"
        assert first not in NOWHERE.get(part, ()), f"{path}: {part} must not import {name}"
    for name in imports(at_import(tree), path):
        allowed = EXTERNAL.get(name.split(".")[0])
        assert allowed is None or part in allowed, f"{path}: importing this module must not import {name}"


BLOCKED_IMPORT = """
import importlib, os, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("blocked for the test: " + name)

sys.meta_path.insert(0, Block())
import dsv4_triton
before = dict(os.environ)
for name in {modules!r}:
    importlib.import_module(name)
assert dict(os.environ) == before, "an import changed the environment"
loaded = sys.modules.get("dsv4_triton.compiler.host")
assert loaded is None or not loaded.is_installed(), "an import installed the host driver"
"""


@pytest.mark.parametrize(
    ("parts", "blocked"),
    [
        ((), {"torch", "triton", "vllm", "torch_npu", "transformers", "numpy"}),
        (
            ("device", "config", "options", "console", "cli_bench", "cli", "doctor", "demo"),
            {"torch", "triton", "vllm", "torch_npu", "transformers"},
        ),
        (("reference",), {"triton", "vllm", "torch_npu", "transformers"}),
        (("compiler", "kernels"), {"vllm", "torch_npu", "transformers"}),
    ],
    ids=["package", "command line", "reference", "kernels"],
)
def test_imports_without(parts: tuple[str, ...], blocked: set[str]) -> None:
    """Each part imports in a process where the packages it does not need are absent."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in MODULES
        if part_of(path) in parts
    ]
    assert modules or not parts
    code = BLOCKED_IMPORT.format(blocked=blocked, modules=modules)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def limit_of(path: Path) -> int:
    relative = path.relative_to(ROOT).parts
    if relative[0] == "tests":
        return 600
    return 450 if relative[1] == "kernels" else 800


@pytest.mark.parametrize(
    "path", [*MODULES, *sorted((ROOT / "tests").rglob("*.py"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_file_size(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= limit_of(path), f"{path.name} has {lines} lines, the limit is {limit_of(path)}: split it"


OPS = sorted(path.stem for path in (PACKAGE / "kernels").glob("*.py") if not path.stem.startswith("_"))


def public_functions(path: Path) -> dict[str, ast.FunctionDef]:
    body = ast.parse(path.read_text()).body
    return {
        node.name: node
        for node in body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and not node.decorator_list
    }


@pytest.mark.parametrize("op", OPS)
def test_reference_mirrors_kernel(op: str) -> None:
    """Every kernel has a test and a reference of the same name, whose function takes the same arguments."""
    assert (ROOT / "tests" / "kernels" / f"test_{op}.py").is_file(), f"no tests/kernels/test_{op}.py"
    reference = PACKAGE / "reference" / f"{op}.py"
    assert reference.is_file(), f"no reference for the kernel {op}"
    launcher = public_functions(PACKAGE / "kernels" / f"{op}.py").get(op)
    mirrored = public_functions(reference).get(op)
    assert launcher is not None, f"kernels/{op}.py has no function {op}"
    assert mirrored is not None, f"reference/{op}.py has no function {op}"

    def shape(function: ast.FunctionDef) -> tuple[list[str], list[str], list[str]]:
        a = function.args
        defaults = [ast.unparse(d) if d is not None else "" for d in [*a.defaults, *a.kw_defaults]]
        return [arg.arg for arg in a.args], [arg.arg for arg in a.kwonlyargs], defaults

    assert shape(launcher) == shape(mirrored), "kernel and reference must be interchangeable"
    assert ast.get_docstring(launcher), f"{op} needs a docstring"
