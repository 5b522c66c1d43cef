"""The members of the model family, and the few things in which they differ (spec model.md 16.2).

Everything that is not named here is shared. A member is chosen by the exact `model_type` of its config.json.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """What one generation of the family does in its own way."""

    model_type: str
    architecture: str
    # name of the nested `text_config`; None: the file is flat
    text_model_type: str | None
    # tokens per compressed entry that a layer may have; 0 is the window alone
    ratios: frozenset[int]
    # sides of the FP8 weight tiles, and length of the activation groups that meet them
    tile: int
    # a sublayer is collapsed by the mix of the one before it; otherwise by its own, and the head has one too
    delayed_collapse: bool
    # queries are normed per head, without a weight
    query_head_norm: bool
    # gates of a compression have a bias per position, index keys a compression of their own, every
    # compressed layer is its own source, and those of few tokens per entry overlap
    biased_compression: bool
    # the router has a second bias for image rows, which the text model does not read
    image_bias: bool
    # weights may be stored unquantised
    plain_weights: bool


V41 = Generation(
    model_type="deepseek_v41",
    architecture="DeepseekV41ForCausalLM",
    text_model_type="deepseek_v41_text",
    ratios=frozenset({0, 1, 2}),
    tile=32,
    delayed_collapse=True,
    query_head_norm=False,
    biased_compression=False,
    image_bias=True,
    plain_weights=False,
)
V4 = Generation(
    model_type="deepseek_v4",
    architecture="DeepseekV4ForCausalLM",
    text_model_type=None,
    ratios=frozenset({0, 4, 8, 16, 32, 64, 128}),
    tile=128,
    delayed_collapse=False,
    query_head_norm=True,
    biased_compression=True,
    image_bias=False,
    plain_weights=True,
)
GENERATIONS = {generation.model_type: generation for generation in (V41, V4)}
# ratio of the biased compressions whose windows overlap and whose entries an indexer picks from
OVERLAPPING_RATIO = 4
