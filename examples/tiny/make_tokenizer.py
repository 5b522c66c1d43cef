"""The tokenizer of the tiny model, and the corpus as token ids.

    python examples/tiny/make_tokenizer.py --cache DIR

trains a byte-level BPE on the training part of DIR/corpus.jsonl (see corpus.py), writes tokenizer.json,
tokenizer_config.json and generation_config.json into checkpoint/, builds the compressed token map of the
Engram layers from it, and writes into DIR:

    train.bin, heldout.bin   token ids, little-endian uint16: per document BOS, its text, EOS
    tokens.json              per split and document: source, title, first token, tokens, bytes of text

Bits per byte are the bits of all tokens but the BOS ones (they are given, not predicted) over the bytes of
text. With --encode-only, the tokenizer in checkpoint/ is used as it is.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import numpy as np
from corpus import CORPUS_NAME, Document, read_corpus, split_documents
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from deepinfer.graphs.engram_tables import compress_tokens

VOCAB_SIZE = 3072
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
IMAGE = "<｜deepseek_image｜>"
# The ids after the learned tokens, in this order. Those that are part of an answer's text stay visible when
# it is decoded; the others steer the chat format.
CONTROL_TOKENS = (
    "<｜System｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁end｜>",
    IMAGE,
)
VISIBLE_TOKENS = ("<think>", "</think>", "｜DSML｜")
CHECKPOINT = Path(__file__).with_name("checkpoint")


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Byte-level BPE of `vocab_size` entries, special tokens included; encoding adds BOS.

    Ids 0, 1, 2 are BOS, EOS, padding; then come the bytes and the learned tokens, and last the other special
    tokens. The same texts give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CONTROL_TOKENS) - len(VISIBLE_TOKENS),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(name, normalized=False, special=False) for name in VISIBLE_TOKENS])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]),
        ]
    )
    return tokenizer


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "do_sample": True,
            "temperature": 0.7,
            "top_p": 1.0,
        },
    )


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> tuple[np.ndarray, list[dict]]:
    """Token ids of the documents in order, uint16 [tokens], and per document where it lies and its bytes."""
    rows, facts, first = [], [], 0
    for document in documents:
        ids = [*tokenizer.encode(document.text).ids, EOS_ID]
        facts.append(
            {
                "source": document.source,
                "title": document.title,
                "first_token": first,
                "tokens": len(ids),
                "bytes": len(document.text.encode()),
            }
        )
        rows.append(np.array(ids, dtype="<u2"))
        first += len(ids)
    return np.concatenate(rows), facts


def write_tokens(tokenizer: Tokenizer, splits: dict[str, list[Document]], folder: Path) -> dict[str, dict]:
    """Write each split's token ids to `<name>.bin` and the facts to tokens.json; return these by split."""
    facts = {}
    for name, documents in splits.items():
        tokens, where = encode_documents(tokenizer, documents)
        tokens.tofile(folder / f"{name}.bin")
        facts[name] = {
            "tokens": len(tokens),
            "predicted_tokens": len(tokens) - len(where),
            "bytes": sum(document["bytes"] for document in where),
            "documents": where,
        }
    _write_json(folder / "tokens.json", {"vocab_size": tokenizer.get_vocab_size(), "splits": facts})
    return facts


def main(arguments: list[str] | None = None) -> int:
    """Train, write, encode, and print the sizes."""
    parser = argparse.ArgumentParser(description="Make the tiny model's tokenizer and encode its corpus.")
    parser.add_argument("--cache", type=Path, required=True, help=f"folder with {CORPUS_NAME}")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT, help="folder for the tokenizer")
    parser.add_argument("--encode-only", action="store_true", help="use the tokenizer that is there")
    options = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    train, held_out = split_documents(read_corpus(options.cache / CORPUS_NAME))
    if not options.encode_only:
        write_tokenizer(train_tokenizer([document.text for document in train]), options.checkpoint)
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    compressed = compress_tokens(tokenizer)
    print(f"vocab_size {tokenizer.get_vocab_size()}, image_token_id {tokenizer.token_to_id(IMAGE)}")
    print(f"engram_compressed_vocab_size {len(set(compressed))}, compressed pad id {compressed[PAD_ID]}")
    for name, split in write_tokens(tokenizer, {"train": train, "heldout": held_out}, options.cache).items():
        per_token = split["bytes"] / split["predicted_tokens"]
        print(f"{name}: {split['tokens']} tokens, {split['bytes']} bytes, {per_token:.3f} bytes per token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
