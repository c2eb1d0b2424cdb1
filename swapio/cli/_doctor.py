"""`swapio doctor`: what this machine gives, and what to do about it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from ..errors import ConfigError
from ..io import filesystem_of
from ..report import Check, Status, check_line, check_table, verdict, worst
from ..spec import parse_nbytes
from ..swap import host_memory
from . import _checks, _facts
from ._place import places

__all__ = ["examine", "run_doctor"]

_LAST_RESORT = Path("/tmp")


def run_doctor(path: Path | None, budget: str | None, json_file: Path | None, console: Console) -> int:
    """Print what `examine` finds, or with `json_file` "-" only the JSON.

    Args:
        path: where swap files shall go; default: the local drive with the most room.
        budget: the host memory that training will be given, as in the config; None and "auto" for what the machine has to spare.
        json_file: also write the checks there.

    Returns:
        The exit code: 0 when all is ok, 1 when something is degraded, 2 when something is broken.

    Raises:
        ConfigError: `budget` is no size, or `json_file` cannot be written.
    """
    budget_nbytes = None if budget in (None, "auto") else parse_nbytes(budget, key="--host-memory")
    with _said_here():
        checks = examine(path, budget_nbytes)
    report = {"verdict": worst(checks), "checks": [dataclasses.asdict(check) for check in checks]}
    text = json.dumps(report, indent=2) + "\n"
    if json_file == Path("-"):
        print(text, end="", file=console.file)
        return worst(checks).exit_code
    if console.is_terminal:
        console.print(check_table(checks))
    else:
        for check in checks:
            print(check_line(check), file=console.file)
    print(verdict(checks), file=console.file)
    if json_file is not None:
        try:
            json_file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: {json_file} cannot be written ({error.strerror}); give another file", key="json") from error
    return worst(checks).exit_code


def examine(path: Path | None = None, budget_nbytes: int | None = None, *, root: Path = Path("/")) -> list[Check]:
    """All checks, for swap files in `path` (default: the local drive with the most room) and a budget for host memory (default: auto).

    A file is written there for a moment; nothing is left. Never raises: a check that fails itself is a line that says so. `root` is where
    `dev`, `proc` and `sys` are.
    """
    path, chosen = _place(path)
    accelerators = functools.cache(lambda: _facts.accelerators(root))
    memory = functools.cache(lambda: host_memory(root))

    def memlock() -> Check:
        wanted = memory().auto_nbytes if budget_nbytes is None else budget_nbytes
        return _checks.check_memlock(_facts.lock_limit(root), has_accelerator=accelerators().usable, wanted_nbytes=wanted)

    checks: dict[str, Callable[[], Check]] = {
        "backend": lambda: _checks.check_backend(_facts.try_storage(path)),
        "filesystem": lambda: _checks.check_filesystem(filesystem_of(path)),
        "space": lambda: _checks.check_space(_facts.space(path)),
        "drive": lambda: _checks.check_drive(_facts.drives_below(path, root)),
        "leftovers": lambda: _checks.check_leftovers(_facts.leftovers(path)),
        "file size": lambda: _checks.check_file_size(_facts.soft_limit(resource.RLIMIT_FSIZE)),
        "open files": lambda: _checks.check_open_files(_facts.soft_limit(resource.RLIMIT_NOFILE)),
        "memory": lambda: _checks.check_memory(memory(), budget_nbytes),
        "memlock": memlock,
        "devices": lambda: _checks.check_accelerators(accelerators()),
        "bf16": lambda: _checks.check_bf16(_facts.computes_in_bf16(), has_accelerator=accelerators().usable),
        "cores": lambda: _checks.check_cores(_facts.cores(root)),
        "numa": lambda: _checks.check_numa(_facts.numa_nodes(root)),
        "versions": lambda: _checks.check_versions(_facts.versions()),
    }
    return [chosen, *(_attempt(name, check) for name, check in checks.items())]


@contextlib.contextmanager
def _said_here() -> Iterator[None]:
    """Inside, warnings of the log do not go to standard error where nobody set it up: the checks say the same."""
    log, silent = logging.getLogger("swapio"), logging.NullHandler()
    log.addHandler(silent)
    try:
        yield
    finally:
        log.removeHandler(silent)


def _place(path: Path | None) -> tuple[Path, Check]:
    if path is not None:
        return path, Check("path", Status.OK, f"{path}, as asked")
    try:
        found = places()
    except Exception as error:
        return _LAST_RESORT, _failed("path", error)
    if not found:
        why = f"no local drive can be written, so {_LAST_RESORT} is looked at"
        return _LAST_RESORT, Check("path", Status.DEGRADED, why, "give a directory: swapio doctor PATH")
    return found[0].path, Check("path", Status.OK, f"{found[0].path}, the best of the local drives that can be written ({len(found)})")


def _attempt(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # whatever it is, the other checks still help
        return _failed(name, error)


def _failed(name: str, error: Exception) -> Check:
    return Check(name, Status.DEGRADED, f"not known, because {type(error).__name__}: {error}", "the other lines hold all the same")
