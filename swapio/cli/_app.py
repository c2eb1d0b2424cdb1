"""The commands. Errors of ours are one line and exit code 1; others are bugs and keep their traceback."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import swapio

from ..errors import SwapioError

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train PyTorch models larger than the machine's memory.")


class Offload(enum.StrEnum):
    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class Dtype(enum.StrEnum):
    bf16 = "bf16"
    fp32 = "fp32"


def _version(value: bool) -> None:
    if value:
        print(swapio.__version__)
        raise typer.Exit


@app.callback()
def _options(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False) -> None:
    pass


@app.command()
def demo(
    offload: Annotated[Offload, typer.Option(help="Where weights and optimizer state rest.")] = Offload.nvme,
    nvme_path: Annotated[Path | None, typer.Option(help="Directory on a local drive; default: the one with the most room.")] = None,
    host_memory: Annotated[str | None, typer.Option(help='Hard limit of host memory, like "768MiB".')] = None,
    out: Annotated[Path, typer.Option(help="Folder for the log and the picture.")] = Path("demo-out"),
    layers: Annotated[int, typer.Option(min=1)] = 8,
    dim: Annotated[int, typer.Option(min=64, help="A multiple of 64.")] = 512,
    seq: Annotated[int, typer.Option(min=1)] = 128,
    batch: Annotated[int, typer.Option(min=1)] = 4,
    steps: Annotated[int, typer.Option(min=1)] = 100,
    seed: Annotated[int, typer.Option()] = 0,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 6e-4,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights; bf16 has exact fp32 masters.")] = Dtype.bf16,
    device: Annotated[str, typer.Option(help='Where to compute: "auto", "cpu", "cuda", "simulated".')] = "auto",
) -> None:
    """Train a byte-level GPT on real text, everything on the drive, and show what moves."""
    from ._demo import DemoOptions, run_demo

    if host_memory is None and offload is Offload.nvme:
        host_memory = "160MiB"
    run_demo(
        DemoOptions(offload.value, nvme_path, host_memory, out, layers, dim, seq, batch, steps, seed, lr, dtype.value, device), Console()
    )


def main() -> None:
    """The entry point of `swapio` and `python -m swapio`."""
    try:
        app()
    except SwapioError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise SystemExit(1) from None
