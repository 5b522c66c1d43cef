"""Ring writes: what is kept, every dtype, strided rings, far offsets, padding, refusals before any change."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import ring_write

STORED = [(torch.uint8, torch.uint8), (torch.float32, torch.float32), (torch.int32, torch.int32)]
STORED.append((torch.int32, torch.int64))


def step(chunks, width, value_dtype, padding=0):
    """Arguments after the ring for requests of (slot, start, count), one line each."""
    positions, lines = [], []
    for line, (_, start, count) in enumerate(chunks):
        positions += range(start, start + count)
        lines += [line] * count
    positions, lines = positions + [-1] * padding, lines + [0] * padding
    values = torch.arange(len(positions) * width).reshape(-1, width) % 251
    columns = [torch.tensor(column, dtype=torch.int64) for column in zip(*chunks, strict=True)]
    return (
        values.to(value_dtype),
        torch.tensor(positions, dtype=torch.int64),
        torch.tensor(lines, dtype=torch.int64),
        *columns,
    )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("stored", "given_dtype"), STORED)
def test_the_last_rows_of_each_request_take_their_places(route, stored, given_dtype):
    ring = torch.full((5, 7, 3), 255).to(stored)
    chunks = [(3, 0, 20), (1, 5, 1), (4, 4, 7)]
    values, positions, lines, *rest = step(chunks, 3, given_dtype, padding=3)
    want = ring.clone()
    for row, (position, line) in enumerate(zip(positions.tolist(), lines.tolist(), strict=True)):
        slot, start, count = chunks[line]
        if position >= max(0, start + count - 7):
            want[slot, position % 7] = values[row].to(stored)
    assert getattr(ring_write, route)(ring, values, positions, lines, *rest) is None
    assert torch.equal(ring, want)
    assert (ring[0] == 255).all()
    assert (ring[2] == 255).all()


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    length=st.integers(1, 12),
    start=st.integers(0, 20),
)
def test_chunks_leave_what_one_step_leaves(cuts, length, start):
    total = sum(cuts)
    values, positions, lines, *rest = step([(1, start, total)], 2, torch.float32)
    once = torch.full((2, length, 2), -1.0)
    ring_write.native(once, values, positions, lines, *rest)
    chunked, done = torch.full((2, length, 2), -1.0), 0
    for count in cuts:
        part = slice(done, done + count)
        args = (lines[part], rest[0], torch.tensor([start + done]), torch.tensor([count]))
        ring_write.native(chunked, values[part], positions[part], *args)
        done += count
    # what came before the last `length` positions of the whole is overwritten in either case
    assert torch.equal(chunked, once)


@pytest.mark.parametrize("route", ROUTES)
def test_a_ring_inside_an_arena_changes_nothing_around_it(route):
    arena = torch.full((4, 100), 9, dtype=torch.uint8)
    ring = arena[:, 10:52].unflatten(1, (7, 6))
    assert not ring.is_contiguous()
    arguments = step([(2, 3, 2), (3, 0, 1)], 6, torch.uint8)
    getattr(ring_write, route)(ring, *arguments)
    assert torch.equal(ring[2, 3:5].flatten(), arguments[0][:2].flatten())
    assert torch.equal(ring[3, 0], arguments[0][2])
    assert (arena[:, :10] == 9).all()
    assert (arena[:, 52:] == 9).all()
    assert (arena[:2] == 9).all()


@pytest.mark.parametrize("route", ROUTES)
def test_offsets_beyond_two_to_the_31(route, tmp_path):
    """A sparse file: only the touched pages exist."""
    stride, slots = 2**30 + 64, 4
    arena = torch.from_file(str(tmp_path / "arena"), shared=True, size=stride * slots, dtype=torch.uint8)
    ring = arena.as_strided((slots, 5, 4), (stride, 4, 1))
    getattr(ring_write, route)(ring, *step([(3, 7, 1)], 4, torch.uint8))
    assert arena[3 * stride + 8 : 3 * stride + 12].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("route", ROUTES)
def test_no_rows_are_fine_and_padding_needs_no_line(route):
    ring = torch.zeros(2, 3, 4)
    nothing = torch.zeros(0, dtype=torch.int64)
    getattr(ring_write, route)(ring, torch.ones(0, 4), *(nothing,) * 5)
    padding = torch.tensor([-1, -1])
    getattr(ring_write, route)(ring, torch.ones(2, 4), padding, torch.tensor([0, 99]), *(nothing,) * 3)
    assert not ring.any()


def test_wrong_arguments_are_refused_before_anything_is_written():
    ring = torch.zeros(3, 4, 2)
    values, positions, lines, slots, starts, counts = step([(1, 0, 2), (2, 5, 1)], 2, torch.float32)

    def at(tensor, index, value):
        changed = tensor.clone()
        changed[index] = value
        return changed

    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        run = getattr(ring_write, route)
        for slot in (3, -1, 0, 2**62):
            with pytest.raises(error, match=r"ring_write: slot_ids:? must lie in 1 \.\. 2"):
                run(ring, values, positions, lines, at(slots, 1, slot), starts, counts)
        for line in (2, -1):
            with pytest.raises(error, match=r"ring_write: request_index:? must lie in 0 \.\. 1"):
                run(ring, values, positions, at(lines, 2, line), slots, starts, counts)
        with pytest.raises(error, match=r"ring_write: values.* must"):
            run(ring, values.to(torch.uint8), positions, lines, slots, starts, counts)
        with pytest.raises(error, match=r"ring_write: values:? must have shape \[(any|-1), 2\]"):
            run(ring, torch.zeros(3, 3), positions, lines, slots, starts, counts)
        with pytest.raises(error, match="ring_write: ring:? must be contiguous within"):
            run(torch.zeros(3, 4, 4)[..., ::2], values, positions, lines, slots, starts, counts)
    assert not ring.any()
    ring_write.fake(ring, values, positions, lines, slots, starts, counts)
    with pytest.raises(UsageError, match="ring_write: ring"):
        ring_write.fake(ring.to(torch.float16), values, positions, lines, slots, starts, counts)
