"""Stretches of memory as boxes."""

from __future__ import annotations

import itertools

import pytest
import torch

from swapio.checkpoint import boxes

SHAPES = [(), (1,), (7,), (3, 5), (1, 5), (5, 1), (2, 3, 4), (2, 1, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_stretch_is_covered_once_and_in_order(shape: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(shape))):
        dense = torch.arange(torch.empty(shape).numel()).view([shape[d] for d in order])
        tensor = dense.permute([order.index(d) for d in range(len(shape))])  # each element is its place in memory
        for start, stop in itertools.combinations(range(tensor.numel() + 1), 2):
            found = list(boxes(shape, tensor.stride(), start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)
            flat = torch.arange(start, stop)
            next_start = start
            for box in found:
                part = tensor[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))]
                assert torch.equal(part, box.view(flat, start))
                assert box.start == next_start
                next_start += box.numel
            assert next_start == stop


def test_nothing_has_no_boxes() -> None:
    assert list(boxes((0, 3), (3, 1), 0, 0)) == []
