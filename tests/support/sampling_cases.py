"""Arguments of the operations `sample` and `verify_drafts` from plain lists."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deepinfer.kernels.sampling import Arguments


def rows_of(logits: Any, **columns: Any) -> Arguments:
    """Arguments for these rows; a column may be one value for all. Unnamed: seed, position, temperature 1.

    history, bias: one dict per row, id to count or to bias. masks: one list of allowed ids per row, or None.
    """
    logits = torch.as_tensor(logits, dtype=torch.float32).contiguous()
    rows, vocab = logits.shape
    a = Arguments(
        logits=logits,
        seeds=_column(columns.pop("seeds", 1), rows, np.int64),
        positions=_column(columns.pop("positions", 1), rows, np.int64),
        temperatures=_column(columns.pop("temperatures", 1.0), rows, np.float64),
        top_k=_optional(columns, "top_k", rows, np.int64),
        top_p=_optional(columns, "top_p", rows, np.float64),
        min_p=_optional(columns, "min_p", rows, np.float64),
        penalties=torch.zeros(0, 3),
        **_lists("history", columns.pop("history", None), "history_counts", np.int64),
        **_lists("bias", columns.pop("bias", None), "bias", np.float32),
        masks=torch.zeros(0, 0, dtype=torch.int32),
        mask_index=torch.zeros(0, dtype=torch.int64),
    )
    if "penalties" in columns:
        penalties = np.broadcast_to(np.asarray(columns.pop("penalties"), np.float32), (rows, 3))
        a = a._replace(penalties=torch.from_numpy(penalties.copy()))
    if (allowed := columns.pop("allowed", None)) is not None:
        bits = [pack(ids, vocab) for ids in allowed if ids is not None]
        index = np.cumsum([ids is not None for ids in allowed]) - 1
        index[[ids is None for ids in allowed]] = -1
        a = a._replace(masks=torch.stack(bits), mask_index=torch.from_numpy(index))
    return a._replace(**columns)


def pack(ids: Sequence[int], vocab: int) -> torch.Tensor:
    """Mask that allows these ids."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return torch.from_numpy(np.packbits(bits, bitorder="little").view("<i4").astype(np.int32))


def _column(value: Any, rows: int, dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.broadcast_to(np.asarray(value, dtype=dtype), (rows,)).copy())


def _optional(columns: dict[str, Any], name: str, rows: int, dtype: Any) -> torch.Tensor:
    return (
        _column(columns.pop(name), rows, dtype) if name in columns else torch.from_numpy(np.zeros(0, dtype))
    )


def _lists(name: str, entries: Any, values: str, dtype: Any) -> dict[str, torch.Tensor]:
    entries_ = [] if entries is None else [sorted(row.items()) for row in entries]
    flat = [pair for row in entries_ for pair in row]
    offsets = [] if entries is None else np.cumsum([0] + [len(row) for row in entries_])
    return {
        f"{name}_offsets": torch.from_numpy(np.asarray(offsets, np.int64)),
        f"{name}_ids": torch.from_numpy(np.asarray([pair[0] for pair in flat], np.int64)),
        values: torch.from_numpy(np.asarray([pair[1] for pair in flat], dtype)),
    }
