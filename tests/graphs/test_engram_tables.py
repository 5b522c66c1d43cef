"""Constants of the n-gram hash against published vectors and the golden model."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_dirs import release_config
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, models

from deepinfer.errors import ConfigError, TokenizerError
from deepinfer.graphs.config import load_config, parse_config
from deepinfer.graphs.engram_tables import (
    TOKEN_MAP_NAME,
    bucket_primes,
    build_engram_tables,
    compress_tokens,
    is_prime,
    load_token_map,
    multipliers,
)

RELEASE_PRIMES = {
    1: "57 79 81 97 121 129 133 183 189 207 211 253 277 289 307 321 339 381 393 399 403 409 447 463",
    14: "477 487 499 507 511 573 609 627 667 669 693 697 711 729 759 769 781 799 813 819 841 877 879 889",
}
# table rows of the last of the compressed ids 5, 17, 99091, 5 in the released model
RELEASE_HASHES = {
    1: "12391924 30601786 32347082 62848667 70397898 94727027 98981383 125214817 137477310 158283928 "
    "170183372 186738561 199160461 222179456 233717225 248862157 264715494 276499540 299365124 311000014 "
    "329498392 341357834 360928159 374153547",
    14: "743092 18408009 41668928 49698968 70671423 85309510 103753309 124352426 133323207 152679242 "
    "173382312 184399208 195980780 215496953 228729201 251781413 261281483 273686983 301155862 306177099 "
    "331534523 343375720 355326914 369472407",
}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def test_released_multipliers():
    assert multipliers(1, 4, 99092).tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert multipliers(14, 4, 99092).tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


def test_multipliers_of_the_tiny_model():
    assert multipliers(1, 4, 256).tolist() == [
        29662608052400909,
        1873410163432121,
        13919202536988139,
        28638879857136817,
    ]
    assert multipliers(3, 4, 256).tolist() == [
        10655090275895937,
        31608505986136395,
        4210609209496719,
        27210409204648803,
    ]


def test_released_primes_add_up_to_the_tables():
    primes = bucket_primes(parse_config(release_config()))
    for row, layer in zip(primes, (1, 14), strict=True):
        assert row.tolist() == [16_000_000 + tail for tail in numbers(RELEASE_PRIMES[layer])]
    assert primes.sum(axis=1).tolist() == [384006168, 384016682]


def test_released_hash_vector():
    """The formula is the model's; here it shows that multipliers, primes and offsets go together."""
    primes = bucket_primes(parse_config(release_config()))
    offsets = np.cumsum(primes, axis=1) - primes
    for index, layer in enumerate((1, 14)):
        products = np.array([5, 99091, 17, 5]) * multipliers(layer, 4, 99092)
        hashes = np.bitwise_xor.accumulate(products)[1:]
        rows = np.repeat(hashes, 8) % primes[index] + offsets[index]
        assert rows.tolist() == numbers(RELEASE_HASHES[layer])


def golden_constants(golden_dir) -> dict[str, np.ndarray]:
    with safe_open(golden_dir / "golden_intermediates.safetensors", "np") as file:
        names = ("engram_token_map", "engram_multipliers", "engram_primes", "engram_offsets")
        return {name: file.get_tensor(name) for name in names}


def test_golden_constants(golden_dir):
    golden = golden_constants(golden_dir)
    tables = build_engram_tables(golden_dir, load_config(golden_dir))
    assert (tables.token_map == golden["engram_token_map"]).all()
    assert (tables.multipliers == golden["engram_multipliers"]).all()
    assert (tables.primes == golden["engram_primes"]).all()
    assert (tables.offsets == golden["engram_offsets"]).all()
    assert tables.pad_id == 1
    assert {a.dtype for a in (tables.token_map, tables.multipliers, tables.primes, tables.offsets)} == {
        np.dtype(np.int64)
    }


def test_tables_that_do_not_add_up_are_refused(golden_dir):
    config = dataclasses.replace(load_config(golden_dir), engram_num_embeddings=(660, 865))
    with pytest.raises(ConfigError, match="865 rows for layer 3.*add up to 864"):
        build_engram_tables(golden_dir, config)


def test_without_engram_no_tokenizer_is_needed(tmp_path, golden_dir):
    config = dataclasses.replace(load_config(golden_dir), engram_layer_ids=(), engram_num_embeddings=())
    assert build_engram_tables(tmp_path, config) is None


@given(st.integers(0, 2**20))
def test_primality_agrees_with_trial_division(number):
    divisors = (d for d in range(2, int(number**0.5) + 1) if number % d == 0)
    assert is_prime(number) == (number > 1 and next(divisors, None) is None)


@pytest.mark.parametrize("number", [2**31 - 1, 2**61 - 1, 3317044064679887385961813])
def test_large_primes_are_found(number):
    assert is_prime(number)
    assert not is_prime(number * 3)


@pytest.mark.parametrize("number", [561, 3215031751, 341550071728321, 3825123056546413051])
def test_strong_pseudoprimes_are_not_taken_for_primes(number):
    assert not is_prime(number)


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 200_000))
def test_hash_products_never_overflow(layer, max_ngram, compressed):
    values = multipliers(layer, max_ngram, compressed).tolist()
    assert all(m % 2 == 1 and m > 0 and m * (compressed - 1) < 2**63 for m in values)


# ---- the token map -------------------------------------------------------------------------------------


def word_tokenizer(*words: str) -> Tokenizer:
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("a", "A", "b"), [0, 0, 1]),
        (("e", "\u00e9", "E\u0301"), [0, 0, 0]),
        (("\ufb01", "fi", "FI"), [0, 0, 0]),
        ((" a", "a", "a\t", "a\n b", "A  B", "a b"), [0, 0, 0, 1, 1, 1]),
        ((" ", "\n", "\t \r\n", "x", "\u00a0"), [0, 0, 0, 1, 0]),
        (("a", " ", "\u0301"), [0, 1, 2]),
        (("\ufffd1", "\ufffd2", "\ufffd1x"), [0, 1, 2]),
    ],
)
def test_tokens_whose_texts_normalise_alike_share_an_id(words, expected):
    assert compress_tokens(word_tokenizer(*words)) == expected


def test_special_tokens_keep_their_text():
    tokenizer = word_tokenizer("a", "b")
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|END|>", special=True)])
    assert compress_tokens(tokenizer) == [0, 1, 2, 2]


def test_vocabulary_rows_beyond_the_tokenizer_get_the_last_id(tmp_path, golden_dir):
    config = dataclasses.replace(load_config(golden_dir), vocab_size=600)
    token_map = load_token_map(golden_dir, config)
    assert token_map.shape == (600,)
    assert token_map[511:].tolist() == [255] * 89


def test_engram_without_tokenizer_is_refused_with_the_reason(tmp_path, golden_dir):
    with pytest.raises(TokenizerError, match="Engram layers hash compressed token ids"):
        load_token_map(tmp_path, load_config(golden_dir))


def test_a_checkpoint_may_carry_the_map_itself(tmp_path, golden_dir):
    config = load_config(golden_dir)
    values = [token // 2 for token in range(512)]
    (tmp_path / TOKEN_MAP_NAME).write_text(json.dumps({"token_map": values}))
    assert load_token_map(tmp_path, config).tolist() == values
    shutil.copyfile(golden_dir / "tokenizer.json", tmp_path / "tokenizer.json")
    assert load_token_map(tmp_path, config).tolist() == values


def test_a_map_that_differs_from_the_tokenizer_is_refused(tmp_path, golden_dir):
    values = [token // 2 for token in range(512)]
    (tmp_path / TOKEN_MAP_NAME).write_text(json.dumps({"token_map": values[::-1]}))
    shutil.copyfile(golden_dir / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match="differs"):
        load_token_map(tmp_path, load_config(golden_dir))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 1], "2 compressed ids"),
        ([], "0 tokens"),
        ([0] * 513, "513 tokens"),
        ([-1] + [t // 2 for t in range(511)], "must be a list"),
        ([True], "must be a list"),
        ([0.0], "must be a list"),
        ("0", "must be a list"),
        ([t % 256 for t in range(511)] + [256], "257 compressed ids"),
    ],
)
def test_an_unusable_map_is_refused(tmp_path, golden_dir, values, message):
    (tmp_path / TOKEN_MAP_NAME).write_text(json.dumps({"token_map": values}))
    with pytest.raises(TokenizerError, match=message):
        load_token_map(tmp_path, load_config(golden_dir))


def test_padding_must_be_a_token(tmp_path, golden_dir):
    config = dataclasses.replace(load_config(golden_dir), engram_compressed_vocab_size=2)
    (tmp_path / TOKEN_MAP_NAME).write_text(json.dumps({"token_map": [0, 1]}))
    with pytest.raises(TokenizerError, match="engram_pad_token_id = 2 is beyond the 2 tokens"):
        load_token_map(tmp_path, config)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, golden_dir):
    word_tokenizer("a", "b", "c").save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        TokenizerError, match="3 compressed ids, engram_compressed_vocab_size asks for 0 to 255"
    ):
        load_token_map(tmp_path, load_config(golden_dir))


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": {"type": "nonsense"}}', b"\xff" * 10])
def test_a_broken_tokenizer_is_refused(tmp_path, golden_dir, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match="cannot be read"):
        load_token_map(tmp_path, load_config(golden_dir))
