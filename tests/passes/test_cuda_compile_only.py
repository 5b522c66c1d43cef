"""The compile-only target: what it replaces is known to the letter, another torch is refused by name."""

import importlib.util

import pytest
import torch

from deepinfer.errors import LoweringError
from deepinfer.passes import cuda_target
from deepinfer.passes.cuda_target import CARDS, KNOWN, check_builder, check_torch, source_digest
from deepinfer.target import TARGETS

PLACE = "torch.cuda:get_device_properties"
pinned = pytest.mark.skipif(
    torch.__version__.partition("+")[0] != cuda_target.TORCH_RELEASE, reason="written for another torch"
)
without_cuda = pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA")


@pinned
def test_everything_that_is_replaced_or_relied_upon_is_what_was_recorded():
    assert {place: source_digest(place) for place in KNOWN} == KNOWN


@pinned
def test_nothing_is_replaced_that_is_not_recorded(monkeypatch):
    monkeypatch.setattr(cuda_target, "_remembered_accesses", lambda: None)  # its parts need Triton
    assert set(cuda_target._replacements(CARDS["sm_90"], "sm_90", {}, {})) <= set(KNOWN)


def test_another_source_is_refused_with_its_place_and_the_way_out():
    with pytest.raises(
        LoweringError, match=r"has another form of torch\.cuda:get_device_properties"
    ) as caught:
        check_torch({PLACE: "0" * 16})
    assert "constraints-cuda.txt" in str(caught.value) and torch.__version__ in str(caught.value)


@pytest.mark.parametrize("place", ["torch.cuda:no_such_name", "torch.no_such_module:name", "torch:float32"])
def test_a_missing_function_is_refused_with_its_place(place):
    assert source_digest(place) is None
    with pytest.raises(LoweringError, match=f"does not have {place}"):
        check_torch({place: "0" * 16})


def test_every_target_of_a_card_has_one():
    assert set(CARDS) == {target.arch for target in TARGETS.values() if target.kind == "cuda"}
    assert {name: card.capability for name, card in CARDS.items()} == {"sm_90": (9, 0), "sm_100": (10, 0)}


@without_cuda
def test_a_torch_without_cuda_is_refused_before_anything_is_replaced(tmp_path):
    original = torch.cuda.get_device_properties
    with pytest.raises(LoweringError, match="built without CUDA .*constraints-cuda.txt"):
        check_builder()
    with (
        pytest.raises(LoweringError, match="built without CUDA"),
        cuda_target.compile_only("sm_90", {}, tmp_path),
    ):
        pytest.fail("the block was entered")
    assert torch.cuda.get_device_properties is original


def test_a_missing_triton_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoweringError, match="Triton is not installed"):
        check_builder()
