"""A checkpointed call is the plain call to the bit, and keeps its inputs only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import swapio as deepspeed
from swapio.checkpointing import checkpoint

from .models import DIM, Block, check_equal, kept, leave

MODES = pytest.mark.parametrize("reentrant", [False, True])


@MODES
def test_dropout_is_exact(reentrant: bool) -> None:
    blocks: list[Any] = []

    def call(block: nn.Module, x: torch.Tensor) -> Any:
        blocks.append(block)
        return deepspeed.checkpointing.checkpoint(block, x, use_reentrant=reentrant)

    check_equal(leave(call), leave(lambda block, x: block(x)))
    assert blocks[0].num_runs == 2


@MODES
def test_arguments_of_any_kind(reentrant: bool) -> None:
    def function(block: nn.Module, x: torch.Tensor, factor: float, *, table: dict[str, Any], other: torch.Tensor, word: str = "") -> Any:
        table["calls"] += 1
        return block(x) * factor + other * table["weight"] + len(word)

    def call(block: nn.Module, x: torch.Tensor) -> Any:
        table = {"weight": torch.ones(DIM), "calls": 0}
        y = checkpoint(function, block, x, 0.5, table=table, other=x.sin(), word="four", use_reentrant=reentrant)
        assert table["calls"] == 1  # the very object, not a copy
        return y

    want = leave(lambda block, x: function(block, x, 0.5, table={"weight": torch.ones(DIM), "calls": 0}, other=x.sin(), word="four"))
    check_equal(leave(call), want)


@MODES
def test_several_outputs(reentrant: bool) -> None:
    def function(block: nn.Module, x: torch.Tensor) -> Any:
        y = block(x)
        return y, None, y.sigmoid()

    check_equal(leave(lambda block, x: checkpoint(function, block, x, use_reentrant=reentrant)), leave(function))


def test_any_output() -> None:
    x = torch.ones(3, requires_grad=True)
    out = checkpoint(lambda x: {"y": [x * 2, "text"]}, x)
    out["y"][0].sum().backward()
    assert out["y"][1] == "text"
    assert torch.equal(x.grad if x.grad is not None else x, torch.full((3,), 2.0))


@MODES
def test_nested(reentrant: bool) -> None:
    blocks: list[Any] = []

    def make() -> nn.Module:
        return nn.ModuleList(Block() for _ in range(3))

    def inner(block: Any, x: torch.Tensor) -> Any:
        return checkpoint(block, x, use_reentrant=reentrant)

    def call(blocks_: Any, x: torch.Tensor) -> Any:
        blocks.extend(blocks_)

        def outer(x: torch.Tensor) -> Any:
            for block in blocks_:
                x = inner(block, x)
            return x

        return checkpoint(outer, x, use_reentrant=reentrant)

    def plain(blocks_: Any, x: torch.Tensor) -> Any:
        for block in blocks_:
            x = block(x)
        return x

    check_equal(leave(call, make), leave(plain, make))
    # the outer one need not run its last block again, unless it is of the kind that runs everything
    assert [b.num_runs for b in blocks] == ([3, 3, 3] if reentrant else [3, 3, 2])


@MODES
def test_without_gradients_it_is_the_plain_call(reentrant: bool) -> None:
    block = Block()
    x = torch.randn(3, DIM)
    with torch.no_grad():
        torch.manual_seed(0)
        got = checkpoint(block, x, scale=2.0, use_reentrant=reentrant, preserve_rng_state=False)
        torch.manual_seed(0)
        assert torch.equal(got, block(x, 2.0))
    assert not got.requires_grad
    assert block.num_runs == 2
    with torch.inference_mode():
        assert checkpoint(lambda: "nothing at all", use_reentrant=reentrant) == "nothing at all"


@MODES
def test_only_inputs_are_kept(reentrant: bool) -> None:
    block = Block()
    x = torch.randn(3, DIM, requires_grad=True) * 1
    with kept() as tensors:
        y = checkpoint(block, x, use_reentrant=reentrant)
    assert [t.data_ptr() for t in tensors] == [x.data_ptr()]
    y.sum().backward()
    assert block.up.weight.grad is not None


@MODES
def test_outer_hooks_keep_the_inputs(reentrant: bool) -> None:
    def call(block: nn.Module, x: torch.Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(block, x, use_reentrant=reentrant)

    check_equal(leave(call), leave(lambda block, x: block(x)))


@MODES
def test_autocast_is_restored(reentrant: bool) -> None:
    def autocast(block: nn.Module, x: torch.Tensor, use: bool) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(block, x, use_reentrant=reentrant) if use else block(x)

    check_equal(leave(lambda b, x: autocast(b, x, True)), leave(lambda b, x: autocast(b, x, False)))


def test_backward_twice() -> None:
    def call(block: nn.Module, x: torch.Tensor) -> Any:
        y = checkpoint(block, x)
        (y * y).sum().backward(retain_graph=True)
        return y

    def plain(block: nn.Module, x: torch.Tensor) -> Any:
        y = block(x)
        (y * y).sum().backward(retain_graph=True)
        return y

    check_equal(leave(call), leave(plain))


def test_pytorchs_options_are_not_the_functions() -> None:
    runs = []

    def function(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        runs.append(kwargs)
        return (x @ x).sin()

    def keep_products() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    x = torch.ones(2, 2, requires_grad=True)
    y = checkpoint(function, x, context_fn=keep_products, determinism_check="none", debug=False, early_stop=False, mine=1)
    y.sum().backward()
    assert runs == [{"mine": 1}] * 2


@MODES
def test_an_error_leaves_no_hooks_behind(reentrant: bool) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        checkpoint(broken, torch.ones(2, requires_grad=True) * 1, use_reentrant=reentrant)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
