"""`index.toml`: every report is there once, every test that it names exists, and what is open is counted."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
INDEX: dict[str, Any] = tomllib.loads((Path(__file__).parent / "index.toml").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = INDEX["row"]
FOUND: list[dict[str, Any]] = INDEX.get("found", [])


def functions_of(path: Path) -> dict[str, bool]:
    """The tests in a file, and whether (some of) each is expected to fail."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    marks = [n for n in body if isinstance(n, ast.Assign) and "xfail" in ast.unparse(n.value)]
    named = {target.id for mark in marks for target in mark.targets if isinstance(target, ast.Name)}

    def fails(decorator: ast.expr) -> bool:
        return any(isinstance(n, ast.Name) and n.id in named for n in ast.walk(decorator)) or "xfail" in ast.unparse(decorator)

    functions = [n for n in body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_")]
    return {f.name: any(map(fails, f.decorator_list)) for f in functions}


def test_every_report_is_there_once() -> None:
    listed = [report for reports in INDEX["kinds"].values() for report in reports]
    assert Counter(report for row in ROWS for report in row["reports"]) == Counter(listed)
    assert max(Counter(listed).values()) == 1
    assert {report.partition("#")[0] for report in listed} == set(INDEX["repositories"])
    assert all(report.partition("#")[2].isdecimal() for report in listed)


def test_every_row_has_an_answer() -> None:
    for row in [*ROWS, *FOUND]:
        assert set(row) <= {"reports", "wanted", "tests", "open", "cannot_arise"}, row
        assert ("cannot_arise" in row) != ("tests" in row or "open" in row), row
        assert all(row.values()), row


def test_every_test_exists() -> None:
    """And one that is expected to fail says that something is open."""
    known: dict[str, dict[str, bool]] = {}
    for row in [*ROWS, *FOUND]:
        for node in row.get("tests", ()):
            path, _, name = node.partition("::")
            assert name in known.setdefault(path, functions_of(ROOT / path)), node


def test_what_is_expected_to_fail_is_open() -> None:
    failing = {
        f"tests/reports/{path.name}::{name}"
        for path in sorted(Path(__file__).parent.glob("test_*.py"))
        for name, fails in functions_of(path).items()
        if fails
    }
    assert failing <= {node for row in [*ROWS, *FOUND] if "open" in row for node in row.get("tests", ())}
    assert all(failing & set(row["tests"]) for row in FOUND), "what was found and mended is no longer listed"


def test_counts() -> None:
    assert INDEX["counts"] == {
        "tested": sum("open" not in row and "tests" in row for row in ROWS),
        "cannot_arise": sum("cannot_arise" in row for row in ROWS),
        "open": sum("open" in row for row in ROWS),
        "found": len(FOUND),
    }
