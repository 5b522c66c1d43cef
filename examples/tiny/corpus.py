"""The text that the tiny model learns: fetched from Debian packages, normalised, split; all reproducible.

    python examples/tiny/corpus.py --cache DIR

downloads the packages that corpus.json names (`apt-get download`; or takes them from --packages), checks
their digests, and writes DIR/corpus.jsonl, one document per line. corpus.json also records the digest of
every text and of the result, so the same file comes out everywhere or the script stops.

Normalisation. Everywhere: Unicode NFC, runs of blanks become one space. Novels: one document per chapter;
lines are joined into paragraphs, which a blank line separates; indented verse keeps its lines; headings,
title pages, remarks of editors in brackets, footnotes and the underscores that mark italics are dropped.
Bible: one document per book; one line per verse, without its reference; a blank line separates chapters.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from package_formats import FormatError, read_deb, read_r_database, read_verses

RECORD = Path(__file__).with_name("corpus.json")
CORPUS_NAME = "corpus.jsonl"
CHUNK_CHARACTERS = (
    8000  # about 2,200 tokens, so that held-out text fills a context longer than the training's
)
HELD_OUT_EVERY = 20
_HELD_OUT_PHASE = 10

_HEADING = re.compile(r"(CHAPTER|Chapter|VOLUME) [IVXLC0-9]+\.?")
_ENDING = re.compile(r"FINIS|Finis|THE END")
_REFERENCE = re.compile(r"(\d?[A-Za-z]+)(\d+):(\d+)")


class CorpusError(RuntimeError):
    """The corpus cannot be built as recorded."""


@dataclass(frozen=True)
class Document:
    """One text: `source` is the id of its work, `title` tells it from the other documents of that work."""

    source: str
    title: str
    text: str


# ---- normalisation ----------------------------------------------------------------------------------------


def _clean(text: str) -> str:
    return re.sub(r"\s+", " ", unicodedata.normalize("NFC", text)).strip()


def _paragraph(lines: list[str]) -> str:
    """One line of text; or, where every line is indented, as verse is, the lines as they are."""
    if all(line.startswith("  ") for line in lines):
        return "\n".join(_clean(line) for line in lines)
    return _clean(" ".join(lines))


def novel_documents(source: str, lines: list[str]) -> list[Document]:
    """The chapters of a novel as documents; text before the first heading is a title page and is dropped."""
    text = re.sub(r"\[[^\]]*\]|\(End of volume [a-z]+\.\)", "", "\n".join(lines)).replace("_", "")
    text = text.partition("\nA NOTE ON THE TEXT")[0]  # by an editor of our time
    chapters: list[list[str]] = []
    for block in re.split(r"\n\s*\n", text):
        block_lines = [line for line in block.split("\n") if line.strip()]
        if not block_lines:
            continue
        paragraph = _paragraph(block_lines)
        if _HEADING.fullmatch(paragraph):
            if not chapters or chapters[-1]:
                chapters.append([])
        elif chapters and not paragraph.startswith("*") and not _ENDING.fullmatch(paragraph):
            chapters[-1].append(paragraph.replace("*", ""))
    return [
        Document(source, f"chapter {number}", "\n\n".join(chapter))
        for number, chapter in enumerate(chapters, start=1)
        if chapter
    ]


def bible_documents(source: str, verses: list[tuple[str, str]]) -> list[Document]:
    """The books of the Bible as documents. Raises FormatError for a verse without a reference."""
    books: dict[str, dict[str, list[str]]] = {}
    for reference, text in verses:
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise FormatError(f"a verse has the reference {reference!r}")
        books.setdefault(match[1], {}).setdefault(match[2], []).append(_clean(text))
    return [
        Document(source, book, "\n\n".join("\n".join(chapter) for chapter in chapters.values()))
        for book, chapters in books.items()
    ]


# ---- split ------------------------------------------------------------------------------------------------


def _chunks(text: str, size: int) -> list[str]:
    """Cut at line ends into pieces of `size` characters or somewhat more; a short rest joins the last piece.

    The pieces joined are the text.
    """
    pieces, piece = [], ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= size:
            pieces.append(piece)
            piece = ""
    if pieces and len(piece) < size // 2:
        pieces[-1] += piece
    elif piece:
        pieces.append(piece)
    return pieces


def split_documents(
    documents: list[Document], chunk_characters: int = CHUNK_CHARACTERS, every: int = HELD_OUT_EVERY
) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents: of all chunks, numbered through the corpus, 1 in `every` is held out.

    Neighbouring chunks that are both trained on stay one document; a held-out chunk is one of its own.
    White space at the cuts is dropped.
    """
    train: list[Document] = []
    held_out: list[Document] = []
    number = 0
    for document in documents:
        parts: list[tuple[bool, str]] = []
        for chunk in _chunks(document.text, chunk_characters):
            is_held_out = number % every == _HELD_OUT_PHASE % every
            number += 1
            if parts and not parts[-1][0] and not is_held_out:
                parts[-1] = (False, parts[-1][1] + chunk)
            else:
                parts.append((is_held_out, chunk))
        for part, (is_held_out, text) in enumerate(parts, start=1):
            title = f"{document.title}, part {part}" if len(parts) > 1 else document.title
            (held_out if is_held_out else train).append(Document(document.source, title, text.strip()))
    return train, held_out


# ---- files ------------------------------------------------------------------------------------------------


def read_corpus(path: Path) -> list[Document]:
    """Documents of a corpus.jsonl file."""
    with path.open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


def encode_corpus(documents: list[Document]) -> bytes:
    """Bytes of a corpus.jsonl file."""
    rows = ({"source": d.source, "title": d.title, "text": d.text} for d in documents)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _download(package: dict, folder: Path) -> None:
    apt = shutil.which("apt-get")
    if apt is None:
        raise CorpusError(
            f"there is no apt-get here: put {package['file']} into a folder and give --packages"
        )
    wanted = f"{package['name']}={package['version']}"
    done = subprocess.run([apt, "download", wanted], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CorpusError(f"apt-get download {wanted} failed: {done.stderr.strip()[-500:]}")


def _load_package(package: dict, packages: Path | None, cache: Path) -> bytes:
    path = (packages or cache) / package["file"]
    if not path.is_file() and packages is None:
        _download(package, cache)
    if not path.is_file():
        raise CorpusError(f"{path} is missing")
    return path.read_bytes()


def _compare(what: str, expected: str, data: bytes, record: bool) -> str:
    digest = _digest(data)
    if digest != expected and not record:
        raise CorpusError(f"{what} has SHA-256 {digest}, {RECORD.name} says {expected}")
    return digest


def _package_documents(package: dict, data: bytes, record: bool) -> list[Document]:
    """Documents of one package; fills in or checks the facts about its texts."""
    files = read_deb(data, package["members"])
    contents = [files[path] for path in package["members"]]
    if package["format"] == "r-database":
        found = read_r_database(*contents)
        works = {text["id"]: novel_documents(text["id"], found[text["id"]]) for text in package["texts"]}
    else:
        works = {
            package["texts"][0]["id"]: bible_documents(package["texts"][0]["id"], read_verses(*contents))
        }
    documents = []
    for text in package["texts"]:
        work = works[text["id"]]
        text["sha256"] = _compare(text["title"], text.get("sha256", ""), encode_corpus(work), record)
        text["documents"], text["bytes"] = len(work), sum(len(d.text.encode()) for d in work)
        documents += work
    return documents


def build_corpus(cache: Path, packages: Path | None = None, record: bool = False) -> Path:
    """Write corpus.jsonl under `cache` and return its path; `packages` is a folder of package files to read.

    With `record`, write the digests found to corpus.json instead of checking them. Raises CorpusError and
    FormatError.
    """
    facts = json.loads(RECORD.read_text(encoding="utf-8"))
    cache.mkdir(parents=True, exist_ok=True)
    documents = []
    for package in facts["packages"]:
        data = _load_package(package, packages, cache)
        package["sha256"] = _compare(package["file"], package.get("sha256", ""), data, record)
        documents += _package_documents(package, data, record)
    content = encode_corpus(documents)
    facts["corpus"] = {
        "file": CORPUS_NAME,
        "sha256": _compare(CORPUS_NAME, facts.get("corpus", {}).get("sha256", ""), content, record),
        "documents": len(documents),
        "text_bytes": sum(len(document.text.encode()) for document in documents),
    }
    if record:
        RECORD.write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    path = cache / CORPUS_NAME
    path.write_bytes(content)
    return path


def main(arguments: list[str] | None = None) -> int:
    """Build the corpus and print what is in it."""
    parser = argparse.ArgumentParser(description="Build the training text of the tiny model.")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the packages and the corpus")
    parser.add_argument("--packages", type=Path, help="folder of package files, instead of a download")
    parser.add_argument("--record", action="store_true", help="write the digests to corpus.json")
    options = parser.parse_args(arguments)
    try:
        path = build_corpus(options.cache, options.packages, options.record)
    except (CorpusError, FormatError) as error:
        print(f"corpus: {error}", file=sys.stderr)
        return 1
    documents = read_corpus(path)
    train, held_out = split_documents(documents)
    for name, part in (("all", documents), ("train", train), ("held out", held_out)):
        print(f"{name}: {len(part)} documents, {sum(len(d.text.encode()) for d in part)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
