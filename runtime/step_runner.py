"""The runner that serves an artifact: on the CPU as it was loaded, on a card by captured graphs."""

import torch

from deepinfer.errors import ResourceError
from deepinfer.runtime.cuda_device import CudaDevice
from deepinfer.runtime.cuda_runner import CudaModelRunner, HostLogits
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.loader import LoadedArtifact
from deepinfer.runtime.model_runner import CpuModelRunner


def step_runner(loaded: LoadedArtifact, limits: Limits) -> CpuModelRunner | HostLogits:
    """What an engine runs the artifact with, for the sizes of `limits`.

    On a card every graph is captured now, so that no step captures; logits come to the host, where tokens are
    drawn. Raises ResourceError if the card's memory is short.
    """
    if loaded.manifest.target.device == "cpu":
        loaded.runner.limits = limits
        return loaded.runner
    device = CudaDevice()
    try:
        runner = CudaModelRunner(
            limits, loaded.graphs, loaded.arenas, device, identity=loaded.artifact_id, capture_all=True
        )
        return HostLogits(runner, device)
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            "the card's memory does not hold what the graphs work in, besides weights and caches",
            where=loaded.artifact_id,
            action="build the artifact with smaller prefill_tokens, max_model_len or max_num_seqs",
        ) from error
