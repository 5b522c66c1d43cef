"""One graph of an artifact as text: as it was compiled, or as it was after one of its passes.

Executes nothing and needs no torch. The text that was compiled is a file of the identity, and hashed; those
after single passes are a sidecar, and only as good as whoever wrote it.
"""

from dataclasses import dataclass
from pathlib import Path

from deepinfer.artifacts.pass_texts import CAPTURED, MAX_TEXTS_BYTES, read_pass_texts
from deepinfer.artifacts.reader import OpenedArtifact, open_artifact
from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError, UsageError


@dataclass(frozen=True)
class GraphView:
    """A graph's text. `after` is the pass that it was taken after, None for what was compiled."""

    artifact_id: str
    graph: str
    after: str | None
    text: str


def view_graph(directory: Path | str, graph: str, after: str | None = None) -> GraphView:
    """The text of a graph: what was compiled, or the one after a pass (`captured`: before the first).

    Raises what `open_artifact` raises, UsageError for a graph or a pass that there is not, and
    ArtifactCorruptError when the text after single passes is damaged or was not kept.
    """
    with open_artifact(directory, verify=False) as artifact:
        names = [entry.name for entry in artifact.manifest.graphs]
        if graph not in names:
            raise UsageError(
                f"there is no graph {graph[:100]!r}",
                where=str(directory),
                action=f"the graphs are {', '.join(names) or 'none'}",
            )
        if after is not None:
            _check_pass(artifact, graph, after)
        text = _compiled_text(artifact, graph)
        if after is not None:
            text = _text_after(artifact, graph, after, compiled=text)
        return GraphView(artifact.artifact_id, graph, after, text)


def _check_pass(artifact: OpenedArtifact, graph: str, after: str) -> None:
    disabled = artifact.manifest.disabled_passes
    ran = [step.name for step in artifact.pass_reports[graph].passes if step.name not in disabled]
    if after in (CAPTURED, *ran):
        return
    raise UsageError(
        f"the pass {after} was switched off" if after in disabled else f"there is no pass {after[:100]!r}",
        where=graph,
        action=f"there is text after {', '.join((CAPTURED, *ran))}",
    )


def _compiled_text(artifact: OpenedArtifact, graph: str) -> str:
    path = f"graphs/{graph}/graph.txt"
    size = next(entry.bytes for entry in artifact.manifest.files if entry.path == path)
    if size > MAX_TEXTS_BYTES:
        raise ArtifactFormatError(
            f"{size} bytes of text, the limit is {MAX_TEXTS_BYTES}", where=path, action="read the file itself"
        )
    try:
        return artifact.read_file(path).decode()
    except UnicodeDecodeError as error:
        raise ArtifactFormatError("not UTF-8", where=path, action="build the artifact again") from error


def _text_after(artifact: OpenedArtifact, graph: str, after: str, *, compiled: str) -> str:
    texts = read_pass_texts(artifact.directory, graph, artifact.artifact_id)
    if texts is None:
        raise ArtifactCorruptError(
            "the text after every pass is not there: an older version built the artifact, or it was copied "
            "without reports/",
            where=f"{artifact.directory}/reports",
            action="copy reports/ too or build again with --force; without --after its final text is shown",
        )
    where = f"reports/ of {graph}"
    if after not in texts:
        raise ArtifactCorruptError(f"no text after {after}", where=where, action="build again with --force")
    if next(reversed(texts.values())) != compiled:
        raise ArtifactCorruptError(
            "the text after the last pass is not that of the compiled graph",
            where=where,
            action="do not rely on these texts: build again with --force",
        )
    return texts[after]
