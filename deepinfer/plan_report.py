"""The plan of a build as text for people. Numbers come from the plan; this file only arranges them."""

from collections.abc import Iterator, Mapping

from deepinfer.plan import BuildPlan, GraphPlan

_WIDTH = 100  # of lists of names and numbers
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNTS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def plan_text(plan: BuildPlan) -> str:
    """Return the plan as lines of at most 110 columns."""
    parts = (_model, _graphs, _weights, _cache, _flops, _files)
    return "\n".join(line for part in parts for line in part(plan))


def _bytes(size: int) -> str:
    return _scaled(size, _BYTES, "B")


def _flop(work: float) -> str:
    return f"{_scaled(work, _COUNTS, '')}FLOP"


def _count(number: float) -> str:
    return _scaled(number, _COUNTS, "").rstrip()


def _scaled(value: float, units: tuple[tuple[float, str], ...], smallest: str) -> str:
    for unit, name in units:
        if value >= unit:
            return f"{value / unit:,.2f} {name}"
    return f"{value:,.0f} {smallest}"


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values)) or "none"


def _wrapped(label: str, items: list[str]) -> Iterator[str]:
    """Items separated by commas, `label` before the first line."""
    line = ""
    for item in items:
        if line and len(line) + len(item) > _WIDTH - 13:
            yield f"{label:<11}{line},"
            label, line = "", ""
        line = f"{line}, {item}" if line else item
    if line:
        yield f"{label:<11}{line}"


def _model(plan: BuildPlan) -> Iterator[str]:
    model, settings, parameters = plan.model, plan.settings, plan.parameters
    yield f"model      {model.model_type} {model.config_sha256[:16]}"
    yield f"           {model.layers} layers, width {model.hidden_size:,}, vocabulary {model.vocab_size:,}"
    heads = f"{model.heads} heads of {model.head_dim}"
    yield f"           {heads}; {model.experts} experts, {model.experts_per_token} a token and a shared one"
    sources = zip(model.kv_source_layers, model.kv_source_ratios, strict=True)
    keys = ", ".join(f"{layer} (ratio {ratio})" for layer, ratio in sources) or "none"
    yield f"           layers that compress: {keys}"
    yield f"           layers that index: {_listed(model.index_source_layers)}"
    yield f"           layers with n-gram memory: {_listed(model.engram_layers)}"
    yield (
        f"parameters {_count(parameters.total)}, of them "
        f"{_count(parameters.engram_tables)} in n-gram tables; "
        f"{_count(parameters.per_token)} used for a token"
    )
    yield (
        f"settings   {settings['precision']}, requests of {settings['max_model_len']:,} tokens, "
        f"{settings['max_num_seqs']} at once"
    )


def _graphs(plan: BuildPlan) -> Iterator[str]:
    for graph in plan.graphs:
        calls = sum(graph.ops.values())
        space = "not known" if graph.workspace_bytes is None else _bytes(graph.workspace_bytes)
        yield (
            f"graph      {graph.name:<14} {graph.captured_nodes:>7,} nodes {calls:>6,} calls"
            f" {graph.fusions:>6,} fusions   workspace {space}{'   taps' if graph.taps else ''}"
        )
    told: dict[str, GraphPlan] = {}
    for graph in plan.graphs:
        if graph.phase not in told:
            same = next((phase for phase, other in told.items() if other.ops == graph.ops), None)
            told[graph.phase] = graph
            yield from _calls(graph) if same is None else [f"{graph.phase:<11}the same calls as {same}"]
    traced = [graph.name for graph in plan.graphs if graph.counted_in == graph.name]
    if len(traced) < len(plan.graphs):
        yield f"           traced: {', '.join(traced)}; the others are counted as that of their phase"


def _calls(graph: GraphPlan) -> Iterator[str]:
    yield from _wrapped(graph.phase, [f"{count} {name}" for name, count in graph.ops.items()])


def _weights(plan: BuildPlan) -> Iterator[str]:
    tensors = sum(group.tensors for group in plan.weights)
    yield f"weights    {_bytes(plan.weights_bytes)} in {tensors:,} tensors"
    for group in plan.weights:
        form = f"{group.format}, packed" if group.packed else group.format
        size = _bytes(group.bytes)
        yield f"           {group.purpose:<18} {form:<20} {group.tensors:>6,} tensors {size:>12}"


def _cache(plan: BuildPlan) -> Iterator[str]:
    cache = plan.cache
    yield (
        f"cache      {_bytes(cache.arena_bytes)}: {cache.num_blocks:,} blocks of {cache.block_bytes:,} B "
        f"({cache.block_tokens} tokens), {cache.num_slots:,} slots of {cache.slot_bytes:,} B"
    )
    yield from _wrapped("", [f"{kind} {size:,} B" for kind, size in cache.region_bytes.items()])
    spaces = [graph.workspace_bytes for graph in plan.graphs if graph.workspace_bytes is not None]
    total = plan.weights_bytes + cache.arena_bytes + max(spaces)
    yield f"memory     {_bytes(total)}: weights, cache and the largest workspace (mapped weights load on use)"


def _flops(plan: BuildPlan) -> Iterator[str]:
    flops, tokens = plan.flops, f"{plan.flops.tokens:,}"
    yield f"work       decode: {_flop(flops.decode_row)} for the row at token {tokens}"
    yield from _by_op(flops.decode_row_by_op)
    mean = _flop(flops.prompt_mean_row)
    yield f"           prefill: {_flop(flops.prompt)} for a prompt of {tokens} tokens, {mean} a row"
    yield from _by_op(flops.prompt_by_op)
    yield f"           logits: {_flop(flops.logits_row)} a row"
    if flops.not_counted:
        yield from _wrapped("", [f"not counted: {count} {name}" for name, count in flops.not_counted.items()])


def _by_op(work: Mapping[str, int]) -> Iterator[str]:
    ordered = sorted(work.items(), key=lambda item: (-item[1], item[0]))
    yield from _wrapped("", [f"{name} {_count(count)}" for name, count in ordered if count])


def _files(plan: BuildPlan) -> Iterator[str]:
    yield f"files      {len(plan.files)}, of which a build would make {len(plan.graphs)} graphs:"
    folders: dict[str, list[str]] = {}
    for file in plan.files:
        folder, _, name = file.name.rpartition("/")
        size = f" ({_bytes(file.size)})" if file.size is not None else ""
        folders.setdefault(folder, []).append(name + size)
    for folder, names in folders.items():
        yield f"           {folder}/: {', '.join(names)}" if folder else f"           {', '.join(names)}"
    yield f"planned    in {plan.seconds:.1f} s; nothing was written"
