"""The golden model's weights, loaded once, and models over them with caches of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
from golden import Golden
from graph_steps import make_model
from torch import Tensor

from deepinfer.graphs.checkpoint import Checkpoint
from deepinfer.graphs.config import ModelConfig, load_config
from deepinfer.graphs.eager import EagerModel
from deepinfer.graphs.store import build_store

MAX_MODEL_LEN = 256


@pytest.fixture(scope="session")
def golden(golden_dir: Path) -> Golden:
    """The reference results of the tiny model."""
    return Golden(golden_dir)


@pytest.fixture(scope="session")
def config(golden_dir: Path) -> ModelConfig:
    """The tiny model's configuration."""
    return load_config(golden_dir)


@pytest.fixture(scope="session")
def weights(golden_dir: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The tiny model's store; tests must not write to it."""
    return build_store(Checkpoint(golden_dir, config), config, MAX_MODEL_LEN)


@pytest.fixture(scope="session")
def new_model(config: ModelConfig, weights: dict[str, Tensor]) -> Callable[..., EagerModel]:
    """A function that returns a tiny model with fresh caches: `new_model(precision, max_num_seqs=2)`."""

    def make(*args, **settings) -> EagerModel:
        return make_model(config, weights, *args, **settings)

    return make
