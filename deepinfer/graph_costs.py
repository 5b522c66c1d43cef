"""What a traced graph costs, read from its nodes: calls of operations, products per row, memory in between.

Counted are products of matrices and sums of products over weights, keys and streams, two operations for each
multiply and add. Norms, activations, softmax, rotations, gates and quantisers are not: they are a small part.
Nothing is run, and no value is looked at.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload

from deepinfer.graphs.cache_layout import BLOCK_TOKENS
from deepinfer.kernels import OPS
from deepinfer.kernels.packing import linear_outputs, scaled_outputs
from deepinfer.kernels.registry import NAMESPACE

Arguments = Mapping[str, Any]

# products outside the project's operations, which no formula here covers
_MATRIX_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum", "mv", "dot"})


@dataclass(frozen=True)
class Term:
    """Work of one row: `flops` times a number that depends on how many tokens the row sees, itself included.

    That number is 1; with `ratio`, the entries seen, tokens div ratio, at most `limit`; with `closing`, 1 for
    the rows that close a group of `ratio` tokens and 0 for others.
    """

    flops: int
    ratio: int = 0
    limit: int | None = None
    closing: bool = False

    def row(self, tokens: int) -> int:
        """Operations of the row that sees `tokens`."""
        if not self.ratio:
            return self.flops
        if self.closing:
            return self.flops * (tokens % self.ratio == 0)
        entries = tokens // self.ratio
        return self.flops * (entries if self.limit is None else min(entries, self.limit))

    def prompt(self, tokens: int) -> int:
        """Operations of all rows of a prompt of `tokens`: the sum of `row` from 1 on."""
        if not self.ratio:
            return self.flops * tokens
        if self.closing:
            return self.flops * (tokens // self.ratio)
        rising = tokens if self.limit is None else min(tokens, self.ratio * self.limit)
        full = rising // self.ratio
        entries = self.ratio * full * (full - 1) // 2 + full * (rising - full * self.ratio + 1)
        return self.flops * (entries + (tokens - rising) * (self.limit or 0))


def _linear(a: Arguments) -> list[Term]:
    return [Term(2 * a["x"].shape[-1] * linear_outputs(a["weight"]))]


def _linear_fp8(a: Arguments) -> list[Term]:
    _, groups, inputs = a["x"].shape
    return [Term(2 * groups * inputs * scaled_outputs(a["weight"]))]


def _linear_fp4(a: Arguments) -> list[Term]:
    return [Term(2 * a["expert_ids"].shape[1] * a["x"].shape[-1] * scaled_outputs(a["weight"]))]


def _moe_gate(a: Arguments) -> list[Term]:
    return [Term(2 * a["x"].shape[1] * linear_outputs(a["weight"]))]


def _expert(a: Arguments) -> int:
    """One expert: gate and up from the row, then down to its width again."""
    width, both = a["x"].shape[1], scaled_outputs(a["w13"])
    return 2 * width * both + 2 * (both // 2) * scaled_outputs(a["w2"])


def _moe_experts(a: Arguments) -> list[Term]:
    return [Term(a["expert_ids"].shape[1] * _expert(a))]


def _shared_expert(a: Arguments) -> list[Term]:
    return [Term(_expert(a))]


def _compress(a: Arguments) -> list[Term]:
    return [Term(2 * a["x"].shape[1] * (linear_outputs(a["wkv"]) + linear_outputs(a["wgate"])))]


def _index_key(a: Arguments) -> list[Term]:
    flops = 2 * a["latent"].shape[1] * linear_outputs(a["wk"])
    return [Term(flops, a["ratio"], closing=True)]


def _index_topk(a: Arguments) -> list[Term]:
    _, heads, dim = a["query"].shape
    blocks = a["candidates"].shape[1]
    # a product per head, then their weighted sum
    return [Term(2 * heads * (dim + 1), a["ratio"], blocks * a["candidate_block_size"] if blocks else None)]


def _sparse_attention(a: Arguments) -> list[Term]:
    _, heads, dim = a["query"].shape
    flops, picks = 4 * heads * dim, a["picks"].shape[1]  # a key is used as key and as value
    window = Term(flops, 1, a["window"])
    ratio = BLOCK_TOKENS // a["compressed"].shape[1]
    return [window, Term(flops, ratio, picks)] if picks else [window]


def _mhc_mix(a: Arguments) -> list[Term]:
    return [Term(2 * a["fn"].numel())]


def _mhc_collapse(a: Arguments) -> list[Term]:
    _, streams, width = a["residual"].shape
    return [Term(2 * streams * width)]


def _mhc_expand(a: Arguments) -> list[Term]:
    _, streams, width = a["residual"].shape
    return [Term(2 * streams * (streams + 1) * width)]


FORMULAS: dict[str, Callable[[Arguments], list[Term]]] = {
    "linear": _linear,
    "linear_fp8": _linear_fp8,
    "linear_fp4": _linear_fp4,
    "moe_gate": _moe_gate,
    "moe_hash_gate": _moe_gate,
    "moe_experts": _moe_experts,
    "shared_expert": _shared_expert,
    "compress": _compress,
    "compress_biased": _compress,
    "index_key": _index_key,
    "index_topk": _index_topk,
    "sparse_attention": _sparse_attention,
    "mhc_mix": _mhc_mix,
    "mhc_collapse": _mhc_collapse,
    "mhc_expand": _mhc_expand,
}

# operations with no product that counts, or that no step graph calls
WITHOUT_PRODUCTS = frozenset(
    {
        "rms_norm", "rope", "ring_write", "window_record", "engram_gate", "engram_gather", "engram_ids",
        "quantize_fp8", "dequantize_fp8", "quantize_fp4", "dequantize_fp4", "sample",
        "quantize_tail", "dequantize_tail", "hadamard", "verify_drafts",
    }
)  # fmt: skip

_COMPOSITE = frozenset(op.name for op in OPS if op.composite)


def operation(node: fx.Node) -> str | None:
    """Name of the project's operation that a node calls, or None."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or target.namespace != NAMESPACE:
        return None
    return target._schema.name.partition("::")[2]


def op_calls(graph: fx.Graph) -> dict[str, int]:
    """Calls of every operation of the project, by name."""
    return dict(sorted(Counter(name for node in graph.nodes if (name := operation(node))).items()))


def fusions(calls: Mapping[str, int]) -> int:
    """How many of the calls stand for several operations in one."""
    return sum(count for name, count in calls.items() if name in _COMPOSITE)


def row_terms(graph: fx.Graph) -> tuple[dict[str, list[Term]], dict[str, int]]:
    """Work of a row by operation, and calls that make products but have no formula here."""
    terms: dict[str, list[Term]] = {}
    unknown: Counter[str] = Counter()
    for node in graph.nodes:
        name = operation(node)
        if name in FORMULAS:
            terms.setdefault(name, []).extend(FORMULAS[name](_arguments(node)))
        elif name is not None and name not in WITHOUT_PRODUCTS:
            unknown[f"{NAMESPACE}.{name}"] += 1
        elif isinstance(node.target, OpOverload) and node.target.namespace == "aten":
            packet = node.target._schema.name.partition("::")[2]
            unknown[f"aten.{packet}"] += packet in _MATRIX_PRODUCTS
    return dict(sorted(terms.items())), dict(sorted((+unknown).items()))


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call by name; tensors as their fakes."""
    assert isinstance(node.target, OpOverload), node
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return {name: value.meta["val"] if isinstance(value, fx.Node) else value for name, value in given.items()}


def workspace_bytes(graph: fx.Graph) -> int:
    """Bytes of the largest set of values that are alive at once, in the order of the nodes.

    A value lives from its node to its last use, a result of the graph to the end; views share what they
    view. Inputs, weights and caches are no part of it, nor what an operation allocates inside. A compiler
    that fuses and reuses needs less.
    """
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    outside: set[int] = set()
    for index, node in enumerate(graph.nodes):
        for tensor in _tensors(node):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if node.op == "placeholder":
                outside.add(key)
            elif key not in outside:
                sizes[key] = storage.nbytes()
                first.setdefault(key, index)
                last[key] = index
        for source in node.all_input_nodes:
            for tensor in _tensors(source):
                last[tensor.untyped_storage()._cdata] = index
    change = [0] * (len(graph.nodes) + 1)
    for key, size in sizes.items():
        change[first[key]] += size
        change[last[key] + 1] -= size
    most = alive = 0
    for step in change:
        alive += step
        most = max(most, alive)
    return most


def _tensors(node: fx.Node) -> Iterator[Tensor]:
    value = node.meta.get("val")
    for item in value if isinstance(value, tuple | list) else (value,):
        if isinstance(item, Tensor):
            yield item
