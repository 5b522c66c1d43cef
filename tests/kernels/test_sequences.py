"""Whole-sequence forms against their definitions, with torch's own functions."""

import pytest
import torch

from deepinfer.kernels import training_library
from deepinfer.kernels.sequences import attend_sequences, index_scores, pool_groups, take_rows

LENGTH = 11


@pytest.fixture(autouse=True)
def without_the_library(monkeypatch):
    monkeypatch.setattr(training_library, "_loaded", False)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_attention_one_row_at_a_time():
    query, record, entries = drawn(0, 22, 2, 8), drawn(1, 22, 8), drawn(2, 2, 5, 8)
    sink, picks = drawn(3, 2), torch.full((22, 3), -1)
    picks[5, :2], picks[20] = torch.tensor([0, 4]), torch.tensor([1, 2, 3])
    output, mass = attend_sequences(query, record, entries, picks, sink, 0.4, 4, LENGTH)
    for row in range(22):
        sequence, position = divmod(row, LENGTH)
        window = list(range(max(0, position - 3), position + 1))
        keys = [record[sequence * LENGTH + at] for at in window]
        keys += [entries[sequence, pick] for pick in picks[row].tolist() if pick >= 0]
        logits = torch.cat((query[row] @ torch.stack(keys).T * 0.4, sink.unsqueeze(1)), dim=1)
        shares = logits.softmax(1)[:, :-1]
        torch.testing.assert_close(output[row], shares @ torch.stack(keys))
        assert mass[row].sum().item() == pytest.approx(shares.sum().item(), rel=1e-5)
        assert (mass[row] != 0).sum() == len(keys)


def test_groups_are_pooled_by_their_gates():
    value, gate = drawn(4, 12, 3), drawn(5, 12, 3)
    pooled = pool_groups(value, gate, 3, 6)
    for last in (2, 5, 8, 11):
        shares = gate[last - 2 : last + 1].softmax(0)
        torch.testing.assert_close(pooled[last], (shares * value[last - 2 : last + 1]).sum(0))


def test_index_scores_of_every_entry():
    query, weights, keys = drawn(6, 22, 3, 8), drawn(7, 22, 3), drawn(8, 2, 5, 8)
    scores = index_scores(query, weights, keys, 2, LENGTH)
    for row in range(22):
        expected = ((query[row] @ keys[row // LENGTH].T).relu() * weights[row].unsqueeze(1)).sum(0)
        torch.testing.assert_close(scores[row], expected)


def test_taken_rows_add_up_their_gradients():
    values = drawn(9, 4, 3).requires_grad_()
    take_rows(values, torch.tensor([[1, 1], [3, 1]])).sum().backward()
    assert values.grad[:, 0].tolist() == [0, 3, 0, 1]
