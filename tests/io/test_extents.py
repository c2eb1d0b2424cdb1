from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio.io import ExtentAllocator
from swapio.spec import Extent


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_extents_never_overlap(steps: list[tuple[bool, int]]) -> None:
    allocator = ExtentAllocator()
    used: list[Extent] = []
    for take, number in steps:
        if take or not used:
            extent = allocator.take(number)
            assert all(extent.end <= u.offset or u.end <= extent.offset or not extent.nbytes or not u.nbytes for u in used)
            used.append(extent)
        else:
            allocator.give_back(used.pop(number % len(used)))
        assert allocator.end - allocator.free_nbytes == sum(u.nbytes for u in used)
    for extent in used:
        allocator.give_back(extent)
    assert allocator.free_nbytes == allocator.end
    if allocator.end:
        assert allocator.take(allocator.end) == Extent(0, allocator.end), "holes were not joined"


@pytest.mark.parametrize("wrong", [Extent(8, 8), Extent(4, 8), Extent(12, 8), Extent(0, 17), Extent(24, 9), Extent(8, 16)])
def test_only_what_is_in_use_is_given_back(wrong: Extent) -> None:
    allocator = ExtentAllocator()
    extents = [allocator.take(8) for _ in range(4)]
    allocator.give_back(extents[1])
    with pytest.raises(ValueError, match="not in use"):
        allocator.give_back(wrong)
    allocator.give_back(extents[2])
    allocator.give_back(extents[0])
    assert allocator.take(24) == Extent(0, 24)
