"""The role of every layer, as a table for reports and for counts that passes assert."""

from dataclasses import dataclass

from deepinfer.graphs.config_schema import ModelConfig


@dataclass(frozen=True)
class LayerRole:
    """What one layer does with keys: whose cache it reads, whose picks it uses, what it computes itself."""

    layer: int
    name: str
    ratio: int
    kv_source: int | None
    index_source: int | None
    has_engram: bool


def _name(config: ModelConfig, layer: int) -> str:
    ratio = config.ratio(layer)
    if ratio == 0:
        return "window_only"
    if config.is_candidate_source(layer):
        return "candidate_source"
    if config.is_kv_source(layer):
        return "kv_index_source"
    if config.is_index_source(layer):
        return "candidate_index_source" if config.uses_candidate_mask(layer) else "index_source"
    return f"consumer_ratio{ratio}"


def layer_roles(config: ModelConfig) -> tuple[LayerRole, ...]:
    """The roles of all layers in order (spec model.md 2)."""
    return tuple(
        LayerRole(
            layer=layer,
            name=_name(config, layer),
            ratio=config.ratio(layer),
            kv_source=config.kv_source(layer),
            index_source=config.index_source(layer),
            has_engram=config.has_engram(layer),
        )
        for layer in range(config.num_hidden_layers)
    )
