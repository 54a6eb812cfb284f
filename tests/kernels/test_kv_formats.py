"""The KV formats as such: how near numbers come back, what is stored for odd vectors, how much room a token takes."""

import math
from dataclasses import replace

import pytest
import torch
from backends import each_backend
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.kernels import Kernels
from batchgen.kernels.attention import cases
from batchgen.kernels.attention.cases import Shape
from batchgen.kernels.attention.format_cases import expected, make, numbers, run
from batchgen.kernels.case import error, generator
from batchgen.kernels.kv_format import FORMATS, LayerPages, Pages, turn_width
from batchgen.kernels.kv_format.cases import empty_pages
from batchgen.kernels.kv_format.reference import LARGEST, decode, encode, turn
from batchgen.kernels.rotate_write.cases import no_turn

QUANTISED = ("fp8", "int8", "int4")
each_quantised = pytest.mark.parametrize("name", QUANTISED)


def read_back(name: str, vectors: torch.Tensor) -> torch.Tensor:
    return decode(FORMATS[name], *encode(FORMATS[name], vectors), vectors.shape[-1])


def allowed(name: str, vectors: torch.Tensor) -> torch.Tensor:
    """The error bound of every number: half a step, and what float32 rounds on the way."""
    largest = vectors.abs().amax(-1, keepdim=True)
    if name == "int8":
        return largest / 127 * 0.5001
    if name == "fp8":  # 3 bits behind the leading one, steps of 2^-9 below 2^-6
        return (vectors.abs() / 16).maximum(largest / 448 * 2**-10) * 1.0001
    parts = vectors.split(64, -1)
    extents = [(part.amax(-1, keepdim=True) - part.amin(-1, keepdim=True)).expand_as(part) for part in parts]
    return torch.cat(extents, -1) / 15 * 0.501 + largest * 1e-6


@each_quantised
@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 200),
    size=st.floats(-25, 30),
    offset=st.sampled_from([0.0, 3.0, -100.0]),
    outlier=st.sampled_from([1.0, 50.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_numbers_come_back_within_half_a_step(name, width, size, offset, outlier, seed) -> None:
    vectors = torch.randn(5, width, generator=generator(seed)) + offset
    vectors[:, seed % width] *= outlier
    vectors *= 10.0**size
    assert ((read_back(name, vectors) - vectors).abs() <= allowed(name, vectors)).all()


@each_quantised
@pytest.mark.parametrize("width", [7, 64, 96])
def test_odd_vectors(name: str, width: int) -> None:
    zero, tiny = torch.zeros(width), torch.full((width,), 1e-38)
    assert torch.equal(read_back(name, zero), zero)
    assert (read_back(name, tiny) - tiny).abs().max() <= 2.0**-100
    most = torch.finfo(torch.float32).max
    huge = torch.tensor([most, -most]).repeat(width)[:width]
    back = read_back(name, huge)
    assert torch.equal(back.sign(), huge.sign())
    assert (back.abs() <= LARGEST * 1.001).all()
    assert back.bfloat16().isfinite().all()
    for broken in (math.nan, math.inf, -math.inf):
        vector = torch.ones(width)
        vector[width // 2] = broken
        back = read_back(name, torch.stack([vector, torch.ones(width)]))
        assert back[0, : min(width, 64)].isnan().all()
        assert torch.allclose(back[1], torch.ones(width))


def test_constants_are_exact_in_int4() -> None:
    vectors = torch.tensor([[0.1], [-3.3e20], [7.0]]).expand(3, 100)
    assert torch.equal(read_back("int4", vectors), vectors)


@pytest.mark.parametrize("width", [1, 2, 33, 48, 64, 80, 128])
def test_turning_is_multiplying_by_a_hadamard_matrix(width: int) -> None:
    block = turn_width(width)
    assert width % block == 0
    assert (width // block) % 2 == 1
    matrix = torch.ones(1, 1)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    vectors = torch.randn(6, width, generator=generator(1))
    expected = (vectors.view(6, -1, block) @ (matrix / block**0.5)).view(6, width)
    assert torch.allclose(turn(vectors), expected, atol=1e-5)
    assert torch.allclose(turn(turn(vectors)), vectors, atol=1e-5)


def test_turning_spreads_outliers() -> None:
    """Keys with one outlying channel, as models with biased projections have: int4 keeps most of what turning saves."""
    keys = torch.randn(200, 64, generator=generator(2))
    keys[:, 5] += 40
    plain = (read_back("int4", keys) - keys).square().mean()
    turned = (turn(read_back("int4", turn(keys))) - keys).square().mean()
    assert turned < plain / 4


@pytest.mark.parametrize(
    ("name", "width", "size"),
    [
        *(("float32", 64, 256), ("bfloat16", 64, 128), ("fp8", 64, 68), ("int8", 64, 68), ("int4", 64, 40)),
        *(("int4", 33, 25), ("int4", 80, 56), ("int4", 128, 80), ("fp8", 128, 132)),
    ],
)
def test_room_of_a_vector(name: str, width: int, size: int) -> None:
    assert FORMATS[name].vector_bytes(width) == size
    pages = empty_pages(FORMATS[name], 1, 3, 4, width)
    assert pages.codes.nbytes + pages.scales.nbytes == 12 * size


KEYS = {"float32": 1e-6, "bfloat16": 0.004, "fp8": 0.05, "int8": 0.012, "int4": 0.16}
VALUES = {"float32": 1e-6, "bfloat16": 0.0025, "fp8": 0.035, "int8": 0.008, "int4": 0.12}


@each_backend
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("values", VALUES)
def test_error_of_every_pair_of_formats(kernels: Kernels, keys: str, values: str) -> None:
    """Root mean square, relative to the outputs', of attention in float32: each side's share of it, and no more."""
    step, shape = cases.prefill(60, 40, 8), Shape(4, 2, 64)
    exact = make(step, shape, (FORMATS["float32"], FORMATS["float32"]), torch.float32)
    rounded = make(step, shape, (FORMATS[keys], FORMATS[values]), torch.float32)
    truth = cases.expected(exact[0], numbers(exact[1].keys), numbers(exact[1].values), *exact[2:])[0]
    off = float((run(kernels, *rounded)[0] - truth).square().mean() / truth.square().mean()) ** 0.5
    most = math.hypot(KEYS[keys], VALUES[values])
    assert off <= most
    assert off > most / 2 or most < 1e-5


@each_backend
@pytest.mark.parametrize("width", [64, 50])
def test_rounded_queries_add_no_more_than_int8_keys_do(kernels: Kernels, width: int) -> None:
    formats = FORMATS["int8"], FORMATS["int8"]
    query, *rest = make(cases.prefill(60, 40, 8), Shape(4, 2, width), formats, torch.bfloat16)
    query[..., 7] *= 3  # a channel that lies apart
    truth = expected(query, *rest)[0]
    off = float((run(kernels, query, *rest)[0] - truth).square().mean() / truth.square().mean()) ** 0.5
    assert off <= 1.5 * KEYS["int8"]


@each_backend
@each_quantised
def test_queries_without_a_direction_see_all_their_keys_alike(kernels: Kernels, name: str) -> None:
    """Zeros, or so small that they count as such, beside others and one that is not finite."""
    formats = FORMATS[name], FORMATS[name]
    query, *rest = make(cases.prefill(60, 40, 8), Shape(4, 2, 64, window=50), formats, torch.bfloat16)
    query[3], query[8], query[11, 2, 5] = 0, 1e-35, torch.inf
    out, truth = run(kernels, query, *rest)[0], expected(query, *rest)[0]
    assert out[11, 2].isnan().all()
    out[11, 2] = truth[11, 2] = 0
    assert error(out, truth) <= 0.04


@each_backend
@each_quantised
def test_a_broken_row_leaves_its_neighbours_alone(kernels: Kernels, name: str) -> None:
    step = cases.decode(4, 20, 8)
    query, pages, items, masking = make(step, Shape(4, 2, 32), (FORMATS[name], FORMATS[name]), torch.float32)
    whole = run(kernels, query, pages, items, masking)[0]
    bad = torch.full((1, 2, 32), torch.nan)
    last = torch.from_numpy(cases.key_slots(items, 2, 8)[-1:])
    kernels.rotate_write(bad, bad, bad, *no_turn(1, 16), last, pages)
    broken = run(kernels, query, pages, items, masking)[0]
    assert broken[2].isnan().all()
    others = torch.tensor([0, 1, 3])
    assert torch.equal(broken[others], whole[others])


@each_backend
@each_quantised
def test_a_written_vector_does_not_depend_on_its_company(kernels: Kernels, name: str) -> None:
    heads = torch.randn(20, 3, 64, generator=generator(3))
    together, alone = (LayerPages(*(empty_pages(FORMATS[name], 3, 4, 8, 64) for _ in range(2))) for _ in range(2))
    kernels.rotate_write(heads, heads, heads.flip(0), *no_turn(20, 32), torch.arange(20), together)
    for token in range(20):
        row = slice(token, token + 1)
        one, value = heads[row], heads.flip(0)[row]
        kernels.rotate_write(one, one, value, *no_turn(1, 32), torch.tensor([token]), alone)
    for one, other in ((together.keys, alone.keys), (together.values, alone.values)):
        assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
        assert torch.equal(one.scales.view(torch.int32), other.scales.view(torch.int32))


def spread(pages: Pages) -> Pages:
    """The same pages with the heads of a block, and some room, between one block and the next."""

    def lay(stored: torch.Tensor) -> torch.Tensor:
        heads, blocks, size, width = stored.shape
        room = torch.zeros(blocks, heads + 2, size, width, dtype=stored.dtype)
        return room[:, 1:-1].permute(1, 0, 2, 3)

    return replace(pages, codes=lay(pages.codes), scales=lay(pages.scales))


@each_backend
@pytest.mark.parametrize("name", FORMATS)
def test_heads_and_blocks_may_lie_anywhere(kernels: Kernels, name: str) -> None:
    query, pages, items, masking = make(cases.branching(8), Shape(4, 2, 24), (FORMATS[name],) * 2, torch.float32)
    apart = LayerPages(spread(pages.keys), spread(pages.values))
    for into in (pages, apart):
        heads = torch.randn(pages.num_blocks * 8, 2, 24, generator=generator(1))
        kernels.rotate_write(heads, heads, heads.flip(0), *no_turn(len(heads), 12), torch.arange(len(heads)), into)
    assert torch.equal(apart.keys.codes.view(torch.uint8), pages.keys.codes.view(torch.uint8))
    assert torch.equal(run(kernels, query, apart, items, masking)[0], run(kernels, query, pages, items, masking)[0])


def test_pages_that_do_not_lie_alike_are_refused() -> None:
    one = empty_pages(FORMATS["int8"], 2, 5, 8, 24)
    with pytest.raises(ValueError, match="differently far apart"):
        LayerPages(one, spread(one))
    with pytest.raises(ValueError, match="differently far apart"):
        LayerPages(replace(one, scales=spread(one).scales), one)
    with pytest.raises(ValueError, match="not side by side"):
        LayerPages(replace(one, codes=torch.zeros(2, 5, 24, 8, dtype=torch.int8).transpose(2, 3)), one)
