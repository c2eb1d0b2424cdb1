import pytest
import torch

from swapio.optim import merge_, round_, round_bf16, split_

SIZES = [0, 1, 63, 64, 65, 1009]


def bits_of(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def check_round_trip(bits: torch.Tensor, *, scratch_numel: int | None = None) -> torch.Tensor:
    """Split, merge, compare all bits; returns the weights."""
    scratch = None if scratch_numel is None else torch.empty(scratch_numel, dtype=torch.int32)
    master, again = bits.view(torch.float32).clone(), torch.full((bits.numel(),), -7.0)
    hi, lo = torch.empty(bits.numel(), dtype=torch.bfloat16), torch.empty(bits.numel(), dtype=torch.int16)
    split_(master, hi, lo, scratch=scratch)
    assert torch.equal(master.view(torch.int32), bits)
    merge_(hi, lo, again, scratch=scratch)
    assert torch.equal(again.view(torch.int32), bits)
    weight = torch.empty_like(hi)
    round_(master, weight, scratch=scratch)
    finite = master.isfinite()
    assert torch.equal(weight[finite].view(torch.int16), hi[finite].view(torch.int16))
    return hi


def assert_weights_are_rounded(hi: torch.Tensor, bits: torch.Tensor) -> None:
    assert torch.equal(hi.view(torch.int16), round_bf16(bits.view(torch.float32)).view(torch.int16))


@pytest.mark.parametrize("sign", [0, 1 << 31])
@pytest.mark.parametrize("high", [0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0x3FFF, 0x7F00, 0x7F7E])
def test_every_low_half(high: int, sign: int) -> None:
    bits = (torch.arange(65536, dtype=torch.int64) + (high << 16 | sign)).to(torch.int32)
    hi = check_round_trip(bits)
    assert_weights_are_rounded(hi, bits)
    nearest = bits.view(torch.float32).to(torch.bfloat16)
    assert set((hi != nearest).nonzero().flatten().tolist()) <= {0x8000}  # ties only


@pytest.mark.parametrize("flush", [False, True])
def test_subnormals(flush: bool) -> None:
    bits = torch.arange(0, 1 << 23, 61, dtype=torch.int32)
    bits = torch.cat([bits, bits | (-1 << 31)])
    if not torch.set_flush_denormal(flush):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        hi = check_round_trip(bits)
    finally:
        torch.set_flush_denormal(False)
    assert_weights_are_rounded(hi, bits)


def test_random_values() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (10_000_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    hi = check_round_trip(bits)  # any pattern, NaN too
    finite = bits.view(torch.float32).isfinite()
    assert_weights_are_rounded(hi[finite], bits[finite])


def test_nonfinite_masters_survive_but_their_weights_may_differ() -> None:
    bits = bits_of([0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0x7F7F7FFF, 0x7F7F8000, 0x7FFFFFFF])
    hi = check_round_trip(bits)
    assert hi.view(torch.int16).tolist() == [0x7F80, 0xFF80 - 65536, 0x7FC0, 0x7F80, 0x7F7F, 0x7F80, -0x8000]


def test_merge_then_split_gives_back_any_pair() -> None:
    hi = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for low in (-32768, -32767, -1, 0, 1, 32767):
        lo = torch.full((65536,), low, dtype=torch.int16)
        master, hi2, lo2 = torch.empty(65536), torch.empty_like(hi), torch.empty_like(lo)
        merge_(hi, lo, master)
        split_(master, hi2, lo2)
        assert torch.equal(hi2.view(torch.int16), hi.view(torch.int16))
        assert torch.equal(lo2, lo)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("scratch_numel", [1, 64, 4096])
def test_sizes_and_scratch(numel: int, scratch_numel: int) -> None:
    bits = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).view(torch.int32)
    assert_weights_are_rounded(check_round_trip(bits, scratch_numel=scratch_numel), bits)
