"""transformers' DeepSeek-V4 behind the interface "ids in, scores out": a witness that we did not write."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

# what a release keeps in float32
_FLOAT32 = ("_hc", "hc_", "sinks", "position_bias", "correction_bias")


class TransformersModel:
    """`DeepseekV4ForCausalLM` in float32 with its plain attention."""

    def __init__(self, model: Any) -> None:
        self.model = model.float().eval()

    @classmethod
    def random(cls, config: dict[str, Any], seed: int) -> "TransformersModel":
        """Random weights, large enough that every part of the model matters to the logits."""
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

        torch.manual_seed(seed)
        model = DeepseekV4ForCausalLM._from_config(
            DeepseekV4Config(**copy.deepcopy(config)), attn_implementation="eager", dtype=torch.float32
        )
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                parameter.copy_(_drawn(name, parameter, draw))
            for name, buffer in sorted(model.named_buffers()):
                if name.endswith("tid2eid"):
                    buffer.copy_(_distinct_experts(buffer, config["n_routed_experts"], draw))
                elif name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn(buffer.shape, generator=draw) * 0.1)
        return cls(model)

    def save(self, directory: Path, config: dict[str, Any]) -> Path:
        """Write config and weights under transformers' own names, in the dtypes of a release."""
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        tensors = {name: _stored(name, tensor) for name, tensor in self.model.state_dict().items()}
        save_file(tensors, directory / "model.safetensors")
        return directory

    def scores(self, token_ids: Sequence[int]) -> np.ndarray:
        """Logits at every position, `[tokens, vocab]` float32."""
        with torch.no_grad():
            logits = self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return logits.float().numpy()

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow, with the model's own cache."""
        with torch.no_grad():
            output = self.model.generate(
                torch.tensor([list(token_ids)]),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        tokens: list[int] = output[0, len(token_ids) :].tolist()
        return tokens


def _drawn(name: str, parameter: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    noise = torch.randn(parameter.shape, generator=draw)
    if parameter.dim() == 1 or "hc_" in name or ".hc" in name or "scale" in name:
        centre = 1.0 if "norm" in name or "scale" in name else 0.0
        value = centre + 0.2 * noise
    else:
        value = noise / parameter.shape[-1] ** 0.5
    # what a checkpoint can hold: matrices and norms are bf16 there
    return value.bfloat16().float()


def _distinct_experts(buffer: torch.Tensor, experts: int, draw: torch.Generator) -> torch.Tensor:
    rows = [torch.randperm(experts, generator=draw)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
    return torch.stack(rows).to(buffer.dtype)


def _stored(name: str, tensor: torch.Tensor) -> torch.Tensor:
    whole = not tensor.is_floating_point() or any(part in name for part in _FLOAT32)
    return tensor.clone() if whole else tensor.bfloat16()
