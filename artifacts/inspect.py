"""What is in an artifact, for people and for tools. Executes nothing, writes nothing, needs no torch."""

from pathlib import Path
from typing import Any

import msgspec

from deepinfer.artifacts.certificate import list_certificates
from deepinfer.artifacts.reader import OpenedArtifact, open_artifact
from deepinfer.artifacts.schema import Certificate
from deepinfer.artifacts.trust import TrustStore
from deepinfer.errors import ArtifactUntrustedError


def describe(
    directory: Path | str, *, verify: bool = False, trust_store: TrustStore | None = None
) -> dict[str, Any]:
    """Facts about the artifact in `directory`, as JSON-ready values; `render` makes text of them.

    `verify` hashes the weights too. Raises what `open_artifact` raises. A trust store that cannot be relied
    on is reported, not raised: looking is always allowed.
    """
    with open_artifact(directory, verify=verify) as artifact:
        certificates, ignored = list_certificates(directory)
        facts = _facts(artifact)
    facts["weights"]["hashes_checked"] = verify
    facts["certificates"] = [_certificate_facts(certificate) for certificate in certificates]
    facts["reports_ignored"] = ignored
    try:
        origin = (trust_store or TrustStore()).origin(artifact.artifact_id)
        facts["trust"] = origin or "untrusted"
    except ArtifactUntrustedError as error:
        facts["trust"] = f"unknown: {error}"
    return facts


def render(facts: dict[str, Any]) -> str:
    """The result of `describe` as text, one fact a line, with units."""
    model, target, cache, weights = facts["model"], facts["target"], facts["cache"], facts["weights"]
    limits, toolchain = facts["limits"], facts["toolchain"]
    hashed = "" if weights["hashes_checked"] else ", hashes not checked"
    lines = [
        f"artifact    {facts['artifact_id']}",
        f"format      {facts['format_version']}",
        f"model       {model['model_type']}, {model['architecture']}, {model['num_hidden_layers']} layers, "
        f"vocabulary {model['vocab_size']}",
        f"target      {target['device']} {target['arch']} {target['isa']}, precision {facts['precision']}",
        f"toolchain   deepinfer {toolchain['deepinfer']}, torch {toolchain['torch']}, python "
        f"{toolchain['python']}, {toolchain['compiler']}",
        f"limits      {limits['max_num_seqs']} requests of {limits['max_model_len']} tokens",
        f"cache       {cache['num_blocks']} blocks of {cache['block_tokens']} tokens, {cache['block_bytes']} "
        f"B each; {cache['num_slots']} slots, {cache['slot_bytes']} B each; {len(cache['regions'])} regions",
        f"weights     {weights['tensor_count']} tensors, {_size(weights['total_bytes'])}{hashed}",
        f"tokenizer   {facts['tokenizer_sha256'] or 'none'}",
        f"trust       {facts['trust']}",
    ]
    for phase, buckets in facts["buckets"].items():
        lines.append(f"graphs      {phase:<8} {' '.join(str(bucket) for bucket in buckets)}")
    lines += [f"pass        {info['name']}{_pass_note(info)}" for info in facts["passes"]]
    lines += [f"switched off  {name}" for name in facts["disabled_passes"]]
    for graph, fired in facts["fired"].items():
        counts = ", ".join(f"{name} {count}" for name, count in fired.items())
        lines.append(f"fired       {graph:<14} {counts or 'nothing'}")
    for certificate in facts["certificates"]:
        lines.append(
            f"certificate {certificate['kind']}: {certificate['verdict']}, {len(certificate['graphs'])} "
            f"graphs, by {certificate['created_by']}"
        )
        lines += [_result_line(result) for result in certificate["graphs"]]
    if not facts["certificates"]:
        lines.append("certificate none")
    if facts["kernels"] is not None:
        lines += kernel_lines(facts["kernels"], executed=bool(facts["certificates"]))
    lines += [f"ignored     reports/{name}" for name in facts["reports_ignored"]]
    lines += [f"file        {_size(entry['bytes']):>12}  {entry['path']}" for entry in facts["files"]]
    return "".join(f"{printable(line)}\n" for line in lines)


def _facts(artifact: OpenedArtifact) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(artifact.manifest)
    buckets: dict[str, list[int]] = {}
    for graph in artifact.manifest.graphs:
        buckets.setdefault(graph.phase, []).append(graph.bucket)
    rewrites: dict[str, int] = {}
    for report in artifact.pass_reports.values():
        for result in report.passes:
            rewrites[result.name] = rewrites.get(result.name, 0) + result.rewrites
    for info in facts["passes"]:
        info["rewrites"] = rewrites.get(info["name"], 0)
    facts["fired"] = {
        graph: {result.name: result.rewrites for result in report.passes if result.rewrites}
        for graph, report in artifact.pass_reports.items()
    }
    facts["kernels"] = None if artifact.kernels is None else msgspec.to_builtins(artifact.kernels)
    facts["artifact_id"] = artifact.artifact_id
    facts["buckets"] = buckets
    facts["total_file_bytes"] = sum(entry.bytes for entry in artifact.manifest.files)
    return facts


def _certificate_facts(certificate: Certificate) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(certificate)
    facts["verdict"] = "pass" if certificate.passed else "fail"
    return facts


def _pass_note(info: dict[str, Any]) -> str:
    return f", {info['rewrites']} rewrites{'' if info['exact'] else ', approximate'}"


def kernel_lines(table: dict[str, Any], *, executed: bool) -> list[str]:
    """What the kernels of a `KernelTable` take of a card, as columns; the assembler says so, not a run."""
    lines = [f"compiler    {name} {version}" for name, version in table["compilers"].items()]
    lines.append(
        f"kernels     {len(table['kernels'])}, registers and spilled bytes per thread, shared memory in bytes"
        f"{'' if executed else '; nothing of them ran yet'}"
    )
    widths = (22, 26, 7)
    heads = ("operation", "kernel", "code")
    columns = "threads  registers  shared  spilled"
    lines.append("            " + " ".join(f"{h:<{w}}" for h, w in zip(heads, widths, strict=True)) + columns)
    for entry in table["kernels"]:
        names = (entry["op"], entry["kernel"], entry["language"])
        told = " ".join(f"{n:<{w}}" for n, w in zip(names, widths, strict=True))
        note = "" if entry["chosen"] else "  not chosen"
        lines.append(
            f"            {told}{entry['threads']:>7} {entry['registers']:>10} {entry['shared_bytes']:>7} "
            f"{entry['spill_bytes']:>8}{note}"
        )
    return lines


def _result_line(result: dict[str, Any]) -> str:
    error = "not finite" if result["max_abs_error"] is None else f"{result['max_abs_error']:.3g}"
    line = (
        f"            {result['graph']}: {result['verdict']}, {result['rows_compared']} rows, error {error}"
    )
    if result["first_differing_layer"]:
        line += f", differs first at {result['first_differing_layer']}"
    return line


def _size(number: int) -> str:
    if number < 10_000:
        return f"{number} B"
    for unit, factor in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        if number < 1000 * factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 10**12:.1f} TB"


def printable(line: str) -> str:
    """Texts come from a file that may be hostile: no control character reaches the terminal."""
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
