"""The static sizes of a compiled model: what the scheduler may plan and the runner has room for.

One frozen record, filled from the artifact's manifest and passed down; nothing else looks sizes up.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes and special tokens of one artifact. Bucket tuples are ascending and without repeats."""

    prefill_buckets: tuple[int, ...]  # token rows of one prefill step
    decode_buckets: tuple[int, ...]  # token rows, one per request, of one decode step
    logits_buckets: tuple[int, ...]  # hidden rows of one logits call
    prefill_table_size: int  # lines of the request table of a prefill step
    max_model_len: int  # prompt plus output tokens of one request
    block_tokens: int  # token positions of one cache block
    max_blocks_per_request: int  # width of a block table
    num_blocks: int  # cache blocks, with block 0 which nobody owns
    num_slots: int  # state slots, with slot 0 which nobody owns
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    image_token_id: int | None = None  # stands for image rows, so text prompts may not hold it

    def __post_init__(self) -> None:
        for buckets in (self.prefill_buckets, self.decode_buckets, self.logits_buckets):
            assert buckets and buckets[0] >= 1 and list(buckets) == sorted(set(buckets)), buckets
        assert min(self.prefill_table_size, self.block_tokens) >= 1, self
        assert self.max_blocks_per_request >= self.blocks_for(self.max_model_len), self
        assert self.num_blocks >= 2 and self.num_slots >= 2, self

    def blocks_for(self, num_tokens: int) -> int:
        """Cache blocks that hold positions 0 .. num_tokens - 1."""
        return -(-num_tokens // self.block_tokens)


def smallest_bucket(buckets: tuple[int, ...], rows: int) -> int:
    """The smallest bucket that holds `rows`; the caller has cut `rows` to the largest bucket."""
    return next(bucket for bucket in buckets if bucket >= rows)
