"""Any model's blocks are checkpointed without a change to its code, and without a trace after `remove`."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import swapio
from swapio import ConfigError, UsageError
from swapio.activation._configure import current
from swapio.checkpointing import checkpoint, checkpoint_blocks, configure
from swapio.cli.gpt import GPT, GPTConfig

from .models import DIM, Block, check_equal, kept, leave


class Stack(nn.Module):
    """Blocks in a `ModuleList` between other layers; `passes` times through them."""

    def __init__(self, num: int = 4, passes: int = 1) -> None:
        super().__init__()
        self.inlet = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num))
        self.passes = passes

    def forward(self, x: torch.Tensor) -> Any:
        x = self.inlet(x)
        for _ in range(self.passes):
            for block in self.blocks:
                x = block(x)
        return x


def row(num: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, DIM), *(Block() for _ in range(num)), nn.Linear(DIM, DIM))


def blocks_of(model: nn.Module) -> Iterator[Any]:
    return (m for m in model.modules() if isinstance(m, Block))


def runs(model: nn.Module) -> list[int]:
    counts = []
    for block in blocks_of(model):
        counts.append(block.num_runs)
        block.num_runs = 0
    return counts


def train(model: nn.Module, x: torch.Tensor | None = None) -> list[int]:
    model(torch.ones(2, DIM) if x is None else x).sum().backward()
    return runs(model)


MAKERS: dict[str, Callable[[], nn.Module]] = {"list": Stack, "twice": lambda: Stack(passes=2), "row": row}


@pytest.mark.parametrize("number", [None, 1, 2, 3, 4, 100])
@pytest.mark.parametrize("kind", MAKERS)
def test_exact_with_dropout(kind: str, number: int | None) -> None:
    make = MAKERS[kind]

    def wrapped() -> nn.Module:
        model = make()
        checkpoint_blocks(model, number_checkpoints=number)
        return model

    check_equal(leave(lambda m, x: m(x), wrapped), leave(lambda m, x: m(x), make))


def test_blocks_are_found() -> None:
    assert checkpoint_blocks(Stack(3)).names == ("blocks.0", "blocks.1", "blocks.2")
    assert checkpoint_blocks(row(2)).names == ("1", "2")
    assert checkpoint_blocks(GPT(GPTConfig(16, 8, 2, 16, 2))).names == ("blocks.0", "blocks.1")
    pairs = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    assert checkpoint_blocks(pairs).names == ("0", "1")
    model = Stack(3)
    assert checkpoint_blocks(model, [model.blocks[2], model.inlet]).names == ("blocks.2", "inlet")
    assert checkpoint_blocks(model, model.blocks).names == ("blocks.0", "blocks.1", "blocks.2")
    assert checkpoint_blocks(model, [model]).names == ("",)


def test_only_training_with_gradients_is_checkpointed() -> None:
    model = Stack(2)
    assert train(model) == [1, 1]
    handle = checkpoint_blocks(model)
    assert train(model) == [2, 2]
    with torch.no_grad():
        model(torch.ones(2, DIM))
    assert runs(model) == [1, 1]
    model.eval()
    assert train(model) == [1, 1]
    model.train()
    model.blocks[0].eval()
    assert train(model) == [1, 2]
    model.train()
    handle.remove()
    assert train(model) == [1, 1]
    assert "forward" not in vars(model.blocks[0])
    handle.remove()


def test_generation_is_untouched() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(32, 8, 2, 16, 2))
    start = torch.zeros(1, 1, dtype=torch.int64)
    want = model.generate(start, 5, generator=torch.Generator().manual_seed(1))
    checkpoint_blocks(model)
    assert torch.equal(model.generate(start, 5, generator=torch.Generator().manual_seed(1)), want)


def hidden(tensors: list[torch.Tensor]) -> int:
    """How many different tensors of a block's input size are kept."""
    return len({t.untyped_storage().data_ptr() for t in tensors if tuple(t.shape) == (5, DIM)})


@pytest.mark.parametrize(("number", "inputs", "num_runs"), [
    (None, 6, [2] * 6),
    (6, 6, [2] * 6),
    (3, 3, [3, 2] * 3),  # the last block of a segment need not run to find the inputs of the others
    (2, 2, [3, 3, 2] * 2),
    (1, 1, [3, 3, 3, 3, 3, 2]),
    (4, 3, [3, 2] * 3),
    (5, 3, [3, 2] * 3),
])  # fmt: skip
def test_number_checkpoints_in_a_row(number: int | None, inputs: int, num_runs: list[int]) -> None:
    model = row(6)
    handle = checkpoint_blocks(model, number_checkpoints=number)
    with kept() as tensors:
        y = model(torch.ones(5, DIM))
    others = 2  # the inputs of the two Linears around the row
    assert hidden(tensors) == inputs + others
    y.sum().backward()
    assert runs(model) == num_runs
    handle.remove()
    assert "forward" not in vars(model)
    with kept() as tensors:
        model(torch.ones(5, DIM))
    assert hidden(tensors) == 6 + others, "and much more of other sizes"
    assert len(tensors) > 6 * 4


def test_a_segment_of_the_rest_is_no_call_of_its_own() -> None:
    model = row(4)
    checkpoint_blocks(model, number_checkpoints=2)
    model.append(Block())
    model.append(Block())
    assert train(model) == [3, 2, 3, 2, 1, 1]
    checkpoint_blocks(model, number_checkpoints=2)
    model.pop(-1)
    assert train(model) == [3, 3, 2, 2, 2]


def test_where_the_order_is_not_known_each_block_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    model = Stack(4)
    with caplog.at_level(logging.INFO, "swapio"):
        checkpoint_blocks(model, number_checkpoints=2)
    assert [r.getMessage() for r in caplog.records] == [
        "number_checkpoints: 4 blocks (blocks.0 ...) are in no nn.Sequential, and kept one by one"
    ]
    assert train(model) == [2] * 4


def test_a_sequential_that_is_iterated_over() -> None:
    model = Stack(0)
    model.blocks = nn.Sequential(*(Block() for _ in range(4)))  # type: ignore[assignment]
    checkpoint_blocks(model, number_checkpoints=2)
    assert train(model) == [2] * 4


def test_a_sequential_with_a_forward_of_its_own() -> None:
    class Backwards(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            for block in reversed(list(self)):
                x = block(x)
            return x

    model = Backwards(*(Block() for _ in range(4)))
    checkpoint_blocks(model, number_checkpoints=2)
    assert train(model) == [2] * 4


@pytest.mark.parametrize("number", [None, 1])
def test_a_block_several_times_in_a_row(number: int | None) -> None:
    def shared() -> nn.Module:
        block = Block()
        return nn.Sequential(block, nn.Tanh(), block, block)

    def wrapped() -> nn.Module:
        model = shared()
        checkpoint_blocks(model, [model[0]], number_checkpoints=number)  # type: ignore[index]
        return model

    check_equal(leave(lambda m, x: m(x), wrapped), leave(lambda m, x: m(x), shared))


def test_configured_number() -> None:
    model = row(4)
    configure(num_checkpoints=2)
    checkpoint_blocks(model)
    assert train(model) == [3, 2, 3, 2]
    checkpoint_blocks(model, config={"activation_checkpointing": {"number_checkpoints": 1}})
    assert current().number_checkpoints == 1
    assert train(model) == [3, 3, 3, 2]
    checkpoint_blocks(model, number_checkpoints=4)
    assert train(model) == [2] * 4


def test_another_call_replaces_the_first() -> None:
    model = row(4)
    first = checkpoint_blocks(model, number_checkpoints=2)
    second = checkpoint_blocks(model)
    assert train(model) == [2] * 4
    first.remove()
    assert train(model) == [2] * 4
    second.remove()
    assert train(model) == [1] * 4
    with checkpoint_blocks(model, list(model)[1:3]), checkpoint_blocks(model, list(model)[3:5]):
        assert train(model) == [2] * 4
    assert train(model) == [1] * 4


def test_a_forward_that_was_replaced_before_comes_back() -> None:
    model = Stack(2)
    block = model.blocks[0]
    calls = []

    def mine(x: torch.Tensor) -> Any:
        calls.append("mine")
        return Block.forward(block, x)  # type: ignore[arg-type]

    block.forward = mine
    handle = checkpoint_blocks(model)
    assert train(model) == [2, 2]
    assert calls == ["mine"] * 2
    handle.remove()
    assert block.forward is mine


def test_a_forward_that_was_replaced_after_is_an_error() -> None:
    model = Stack(2)
    handle = checkpoint_blocks(model)
    block = model.blocks[1]
    ours = block.forward

    def theirs(x: torch.Tensor) -> Any:
        return ours(x)

    block.forward = theirs
    with pytest.raises(UsageError, match="forward of a Block was replaced"):
        handle.remove()
    assert train(model) == [2, 2], "nothing was changed"
    block.forward = ours
    handle.remove()
    assert train(model) == [1, 1]


def via_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def via_save(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, via_pickle, via_save])
@pytest.mark.parametrize("make", [Stack, row])
def test_copies_are_checkpointed_on_their_own(make: Callable[[], Any], how: Callable[[Any], Any]) -> None:
    model = make()
    checkpoint_blocks(model, number_checkpoints=2)
    want = copy.deepcopy(model).eval()(torch.ones(2, DIM))
    twin = how(model)
    once = train(model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    del model
    assert train(twin) == once
    assert runs(twin) == [0] * len(once)
    assert torch.equal(twin.eval()(torch.ones(2, DIM)), want)
    runs(twin)
    checkpoint_blocks(twin.train(), number_checkpoints=100).remove()
    assert train(twin) == [1] * len(once)


def test_state_dicts_are_the_same() -> None:
    model = row()
    keys = list(model.state_dict())
    checkpoint_blocks(model, number_checkpoints=2)
    assert list(model.state_dict()) == keys
    plain = row()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    assert torch.equal(plain.eval()(torch.ones(2, DIM)), model.eval()(torch.ones(2, DIM)))


def test_a_dropped_model_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model = row(4)
        handle = checkpoint_blocks(model, list(model)[1:5], number_checkpoints=2)
        train(model)
        gone = weakref.ref(model)
        forward = model.forward
        del model
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(UsageError, match="gone"):
        forward(torch.ones(2, DIM))  # type: ignore[no-untyped-call]
    handle.remove()


def test_hooks_run_once_per_call() -> None:
    model = Stack(2)
    checkpoint_blocks(model)
    seen = []
    model.blocks[1].register_forward_hook(lambda *_: seen.append("hook"))
    assert train(model) == [2, 2]
    assert seen == ["hook"]


def test_the_signature_is_the_blocks() -> None:
    model = Stack(2)
    want = inspect.signature(model.blocks[0].forward)
    checkpoint_blocks(model)
    assert inspect.signature(model.blocks[0].forward) == want


def test_keywords_belong_to_the_block() -> None:
    class Keywords(nn.Module):
        def forward(self, x: torch.Tensor, *, debug: float, use_reentrant: torch.Tensor) -> torch.Tensor:
            return x * debug * use_reentrant

    model = nn.ModuleList([Keywords()])
    checkpoint_blocks(model, model)
    x = torch.ones(2, requires_grad=True)
    model[0](x, debug=2.0, use_reentrant=x * 3).sum().backward()
    assert torch.equal(x.grad if x.grad is not None else x, torch.full((2,), 12.0))


def test_blocks_inside_blocks_and_calls() -> None:
    def wrapped() -> nn.Module:
        model = nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))
        checkpoint_blocks(model, [*model, *blocks_of(model)], number_checkpoints=2)
        return model

    def plain() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(Block(), Block()) for _ in range(2)))

    check_equal(leave(lambda m, x: checkpoint(m, x), wrapped), leave(lambda m, x: m(x), plain))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"model": nn.Linear(2, 2)}, "none in the Linear, which has no ModuleList or Sequential"),
        ({"model": nn.Sequential(nn.Linear(2, 2), nn.ReLU())}, r"blocks=\[model.encoder\]"),
        ({"model": Stack(2), "blocks": []}, "none in the Stack"),
        ({"model": Stack(2), "blocks": [Block()]}, "Block is not in the Stack"),
        ({"model": Stack(2), "number_checkpoints": 0}, "number_checkpoints.*0"),
        ({"model": Stack(2), "config": {"activation_checkpointing": {"number_checkpoint": 2}}}, "did you mean"),
    ],
)
def test_what_cannot_work_is_an_error(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        checkpoint_blocks(**arguments)
    assert not [m for m in arguments["model"].modules() if "forward" in vars(m)]


def test_by_deepspeeds_name() -> None:
    assert swapio.checkpointing.checkpoint_blocks is checkpoint_blocks
