"""Runs compiled graphs and the eager model side by side over the same steps, and measures the differences.

Each side advances its own caches; those of the compiled side start as NaN, so that nothing hides behind
zeros. Where a graph exports its residual streams, every sublayer and every cache record is measured as well:
the eager sublayer gets the compiled streams and caches as its input, so that a difference stays where it
arises. Decides nothing; `diff.py` turns the measurements into a verdict.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from deepinfer.artifacts import GraphEntry
from deepinfer.diff_steps import SEED, Chunk
from deepinfer.graphs.cache_layout import Region
from deepinfer.graphs.capture import residual_taps
from deepinfer.graphs.eager import EagerModel, pad_rows
from deepinfer.graphs.margins import MarginTap
from deepinfer.graphs.records import record_tail
from deepinfer.graphs.rows import StepInputs

GROUP_ROWS = 64
RECORD_PARTS = {
    "window": "window record",
    "compressed_kv": "compressed record",
    "index_key": "index key record",
    "open_group": "open group",
    "open_index_group": "open index group",
    "token_history": "token history",
}  # what a comparison calls the cache regions
QUANTIZED_PARTS = ("window record", "compressed record", "index key record")
_POISON = {"float32": float("nan"), "uint8": 0xFF, "int32": -1}  # 0xFF is NaN as E4M3 and as a scale


class Graph(Protocol):
    """Anything that runs like a compiled graph: static inputs, then cache regions that it mutates."""

    def run(self, inputs: list[Tensor]) -> Sequence[Tensor]: ...


@dataclass
class RowMeasures:
    """One entry per compared row of one graph."""

    positions: list[int] = field(default_factory=list)
    max_abs_errors: list[float] = field(default_factory=list)
    kls: list[float] = field(default_factory=list)
    top1_equal: list[bool] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    square_errors: list[float] = field(default_factory=list)
    variances: list[float] = field(default_factory=list)

    def add(self, positions: Sequence[int], compiled: Tensor, eager: Tensor, margins: Tensor) -> None:
        """Measure logits `[rows, vocab]` of both sides."""
        difference = compiled.double() - eager.double()
        expected = torch.log_softmax(eager.double(), dim=1)
        actual = torch.log_softmax(compiled.double(), dim=1)
        self.positions += positions
        self.max_abs_errors += difference.abs().amax(1).tolist()
        self.kls += (expected.exp() * (expected - actual)).sum(1).tolist()
        self.top1_equal += (compiled.argmax(1) == eager.argmax(1)).tolist()
        self.margins += margins.tolist()
        self.cosines += torch.cosine_similarity(compiled.double(), eager.double(), dim=1).tolist()
        self.square_errors += difference.pow(2).mean(1).tolist()
        self.variances += eager.double().var(1).tolist()


@dataclass
class Ratio:
    """Root mean square of differences over that of the expected values, in the worst group of rows.

    Groups have about `GROUP_ROWS` rows: few enough that rows which differ are not lost among many that do
    not, enough that a single value rounded the other way does not count as a difference.
    """

    groups: list[tuple[float, float]] = field(default_factory=list)  # squares: of differences, of values
    rows: int = 0  # in the last group

    def add(self, actual: Tensor, expected: Tensor) -> None:
        """Take in two tensors of one shape, rows first."""
        for part, wanted in zip(actual.split(GROUP_ROWS), expected.split(GROUP_ROWS), strict=True):
            wanted = wanted.double()
            squares = float((part.double() - wanted).pow(2).sum()), float(wanted.pow(2).sum())
            if not self.groups or self.rows >= GROUP_ROWS:
                self.groups.append(squares)
                self.rows = 0
            else:
                difference, size = self.groups[-1]
                self.groups[-1] = difference + squares[0], size + squares[1]
            self.rows += len(part)

    @property
    def value(self) -> float:
        """The ratio so far; infinite where something differs from zeros, NaN where anything is not finite."""
        groups = self.groups
        if len(groups) > 1 and self.rows < GROUP_ROWS:  # too few rows to judge alone
            (difference, size), (more, larger) = groups[-2:]
            groups = [*groups[:-2], (difference + more, size + larger)]
        ratios = [_ratio(*group) for group in groups]
        return math.nan if any(map(math.isnan, ratios)) else max(ratios, default=0.0)


def _ratio(difference: float, size: float) -> float:
    if size == 0:
        return 0.0 if difference == 0 else math.inf
    return (difference / size) ** 0.5


class SideBySide:
    """The two implementations of one model and the caches of each."""

    def __init__(
        self,
        graphs: Mapping[str, Graph],
        regions: Mapping[str, Tensor],
        entries: Sequence[GraphEntry],
        eager: EagerModel,
        margin: float,
    ) -> None:
        """`regions` are the compiled side's caches in layout order; `margin` excludes rows from sublayers."""
        self.graphs, self.regions, self.entries, self.eager, self.margin = (
            graphs,
            regions,
            entries,
            eager,
            margin,
        )
        self.rows: dict[str, RowMeasures] = {entry.name: RowMeasures() for entry in entries}
        self.windows: dict[int, Ratio] = {layer: Ratio() for layer in range(eager.config.num_hidden_layers)}
        self.sublayers: dict[tuple[str, int, str], Ratio] = {}
        self._places: list[tuple[int, list[int]]] = []  # slot and blocks of every request
        self._random = random.Random(SEED)
        self._poison([0], [0])
        self._biases = {
            layer: eager.weights[f"layers.{layer}.ffn.gate.bias"]
            for layer in range(eager.config.num_hidden_layers)
            if not eager.config.is_hash_routed(layer)
        }
        self._taught: EagerModel | None = None
        if any(entry.taps for entry in entries):
            self._taught = EagerModel(eager.config, eager.precision, eager.weights, eager.layout)

    def begin(self, lengths: Sequence[int]) -> None:
        """Forget all requests and give a slot and blocks to new ones, of at most `lengths` tokens each.

        Places are drawn in no order, as in a server that has run for a while, so that a slot or a block is
        found through the inputs or not at all.
        """
        layout = self.eager.layout
        needed = [-(-length // layout.block_tokens) for length in lengths]
        slots = self._random.sample(range(1, layout.num_slots), len(lengths))
        blocks = self._random.sample(range(1, layout.num_blocks), sum(needed))
        self._poison(slots, blocks)
        self._places = []
        for slot, count in zip(slots, needed, strict=True):
            self._places.append((slot, blocks[:count]))
            blocks = blocks[count:]

    def _poison(self, slots: list[int], blocks: list[int]) -> None:
        """Fill the compiled side's records with what no result survives, until a graph writes them."""
        for region in self.eager.layout.regions:
            ids = slots if region.kind == "state" else blocks
            self.regions[region.name][ids] = _POISON[region.dtype]

    def step(self, entry: GraphEntry, chunks: Sequence[Chunk]) -> None:
        """Run one step of prefill or decode on both sides and measure its rows."""
        inputs = self.step_inputs(chunks)
        num_rows = inputs.positions.shape[0]
        if self._taught is not None and entry.taps:
            self._copy_caches(self._taught.caches, inputs)
        outputs = self.graphs[entry.name].run([*self._padded(entry, inputs), *self.regions.values()])
        margins = MarginTap(self.eager.config, self._biases)
        hidden = self.eager.step(entry.phase, inputs, margins)  # type: ignore[arg-type]
        narrowest = self._narrowest(margins, num_rows)
        compiled_logits = self.compiled_logits(outputs[0][:num_rows])
        positions = inputs.positions.tolist()
        self.rows[entry.name].add(positions, compiled_logits, self.eager.logits(hidden), narrowest)
        if self._taught is not None and entry.taps:
            self._teach(entry, inputs, outputs)
        else:
            clear = narrowest >= self.margin
            self._compare_windows(self.eager.caches, inputs, clear)

    def compiled_logits(self, hidden: Tensor) -> Tensor:
        """Return logits of hidden rows `[n, D]` from the compiled head, in pieces of its smallest bucket."""
        entry = min(
            (entry for entry in self.entries if entry.phase == "logits"), key=lambda entry: entry.bucket
        )
        return torch.cat([self._head(entry, piece) for piece in hidden.split(entry.bucket)])

    def compare_heads(self, hidden: Tensor) -> None:
        """Measure every logits graph on the same hidden rows `[n, D]` as the eager head."""
        for entry in self.entries:
            if entry.phase == "logits":
                for piece in hidden.split(entry.bucket):
                    far = torch.full((len(piece),), torch.inf)
                    indices = list(range(len(piece)))
                    self.rows[entry.name].add(
                        indices, self._head(entry, piece), self.eager.logits(piece), far
                    )

    def _head(self, entry: GraphEntry, hidden: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(hidden, (0, 0, 0, entry.bucket - len(hidden)))
        return self.graphs[entry.name].run([padded.contiguous()])[0][: len(hidden)]

    def step_inputs(self, chunks: Sequence[Chunk]) -> StepInputs:
        """Return the inputs of a step without padding: a line per chunk, its rows one after another."""
        places = [self._places[chunk.request] for chunk in chunks]
        width = self.eager.layout.max_blocks_per_request
        counts = torch.tensor([len(chunk.token_ids) for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        lines = torch.arange(len(chunks)).repeat_interleave(counts)
        row_starts = counts.cumsum(0) - counts
        return StepInputs(
            token_ids=torch.tensor([token for chunk in chunks for token in chunk.token_ids]),
            positions=torch.arange(len(lines)) - row_starts[lines] + starts[lines],
            request_index=lines,
            block_table=torch.tensor([blocks + [0] * (width - len(blocks)) for _, blocks in places]),
            slot_ids=torch.tensor([slot for slot, _ in places]),
            num_computed_tokens=starts,
            row_starts=row_starts,
            row_counts=counts,
        )

    @staticmethod
    def _padded(entry: GraphEntry, inputs: StepInputs) -> StepInputs:
        padded = pad_rows(inputs, entry.bucket - inputs.positions.shape[0], pad_table=entry.phase == "decode")
        missing = entry.request_rows - padded.slot_ids.shape[0]
        pad = torch.nn.functional.pad
        return padded._replace(
            block_table=pad(padded.block_table, (0, 0, 0, missing)),
            slot_ids=pad(padded.slot_ids, (0, missing)),
            num_computed_tokens=pad(padded.num_computed_tokens, (0, missing)),
            row_starts=pad(padded.row_starts, (0, missing)),
            row_counts=pad(padded.row_counts, (0, missing)),
        )

    @staticmethod
    def _narrowest(margins: MarginTap, num_rows: int) -> Tensor:
        assert margins.smallest is not None  # every layer has a router
        return margins.smallest[:num_rows]

    def _copy_caches(self, target: Mapping[str, Tensor], inputs: StepInputs) -> None:
        """Give `target` the compiled side's state of the step's requests."""
        for region in self.eager.layout.regions:
            ids = inputs.block_table.flatten() if region.kind == "paged" else inputs.slot_ids
            target[region.name][ids] = self.regions[region.name][ids]

    def _teach(self, entry: GraphEntry, inputs: StepInputs, outputs: Sequence[Tensor]) -> None:
        """Run the eager model on the compiled streams and measure what each sublayer makes of them."""
        assert self._taught is not None
        config, num_rows = self.eager.config, inputs.positions.shape[0]
        compiled = dict(zip(residual_taps(config), outputs[1:], strict=True))
        margins = MarginTap(config, self._biases)

        def compare(layer: int, name: str, value: Tensor) -> Tensor:
            margins(layer, name, value)
            if (layer, name) not in compiled:
                return value
            self._measure(entry.name, layer, name, compiled[layer, name], value, margins, num_rows)
            return torch.cat((compiled[layer, name][:num_rows], value[num_rows:]))

        hidden = self._taught.step(entry.phase, inputs, compare)  # type: ignore[arg-type]
        last = config.num_hidden_layers - 1
        self._measure(entry.name, last, "final norm", outputs[0], hidden, margins, num_rows)
        clear = self._narrowest(margins, num_rows) >= self.margin
        self._compare_windows(self._taught.caches, inputs, clear)
        self._compare_records(entry.name, self._taught.caches, inputs, clear)

    def _measure(
        self,
        graph: str,
        layer: int,
        part: str,
        compiled: Tensor,
        eager: Tensor,
        margins: MarginTap,
        num_rows: int,
    ) -> None:
        clear = torch.ones(num_rows, dtype=torch.bool)
        if margins.smallest is not None:
            clear = margins.smallest[:num_rows] >= self.margin
        ratio = self.sublayers.setdefault((graph, layer, part), Ratio())
        ratio.add(compiled[:num_rows][clear], eager[:num_rows][clear])

    def _compare_windows(self, expected: Mapping[str, Tensor], inputs: StepInputs, clear: Tensor) -> None:
        """Measure the window records that the step wrote, layer by layer, on the rows that are `clear`."""
        decode = self._decoders()["window"]
        for layer, ratio in self.windows.items():
            region = self.eager.layout.region(f"layers.{layer}.window")
            self._add_records(ratio, region, decode, expected, inputs, clear)

    def _decoders(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """What makes vectors of records, by kind of region."""
        precision = self.eager.precision
        tail = record_tail(self.eager.config, precision)
        return {
            "window": partial(precision.window_vector, tail=tail),
            "compressed_kv": partial(precision.compressed_vector, tail=tail),
            "index_key": precision.index_key_vector,
        }

    def _compare_records(
        self, graph: str, expected: Mapping[str, Tensor], inputs: StepInputs, clear: Tensor
    ) -> None:
        """Measure the records of every kind that the step wrote, as parts of their layers.

        Some are read in a later step alone, and then by both sides: no stream would show what is wrong.
        """
        decoders = self._decoders()
        for region in self.eager.layout.regions:
            *_, layer, kind = ("0", *region.name.split(".")[-2:])
            ratio = self.sublayers.setdefault((graph, int(layer), RECORD_PARTS[kind]), Ratio())
            self._add_records(ratio, region, decoders.get(kind, _as_it_is), expected, inputs, clear)

    def _add_records(
        self,
        ratio: Ratio,
        region: Region,
        decode: Callable[[Tensor], Tensor],
        expected: Mapping[str, Tensor],
        inputs: StepInputs,
        clear: Tensor,
    ) -> None:
        """Measure what the step wrote to one region, on the rows that are `clear`."""
        positions, lines = inputs.positions, inputs.request_index
        if region.kind == "state":  # of a long chunk only the last rows remain
            ends = (inputs.num_computed_tokens + inputs.row_counts)[lines]
            kept = clear & (positions >= ends - region.entries)
            places = inputs.slot_ids[lines[kept]]
            entries = positions[kept] % region.entries
        else:
            kept = clear & ((positions + 1) % region.tokens_per_entry == 0)
            entries = positions[kept] // region.tokens_per_entry
            places = inputs.block_table[lines[kept], entries // region.entries]
            entries = entries % region.entries
        actual = self.regions[region.name][places, entries]
        ratio.add(decode(actual), decode(expected[region.name][places, entries]))


def _as_it_is(record: Tensor) -> Tensor:
    return record
