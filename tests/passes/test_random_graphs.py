"""Exact passes change no bit, on graphs drawn at random."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_graph import Function, capture

from deepinfer.passes import PASSES_EXACT, PassManager, graph_text

ROWS, WIDTH = 4, 8

UNARY = {
    "cast": lambda x: x.to(torch.bfloat16),
    "widen": lambda x: x.to(torch.float32),
    "same": lambda x: x.to(x.dtype),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "detach": lambda x: x.detach(),
    "view": lambda x: x.reshape(ROWS, WIDTH),
    "other_view": lambda x: x.reshape(WIDTH, ROWS).reshape(ROWS, WIDTH),
    "transposed": lambda x: x.t().contiguous().t(),
    "slice": lambda x: x[:, :],
    "flip": lambda x: x.flip(1),
    "expand": lambda x: x.expand(ROWS, WIDTH),
    "neg": lambda x: -x,
    "half": lambda x: x * 0.5,
    "zero": lambda x: x + 0.0,
}
BINARY = {
    "add": lambda x, y: torch.add(x, y, alpha=1),
    "sub": lambda x, y: torch.sub(x, y, alpha=1),
    "add2": lambda x, y: torch.add(x, y, alpha=2),
    "mul": lambda x, y: x * y,
    "write": lambda x, y: x.clone().copy_(y),
    "write_half": lambda x, y: _written_half(x, y),
}


def _written_half(x, y):
    buffer = torch.zeros(ROWS, WIDTH, dtype=x.dtype)
    buffer[:, : WIDTH // 2].copy_(y[:, : WIDTH // 2])
    return buffer + x


steps = st.lists(
    st.tuples(st.sampled_from(sorted(UNARY) + sorted(BINARY)), st.integers(0, 99), st.integers(0, 99)),
    min_size=1,
    max_size=12,
)


def build(plan, outputs, write_region):
    def step(x, index, region):
        values = [x, region[index]]
        for name, left, right in plan:
            a, b = values[left % len(values)], values[right % len(values)]
            values.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
        if write_region:
            region.index_put_((index,), values[-1].to(region.dtype))
            values.append(region[index] * 2)
        return tuple(values[output % len(values)] + 1 for output in outputs)

    return step


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(steps, st.lists(st.integers(0, 99), min_size=1, max_size=3), st.booleans(), st.integers(0, 1000))
def test_passes_keep_every_bit_and_are_idempotent(plan, outputs, write_region, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, generator=draw) * 10.0 ** torch.randint(
        -40, 38, (ROWS, WIDTH), generator=draw
    )
    x[0, :3] = torch.tensor([-0.0, torch.inf, -torch.inf])
    region = torch.randn(9, WIDTH, generator=draw)
    index = torch.tensor([1, 3, 5, 8])
    program = capture(Function(build(plan, outputs, write_region)), x, index, region)
    before_region, after_region = region.clone(), region.clone()
    before = program.module()(x, index, before_region)
    PassManager(PASSES_EXACT, ["check_invariance"]).run(program)
    after = program.module()(x, index, after_region)
    for a, b in zip(before, after, strict=True):
        assert a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b))
    assert torch.equal(as_bytes(before_region), as_bytes(after_region))
    text = graph_text(program.graph_module)
    again = PassManager(PASSES_EXACT, ["check_invariance"]).run(program)
    assert not any(result.rewrites for result in again.results)
    assert graph_text(program.graph_module) == text
