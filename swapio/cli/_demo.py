"""`swapio demo`: a GPT that lives on the drive learns real text, and says what it costs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from rich.console import Console

from ..engine import Engine, initialize
from ..errors import BudgetError, ConfigError
from ..report import LiveRun, StepEntry, Totals, machine, memory_table, plot_run, time_table
from ..spec import format_nbytes, parse_nbytes
from ._data import Corpus
from ._facts import computes_in_bf16
from ._meter import StepMeter, peak_rss
from ._output import output_file
from ._place import STATE_NBYTES, pick_directory
from .gpt import GPT, GPTConfig

__all__ = ["DemoOptions", "DemoResult", "run_demo"]

_PROMPT = b"The "
_SAMPLE_TOKENS = 240
_SAMPLE_SECONDS = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command's options; None stands for a choice by the demo."""

    offload: str = "nvme"
    nvme_path: Path | None = None
    host_memory: str | None = None
    out: Path = Path("demo-out")
    layers: int = 4
    dim: int = 256
    seq: int = 128
    batch: int = 8
    steps: int = 180
    seed: int = 0
    lr: float | None = None
    dtype: str = "auto"
    device: str = "auto"

    @property
    def rate(self) -> float:
        """The highest learning rate; wider models bear less."""
        return self.lr if self.lr is not None else 0.25 / self.dim

    @property
    def shape(self) -> GPTConfig:
        """The model's."""
        return GPTConfig(Corpus.vocab_size, self.seq, self.layers, self.dim, self.dim // 64)


@dataclasses.dataclass(frozen=True, slots=True)
class DemoResult:
    """What a run gave."""

    losses: list[float]
    interrupted: bool
    peak_rss: int
    files: list[Path]


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Train, show, and write `demo.jsonl`, `demo.json` and `demo.png`.

    Batches and initial weights depend on the seed only, so losses of different `offload` can be compared digit for digit.

    Raises:
        ConfigError, BudgetError, StorageError: what was asked for cannot work; nearly always before training starts.
    """
    if options.dim % 64:
        raise ConfigError(f"--dim: {options.dim} is no multiple of 64, the width of a head", key="dim", value=options.dim)
    if options.host_memory is not None and options.host_memory != "auto":
        parse_nbytes(options.host_memory, key="--host-memory")
    dtype, dtype_reason = _choose_dtype(options)
    corpus = Corpus()
    if options.seq > len(corpus.tokens) - 2:
        raise ConfigError(f"--seq: {options.seq} is longer than the text, {len(corpus.tokens)} bytes", key="seq", value=options.seq)
    log_path, png_path, json_path = (output_file(options.out, name) for name in ("demo.jsonl", "demo.png", "demo.json"))
    state_nbytes = STATE_NBYTES * options.shape.num_params
    _explain_model(options, dtype, dtype_reason, console)
    with contextlib.ExitStack() as stack:
        path = _place(options, state_nbytes, console)
        engine = _initialize(options, dtype, path, state_nbytes, console)
        stack.callback(engine.abandon)  # close() would bring the weights back into memory only to drop them
        stop = stack.enter_context(_StopAfterStep(console))
        for old in (png_path, json_path):  # of an earlier run, beside whose log they would mislead
            old.unlink(missing_ok=True)
        log = stack.enter_context(log_path.open("w", encoding="utf-8"))
        meter = StepMeter(engine)
        totals, losses = Totals(), []
        with LiveRun(console, num_steps=options.steps) as live:
            for step in range(1, options.steps + 1):
                entry = _step(engine, corpus, meter, options, step)
                totals.add(entry)
                losses.append(entry.loss)
                log.write(json.dumps(entry.as_dict()) + "\n")
                log.flush()  # a run that is killed leaves what it did
                live.update(entry)
                if stop.asked:
                    break
        peak = peak_rss()
        stats = engine.stats()
        _show_sample(engine, options, stop, console)
    _explain_result(losses, stats, totals, peak, console)
    log.close()
    summary = _summary(options, dtype, stats, totals, losses, peak, interrupted=stop.asked)
    json_path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    files = [log_path, json_path]
    entries = [json.loads(line) for line in log_path.read_text(encoding="utf-8").splitlines()]
    if plot_run(entries, png_path, title=_title(options, dtype, stats)):
        files.append(png_path)
    else:
        console.print('No picture: matplotlib is not installed (pip install "swapio\\[plot]").')
    console.print(
        f"Written: {', '.join(map(str, files))}." + (" The swap file is gone." if options.offload == "nvme" else ""), soft_wrap=True
    )
    if options.offload == "nvme" and not stop.asked:
        console.print("The same command with [bold]--offload none[/] keeps everything in memory; its losses are the same, digit for digit.")
    return DemoResult(losses, stop.asked, peak, files)


def _choose_dtype(options: DemoOptions) -> tuple[str, str]:
    if options.dtype != "auto":
        return options.dtype, "as asked"
    if options.device.startswith("cuda") or (options.device == "auto" and torch.cuda.is_available()):
        return "bf16", "the accelerator computes in it"
    if computes_in_bf16():
        return "bf16", "this processor computes in it"
    return "fp32", "this processor has no instructions for bf16, which would be ten times slower; --dtype bf16 takes it all the same"


def _explain_model(options: DemoOptions, dtype: str, reason: str, console: Console) -> None:
    shape = options.shape
    weights = "2 of weight in bf16, 2 that make it the exact fp32 master" if dtype == "bf16" else "4 of weight in fp32"
    gradient = 2 if dtype == "bf16" else 4
    console.print(
        f"[bold]The model.[/] A GPT of {shape.num_params / 1e6:.1f} million parameters ({options.layers} layers, {options.dim} wide) that "
        f"predicts the next byte of Python's own documentation. AdamW needs {STATE_NBYTES} bytes per parameter, {weights} and 8 of "
        f"moments: [bold]{format_nbytes(STATE_NBYTES * shape.num_params)}[/] of state, and "
        f"{format_nbytes(gradient * shape.num_params)} of gradients while a step runs. Computing in {dtype}: {reason}."
    )


def _place(options: DemoOptions, state_nbytes: int, console: Console) -> Path | None:
    """The directory for the swap file, None when none is needed."""
    if options.offload != "nvme":
        console.print(f"[bold]The place.[/] Memory: nothing goes to a drive (--offload {options.offload}).")
        return None
    if options.nvme_path is not None:
        path, why = options.nvme_path, "as asked"
        if not path.is_dir():
            raise ConfigError(f"--nvme-path: {path} is no directory; make it, or give another", key="nvme_path", value=path)
    else:
        place, why = pick_directory(state_nbytes)
        path, why = place.path, f"{why}, {place.filesystem} with {format_nbytes(place.free_nbytes)} free; --nvme-path chooses another"
    console.print(
        f"[bold]The place.[/] The state rests in a file in {path} ({why}). A step fetches what it uses, layer by layer, ahead of "
        f"time where it can guess, and writes back what changed."
    )
    return path


def _initialize(options: DemoOptions, dtype: str, path: Path | None, state_nbytes: int, console: Console) -> Engine:
    torch.manual_seed(options.seed)
    model = GPT(options.shape)
    if options.host_memory is not None or options.offload != "nvme":
        engine = initialize(model=model, config=_config(options, dtype, path, options.host_memory or "auto"))[0]
        why = "as asked" if options.host_memory is not None else "what this machine has to spare"
    else:
        half = -(-state_nbytes // 2**21) * 2**20
        try:
            engine = initialize(model=model, config=_config(options, dtype, path, half))[0]
            why = "half of the state, so that the drive has work to do; --host-memory chooses another"
        except BudgetError as error:
            if error.works_nbytes is None:
                raise
            engine = initialize(model=model, config=_config(options, dtype, path, error.works_nbytes))[0]
            why = "the least that works for this model; --host-memory chooses another"
    budget = engine.stats()["host_memory_budget"]
    console.print(
        f"[bold]The budget.[/] {'No limit' if budget is None else format_nbytes(budget)} of host memory for weights, gradients and "
        f"state in transit ({why}). It is a hard limit; what is left of it keeps a part of the state from one step to the next."
    )
    return engine


def _config(options: DemoOptions, dtype: str, path: Path | None, host_memory: int | str) -> dict[str, Any]:
    where = {"device": options.offload} | ({"nvme_path": str(path)} if path is not None else {})
    return {
        "train_batch_size": options.batch,
        "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": options.rate, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": where},
        "swapio": {"host_memory": host_memory, "device": options.device},
    }


def _step(engine: Engine, corpus: Corpus, meter: StepMeter, options: DemoOptions, step: int) -> StepEntry:
    # up over the first tenth, of a short run the first half (AdamW's first steps are wild), then down to a tenth
    warmup = min(max(0.1 * options.steps, 10), 0.5 * options.steps)
    rate = options.rate * min(1.0, step / warmup) * (1 - 0.9 * (step - 1) / options.steps)
    for group in engine.optimizer.param_groups if engine.optimizer is not None else ():
        group["lr"] = rate
    inputs, targets = corpus.batch(step, seed=options.seed, batch=options.batch, seq=options.seq)
    meter.start()
    loss = engine(inputs.to(engine.device), targets.to(engine.device))
    meter.end("forward")
    engine.backward(loss)
    meter.end("backward")
    engine.step()
    value = loss.item()
    meter.end("optimizer")
    return meter.entry(step=step, loss=value, tokens=options.batch * options.seq, learning_rate=rate)


def _show_sample(engine: Engine, options: DemoOptions, stop: _StopAfterStep, console: Console) -> None:
    if stop.asked:
        return
    console.print(f"[bold]What it writes by now,[/] after {_PROMPT.decode()!r}:")
    engine.eval()
    generator = torch.Generator().manual_seed(options.seed)
    idx = torch.tensor([list(_PROMPT)], dtype=torch.int64, device=engine.device)
    started = time.monotonic()
    for _ in range(_SAMPLE_TOKENS):
        idx = engine.generate(idx, 1, generator=generator)
        if stop.asked or time.monotonic() - started > _SAMPLE_SECONDS:
            break
    text = bytes(idx[0].tolist()).decode("utf-8", errors="replace")
    console.print("\n".join("  " + line for line in text.splitlines() if line.strip()), style="cyan", highlight=False, markup=False)


def _explain_result(losses: list[float], stats: dict[str, Any], totals: Totals, peak: int, console: Console) -> None:
    tail = losses[-max(len(losses) // 10, 1) :]
    console.print(
        f"[bold]The result.[/] The loss went from {losses[0]:.3f} to {sum(tail) / len(tail):.3f} nats per byte (the mean of the last "
        f"{len(tail)}) in {len(losses)} steps; a blind guess costs 5.545."
    )
    console.print()
    console.print(memory_table(stats, totals, peak_rss=peak))
    console.print()
    console.print(time_table(totals))
    console.print()


def _title(options: DemoOptions, dtype: str, stats: dict[str, Any]) -> str:
    budget = stats["host_memory_budget"]
    return (
        f"GPT {options.layers} x {options.dim}, {options.shape.num_params / 1e6:.1f}M parameters, {dtype}, --offload {options.offload}, "
        f"host memory {'without limit' if budget is None else format_nbytes(budget)}"
    )


def _summary(
    options: DemoOptions, dtype: str, stats: dict[str, Any], totals: Totals, losses: list[float], peak: int, *, interrupted: bool
) -> dict[str, Any]:
    """Everything that a repeat of the run needs, and its figures."""
    return {
        "options": {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()}
        | {"dtype": dtype, "lr": options.rate},
        "num_params": options.shape.num_params,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "interrupted": interrupted,
        "peak_rss": peak,
        "totals": vars(totals),
        "stats": stats,
        "machine": machine() | {"threads": torch.get_num_threads()},
    }


class _StopAfterStep:
    """Within it the first Ctrl-C lets the step end, so that what was done can be shown; the second one stops at once."""

    def __init__(self, console: Console) -> None:
        self.asked = False
        self._console = console
        self._before: Any = None

    def __enter__(self) -> Self:
        with contextlib.suppress(ValueError):  # not the main thread: whoever owns it handles its signals
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._console.print("\n[yellow]Stopping after this step. Ctrl-C again stops at once.[/]")
