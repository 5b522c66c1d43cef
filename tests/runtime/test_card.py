"""A graph on a device called from the host: nothing is shared, what may be written comes back."""

import torch

from deepinfer.runtime.card import HostGraph, card_architecture


class Doubling:
    """Writes twice its first input to every other one, in place, and returns their sum."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.seen = inputs
        for tensor in inputs[1:]:
            tensor.copy_(2 * inputs[0])
        return [sum(inputs[1:], torch.zeros_like(inputs[0]))]


def test_written_inputs_come_back_and_others_do_not() -> None:
    rows, first, second = torch.arange(3.0), torch.zeros(3), torch.zeros(3)
    (total,) = HostGraph(Doubling(), torch.device("cpu"), written=[1]).run([rows, first, second])
    assert total.tolist() == [0, 4, 8] and rows.tolist() == [0, 1, 2]
    assert first.tolist() == [0, 2, 4] and second.tolist() == [0, 0, 0]


def test_inputs_keep_their_strides_in_memory_of_their_own() -> None:
    arena = torch.zeros(40)
    region = torch.as_strided(arena, (3,), (13,), 1)
    graph = Doubling()
    HostGraph(graph, torch.device("cpu"), written=[1]).run([torch.arange(3.0), region])
    (there,) = graph.seen[1:]
    assert there.stride() == (13,) and there.storage_offset() == 0
    assert arena.nonzero().flatten().tolist() == [14, 27] and region.tolist() == [0, 2, 4]


def test_without_a_card_there_is_no_architecture(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert card_architecture() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    assert card_architecture() == "sm_103"
