"""The shipped small model: what its README claims and a test can repeat."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from deepinfer.graphs.eager import EagerModel, single_request_inputs
from deepinfer.kernels.native import load_host_library

FOLDER = Path(__file__).parents[2] / "examples" / "tiny"
CHECKPOINT = FOLDER / "checkpoint"
TEXT = (
    "And it came to pass in those days, that the king said unto his servants, Go ye out into the city, and "
    "bring unto me the elders of the people. And they went out, and did as the king had commanded them."
)


def loss_of(model: EagerModel, tokens: list[int]) -> float:
    """Nats per token."""
    block_table = torch.arange(1, model.layout.max_blocks_per_request + 1)
    logits = model.logits(model.step("prefill", single_request_inputs(tokens, 0, block_table, slot=1)))
    return F.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).item()


def test_it_is_small_and_in_the_released_layout():
    files = list(CHECKPOINT.iterdir())
    assert sum(path.stat().st_size for path in files) <= 16 << 20
    index = json.loads((CHECKPOINT / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= {path.name for path in files}


def test_it_has_learned_english_of_its_kind():
    """Far better than chance (8.03 nats) on a sentence in the manner of its text, and the order matters."""
    load_host_library()
    model = EagerModel.load(CHECKPOINT, "native", max_model_len=128, native_ops=True)
    tokens = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(TEXT).ids
    assert tokens[0] == 0  # the token that begins a text
    assert loss_of(model, tokens) < 3.0
    assert loss_of(model, [tokens[0], *tokens[:0:-1]]) > 6.0


def test_the_definitions_agree_with_the_op_library():
    """The float32 form of the trained model, reference against native."""
    load_host_library()
    tokens = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(TEXT).ids
    models = (
        EagerModel.load(CHECKPOINT, "float32", max_model_len=128, native_ops=native)
        for native in (True, False)
    )
    native, plain = (loss_of(model, tokens) for model in models)
    assert native == pytest.approx(plain, abs=1e-4)


@pytest.mark.slow
def test_the_sample_of_the_readme_comes_out_bit_for_bit(tmp_path):
    readme = (FOLDER / "README.md").read_text()
    quoted = re.findall(r"^>(.*)$", readme, re.MULTILINE)
    wanted = " ".join(" ".join(quoted).split())
    prompt = re.search(r'--prompt "([^"]+)"', readme).group(1)
    commands = Path(sys.executable).parent
    compiled = [str(commands / "deepinfer-compile"), str(CHECKPOINT), "-o", str(tmp_path / "tiny.di")]
    subprocess.run(compiled, check=True, capture_output=True, timeout=900)
    generate = [str(commands / "deepinfer"), "generate", str(tmp_path / "tiny.di"), "--prompt", prompt]
    settings = ["--max-tokens", "150", "--temperature", "0.7", "--seed", "1"]
    done = subprocess.run(generate + settings, check=True, capture_output=True, text=True, timeout=300)
    assert " ".join((prompt + done.stdout).split()).startswith(wanted)
