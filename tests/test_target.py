"""The names of targets and what they stand for."""

from pathlib import Path

import pytest
import torch

from deepinfer.compile import compile_model
from deepinfer.errors import LoweringError, SettingsError
from deepinfer.plan import plan_model
from deepinfer.settings import CompileConfig
from deepinfer.target import TARGETS, Target, parse_target


def test_every_name_stands_for_its_target() -> None:
    assert parse_target("cpu") == Target("cpu") and parse_target("cuda:sm_90") == Target("cuda", "sm_90")
    assert {name: target.name for name, target in TARGETS.items()} == {name: name for name in TARGETS}


def test_every_target_is_a_setting() -> None:
    assert [CompileConfig(target=name).target for name in TARGETS] == list(TARGETS)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "cuda", "cuda:sm_80", "CPU", "x" * 1000])
def test_an_unknown_target_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(SettingsError, match="one of cpu, cuda:sm_90, cuda:sm_100, given"):
        parse_target(name)
    with pytest.raises(SettingsError, match="one of cpu, cuda:sm_90, cuda:sm_100, given"):
        CompileConfig(target=name)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA")
@pytest.mark.parametrize("name", ["cuda:sm_90", "cuda:sm_100"])
def test_a_card_is_not_built_for_without_the_environment_for_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="built without CUDA .*constraints-cuda.txt"):
        compile_model(tmp_path, tmp_path / "out", CompileConfig(target=name))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_plan_of_a_card_is_refused(golden_dir: Path) -> None:
    with pytest.raises(SettingsError, match="not of cuda:sm_90"):
        plan_model(golden_dir, CompileConfig(target="cuda:sm_90"))
