"""Integer constants of the n-gram hash: compressed token map, multipliers, bucket primes and offsets.

Everything is derived from the config and the tokenizer (spec model.md 9.1-9.3). Knows nothing about weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, normalizers

from deepinfer.errors import ConfigError, TokenizerError
from deepinfer.graphs.config_schema import ModelConfig
from deepinfer.graphs.strict_json import read_json_object

TOKENIZER_NAME = "tokenizer.json"
# Optional file of a checkpoint without tokenizer: {"token_map": [compressed id of token 0, 1, ...]}.
TOKEN_MAP_NAME = "engram_token_map.json"
MAX_TOKENIZER_BYTES = 64 << 20
_SEED_FACTOR = 10007
_LONE_SPACE = "\ue000"  # keeps a token that is one space apart from an empty one while stripping
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class EngramTables:
    """Constants of all Engram layers; row i of the 2-d arrays belongs to `engram_layer_ids[i]`.

    token_map int64 [vocab_size]; pad_id the compressed id of padding; multipliers int64 [layers, max_ngram];
    primes and offsets int64 [layers, columns], columns ordered by n-gram size, then head.
    """

    token_map: np.ndarray
    pad_id: int
    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray


# ---- token map (9.1) --------------------------------------------------------------------------------------


def _normalizer() -> normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_LONE_SPACE, " "),
        ]
    )


def compress_tokens(tokenizer: Tokenizer) -> list[int]:
    """Compressed id of every token: tokens whose texts normalise alike share one, numbered as they appear."""
    normalizer = _normalizer()
    ids: dict[str, int] = {}
    result = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if _REPLACEMENT in text:  # part of a character: only the raw token tells it apart
            key = tokenizer.id_to_token(token_id) or text
        else:
            key = normalizer.normalize_str(text) or text
        result.append(ids.setdefault(key, len(ids)))
    return result


def _map_from_tokenizer(path: Path) -> list[int]:
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        raise TokenizerError(
            f"larger than {MAX_TOKENIZER_BYTES} bytes", where=path.name, action="restore the file"
        )
    try:
        return compress_tokens(Tokenizer.from_file(str(path)))
    except Exception as fault:  # the library raises Exception itself
        raise TokenizerError(
            f"cannot be read: {str(fault)[:300]}", where=path.name, action="restore the file"
        ) from fault


def _map_from_file(path: Path) -> list[int]:
    values = read_json_object(path, MAX_TOKENIZER_BYTES, TokenizerError).get("token_map")
    if not isinstance(values, list) or any(
        isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values
    ):
        raise TokenizerError(
            "token_map must be a list of compressed ids", where=path.name, action="restore the file"
        )
    return values


def _check_token_map(values: list[int], config: ModelConfig, where: str) -> None:
    action = "use the tokenizer released with the weights"
    if not values or len(values) > config.vocab_size:
        raise TokenizerError(
            f"{len(values)} tokens do not fit vocab_size = {config.vocab_size}", where=where, action=action
        )
    wanted = config.engram_compressed_vocab_size
    if set(values) != set(range(wanted)):
        raise TokenizerError(
            f"{len(set(values))} compressed ids, engram_compressed_vocab_size asks for 0 to {wanted - 1}",
            where=where,
            action=action,
        )
    if config.engram_pad_token_id >= len(values):
        raise TokenizerError(
            f"engram_pad_token_id = {config.engram_pad_token_id} is beyond the {len(values)} tokens",
            where=where,
            action=action,
        )


def load_token_map(model_dir: Path, config: ModelConfig) -> np.ndarray:
    """Compressed id of every vocabulary row, int64 [vocab_size]; rows beyond the tokenizer get the last.

    Built from tokenizer.json, or read from engram_token_map.json; if both are there they must agree. Raises
    TokenizerError when neither is there, or when the ids do not number engram_compressed_vocab_size.
    """
    tokenizer_path, map_path = model_dir / TOKENIZER_NAME, model_dir / TOKEN_MAP_NAME
    values: list[int] | None = None
    where = TOKENIZER_NAME
    if tokenizer_path.is_file():
        values = _map_from_tokenizer(tokenizer_path)
    if map_path.is_file():
        stored = _map_from_file(map_path)
        if values is not None and stored != values:
            raise TokenizerError(
                f"differs from the map of {TOKENIZER_NAME}",
                where=TOKEN_MAP_NAME,
                action="remove the wrong file",
            )
        if values is None:
            values, where = stored, TOKEN_MAP_NAME
    if values is None:
        raise TokenizerError(
            "the file is missing, and Engram layers hash compressed token ids, which come from it",
            where=TOKENIZER_NAME,
            action=f"add tokenizer.json, or {TOKEN_MAP_NAME}",
        )
    _check_token_map(values, config, where)
    padded = np.full(config.vocab_size, values[-1], dtype=np.int64)
    padded[: len(values)] = values
    return padded


# ---- multipliers, primes, offsets (9.2, 9.3) --------------------------------------------------------------


def multipliers(layer: int, max_ngram: int, compressed_vocab_size: int) -> np.ndarray:
    """Odd hash multipliers int64 [max_ngram] of a layer; times a compressed id they stay below 2^63."""
    bound = max(1, (2**63 - 1) // compressed_vocab_size // 2)
    generator = np.random.Generator(np.random.PCG64(_SEED_FACTOR * layer))
    return 2 * generator.integers(0, bound, size=max_ngram, dtype=np.int64) + 1


def is_prime(number: int) -> bool:
    """Miller-Rabin with the bases that decide every number below 3.3e24."""
    if number < 2:
        return False
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)
    for base in bases:
        if number % base == 0:
            return number == base
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        x = pow(base, odd, number)
        if x in (1, number - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % number
            if x == number - 1:
                break
        else:
            return False
    return True


def _primes_from(start: int) -> Iterator[int]:
    number = start
    while True:
        if is_prime(number):
            yield number
        number += 1


def bucket_primes(config: ModelConfig) -> np.ndarray:
    """Bucket counts int64 [layers, columns].

    Each n-gram size of each layer takes, head by head, the smallest prime not below engram_vocab_size that
    nobody has taken: together the consecutive primes from there on. Raises ConfigError if a layer's primes do
    not add up to its engram_num_embeddings.
    """
    source = _primes_from(config.engram_vocab_size)
    layers = [[next(source) for _ in range(config.engram_columns)] for _ in config.engram_layer_ids]
    for layer, primes, rows in zip(
        config.engram_layer_ids, layers, config.engram_num_embeddings, strict=True
    ):
        if sum(primes) != rows:
            raise ConfigError(
                f"{rows} rows for layer {layer}, the bucket primes from engram_vocab_size = "
                f"{config.engram_vocab_size} add up to {sum(primes)}",
                where="config.json engram_num_embeddings",
                action="use the config.json released with the weights",
            )
    return np.array(layers, dtype=np.int64).reshape(len(layers), config.engram_columns)


def build_engram_tables(model_dir: str | Path, config: ModelConfig) -> EngramTables | None:
    """All constants of the n-gram hash, or None if the model has no Engram layer.

    Raises TokenizerError and ConfigError as `load_token_map` and `bucket_primes` do.
    """
    if not config.engram_enabled:
        return None
    primes = bucket_primes(config)
    token_map = load_token_map(Path(model_dir), config)
    return EngramTables(
        token_map=token_map,
        pad_id=int(token_map[config.engram_pad_token_id]),
        multipliers=np.stack(
            [
                multipliers(layer, config.engram_max_ngram_size, config.engram_compressed_vocab_size)
                for layer in config.engram_layer_ids
            ]
        ),
        primes=primes,
        offsets=np.cumsum(primes, axis=1) - primes,
    )
