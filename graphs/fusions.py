"""How often a graph of the model holds each op that is made of others, from the config alone.

The passes must find exactly that. It is stated here, and not counted in a trace: a layer that no longer calls
an op would change a count with it.
"""

from deepinfer.graphs.config import ModelConfig


def fused_calls(config: ModelConfig, phase: str) -> dict[str, int]:
    """Calls by name of the op, in one graph of `phase`; an op that is not named does not occur."""
    if phase == "logits":
        return {}
    layers = range(config.num_hidden_layers)
    memory_layers = len(config.engram_layer_ids)
    kv_sources = sum(config.is_kv_source(layer) for layer in layers)
    index_sources = sum(config.is_index_source(layer) for layer in layers)
    hashed = sum(config.is_hash_routed(layer) for layer in layers)
    biased = config.generation.biased_compression
    return {
        "engram_ids": memory_layers,
        "engram_gather": memory_layers,
        "engram_gate": memory_layers,
        # every layer keeps its window, and the model keeps tokens for the n-grams
        "ring_write": len(layers) + (memory_layers > 0),
        # one for each sublayer, and one before the head
        "mhc_collapse": 2 * len(layers) + 1,
        "mhc_expand": 2 * len(layers),
        # of the queries, of the outputs, and of the queries of an index
        "rope": 2 * len(layers) + index_sources,
        "window_record": len(layers),
        "sparse_attention": len(layers),
        "compress": 0 if biased else kv_sources,
        "index_key": 0 if biased else kv_sources,
        # keys of an index have a compression of their own
        "compress_biased": kv_sources + index_sources if biased else 0,
        "index_topk": index_sources,
        "moe_gate": len(layers) - hashed,
        "moe_hash_gate": hashed,
        "moe_experts": len(layers),
        "shared_expert": len(layers),
    }
