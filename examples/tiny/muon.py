"""Muon: momentum whose update is made orthogonal, for the matrices of a model.

Every direction of a matrix moves equally far, which on a small text learns in about half the tokens that Adam
needs. Embeddings, tables, norms and mixing coefficients stay with Adam.
"""

import torch
from torch import Tensor

# coefficients of the quintic iteration that drives singular values towards 1
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


def orthogonal(matrix: Tensor) -> Tensor:
    """Return about the nearest semi-orthogonal matrix of every `[..., rows, columns]`, by Newton-Schulz."""
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if wide else matrix.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    x = x.reshape(shape)
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Parameters are matrices `[..., rows, columns]`; `lr` is the size of a step's singular values."""

    def __init__(
        self, params: list[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take one step with Nesterov momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(state["momentum"], group["momentum"])
                scale = max(1.0, parameter.shape[-2] / parameter.shape[-1]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(orthogonal(ahead), alpha=-group["lr"] * scale)
