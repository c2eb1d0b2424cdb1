"""The rules of the code base that a reader relies on: imports go down only, no logic in `__init__`, no work inside `assert`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "swapio"

LAYERS = {
    "cli": 6, "report": 6, "__main__": 7,
    "engine": 5, "drive": 5, "checkpointing": 5, "utils": 5, "ops": 5, "runtime": 6,
    "zero": 4, "optim": 3, "checkpoint": 4, "activation": 4,
    "swap": 2,
    "io": 1, "memory": 1,
    "config": 0, "errors": 0, "spec": 0,
}  # fmt: skip
"""A module imports from lower layers only, and from its own package."""

ALLOWED = {("cli", "report"), ("config", "errors"), ("config", "spec"), ("spec", "errors"), ("activation", "zero")}
"""Edges between parts of one layer."""

BESIDE = "testing"  # public helpers of tests: may import everything, nothing imports it

THIRD_PARTY = {
    "torch": {"io", "errors", "spec", "config", "report"},
    "rich": set(LAYERS) - {"cli", "report"},
    "matplotlib": set(LAYERS) - {"report"},
}
"""Who must not import it."""


def sources() -> Iterator[tuple[str, Path]]:
    """Top-level part ("io", "errors", ...) and path of each module, without the package's own `__init__`."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts != ("__init__",):
            yield parts[0], path


def imports(path: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and absolute dotted name, as parts, of everything that a module imports."""
    package = ("swapio", *path.relative_to(ROOT).with_suffix("").parts)[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield node.lineno, (*base, alias.name)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT.parent)}:{line}"


def collect(wrong: Callable[[ast.AST], bool], *, skip: tuple[str, ...] = ()) -> list[str]:
    return [
        where(path, getattr(node, "lineno", 0))
        for part, path in sources()
        if part not in skip
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if wrong(node)
    ]


def test_every_module_has_a_layer() -> None:
    assert {part for part, _ in sources()} <= {*LAYERS, BESIDE}


def test_imports_go_down_only() -> None:
    wrong = []
    for part, path in sources():
        if part == BESIDE:
            continue
        for line, name in imports(path):
            if name[0] != "swapio":
                continue
            # `from .. import x` of a name that is no module is the package itself, which imports everything
            other = name[1] if len(name) > 1 and (name[1] in LAYERS or name[1] == BESIDE) else "the package"
            if other == "the package" and part in ("cli", "__main__"):
                continue
            if other != part and (part, other) not in ALLOWED and LAYERS.get(other, 99) >= LAYERS[part]:
                wrong.append(f"{where(path, line)}: {part} imports {other}")
    assert wrong == []


@pytest.mark.parametrize("name", THIRD_PARTY)
def test_third_parties_stay_where_they_belong(name: str) -> None:
    wrong = [where(path, line) for part, path in sources() if part in THIRD_PARTY[name] for line, n in imports(path) if n[0] == name]
    assert wrong == []


def test_inits_hold_imports_only() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("__init__.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            names = [t.id for t in node.targets if isinstance(t, ast.Name)] if isinstance(node, ast.Assign) else []
            if not (docstring or names in (["__all__"], ["__version__"]) or isinstance(node, ast.Import | ast.ImportFrom)):
                wrong.append(where(path, node.lineno))
    assert wrong == []


PURE = {"isinstance", "len", "all", "any", "issubclass", "callable", "type"}


def test_no_call_inside_assert() -> None:
    """`python -O` drops asserts, and with them what they call."""

    def wrong(node: ast.AST) -> bool:
        return isinstance(node, ast.Assert) and any(
            isinstance(n, ast.Await) or (isinstance(n, ast.Call) and not (isinstance(n.func, ast.Name) and n.func.id in PURE))
            for n in ast.walk(node.test)
        )

    assert collect(wrong, skip=(BESIDE,)) == []


def test_only_the_command_line_prints() -> None:
    assert collect(lambda n: isinstance(n, ast.Name) and n.id == "print", skip=("cli",)) == []


def test_threads_have_names() -> None:
    def wrong(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        wanted = {"Thread": "name", "ThreadPoolExecutor": "thread_name_prefix"}.get(name)
        return wanted is not None and wanted not in {k.arg for k in node.keywords}

    assert collect(wrong) == []
