import pytest
import torch

from swapio.optim import CHUNK_MULTIPLE, ChunkLayout, chunk_layout, from_torch, round_bf16

SPECS = {
    "adamw": from_torch(torch.optim.AdamW([torch.zeros(1)]))[0],
    "amsgrad": from_torch(torch.optim.AdamW([torch.zeros(1)], amsgrad=True))[0],
    "momentum": from_torch(torch.optim.SGD([torch.zeros(1)], momentum=0.9))[0],
    "sgd": from_torch(torch.optim.SGD([torch.zeros(1)]))[0],
}


def _masters(layout: ChunkLayout, split: bool) -> ChunkLayout:
    return layout if split else layout.whole


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 1025, 2048, 10007])
def test_parts_are_aligned_and_disjoint(name: str, dtype: torch.dtype, numel: int) -> None:
    spec = SPECS[name]
    layout = chunk_layout(spec, numel, dtype)
    assert layout.nbytes % 4096 == layout.head_nbytes % 4096 == 0
    buffer = torch.zeros(layout.nbytes + 4096, dtype=torch.uint8)
    views = layout.views(buffer)
    assert tuple(views.fields) == spec.fields
    assert (views.lo is not None) == layout.split == (dtype == torch.bfloat16)
    assert (views.master is not None) == (dtype == torch.float16)
    head = next((tensor for tensor in (views.lo, views.master) if tensor is not None), None)
    assert layout.head_nbytes >= (0 if head is None else head.nbytes)
    parts = [*([] if head is None else [head]), *views.fields.values()]
    for index, part in enumerate(parts):
        assert part.shape == (numel,)
        assert numel == 0 or (part.data_ptr() - buffer.data_ptr()) % 4096 == 0
        part.fill_(index + 1)
    for index, part in enumerate(parts):
        assert (part == index + 1).all()
    assert not buffer[layout.nbytes :].any()
    if numel and views.fields:
        assert next(iter(views.fields.values())).data_ptr() == buffer.data_ptr() + layout.head_nbytes


def test_no_padding_at_the_chunk_multiple() -> None:
    layout = chunk_layout(SPECS["adamw"], 3 * CHUNK_MULTIPLE, torch.bfloat16)
    assert (layout.head_nbytes, layout.nbytes) == (2 * 3 * CHUNK_MULTIPLE, 10 * 3 * CHUNK_MULTIPLE)
    assert chunk_layout(SPECS["adamw"], CHUNK_MULTIPLE, torch.bfloat16).whole.nbytes == 12 * CHUNK_MULTIPLE
    assert chunk_layout(SPECS["adamw"], CHUNK_MULTIPLE, torch.float16).nbytes == 12 * CHUNK_MULTIPLE
    assert chunk_layout(SPECS["adamw"], CHUNK_MULTIPLE, torch.float32).nbytes == 8 * CHUNK_MULTIPLE
    assert chunk_layout(SPECS["sgd"], CHUNK_MULTIPLE, torch.float32).nbytes == 0


@pytest.mark.parametrize(
    ("dtype", "split"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, True), (torch.float32, True)]
)
def test_masters_are_stored_and_weights_adopted(dtype: torch.dtype, split: bool) -> None:
    layout = _masters(chunk_layout(SPECS["sgd"], 100, dtype), split)
    views = layout.views(torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8))
    weights = torch.full((100,), 7.0, dtype=dtype)
    given = torch.nn.Parameter(torch.linspace(0.1, 0.9, 30) + 1e-5)
    views.store_master(given, weights, start=20)
    inside = torch.zeros(100, dtype=torch.bool)
    inside[20:50] = True
    rounded = round_bf16(given.detach()) if dtype == torch.bfloat16 else given.detach().to(dtype)
    assert weights.is_leaf
    assert torch.equal(weights[inside], rounded)
    assert (weights[~inside] == 7).all()
    masters = torch.empty(30)
    views.read_master(masters, weights, start=20)
    assert torch.equal(masters, given)
    weights[30:40] = 0.3
    views.adopt_weights(weights, start=30, stop=40)
    expected = given.detach().clone()
    expected[10:20] = weights[30:40].float()
    views.read_master(masters, weights, start=20)
    assert torch.equal(masters, expected)
    for head in (views.lo, views.master):
        if head is not None:
            assert (head[~inside].contiguous().view(torch.uint8) == 0xFF).all()


def test_misuse() -> None:
    layout = chunk_layout(SPECS["adamw"], 100, torch.float32)
    with pytest.raises(ValueError, match="8192 uint8, got 8191"):
        layout.views(torch.zeros(8191, dtype=torch.uint8))
    with pytest.raises(ValueError, match="int16"):
        layout.views(torch.zeros(8192, dtype=torch.int16))
    with pytest.raises(ValueError, match="float64"):
        chunk_layout(SPECS["adamw"], 100, torch.float64)
    with pytest.raises(ValueError, match="negative"):
        chunk_layout(SPECS["adamw"], -1, torch.float32)
