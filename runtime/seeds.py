"""Seeds of further choices and forks, made of a request's seed (design: choice 0 uses the seed itself)."""

import hashlib
import struct


def derived_seed(seed: int, choice: int) -> int:
    """The first 8 bytes, little-endian, of SHA-256 over seed and choice as little-endian 64-bit integers."""
    assert choice >= 1, choice
    return int.from_bytes(hashlib.sha256(struct.pack("<QQ", seed, choice)).digest()[:8], "little")
