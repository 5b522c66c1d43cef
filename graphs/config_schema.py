"""The validated description of a model: fields of config.json as attributes, and what follows from them.

Owns the dataclasses and the layer schedule (which layer owns keys, which one picks entries). Each field
carries its own range, used by the parser. Knows nothing about files, tensors or JSON.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from deepinfer.graphs.generations import GENERATIONS, OVERLAPPING_RATIO, V41, Generation

QUANT_TILE = 32  # what scales of all kinds cover in the weight store and in records, whatever a file has

# Beyond any model of the family; they keep a hostile file from asking for absurd amounts of work.
_MAX_DIM = 2**24
_MAX_COUNT = 2**31 - 1


def _integer(minimum: int = 1, maximum: int = _MAX_DIM, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"kind": "int", "min": minimum, "max": maximum})


def _optional_integer(maximum: int = _MAX_COUNT) -> Any:
    return dataclasses.field(default=None, metadata={"kind": "optional_int", "min": 0, "max": maximum})


def _number(maximum: float = 1e12, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"kind": "float", "max": maximum})


def _integers(minimum: int = 0, maximum: int = _MAX_DIM, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"kind": "ints", "min": minimum, "max": maximum})


def _flag() -> Any:
    return dataclasses.field(metadata={"kind": "bool"})


def _given(default: Any) -> Any:
    """A field that the parser sets by itself, whatever keys a file has."""
    return dataclasses.field(default=default, metadata={"kind": "given"})


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the layers with a compressed cache (spec model.md 4)."""

    rope_type: str = dataclasses.field(metadata={"kind": "choice", "choices": ("yarn",)})
    factor: float = _number(1e6)
    beta_fast: float = _number(1e6)
    beta_slow: float = _number(1e6)
    original_max_position_embeddings: int = _integer(maximum=_MAX_COUNT)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One text model of the family; attribute names are the field names of config.json.

    Made by `deepinfer.graphs.config.load_config`, which also checks the rules between fields.
    `compress_ratios` holds the backbone's layers only. Groups that a file leaves out are switched
    off: candidate source -1, Engram layers empty.
    """

    model_type: str = _given(V41.model_type)
    # matrices are stored in FP8 and FP4 with scales; otherwise as they are, in bfloat16
    quantized_weights: bool = _given(True)

    vocab_size: int = _integer()
    hidden_size: int = _integer()
    num_hidden_layers: int = _integer(maximum=1024)
    max_position_embeddings: int = _integer(maximum=_MAX_COUNT)
    rms_norm_eps: float = _number(1.0)
    bos_token_id: int | None = _optional_integer()
    eos_token_ids: tuple[int, ...] = _integers(maximum=_MAX_COUNT, default=())
    pad_token_id: int | None = _optional_integer()
    image_token_id: int | None = _optional_integer()

    num_attention_heads: int = _integer(maximum=65536)
    head_dim: int = _integer(maximum=65536)
    qk_rope_head_dim: int = _integer(maximum=65536)
    q_lora_rank: int = _integer()
    o_lora_rank: int = _integer()
    o_groups: int = _integer(maximum=65536)
    rope_theta: float = _number()
    compress_rope_theta: float = _number()
    rope_scaling: RopeScaling = dataclasses.field(metadata={"kind": "rope"})

    n_routed_experts: int = _integer(maximum=65536)
    n_shared_experts: int = _integer(maximum=1)
    num_experts_per_tok: int = _integer(maximum=65536)
    moe_intermediate_size: int = _integer()
    norm_topk_prob: bool = _flag()
    routed_scaling_factor: float = _number(1e6)
    swiglu_limit: float = _number(1e6)
    num_hash_layers: int = _integer(minimum=0, maximum=1024, default=0)

    sliding_window: int = _integer()
    compress_ratios: tuple[int, ...] = _integers()
    kv_source_layer_ids: tuple[int, ...] = _integers()
    index_source_layer_ids: tuple[int, ...] = _integers()
    index_n_heads: int = _integer(maximum=65536)
    index_head_dim: int = _integer(maximum=65536)
    index_topk: int = _integer()
    candidate_source_layer_id: int = _integer(minimum=-1, default=-1)
    candidate_topk_blocks: int = _integer(minimum=0, default=0)
    candidate_block_size: int = _integer(minimum=0, default=0)

    hc_mult: int = _integer(maximum=64)
    hc_sinkhorn_iters: int = _integer(maximum=1000)
    hc_eps: float = _number(1.0)

    engram_layer_ids: tuple[int, ...] = _integers(default=())
    engram_num_embeddings: tuple[int, ...] = _integers(minimum=1, maximum=2**40, default=())
    engram_vocab_size: int = _integer(minimum=0, maximum=_MAX_COUNT, default=0)
    engram_max_ngram_size: int = _integer(maximum=16, default=1)
    engram_n_heads: int = _integer(minimum=0, maximum=64, default=0)
    engram_head_dim: int = _integer(minimum=0, maximum=65536, default=0)
    engram_pad_token_id: int = _integer(minimum=0, maximum=_MAX_COUNT, default=2)
    engram_compressed_vocab_size: int = _integer(minimum=0, maximum=_MAX_COUNT, default=0)

    num_nextn_predict_layers: int = _integer(minimum=0, maximum=64, default=0)
    dspark_target_layer_ids: tuple[int, ...] = _integers(default=())

    # Keys of the file that were skipped, for reports; they are no part of the model.
    ignored_keys: tuple[str, ...] = dataclasses.field(default=(), compare=False, metadata={"kind": "given"})

    @property
    def generation(self) -> Generation:
        """What this member of the family does in its own way."""
        return GENERATIONS[self.model_type]

    # ---- layer schedule (spec model.md 2) -------------------------------------------------------------

    def ratio(self, layer: int) -> int:
        """Tokens per compressed entry seen by `layer`; 0 = the window only."""
        return self.compress_ratios[layer]

    def kv_source(self, layer: int) -> int | None:
        """The layer whose compressed KV `layer` reads: the last source at or before it."""
        if self.ratio(layer) == 0:
            return None
        sources = [source for source in self.kv_source_layer_ids if source <= layer]
        return max(sources) if sources else None

    def index_source(self, layer: int) -> int | None:
        """The layer whose picked entries `layer` attends to: the last index source at or before it.

        None if that would pick from another layer's cache: then every visible entry is attended to.
        """
        if self.ratio(layer) == 0:
            return None
        sources = [source for source in self.index_source_layer_ids if source <= layer]
        if not sources or self.kv_source(max(sources)) != self.kv_source(layer):
            return None
        return max(sources)

    def is_kv_source(self, layer: int) -> bool:
        """Whether the layer compresses keys and owns their cache."""
        return layer in self.kv_source_layer_ids

    def is_index_source(self, layer: int) -> bool:
        """Whether the layer scores index keys and picks entries."""
        return layer in self.index_source_layer_ids

    def overlaps(self, layer: int) -> bool:
        """Whether an entry of the layer's compression also covers the window before its own."""
        return self.generation.biased_compression and self.ratio(layer) == OVERLAPPING_RATIO

    def is_hash_routed(self, layer: int) -> bool:
        """Whether the token alone decides which experts the layer uses."""
        return layer < self.num_hash_layers

    def is_candidate_source(self, layer: int) -> bool:
        """Whether the layer keeps the candidate blocks for the index sources after it."""
        return self.candidate_enabled and layer == self.candidate_source_layer_id

    def uses_candidate_mask(self, layer: int) -> bool:
        """Whether the layer picks entries among the candidate blocks only."""
        return (
            self.candidate_enabled and self.is_index_source(layer) and layer > self.candidate_source_layer_id
        )

    def has_engram(self, layer: int) -> bool:
        """Whether n-gram memory is added to the residual streams before this layer."""
        return layer in self.engram_layer_ids

    def engram_rows(self, layer: int) -> int:
        """Rows of the n-gram table of an Engram layer."""
        return self.engram_num_embeddings[self.engram_layer_ids.index(layer)]

    # ---- sizes ----------------------------------------------------------------------------------------

    @property
    def eos_token_id(self) -> int | None:
        """The first end-of-text id."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def cut(self) -> int:
        """First decoder layer, the last KV source; the number of layers if no layer compresses."""
        return max(self.kv_source_layer_ids, default=self.num_hidden_layers)

    @property
    def candidate_enabled(self) -> bool:
        """Whether index sources after the candidate source see candidate blocks only."""
        return self.candidate_source_layer_id >= 0

    @property
    def engram_enabled(self) -> bool:
        """Whether any layer has n-gram memory."""
        return bool(self.engram_layer_ids)

    @property
    def engram_columns(self) -> int:
        """Table rows looked up per token: n-gram sizes from 2 up, times heads."""
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @property
    def hc_mix_size(self) -> int:
        """Mix coefficients per sublayer: pre, post and the square comb matrix (24 for 4 streams)."""
        return (2 + self.hc_mult) * self.hc_mult

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def o_group_width(self) -> int:
        """Input width of one output group of attention."""
        return self.attention_width // self.o_groups

    def to_canonical_dict(self) -> dict[str, Any]:
        """Every field that belongs to the model's identity as JSON values, in sorted order.

        Files that differ only in skipped keys, spelling (nested or flat) or number form give equal results.
        """
        values = {key: value for key, value in dataclasses.asdict(self).items() if key != "ignored_keys"}
        if self.generation is V41:  # fields that only say something of other generations
            del values["quantized_weights"], values["num_hash_layers"]
        values["rope_scaling"] = dict(sorted(values["rope_scaling"].items()))
        return {key: list(v) if isinstance(v, tuple) else v for key, v in sorted(values.items())}
