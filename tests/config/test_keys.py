from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swapio.config import KEYS, Key, Kind, config_markdown, config_table, load_config
from swapio.config._keys import DEPRECATED, ROWS, SECTIONS
from swapio.config._params import OPTIMIZERS, SCHEDULERS
from swapio.errors import ConfigError


def nested(key: str, value: Any) -> dict[str, Any]:
    for name in reversed(key.split(".")):
        value = {name: value}
    if key.startswith("optimizer."):
        kinds = [kind for kind, model in OPTIMIZERS.values() if key.rpartition(".")[2] in model.model_fields]
        value["optimizer"].setdefault("type", next(iter(kinds), "AdamW"))
    if key.startswith("scheduler.params."):
        name = key.rpartition(".")[2]
        kind, model = next(((kind, model) for kind, model in SCHEDULERS.values() if name in model.model_fields), SCHEDULERS["warmuplr"])
        value["scheduler"]["type"] = kind
        for needed, field in model.model_fields.items():
            if field.is_required():
                value["scheduler"]["params"].setdefault(needed, 1)
    section = value.get(key.partition(".")[0])
    if key.startswith(("fp16.", "csv_monitor.", "tensorboard.")):
        section.setdefault("enabled", True)
    return dict(value)


UNBUILT = [row for row in ROWS if row.kind in (Kind.NOT_YET, Kind.REFUSED)]


def test_each_key_is_in_one_class_and_explained() -> None:
    assert [key for key, count in Counter(row.key for row in ROWS).items() if count > 1] == []
    assert [row.key for row in ROWS if not row.note] == []
    assert SECTIONS.isdisjoint(KEYS)
    assert all(new in KEYS or new in SECTIONS for new, _ in DEPRECATED.values())


def test_the_table_has_every_key_once() -> None:
    table = config_table()
    assert Counter(row[0] for row in table) == Counter(list(KEYS))
    assert ("swapio.timeout_s", "honoured", "300.0", "seconds before a wait becomes an error") in table
    assert ("wandb", "refused", '{"enabled": false}', KEYS["wandb"].note) in table


def test_the_page_is_what_the_table_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text(encoding="utf-8") == config_markdown()
    assert "\n## fp16\n" in config_markdown()
    assert "\n| `timeout_s` | honoured | `300.0` | seconds before a wait becomes an error |\n" in config_markdown()


@pytest.mark.parametrize("row", [row for row in ROWS if row.default is not None], ids=lambda row: row.key)
def test_defaults_are_accepted_when_written_out(row: Key) -> None:
    loaded = load_config(nested(row.key, json.loads(json.dumps(row.default))))
    assert row.key not in loaded.accepted_without_effect


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind is Kind.NO_EFFECT], ids=lambda row: row.key)
def test_keys_without_effect_are_listed(row: Key) -> None:
    loaded = load_config(nested(row.key, 3))
    assert loaded.accepted_without_effect == {row.key: row.note}
    assert loaded.sources[row.key] == "given"


@pytest.mark.parametrize("row", UNBUILT, ids=lambda row: row.key)
def test_only_off_is_accepted_of_what_is_not_built(row: Key) -> None:
    for off in (*row.off, None, "auto"):
        load_config(nested(row.key, off))
    for on in ({"enabled": True, "type": "x", "deepcompile": True, "autotp_size": 2, "pipeline_stage": True}, "something", 7, [0]):
        with pytest.raises(ConfigError) as caught:
            load_config(nested(row.key, on))
        assert caught.value.key == row.key
        assert row.note in str(caught.value)
        assert ("not supported yet" in str(caught.value)) == (row.kind is Kind.NOT_YET)


@pytest.mark.parametrize("key", sorted({*KEYS, *SECTIONS} - {""}))
def test_a_slip_of_the_pen_finds_the_key(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(nested(f"{key}z", 1))
    assert caught.value.key == f"{key}z"
    assert f"did you mean {key!r}?" in str(caught.value)


@pytest.mark.parametrize("old", sorted(DEPRECATED))
def test_deprecated_spellings_mean_the_same(old: str) -> None:
    new, values = DEPRECATED[old]
    value: Any = {"enabled": True} if old == "bfloat16" else True
    loaded, plain = load_config(nested(old, value)), load_config(nested(new, values[True] if values else value))
    assert loaded.resolved() == plain.resolved()
    assert f"{old} is a deprecated spelling of {new}" in loaded.notes
    assert f"deprecated spelling {old}" in loaded.sources.values()
