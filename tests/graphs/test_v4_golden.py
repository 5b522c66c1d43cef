"""The eager deepseek_v4 against its golden results, and against itself however a prompt is cut."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from graph_steps import (
    Chunk,
    Request,
    decode_inputs,
    differing_records,
    ragged_inputs,
    records_of,
    same_bytes,
)
from safetensors.torch import load_file
from torch import Tensor
from v4_checkpoint import quantised_config, write_quantised, write_with_transformers_names

from deepinfer.graphs.cache_layout import cache_layout
from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import load_config
from deepinfer.graphs.eager import EagerModel, eager_logits, single_request_inputs
from deepinfer.graphs.records import PRECISIONS
from deepinfer.graphs.store import build_store
from deepinfer.kernels.native import load_host_library

CASES = ("n7", "n45", "n130")
LIMIT = 1e-4
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def expected(v4_golden_dir: Path) -> dict[str, Tensor]:
    return load_file(v4_golden_dir / "golden_logits.safetensors")


@pytest.fixture(scope="module")
def quantised_dir(v4_golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    golden = json.loads((v4_golden_dir / "config.json").read_text())
    return write_quantised(quantised_config(golden), tmp_path_factory.mktemp("v4") / "quantised")


@pytest.mark.parametrize("case", CASES)
def test_one_shot_logits_agree_with_the_reference(v4_golden_dir, expected, case):
    logits = eager_logits(v4_golden_dir, expected[f"{case}.tokens"].tolist(), "float32")
    assert (torch.from_numpy(logits) - expected[f"{case}.logits"]).abs().max() <= LIMIT


@pytest.mark.parametrize(("case", "sizes"), [("n45", [1]), ("n45", [22, 11]), ("n130", [60, 1, 50])])
def test_chunks_and_decode_agree_with_the_reference_and_give_the_bytes_of_one_shot(
    v4_golden_dir, expected, case, sizes
):
    tokens = expected[f"{case}.tokens"].tolist()
    whole = eager_logits(v4_golden_dir, tokens, "float32")
    logits = eager_logits(v4_golden_dir, tokens, "float32", sizes)
    assert (torch.from_numpy(logits) - expected[f"{case}.logits"]).abs().max() <= LIMIT
    assert logits.tobytes() == whole.tobytes()


def test_names_of_transformers_give_the_same_bytes(v4_golden_dir, expected, tmp_path):
    other = write_with_transformers_names(v4_golden_dir, tmp_path / "other")
    tokens = expected["n45.tokens"].tolist()
    assert (
        eager_logits(other, tokens, "float32").tobytes()
        == eager_logits(v4_golden_dir, tokens, "float32").tobytes()
    )


def test_values_and_decisions_inside_the_layers_agree(v4_golden_dir, expected):
    model = EagerModel.load(v4_golden_dir, "float32", max_model_len=128)
    seen: dict[str, Tensor] = {}

    def keep(layer: int, name: str, value: Tensor) -> Tensor:
        seen[f"L{layer}.{name}"] = value.clone()
        return value

    model.step(
        "prefill", single_request_inputs(expected["n45.tokens"].tolist(), 0, torch.tensor([1]), 1), keep
    )
    names = {"R_out": "ffn", "attn_y": "attn_y", "ffn_y": "ffn_y", "router_weights": "router_weights"}
    for layer in range(6):
        for stored, name in names.items():
            want, got = expected[f"n45.L{layer}.{stored}"], seen[f"L{layer}.{name}"][:45]
            if stored == "router_weights":  # those of top-k layers are stored in another order
                want, got = want.sort(1).values, got.sort(1).values
            assert (got - want).abs().max() <= 1e-4 * want.pow(2).mean().sqrt(), (layer, stored)
        picks = expected[f"n45.L{layer}.router_picks"].long()
        assert torch.equal(seen[f"L{layer}.router_picks"][:45].sort(1).values, picks.sort(1).values)
        if f"n45.L{layer}.topk" in expected:
            assert torch.equal(seen[f"L{layer}.topk"][:45], expected[f"n45.L{layer}.topk"].long())
        if f"n45.L{layer}.compressed_kv" in expected:
            want = expected[f"n45.L{layer}.compressed_kv"]
            got = model.caches[f"layers.{layer}.compressed_kv"][1, : len(want)]
            assert (got - want).abs().max() <= 1e-4 * want.pow(2).mean().sqrt(), layer


# ---- however a prompt is cut ----------------------------------------------------------------------------


def run_in_chunks(
    model: EagerModel, request: Request, counts: list[int], padding: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of all tokens and what the caches hold after them; what is left after `counts` is decoded."""
    total, start, hidden = len(request.token_ids), 0, []
    for count in counts:
        inputs = ragged_inputs([Chunk(request, start, count)], model.layout, padding_rows=padding)
        hidden.append(model.step("prefill", inputs)[:count])
        start += count
    for position in range(start, total):
        chunks = [Chunk(request, position, 1), *[None] * padding]
        hidden.append(model.step("decode", decode_inputs(chunks, model.layout))[:1])
    return model.logits(torch.cat(hidden)), records_of(model, request, total)


@pytest.fixture(scope="module", params=["unquantised", "quantised"])
def new_model(request, v4_golden_dir, quantised_dir) -> Callable[..., EagerModel]:
    """A function that returns a model with fresh caches, of references or of native operations."""
    load_host_library()
    directory = v4_golden_dir if request.param == "unquantised" else quantised_dir
    config = load_config(directory)
    checkpoint = Checkpoint(directory, config)
    stores = {
        native: build_store(checkpoint, config, MAX_MODEL_LEN, packed=native) for native in (False, True)
    }

    def make(precision: str, *, native: bool) -> EagerModel:
        layout = cache_layout(config, precision, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
        return EagerModel(config, PRECISIONS[precision], stores[native], layout, native_ops=native)

    return make


@pytest.mark.parametrize("native", [False, True], ids=["references", "native operations"])
@pytest.mark.parametrize("precision", ["native", "float32"])
def test_chunks_decode_and_padding_give_the_same_bytes(new_model, precision, native):
    """Logits and cache records; the prompt crosses a block and closes windows of both kinds."""
    length = 150 if native else 40
    generator = torch.Generator().manual_seed(5)
    request = Request(torch.randint(384, (length,), generator=generator).tolist(), blocks=(1, 2))
    want_logits, want_records = run_in_chunks(new_model(precision, native=native), request, [length])
    assert want_logits.isfinite().all()
    cuts = [sorted(random.Random(seed).sample(range(1, length), 5)) for seed in range(2)]
    plans = [[b - a for a, b in itertools.pairwise([0, *cut, length])] for cut in cuts]
    for counts, padding in ((plans[0], 0), (plans[1], 3), ([length // 2], 0), ([1], 2)):
        logits, records = run_in_chunks(new_model(precision, native=native), request, counts, padding)
        assert same_bytes(logits, want_logits), counts
        assert not differing_records(records, want_records), counts


@pytest.mark.parametrize(("precision", "limit"), [("float32", 1e-5), ("native", 2e-2)])
def test_native_operations_compute_what_the_references_do(new_model, precision, limit):
    """Of `native` precision only the first row of a request, which no flipped rounding has reached yet."""
    generator = torch.Generator().manual_seed(6)
    request = Request(torch.randint(384, (70,), generator=generator).tolist())
    (want, _), (got, _) = (
        run_in_chunks(new_model(precision, native=native), request, [70]) for native in (False, True)
    )
    rows = slice(None) if precision == "float32" else slice(0, 1)
    difference = (got - want)[rows].pow(2).mean().sqrt() / want[rows].pow(2).mean().sqrt()
    assert difference <= limit
