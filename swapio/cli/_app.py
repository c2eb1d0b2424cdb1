"""The commands. An error of ours is one line and exit code 1 or 2; anything else is a bug and keeps its traceback."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import swapio

from ..config import config_markdown, load_config
from ..errors import BudgetError, ConfigError, SwapioError

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train PyTorch models larger than the machine's memory.",
)


class Offload(enum.StrEnum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class Dtype(enum.StrEnum):
    auto = "auto"
    bf16 = "bf16"
    fp32 = "fp32"


def _version(value: bool) -> None:
    if value:
        print(swapio.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command()
def demo(
    offload: Annotated[Offload, typer.Option(help="Where weights and optimizer state rest.")] = Offload.nvme,
    nvme_path: Annotated[Path | None, typer.Option(help="A directory on a local drive; default: the drive with the most room.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help='Hard limit, like "768MiB"; default: half of the state, or what it needs.')
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the log (JSONL), the summary (JSON) and the picture (PNG).")] = Path("demo-out"),
    layers: Annotated[int, typer.Option(min=1)] = 4,
    dim: Annotated[int, typer.Option(min=64, help="Width of the model, a multiple of 64.")] = 256,
    seq: Annotated[int, typer.Option(min=1, help="Bytes of text in one sequence.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in one step.")] = 8,
    steps: Annotated[int, typer.Option(min=1)] = 180,
    seed: Annotated[int, typer.Option(min=0, help="Of the initial weights and the order of the data.")] = 0,
    lr: Annotated[float | None, typer.Option(help="AdamW's highest learning rate; default: 0.25 / dim.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; bf16 has exact fp32 masters. auto: bf16 where it is fast.")] = Dtype.auto,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda, cuda:1, or simulated.")] = "auto",
) -> None:
    """Train a byte-level GPT on real text, everything on the drive, and show what moved and what it cost."""
    from ._demo import DemoOptions, run_demo

    options = DemoOptions(
        offload.value, nvme_path, host_memory, out, layers, dim, seq, batch, steps, seed, lr, dtype.value, device
    )  # fmt: skip
    if run_demo(options, Console(highlight=False)).interrupted:
        raise typer.Exit(130)


@app.command()
def bench(
    paths: Annotated[list[Path], typer.Argument(help="Directories, each on the drive to measure.", show_default=False)],
    quick: Annotated[bool, typer.Option("--quick", help="Half a minute instead of some minutes.")] = False,
    tiny: Annotated[bool, typer.Option("--tiny", hidden=True, help="Seconds, for tests: the figures mean nothing.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for drive.json and drive.png.")] = Path("bench-out"),
) -> None:
    """Measure what a drive gives: reads, writes and the optimizer's mix, beside fio, and what that means for training."""
    from ..drive import QUICK, STANDARD, TINY
    from ._bench import bench_paths

    bench_paths(paths, TINY if tiny else QUICK if quick else STANDARD, out, Console(highlight=False))


@app.command()
def tune(
    path: Annotated[Path, typer.Argument(help="A directory on the drive.", show_default=False)],
    out: Annotated[Path, typer.Option(help='The file to write, for "swapio": {"tuned": FILE} in a config.')] = Path("swapio-tuned.json"),
) -> None:
    """Find the best block size, depth and backend of a drive with few bytes, and write them as a config block."""
    from ._bench import tune_path

    tune_path(path, out, Console(highlight=False))


@app.command()
def doctor(
    path: Annotated[Path | None, typer.Argument(help="Where swap files shall go; default: the local drive with the most room.")] = None,
    host_memory: Annotated[str | None, typer.Option(help='What training will be given, like "8GiB"; default: what is to spare.')] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write it there; - for standard output, and nothing else.")] = None,
) -> None:
    """Say what this machine gives, each line ok, degraded or broken, and what to do about it. Exit code: 0, 1 or 2, by the worst line."""
    from ._doctor import run_doctor

    raise typer.Exit(run_doctor(path, host_memory, json_file, Console(highlight=False)))


@app.command()
def config(
    file: Annotated[Path | None, typer.Argument(help="A config in JSON; without one, all keys are listed as a page of Markdown.")] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks to share the batch.")] = 1,
) -> None:
    """Show what a config comes to: every value, where it came from, and what has no effect."""
    if file is None:
        print(config_markdown(), end="")
    else:
        print(load_config(file, world_size=world_size, world_size_source="--world-size").describe())


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint, or the one around it.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="The folder to write to.", show_default=False)],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint of several; default: the latest.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, fp16 or bf16; default: as it was trained.", show_default=False)] = None,
    trainable_only: Annotated[bool, typer.Option("--trainable-only", help="Only what was trained, as of an adapter.")] = False,
    max_shard_size: Annotated[str, typer.Option(help="Of a file.")] = "5GB",
) -> None:
    """Write the model of a checkpoint as safetensors, which transformers loads. Load from folders that you trust."""
    from ._checkpoint import export_checkpoint

    export_checkpoint(checkpoint, out, tag, dtype, trainable_only, max_shard_size, Console(highlight=False))


@app.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint, or the one around it.", show_default=False)],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint of several; default: the latest.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and compare it with what was written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, and nothing else.")] = False,
) -> None:
    """Say what is in a checkpoint: step, ranks, sizes, damage, and what is beside it. Exit code 1: it is damaged."""
    from ._checkpoint import inspect_checkpoint

    if not inspect_checkpoint(checkpoint, tag, verify, as_json, Console(highlight=False)):
        raise typer.Exit(1)


def main() -> None:
    """The entry point of `swapio` and `python -m swapio`. Exit code 2: what was asked for cannot work; 1: something failed."""
    try:
        app()
    except SwapioError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[bold red]error:[/] {_plain(error)}")
        raise SystemExit(2 if isinstance(error, ConfigError | BudgetError) else 1) from None


def _plain(error: Exception) -> str:
    return str(error).replace("[", "\\[")  # rich would take [EIO] for a style
