"""`torch.compile(function, backend="deepinfer")`: functions of users through the same passes and lowering."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.errors import UsageError
from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.caches import RegionCaches
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import load_config
from deepinfer.graphs.context import StepContext
from deepinfer.graphs.eager import allocate_caches
from deepinfer.graphs.engram import hash_tokens
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.rows import StepInputs
from deepinfer.graphs.step import run_layer
from deepinfer.graphs.store import build_store
from deepinfer.kernels import mhc_expand, moe_gate
from deepinfer.kernels.mhc_expand import mhc_expand_reference

ROWS = 4


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="deepinfer", fullgraph=True, dynamic=False)


def last_report() -> Any:
    from deepinfer.torch_backend import reports

    return reports()[-1]


def test_the_backend_is_known_to_pytorch() -> None:
    """By its entry point: nothing of deepinfer has to be imported for it."""
    assert "deepinfer" in torch._dynamo.list_backends()


def test_a_layer_of_the_model_compiles_with_all_its_fusions(golden_dir: Path) -> None:
    """Layer 3 of the golden checkpoint: memory, compression, index, attention, experts; caches in place."""
    layer, config = 3, load_config(golden_dir)
    layout = cache_layout(config, "float32", max_num_seqs=ROWS, max_model_len=128)
    weights = build_store(Checkpoint(golden_dir, config), config, 128)
    precision = PRECISIONS["float32"]

    def step(residual: Tensor, pre: Tensor, rows: tuple[Tensor, ...], regions: dict[str, Tensor]) -> Any:
        inputs = StepInputs(*rows)
        caches = RegionCaches(inputs, regions, precision.quantized)
        ctx = StepContext(config, precision, weights, caches, inputs)
        hash_tokens(ctx)
        return run_layer(ctx, layer, residual, pre)

    lines, blocks = torch.arange(ROWS), layout.max_blocks_per_request
    rows = StepInputs(
        token_ids=lines + 7,
        positions=torch.full((ROWS,), 5),
        request_index=lines,
        block_table=1 + torch.arange(ROWS * blocks).reshape(ROWS, blocks),
        slot_ids=lines + 1,
        num_computed_tokens=torch.full((ROWS,), 5),
        row_starts=lines.clone(),
        row_counts=torch.ones(ROWS, dtype=torch.int64),
    )
    draw = torch.Generator().manual_seed(1)
    residual = torch.randn(ROWS, config.hc_mult, config.hidden_size, generator=draw)
    pre = torch.rand(ROWS, config.hc_mult, generator=draw)
    mine, eager = allocate_caches(layout), allocate_caches(layout)
    with torch.no_grad():
        found = compiled(step)(residual, pre, tuple(rows), mine)
        wanted = step(residual, pre, tuple(rows), eager)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for name, region in mine.items():
        torch.testing.assert_close(region, eager[name], rtol=1e-4, atol=1e-5)
    assert any(region.any() for region in mine.values())
    once = "compress index_topk index_key sparse_attention window_record moe_experts shared_expert moe_gate"
    counts = dict.fromkeys(f"{once} engram_ids engram_gate engram_gather".split(), 1)
    counts |= {"ring_write": 2, "mhc_expand": 2, "mhc_collapse": 2, "rope": 3}
    report = last_report()
    assert {name: report.rewrites(f"fuse_{name}") for name in counts} == counts
    for name, count in counts.items():
        assert report.text.count(f"deepinfer.{name}.default(") == count


def test_a_spelled_out_copy_of_an_op_is_found_too() -> None:
    _, args = None, mhc_expand.make_inputs(ROWS, torch.float32, 0)

    def twice(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return mhc_expand(*tensors), mhc_expand_reference(*tensors)

    with torch.no_grad():
        first, second = compiled(twice)(*args)
    assert last_report().rewrites("fuse_mhc_expand") == 2
    assert torch.equal(first, second)
    torch.testing.assert_close(first, mhc_expand_reference(*args))


def test_other_calls_are_lowered_as_they_are() -> None:
    weight = torch.randn(24, 64)

    def function(x: Tensor, counter: Tensor) -> tuple[Tensor, Tensor]:
        _, ids, weights = moe_gate(torch.tanh(x), weight, weight[:, 0].contiguous(), counter, 6, True, 1.5)
        counter.add_(1)
        return ids, torch.softmax(weights @ torch.ones(6, 3), dim=-1)

    x, counter, expected = torch.randn(ROWS, 64), torch.arange(ROWS), torch.arange(ROWS)
    with torch.no_grad():
        found = compiled(function)(x, counter)
        wanted = function(x, expected)
    assert torch.equal(found[0], wanted[0]) and torch.equal(counter, expected)
    torch.testing.assert_close(found[1], wanted[1])


def _fails(function: Callable[..., Any], *args: Any, grad: bool = False) -> str:
    with torch.set_grad_enabled(grad), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(function)(*args)
    return str(caught.value)


def test_gradients_are_refused() -> None:
    message = _fails(lambda x: x * 2, torch.ones(3, requires_grad=True), grad=True)
    assert "gradients are not supported" in message and "torch.no_grad()" in message


def test_an_output_in_the_memory_of_an_input_is_refused() -> None:
    message = _fails(lambda x: x.view(-1), torch.ones(3, 2))
    assert "shares the memory of input" in message and ".clone()" in message


def test_casts_and_literals_are_results_of_their_own() -> None:
    """A cast may return its argument by its schema; to another dtype it cannot."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        first_is_zero = x.clone()
        first_is_zero[0] = 0.0
        return x.half(), x.long(), x * torch.tensor([1.0, 2.0, 3.0]), first_is_zero

    x = torch.tensor([1.5, -2.5, 3.25])
    with torch.no_grad():
        found = compiled(function)(x)
    for one, other in zip(found, function(x), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_written_inputs_may_not_share_memory_with_others() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 2

    block = torch.zeros(4, 8)
    with torch.no_grad():
        step = compiled(function)
        assert torch.equal(step(block[:2].clone(), block[0]), torch.zeros(8))
        assert not block.any()
        with pytest.raises(UsageError, match="input 0 is written and shares memory with input 1"):
            step(block[:2], block[1])
        assert torch.equal(step(block[:2], block[2]), torch.zeros(8))
        assert torch.equal(block[:2], torch.ones(2, 8))


def test_options_are_refused_by_name() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x: x * 2, backend="deepinfer", options={"faster": True})
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="takes no options"):
        function(torch.ones(3))


def test_numbers_that_change_are_refused() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x, scale: x * scale, backend="deepinfer")
    with torch.no_grad():
        assert torch.equal(function(torch.ones(3), 2.5), torch.full((3,), 2.5))
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="numbers must be static"):
            function(torch.ones(3), 3.5)


def test_changing_sizes_are_refused() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x: x * 2, backend="deepinfer", fullgraph=True, dynamic=True)
    with (
        torch.no_grad(),
        pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="must be static"),
    ):
        function(torch.ones(5, 3))
