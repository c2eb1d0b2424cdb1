"""The table of all keys for readers: as rows, and as the page `docs/config.md`."""

from __future__ import annotations

import itertools
import json

from ._keys import ROWS, Key, Kind

__all__ = ["config_markdown", "config_table"]


def config_table() -> list[tuple[str, str, str, str]]:
    """The table for the docs: key, what becomes of it, default or the values that are taken (as JSON), note; by section."""

    def values(row: Key) -> str:
        return ", ".join(map(json.dumps, row.off)) if row.off else json.dumps(row.default) if row.kind is Kind.HONOURED else ""

    return [(row.key, str(row.kind), values(row), row.note) for row in sorted(ROWS, key=lambda row: row.key.rpartition(".")[0])]


def config_markdown() -> str:
    """The page: one table for each section."""
    lines = [
        "# Config",
        "",
        'A dict or a JSON file in DeepSpeed\'s format. Unknown keys are errors; null and `"auto"` count as not given.',
        "`swapio config FILE` shows what a file comes to, with the source of each value. This page is what `swapio config` prints.",
    ]
    for section, rows in itertools.groupby(config_table(), key=lambda row: row[0].rpartition(".")[0]):
        lines += ["", f"## {section or 'Top level'}", "", "| key | what becomes of it | default, or values taken | |", "|---|---|---|---|"]
        for key, kind, values, note in rows:
            cells = (f"`{key.rpartition('.')[2]}`", kind, f"`{values}`" if values else "", note)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
