"""An engine over the table backend whose tokens are given byte strings, and answers that are given too."""

from collections.abc import Callable, Sequence
from typing import Any

from text_pieces import byte_level

from deepinfer.runtime.engine import Engine
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.table_runner import TableRunner

EOS = 256  # a token of its own, written "<end>"
PIECES = [b"<end>", b"hello<", b"ST", b"OP>", "😀".encode()[:2], "😀".encode()[2:], b"word ", b" x"]
TOKEN_BYTES, IDS = byte_level(PIECES)
VOCAB = 300


def text_limits(**changes: Any) -> Limits:
    """Room for four requests of 64 tokens at once."""
    sizes: dict[str, Any] = {
        "prefill_buckets": (4, 8),
        "decode_buckets": (1, 4),
        "logits_buckets": (4,),
        "prefill_table_size": 2,
        "max_model_len": 64,
        "block_tokens": 4,
        "max_blocks_per_request": 16,
        "num_blocks": 65,
        "num_slots": 5,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
    }
    return Limits(**(sizes | changes))


def text_engine(clock: Callable[[], float] | None = None, **changes: Any) -> Engine:
    """An engine whose requests have text."""
    options = {} if clock is None else {"clock": clock}
    return Engine(TableRunner(text_limits(**changes)), token_bytes=TOKEN_BYTES, **options)


def saying(*pieces: bytes, **options: Any) -> SamplingParams:
    """Parameters of a request that answers with these tokens; whole pieces or single bytes."""
    golden = [IDS[piece] for piece in pieces]
    return SamplingParams(**({"golden_token_ids": golden, "max_tokens": len(golden), "seed": 1} | options))


def tokens(pieces: Sequence[bytes]) -> tuple[int, ...]:
    """Ids of tokens by what they stand for."""
    return tuple(IDS[piece] for piece in pieces)
