"""The same DeepSeek-V4 weights in float32 here and in transformers: decode, prefill, peak memory.

A random model of 30 million parameters. transformers decodes with its own cache and takes the best token;
here a step is the engine's, with all that belongs to it. Peaks are those of fresh processes that load and
generate.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_engine import Steps
from harness import Line, compare

from deepinfer.compile import compile_model
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.loader import LoadedArtifact, load_artifact
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.settings import CompileConfig

FOLDER = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(FOLDER / "tests" / "support"))  # the witness of the tests is the contender here

from transformers_model import TransformersModel  # noqa: E402

REQUESTS = (1, 8)
PREFILL = 512
CONTEXT = 100
MAX_MODEL_LEN = 1024
TURN_SECONDS = 2.0  # of each: steps that follow each other, as in generation, not ones in the other's wake
FLOORS = {1: 10.0, 8: 5.0}
PREFILL_FLOOR = 2.0
_SIZES = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "moe_intermediate_size": 192,
    "num_attention_heads": 8,
    "head_dim": 64,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "n_routed_experts": 16,
}
_PEAK = """
import sys
{body}
from deepinfer.peak_memory import peak_memory_bytes
print(peak_memory_bytes())
"""
_OURS = """
from deepinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], num_threads=1)
params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
llm.generate([list(range(3, 515))], params, use_tqdm=False)
"""
_THEIRS = """
import torch
from transformers import DeepseekV4ForCausalLM
torch.set_num_threads(1)
options = {"dtype": torch.float32, "attn_implementation": "eager"}
model = DeepseekV4ForCausalLM.from_pretrained(sys.argv[1], **options).eval()
ids = torch.arange(3, 515)[None]
with torch.no_grad():
    model.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)
"""


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    config = json.loads((FOLDER / "tests/golden_data/v4-tiny/config.json").read_text()) | _SIZES
    model = TransformersModel.random(config, seed=1)
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as name:
        folder = Path(name)
        checkpoint = model.save(folder / "checkpoint", config)
        options = CompileConfig(
            precision="float32",
            decode_rows=REQUESTS,
            prefill_tokens=(PREFILL,),
            logits_rows=REQUESTS,
            max_num_seqs=max(REQUESTS),
            max_model_len=MAX_MODEL_LEN,
            taps="off",
        )
        compile_model(checkpoint, folder / "artifact", options, certify=False)
        loaded = load_artifact(folder / "artifact")
        torch.set_num_threads(threads)  # loading sets its own
        parameters = sum(parameter.numel() for parameter in model.model.parameters())
        label = f"DeepSeek-V4, {parameters / 1e6:.0f} M parameters, float32"
        lines = [_decode(loaded, model, requests, label) for requests in REQUESTS]
        lines.append(_prefill(loaded, model, label))
        if threads == 1:
            lines.append(_peaks(folder / "artifact", checkpoint, label))
        return lines


def _decode(loaded: LoadedArtifact, model: TransformersModel, requests: int, label: str) -> Line:
    prompts = torch.from_numpy(np.random.default_rng(1).integers(3, 4000, (requests, CONTEXT)))
    state: dict[str, Any] = {}

    def theirs() -> None:
        with torch.no_grad():
            if not state or state["length"] >= MAX_MODEL_LEN:
                output = model.model(prompts, use_cache=True)
                state.update(length=CONTEXT)
            else:
                output = model.model(state["ids"], past_key_values=state["cache"], use_cache=True)
            state.update(ids=output.logits[:, -1:].argmax(-1), cache=output.past_key_values)
            state["length"] += 1

    theirs()
    ours = Steps(loaded, requests)
    ours()
    result = compare({"ours": ours, "transformers": theirs}, rounds=7, min_seconds=TURN_SECONDS)
    return result.line(f"{label}: decode step of {requests}", "ours", "transformers", FLOORS[requests])


def _prefill(loaded: LoadedArtifact, model: TransformersModel, label: str) -> Line:
    prompt = np.random.default_rng(2).integers(3, 4000, PREFILL)
    ids = torch.from_numpy(prompt)[None]
    engine = Engine(loaded.runner)

    def ours() -> None:
        engine.add_request(prompt.tolist(), SamplingParams(max_tokens=1, temperature=0))
        while engine.has_work:
            engine.step()

    def theirs() -> None:
        with torch.no_grad():
            model.model(ids, use_cache=True, logits_to_keep=1)

    result = compare({"ours": ours, "transformers": theirs}, rounds=7)
    return result.line(f"{label}: prefill of {PREFILL} tokens", "ours", "transformers", PREFILL_FLOOR)


def _peaks(artifact: Path, checkpoint: Path, label: str) -> Line:
    ours, theirs = _peak(_OURS, artifact), _peak(_THEIRS, checkpoint)
    ratio = theirs / ours
    detail = f"ours {ours / 2**20:.0f} MiB, transformers {theirs / 2**20:.0f} MiB"
    return Line(f"{label}: peak memory of a process that generates", ratio, ratio, ratio, 1.0, detail)


def _peak(body: str, folder: Path) -> int:
    code = _PEAK.format(body=body)
    command = [sys.executable, "-P", "-c", code, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])
