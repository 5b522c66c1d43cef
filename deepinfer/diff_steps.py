"""Which steps a comparison runs: how prompts become chunks, batches and decode steps of an artifact's graphs.

Every graph is met in the shapes that serving gives it: whole and ragged chunks, several requests in one step,
chunks that go on inside an open group, full batches and padding rows, more than one block per request. Knows
nothing of tensors and judges nothing.
"""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from deepinfer.artifacts import GraphEntry, Manifest

DECODE_STEPS = 8
SEED = 20260401  # of everything drawn at random; any number serves, a fixed one makes reports comparable
_FILLER_TOKENS = 3  # length of the requests that only fill up the rows of a decode graph


class Chunk(NamedTuple):
    """Some rows of one request: its number, first position and tokens."""

    request: int
    start: int
    token_ids: list[int]


class Sides(Protocol):
    """What runs the steps: `begin` gives every request its place, `step` runs one step of one graph."""

    def begin(self, lengths: Sequence[int]) -> None: ...

    def step(self, entry: GraphEntry, chunks: Sequence[Chunk]) -> None: ...


def default_lengths(window: int, block_tokens: int, max_model_len: int) -> list[int]:
    """Return prompt lengths: one token, open and closed groups, around and beyond the window and a block."""
    longest = max(max_model_len - DECODE_STEPS, 1)
    lengths = (1, 2, 3, window - 1, window + 1, 2 * window + 8, max(4 * window, block_tokens + 12))
    return sorted({min(max(length, 1), longest) for length in lengths})


def run_steps(sides: Sides, manifest: Manifest, prompts: Sequence[list[int]]) -> Iterator[str]:
    """Run every prefill and decode graph over the prompts; yields the name of each when it is done."""
    prefills = [entry for entry in manifest.graphs if entry.phase == "prefill"]
    decodes = [entry for entry in manifest.graphs if entry.phase == "decode"]
    rng = random.Random(SEED)
    longest = max(prompts, key=len)
    for number in range(max(len(prefills), len(decodes))):
        prefill = prefills[number % len(prefills)]
        decode = decodes[number] if number < len(decodes) else None
        requests = list(prompts) + (_fillers(prompts, decode, manifest) if decode else [])
        for group in _groups(requests, manifest):
            sides.begin([min(len(prompt) + DECODE_STEPS, manifest.limits.max_model_len) for prompt in group])
            _ragged_prefill(sides, prefill, group, rng)
            if decode:
                _decode(sides, decode, group, manifest.limits.max_model_len, rng)
        if decode:
            yield decode.name
        if number < len(prefills):  # and once in whole chunks, alone
            sides.begin([len(longest)])
            for chunk in chunked(0, longest, prefill.bucket):
                sides.step(prefill, [chunk])
            yield prefill.name


def chunked(request: int, token_ids: list[int], size: int) -> Iterator[Chunk]:
    """Cut a request's tokens into chunks of at most `size`."""
    for start in range(0, len(token_ids), size):
        yield Chunk(request, start, token_ids[start : start + size])


def _fillers(prompts: Sequence[list[int]], decode: GraphEntry, manifest: Manifest) -> list[list[int]]:
    """Short requests that fill the rows of a decode graph, at least one request having room to decode."""
    limits = manifest.limits
    missing = min(decode.bucket, limits.max_num_seqs) - len(prompts)
    if all(len(prompt) == limits.max_model_len for prompt in prompts):
        missing = max(missing, 1)
    length = min(_FILLER_TOKENS, limits.max_model_len - 1)
    return [prompts[number % len(prompts)][:length] for number in range(missing)]


def _groups(requests: Sequence[list[int]], manifest: Manifest) -> Iterator[list[list[int]]]:
    """Split requests into groups that the slots and blocks of the artifact can hold at once."""
    group: list[list[int]] = []
    used = 0
    for prompt in requests:
        length = min(len(prompt) + DECODE_STEPS, manifest.limits.max_model_len)
        needed = -(-length // manifest.cache.block_tokens)
        full = len(group) == manifest.limits.max_num_seqs or used + needed > manifest.cache.num_blocks - 1
        if group and full:
            yield group
            group, used = [], 0
        group.append(prompt)
        used += needed
    yield group


def _ragged_prefill(sides: Sides, entry: GraphEntry, group: Sequence[list[int]], rng: random.Random) -> None:
    """Prefill the group in steps that several requests share, in chunks of uneven sizes."""
    done = [0] * len(group)
    while waiting := [number for number, prompt in enumerate(group) if done[number] < len(prompt)]:
        rng.shuffle(waiting)
        chunks, room = [], entry.bucket
        for number in waiting[: entry.request_rows]:
            left = min(len(group[number]) - done[number], room)
            if not left:
                break
            count = rng.choice((left, rng.randint(1, left)))
            chunks.append(Chunk(number, done[number], group[number][done[number] : done[number] + count]))
            done[number] += count
            room -= count
        sides.step(entry, chunks)


def _decode(
    sides: Sides, entry: GraphEntry, group: Sequence[list[int]], max_model_len: int, rng: random.Random
) -> None:
    """Decode the group's requests in batches of the graph's rows; every batch ends with a padding row."""
    vocabulary = sorted({token for prompt in group for token in prompt})
    numbers = list(range(len(group)))
    rng.shuffle(numbers)
    for first in range(0, len(numbers), entry.bucket):
        batch = numbers[first : first + entry.bucket]
        for step in range(DECODE_STEPS):
            lines = [number for number in batch if len(group[number]) + step < max_model_len]
            if step == DECODE_STEPS - 1 and len(lines) == entry.bucket > 1:
                lines.pop()
            if lines:
                chunks = [
                    Chunk(number, len(group[number]) + step, [rng.choice(vocabulary)]) for number in lines
                ]
                sides.step(entry, chunks)
