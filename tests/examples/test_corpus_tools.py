"""The corpus tools on small made-up packages: normalisation, split, record, tokenizer, encoded files."""

import hashlib
import json
from functools import cache
from pathlib import Path

import corpus
import make_tokenizer
import numpy as np
import pytest
from corpus import CorpusError, Document, bible_documents, build_corpus, novel_documents, split_documents
from corpus_packages import deb, r_database, verse_store
from hypothesis import given, settings
from hypothesis import strategies as st
from package_formats import FormatError
from tokenizers import Tokenizer

from deepinfer.graphs.engram_tables import compress_tokens

# ---- normalisation and split ------------------------------------------------------------------------------

NOVEL = """A NOVEL

by the author

VOLUME I

CHAPTER I

It was a _very_ fine
day.  She walked,* and
walked.

    A line of verse,
      and another.

[End of volume one
of this edition.]

Chapter 2

    * * *

"Cafe\u0301," he said.

*See a letter.

FINIS
A NOTE ON THE TEXT

By an editor."""


def test_novel_chapters() -> None:
    assert novel_documents("novel", NOVEL.split("\n")) == [
        Document(
            "novel",
            "chapter 1",
            "It was a very fine day. She walked, and walked.\n\nA line of verse,\nand another.",
        ),
        Document("novel", "chapter 2", '"Café," he said.'),
    ]


def test_bible_books() -> None:
    verses = [("Ge1:1", "In the  beginning."), ("Ge1:2", "And."), ("Ge2:1", "Thus."), ("1Sm1:1", "Now.")]
    assert bible_documents("bible", verses) == [
        Document("bible", "Ge", "In the beginning.\nAnd.\n\nThus."),
        Document("bible", "1Sm", "Now."),
    ]
    with pytest.raises(FormatError, match="reference 'Ge'"):
        bible_documents("bible", [("Ge", "In the beginning.")])


def sample_documents(count: int = 9, lines: int = 40) -> list[Document]:
    return [
        Document("work", str(number), "\n".join(f"document {number} line {line}." for line in range(lines)))
        for number in range(count)
    ]


def test_split_is_deterministic_and_loses_no_line() -> None:
    documents = sample_documents()
    train, held_out = split_documents(documents, chunk_characters=100, every=20)
    assert (train, held_out) == split_documents(documents, chunk_characters=100, every=20)
    assert held_out
    train_lines = [line for document in train for line in document.text.split("\n")]
    held_lines = [line for document in held_out for line in document.text.split("\n")]
    assert not set(train_lines) & set(held_lines)
    all_lines = {line for document in documents for line in document.text.split("\n")}
    assert set(train_lines) | set(held_lines) == all_lines
    assert len(train_lines) + len(held_lines) == len(all_lines)
    titles = [document.title for document in train + held_out]
    assert len(set(titles)) == len(titles)


def test_split_takes_one_chunk_in_twenty() -> None:
    train, held_out = split_documents(sample_documents(lines=400), chunk_characters=200, every=20)
    share = sum(len(d.text) for d in held_out) / sum(len(d.text) for d in train + held_out)
    assert 0.03 < share < 0.07
    assert all(len(document.text) >= 190 for document in held_out)


# ---- the corpus file --------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `packages` with two packages, and a corpus.json that names them without digests."""
    folder = tmp_path / "packages"
    folder.mkdir()
    index, database = r_database({"novel": NOVEL.split("\n")})
    (folder / "novel.deb").write_bytes(deb({"n.rdx": index, "n.rdb": database}))
    (folder / "bible.deb").write_bytes(deb({"b.data": verse_store(["Ge1:1 In the beginning."], 100)}))
    novel = {"file": "novel.deb", "format": "r-database", "members": ["n.rdx", "n.rdb"]}
    bible = {"file": "bible.deb", "format": "verse-store", "members": ["b.data"]}
    novel["texts"], bible["texts"] = [{"id": "novel", "title": "N"}], [{"id": "bible", "title": "B"}]
    record = tmp_path / "corpus.json"
    record.write_text(json.dumps({"packages": [novel, bible]}))
    monkeypatch.setattr(corpus, "RECORD", record)
    return folder


def test_corpus_is_the_recorded_one(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="novel.deb has SHA-256"):
        build_corpus(tmp_path / "cache", recorded)
    first = build_corpus(tmp_path / "cache", recorded, record=True).read_bytes()
    second = build_corpus(tmp_path / "again", recorded).read_bytes()
    assert first == second
    facts = json.loads(corpus.RECORD.read_text())
    assert facts["corpus"]["sha256"] == hashlib.sha256(first).hexdigest()
    assert facts["packages"][1]["texts"][0]["bytes"] == len("In the beginning.")
    assert [d.source for d in corpus.read_corpus(tmp_path / "again" / "corpus.jsonl")] == ["novel"] * 2 + [
        "bible"
    ]


def test_changed_package_and_missing_package(recorded: Path, tmp_path: Path) -> None:
    build_corpus(tmp_path / "cache", recorded, record=True)
    (recorded / "bible.deb").write_bytes(deb({"b.data": verse_store(["Ge1:1 In the end."], 100)}))
    with pytest.raises(CorpusError, match="bible.deb has SHA-256"):
        build_corpus(tmp_path / "cache", recorded)
    (recorded / "bible.deb").unlink()
    with pytest.raises(CorpusError, match="missing"):
        build_corpus(tmp_path / "cache", recorded)


def test_the_record_is_complete() -> None:
    facts = json.loads(corpus.RECORD.read_text(encoding="utf-8"))
    texts = [text for package in facts["packages"] for text in package["texts"]]
    assert sum(text["bytes"] for text in texts) == facts["corpus"]["text_bytes"] > 3_000_000
    assert all(text["licence"].startswith("public domain") for text in texts)
    assert all(len(item["sha256"]) == 64 for item in (*facts["packages"], *texts, facts["corpus"]))


# ---- tokenizer --------------------------------------------------------------------------------------------

TEXT = "In the beginning was the word, and the word was with 1234 others; she said so. " * 20


@pytest.fixture(scope="module")
def small_tokenizer() -> Tokenizer:
    return make_tokenizer.train_tokenizer([TEXT], vocab_size=310)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_every_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = shipped_tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids[0] == make_tokenizer.BOS_ID
    special = make_tokenizer.CONTROL_TOKENS + make_tokenizer.VISIBLE_TOKENS
    if not any(name in text for name in special):
        assert tokenizer.decode(ids) == text


@cache
def shipped_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(make_tokenizer.CHECKPOINT / "tokenizer.json"))


def test_places_of_the_special_tokens(small_tokenizer: Tokenizer) -> None:
    for tokenizer, size in ((small_tokenizer, 310), (shipped_tokenizer(), make_tokenizer.VOCAB_SIZE)):
        assert tokenizer.get_vocab_size() == size
        first = [make_tokenizer.BOS, make_tokenizer.EOS, make_tokenizer.PAD]
        assert [tokenizer.id_to_token(token) for token in range(3)] == first
        last = make_tokenizer.CONTROL_TOKENS + make_tokenizer.VISIBLE_TOKENS
        assert [tokenizer.id_to_token(size - len(last) + at) for at in range(len(last))] == list(last)


def test_thinking_marks_are_single_tokens_and_stay_visible() -> None:
    tokenizer = shipped_tokenizer()
    ids = tokenizer.encode("<｜Assistant｜><think>so</think>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>so</think>"
    assert ids[1] == tokenizer.token_to_id("<｜Assistant｜>")


def test_the_same_text_gives_the_same_tokenizer(small_tokenizer: Tokenizer) -> None:
    assert make_tokenizer.train_tokenizer([TEXT], 310).to_str() == small_tokenizer.to_str()


def test_the_compressed_token_map_builds() -> None:
    compressed = compress_tokens(shipped_tokenizer())
    assert len(compressed) == make_tokenizer.VOCAB_SIZE
    assert sorted(set(compressed)) == list(range(len(set(compressed))))
    assert len(set(compressed)) < make_tokenizer.VOCAB_SIZE  # "The" and " the" meet
    tokenizer = shipped_tokenizer()
    the = [compressed[tokenizer.token_to_id(name)] for name in ("The", "the")]
    assert the[0] == the[1]


def test_encoded_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = [
        Document("work", str(number), f"Chapter {number}.\n\n" + "word " * 2000) for number in range(12)
    ]
    (tmp_path / "corpus.jsonl").write_bytes(corpus.encode_corpus(documents))
    assert make_tokenizer.main(["--cache", str(tmp_path), "--checkpoint", str(tmp_path / "model")]) == 0
    assert "vocab_size" in capsys.readouterr().out
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"] == 1
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    facts = json.loads((tmp_path / "tokens.json").read_text())["splits"]
    for name, expected in zip(("train", "heldout"), split_documents(documents), strict=True):
        tokens = np.fromfile(tmp_path / f"{name}.bin", dtype="<u2")
        assert len(tokens) == facts[name]["tokens"]
        assert facts[name]["predicted_tokens"] == len(tokens) - len(expected)
        for document, where in zip(expected, facts[name]["documents"], strict=True):
            ids = tokens[where["first_token"] : where["first_token"] + where["tokens"]].tolist()
            assert (ids[0], ids[-1]) == (make_tokenizer.BOS_ID, make_tokenizer.EOS_ID)
            assert tokenizer.decode(ids) == document.text
            assert where["bytes"] == len(document.text.encode())


def test_scripts_report_what_is_wrong(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert corpus.main(["--cache", str(tmp_path / "cache"), "--packages", str(recorded)]) == 1
    assert "SHA-256" in capsys.readouterr().err
