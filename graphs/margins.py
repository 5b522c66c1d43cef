"""Decision margins: how narrowly a row's discrete choices were made in an eager step.

Two computations that differ in the last bits may choose otherwise where a margin is tiny; such a row says
nothing about a compiled graph. A margin is the gap between the last chosen and the first rejected score,
divided by the standard deviation of the competing scores of that row. An exact tie is no narrow margin: the
tie rule decides it, in every implementation.
"""

import torch
from torch import Tensor

from deepinfer.graphs.config import ModelConfig


class MarginTap:
    """A tap that keeps the smallest margin of every row over all layers of a step, in `smallest [T]`."""

    def __init__(self, config: ModelConfig, router_biases: dict[int, Tensor]) -> None:
        self._config, self._biases = config, router_biases
        self.smallest: Tensor | None = None

    def __call__(self, layer: int, name: str, value: Tensor) -> Tensor:
        config = self._config
        if name == "index_score":
            self._keep(margin(value, config.index_topk))
            if layer == config.candidate_source_layer_id:
                self._keep(
                    margin(
                        _older_blocks(value, config.candidate_block_size), config.candidate_topk_blocks - 1
                    )
                )
        elif name == "router_logits" and layer in self._biases:  # else no score decides
            scores = torch.nn.functional.softplus(value).sqrt() + self._biases[layer]
            self._keep(margin(scores, config.num_experts_per_tok))
        return value

    def _keep(self, margins: Tensor) -> None:
        self.smallest = margins if self.smallest is None else torch.minimum(self.smallest, margins)


def margin(scores: Tensor, count: int) -> Tensor:
    """Return each row's margin `[T]` for picking `count` of `scores [T, n]`; inf where nothing is rejected.

    Scores at -inf do not compete.
    """
    if not 0 < count < scores.shape[1]:
        return torch.full((scores.shape[0],), torch.inf)
    scores = scores.double()  # squares of tiny scores must not vanish
    best = torch.sort(scores, dim=1, descending=True).values
    gap = best[:, count - 1] - best[:, count]
    competing = scores > -torch.inf
    number = competing.sum(1).clamp(min=1)
    mean = torch.where(competing, scores, 0).sum(1) / number
    spread = (torch.where(competing, scores - mean.unsqueeze(1), 0).pow(2).sum(1) / number).sqrt()
    rejected = best[:, count] > -torch.inf
    return torch.where(rejected & (gap > 0), gap / spread.clamp(min=1e-200), torch.inf).float()


def _older_blocks(scores: Tensor, block_size: int) -> Tensor:
    """Return the best score of every candidate block but a row's newest, which is kept in any case."""
    total = -(-scores.shape[1] // block_size)
    padded = torch.nn.functional.pad(scores, (0, total * block_size - scores.shape[1]), value=-torch.inf)
    blocks = padded.unflatten(1, (total, block_size)).amax(-1)
    newest = (blocks > -torch.inf).sum(1, keepdim=True) - 1
    return torch.where(torch.arange(total) == newest, -torch.inf, blocks)
