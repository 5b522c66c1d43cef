"""Roundings to bf16 survive lowering: compiled equals eager by bytes, for every kind of rounding.

Float sums over an axis are not among the cases, since their order is the compiler's; where one is needed, its
terms are small integers, so that every order gives the same float32 value and only the rounding remains.
"""

import functools

import pytest
import torch
from toy_graph import Function, capture, scratch

from deepinfer.passes import PASSES_EXACT, PassManager, inductor, lower_graph
from deepinfer.runtime.graph_loader import CompiledGraph

ROWS, WIDTH = 32, 129  # 4,128 values per case; the odd width exercises the ends of vector loops
BF16 = torch.bfloat16


def collapse_then_norm(x, y, a, b, integers):
    """Weighted sum of four streams, rounded, then normalised by its largest element and scaled."""
    collapsed = (x * 0.3 + y * 0.7 + (x * y) * 0.11 + (y - x) * 0.05).to(BF16)
    wide = collapsed.float()
    return (wide * torch.rsqrt(wide.square().amax(-1, keepdim=True) + 1e-6) * y).to(BF16)


CASES = {
    "add": lambda x, y, a, b, integers: (x + y).to(BF16).float() * 1.7,
    "mul": lambda x, y, a, b, integers: (x * y).to(BF16).float() + x,
    "sum": lambda x, y, a, b, integers: integers.sum(-1).to(BF16).float()[:, None] * x,
    "sum_of_products": lambda x, y, a, b, integers: (integers * integers).sum(-1).to(BF16).float() * 3,
    "products_added": lambda x, y, a, b, integers: (x * y + y * 0.3 + x * 1.1).to(BF16).float() - y,
    "bf16_add_chain": lambda x, y, a, b, integers: a + b + a + b + a,
    "bf16_mul_add_chain": lambda x, y, a, b, integers: (a * b + a) * b - a,
    "bf16_div": lambda x, y, a, b, integers: a / (b.abs() + 1) + a,
    "there_and_back": lambda x, y, a, b, integers: x.to(BF16).to(torch.float32) * y,
    "twice": lambda x, y, a, b, integers: ((x.to(BF16) * 3).float() * 0.7).to(BF16) + a,
    "silu": lambda x, y, a, b, integers: torch.nn.functional.silu(a) * b,
    "collapse_then_norm": collapse_then_norm,
    "mm_then_add": lambda x, y, a, b, integers: a[:, :128] @ b.t()[:128] + a[:, :ROWS],
    "linear_then_add": lambda x, y, a, b, integers: torch.nn.functional.linear(a, b) + b[:, :ROWS],
}


def inputs():
    draw = torch.Generator().manual_seed(11)
    x, y = (torch.randn(ROWS, WIDTH, generator=draw) * 3 for _ in range(2))
    x[0, :6] = torch.tensor([-0.0, 0.0, torch.inf, 1e-39, 3.39e38, -1.0])
    integers = torch.randint(0, 60, (ROWS, WIDTH), generator=draw).float()
    return [x, y, (x * 1.01).to(BF16), (y * 0.99).to(BF16), integers]


def lower_cases(name, cases):
    step = Function(lambda *tensors: tuple(case(*tensors) for case in cases))
    program = capture(step, *inputs())
    PassManager(PASSES_EXACT, ["check_invariance"]).run(program)
    lowered = lower_graph(program, name=name, work_dir=scratch() / name)
    extern = lowered.extern_json.read_bytes() if lowered.extern_json else None
    return CompiledGraph.open(lowered.shared_object, extern, name=name)


@functools.cache
def compiled_results():
    """All cases in one graph, so that there is something to fuse across."""
    return dict(zip(CASES, lower_cases("roundings", CASES.values()).run(inputs()), strict=True))


def same_bytes(a, b):
    """Equal bits, any NaN being equal to any other."""
    both_nan = a.isnan() & b.isnan()
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and bool((both_nan | (a.view(integer) == b.view(integer))).all())


@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager_by_bytes(name):
    assert same_bytes(compiled_results()[name].contiguous(), CASES[name](*inputs()).contiguous())


@pytest.mark.slow
def test_without_emulated_casts_roundings_are_lost(monkeypatch):
    """The inverse: the option is what keeps them, so the test above can fail."""
    monkeypatch.setitem(inductor.OPTIONS, "emulate_precision_casts", False)
    names = ["bf16_add_chain", "bf16_mul_add_chain", "collapse_then_norm"]
    found = lower_cases("fused", [CASES[name] for name in names]).run(inputs())
    pairs = zip(found, (CASES[name](*inputs()) for name in names), strict=True)
    assert not all(same_bytes(a.contiguous(), b.contiguous()) for a, b in pairs)
