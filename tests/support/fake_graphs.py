"""Compiled graphs' stand-ins for tests of the runtime: a tiny model that distrusts its inputs.

Its state is a running hash of all tokens so far, kept in real cache regions: a ring per slot and records in
blocks. Every call checks the step contract and reads back every earlier position, so a wrong slot, block,
position or row shows as an AssertionError or as other tokens than `expected_tokens`, which uses no caches.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer.artifacts.schema import CacheLayout, CacheRegion
from deepinfer.runtime import sampler
from deepinfer.runtime.caches import CacheArenas
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.model_runner import CpuModelRunner
from deepinfer.runtime.sampling_params import SamplingParams

VOCAB = 50
EOS = 1
IMAGE = 49
RING = 6
BLOCK_TOKENS = 8
HIDDEN = 3
START = 12345
MODULUS = 2**31 - 1
POISON = 11  # a token after which every logit is NaN, if the model has one


def next_hash(state: int, token: int, position: int) -> int:
    """State after one more token."""
    return (state * 48271 + token * 7919 + position + 1) % MODULUS


def logits_of_states(states: np.ndarray) -> np.ndarray:
    """float32 logits [N, VOCAB] of int64 states [N]."""
    column = np.arange(VOCAB, dtype=np.int64)
    mixed = (states[:, None] % 1_000_003 * (2 * column + 3) + column * column * 31) % 10_007
    return (mixed / 10_007 * 8).astype(np.float32)


def expected_tokens(
    prompt: Sequence[int], params: SamplingParams, seed: int, eos_token_ids: tuple[int, ...] = (EOS,)
) -> list[int]:
    """What a request must give, whatever it runs with."""
    state, tokens = START, list(prompt)
    for position, token in enumerate(prompt):
        state = next_hash(state, token, position)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    while True:
        logits = torch.from_numpy(logits_of_states(np.array([state])))
        token = int(sampler.sample(logits, [params], [len(tokens)], [seed]).token_ids[0])
        state = next_hash(state, token, len(tokens))
        tokens.append(token)
        if token in stops or len(tokens) - len(prompt) == params.max_tokens:
            return tokens[len(prompt) :]


class FakeStepGraph:
    """Stands for one prefill or decode graph."""

    def __init__(self, phase: str, bucket: int, limits: Limits, poison: int | None) -> None:
        self.phase, self.bucket, self.limits, self.poison = phase, bucket, limits, poison
        self.calls = 0

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        self.calls += 1
        arrays = [tensor.numpy() for tensor in inputs]
        tokens, positions, lines, tables, slots, computed, starts, counts = arrays[:8]
        window, records, history = arrays[8:]
        self._check_padding(tokens, positions, lines, tables, slots, computed, starts, counts)
        hidden = np.full((self.bucket, HIDDEN), np.nan, np.float32)
        covered = np.zeros(self.bucket, bool)
        for line in np.flatnonzero(counts):
            first, count, begin = int(starts[line]), int(counts[line]), int(computed[line])
            rows = range(first, first + count)
            assert not covered[first : first + count].any(), "two requests share a row"
            covered[first : first + count] = True
            assert (lines[first : first + count] == line).all()
            assert (positions[first : first + count] == np.arange(begin, begin + count)).all()
            state = self._read(tables[line], slots[line], begin, window, records)
            for row in rows:
                position, token = int(positions[row]), int(tokens[row])
                state = next_hash(state, token, position)
                entry = (position + 1, state)
                window[slots[line], position % RING] = entry
                history[slots[line], position % history.shape[1]] = token
                records[tables[line][position // BLOCK_TOKENS], position % BLOCK_TOKENS] = entry
                hidden[row] = (state >> 16, state & 0xFFFF, 1 if token == self.poison else 0)
        assert (covered == (positions >= 0)).all(), "rows and table disagree"
        window[0], records[0], history[0] = -7, -7, -7  # where padding rows may write
        return [torch.from_numpy(hidden)]

    def _check_padding(self, tokens, positions, lines, tables, slots, computed, starts, counts) -> None:
        padding = positions < 0
        assert tokens.shape == positions.shape == lines.shape == (self.bucket,)
        assert (positions[padding] == -1).all() and (tokens[padding] == 0).all()
        used = counts > 0
        for array in (slots, computed, starts, tables):
            assert not array[~used].any(), "an unused line is not empty"
        assert len(set(slots[used])) == used.sum() and (slots[used] > 0).all()
        blocks = tables[tables > 0]
        written = [
            tables[line][position // BLOCK_TOKENS]
            for line, position in zip(lines[~padding], positions[~padding], strict=True)
        ]
        for block in set(written):
            assert (blocks == block).sum() == 1, "a block that is written is shared"
        if self.phase == "decode":
            assert (lines == np.arange(self.bucket)).all() and (counts <= 1).all()
        else:
            assert (lines[padding] == 0).all()

    def _read(self, table, slot, begin, window, records) -> int:
        """The state after position begin - 1, from the ring; every record in the blocks must agree."""
        if begin == 0:
            return START
        position, state = window[slot, (begin - 1) % RING]
        assert position == begin, f"ring of slot {slot} holds position {position - 1}, not {begin - 1}"
        for earlier in range(begin):
            found = records[table[earlier // BLOCK_TOKENS], earlier % BLOCK_TOKENS]
            assert found[0] == earlier + 1, f"block record of position {earlier} is {found}"
        assert found[1] == state
        return int(state)


class FakeLogitsGraph:
    """Stands for one logits graph."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.calls = 0

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        self.calls += 1
        (hidden,) = (tensor.numpy() for tensor in inputs)
        assert hidden.shape == (self.bucket, HIDDEN) and not np.isnan(hidden).any(), (
            "a padding row was sampled"
        )
        states = hidden[:, 0].astype(np.int64) * 65536 + hidden[:, 1].astype(np.int64)
        logits = logits_of_states(states)
        logits[hidden[:, 2] > 0] = np.nan
        return [torch.from_numpy(logits)]


def fake_limits(
    *,
    prefill_buckets: tuple[int, ...] = (4, 16),
    decode_buckets: tuple[int, ...] = (1, 4),
    logits_buckets: tuple[int, ...] = (1, 2),
    max_model_len: int = 64,
    num_blocks: int = 33,
    num_slots: int = 5,
    vocab_size: int = VOCAB,
) -> Limits:
    """Small sizes at which every boundary is met within a few steps."""
    return Limits(
        prefill_buckets=prefill_buckets,
        decode_buckets=decode_buckets,
        logits_buckets=logits_buckets,
        prefill_table_size=2,
        max_model_len=max_model_len,
        block_tokens=BLOCK_TOKENS,
        max_blocks_per_request=-(-max_model_len // BLOCK_TOKENS),
        num_blocks=num_blocks,
        num_slots=num_slots,
        vocab_size=vocab_size,
        eos_token_ids=(EOS,),
        image_token_id=IMAGE,
    )


def fake_cache_layout(limits: Limits) -> CacheLayout:
    """Ring and history in the slot, records in the block, with gaps between and after them."""
    slot = RING * 2 * 4 + 16
    regions = (
        CacheRegion(
            name="layers.0.window",
            kind="state",
            offset_bytes=0,
            entries=RING,
            record_shape=(2,),
            dtype="int32",
        ),
        CacheRegion(
            name="layers.0.compressed_kv",
            kind="paged",
            offset_bytes=8,
            entries=BLOCK_TOKENS,
            record_shape=(2,),
            dtype="int32",
        ),
        CacheRegion(
            name="token_history", kind="state", offset_bytes=slot, entries=4, record_shape=(1,), dtype="int32"
        ),
    )
    return CacheLayout(
        block_tokens=BLOCK_TOKENS,
        block_bytes=BLOCK_TOKENS * 8 + 24,
        num_blocks=limits.num_blocks,
        slot_bytes=slot + 32,
        num_slots=limits.num_slots,
        max_blocks_per_request=limits.max_blocks_per_request,
        regions=regions,
    )


def fake_runner(limits: Limits | None = None, poison: int | None = None) -> CpuModelRunner:
    """The real runner over real arenas and the graphs above. Fresh memory is filled with junk."""
    limits = limits or fake_limits()
    arenas = CacheArenas.allocate(fake_cache_layout(limits))
    arenas.blocks.fill_(0x5A)
    arenas.slots.fill_(0x5A)
    graphs: dict[str, FakeStepGraph | FakeLogitsGraph] = {}
    for phase, buckets in (("prefill", limits.prefill_buckets), ("decode", limits.decode_buckets)):
        graphs |= {f"{phase}-{bucket}": FakeStepGraph(phase, bucket, limits, poison) for bucket in buckets}
    graphs |= {f"logits-{bucket}": FakeLogitsGraph(bucket) for bucket in limits.logits_buckets}
    return CpuModelRunner(limits, graphs, arenas.regions, arenas=arenas)
