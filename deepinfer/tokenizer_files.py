"""The text side of a checkpoint that an artifact carries: tokenizer, chat template, generation defaults."""

from pathlib import Path

from tokenizers import Tokenizer

from deepinfer.errors import TokenizerError
from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.strict_json import parse_json_object

MAX_TOKENIZER_BYTES = 64 << 20
_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_TEXT_FILES = ("chat_template.jinja",)


def tokenizer_files(model_dir: Path) -> dict[str, bytes]:
    """Return the files that are there, by name. Raises TokenizerError for one that cannot be used."""
    files = {}
    for name in (*_JSON_FILES, *_TEXT_FILES):
        path = model_dir / name
        if not path.is_file():
            continue
        with path.open("rb") as file:
            data = file.read(MAX_TOKENIZER_BYTES + 1)
        if len(data) > MAX_TOKENIZER_BYTES:
            raise TokenizerError(f"the file is larger than {MAX_TOKENIZER_BYTES} bytes", where=str(path))
        if name in _JSON_FILES:
            parse_json_object(data, str(path), TokenizerError)
        files[name] = data
    if "tokenizer.json" in files:
        try:
            Tokenizer.from_buffer(files["tokenizer.json"])
        except Exception as error:  # the library raises a bare Exception
            raise TokenizerError(
                f"the tokenizer cannot be read: {error}", where=str(model_dir / "tokenizer.json")
            ) from error
    return files


def eos_token_ids(config: ModelConfig, files: dict[str, bytes]) -> int | tuple[int, ...] | None:
    """Return the ids that end a text: the model's, and those that generation_config.json adds.

    Raises TokenizerError when an id there is not a token of the model.
    """
    where = "generation_config.json"
    if where not in files:
        return _one_or_many(config.eos_token_ids)
    value = parse_json_object(files[where], where, TokenizerError).get("eos_token_id")
    if value is None:
        return _one_or_many(config.eos_token_ids)
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise TokenizerError(
                f"eos_token_id {token!r} is not in [0, {config.vocab_size})", where=where, action="correct it"
            )
    return _one_or_many(tuple(sorted({*config.eos_token_ids, *ids})))


def _one_or_many(ids: tuple[int, ...]) -> int | tuple[int, ...] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else ids
