"""The rows of one step: who they belong to, where they stand, where their state lives.

A step is a ragged batch of rows. A row is one token position of one request; rows of a request follow each
other in position order. Padding rows (position -1) read and write only block 0 and slot 0, which nobody owns.
"""

from typing import Literal, NamedTuple

from torch import Tensor

PhaseName = Literal["prefill", "decode"]


class StepInputs(NamedTuple):
    """Inputs of prefill and decode, all int64; T rows, R lines of the request table (decode: R == T).

    `request_index` names a row's line. `num_computed_tokens` is the position of the request's first row in
    this step, `row_starts` that row's index, `row_counts` how many rows it has (0: the line is unused).
    """

    token_ids: Tensor  # [T]
    positions: Tensor  # [T], -1 marks padding
    request_index: Tensor  # [T]
    block_table: Tensor  # [R, max_blocks_per_request], 0 where there is no block
    slot_ids: Tensor  # [R]
    num_computed_tokens: Tensor  # [R]
    row_starts: Tensor  # [R]
    row_counts: Tensor  # [R]
