"""Lookup in the n-gram table: the step functions' bits, every code and scale, a table larger than memory."""

import os
import resource

import pytest
import torch
from routes import ROUTES

from deepinfer.errors import UsageError
from deepinfer.kernels import dequantize_fp8, engram_gather

DTYPES = (torch.bfloat16, torch.float32)


def without_nan(values):
    """Zeros for NaN: neither sign nor payload of a NaN is promised."""
    return torch.where(values.isnan(), 0, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 256])
def test_both_routes_give_the_bits_of_decoded_records(dtype, size, same_bytes):
    generator = torch.Generator().manual_seed(size)
    codes = torch.randint(0, 256, (300, size), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, (300, size // 32), generator=generator, dtype=torch.uint8)
    codes[:150] = torch.where(codes[:150] & 0x7F == 0x7F, 0, codes[:150])  # half of the records without NaN
    embed = torch.cat((codes, scales), dim=1)
    ids = torch.randint(0, 300, (40, 24), generator=generator)
    want = dequantize_fp8.reference(embed[ids], dtype).flatten(1)
    for route in ROUTES:
        got = getattr(engram_gather, route)(embed, ids, dtype)
        assert torch.equal(got.isnan(), want.isnan())
        same_bytes(without_nan(got), without_nan(want))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale_byte_is_exact(dtype, same_bytes):
    codes = torch.tensor([0, 1, 7, 8, 0x38, 0x7E, 0x80, 0x81, 0xFE] * 4, dtype=torch.uint8)[:32]
    scales = torch.arange(256, dtype=torch.int32).to(torch.uint8).unsqueeze(1)
    embed = torch.cat((codes.expand(256, 32), scales), dim=1).contiguous()
    got = engram_gather.native(embed, torch.arange(256).unsqueeze(1), dtype)
    want = dequantize_fp8.reference(embed, dtype)
    assert want.isnan().any(1).nonzero().tolist() == [[255]]
    assert torch.equal(got.isnan(), want.isnan())
    same_bytes(without_nan(got), without_nan(want))


def test_a_table_beyond_two_to_the_31_is_read_where_it_is_asked_and_nowhere_else(tmp_path, same_bytes):
    """A sparse file of 8 GiB, mapped: the process may grow by a few pages only."""
    rows, width = 1 << 25, 264
    path = tmp_path / "table"
    record = torch.randint(0, 120, (width,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    with path.open("wb") as file:
        file.truncate(rows * width)
        for row in (0, rows // 2 + 5, rows - 1):
            os.pwrite(file.fileno(), bytes(record.tolist()), row * width)
    embed = torch.from_file(str(path), shared=True, size=rows * width, dtype=torch.uint8).view(rows, width)
    ids = torch.tensor([[0, rows // 2 + 5], [rows - 1, 7]])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    got = engram_gather.native(embed, ids, torch.bfloat16)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    want = dequantize_fp8.reference(record, torch.bfloat16)
    same_bytes(got[0], torch.cat((want, want)))
    same_bytes(got[1], torch.cat((want, torch.zeros(256, dtype=torch.bfloat16))))
    assert grown_kib < 16 << 10


def test_wrong_arguments_are_refused():
    embed, ids, dtype = engram_gather.make_inputs(3, torch.bfloat16, 0)
    for route, error in (("reference", UsageError), ("native", RuntimeError)):
        run = getattr(engram_gather, route)
        with pytest.raises(
            error, match="engram_gather: last axis of embed:? must be a positive multiple of 33"
        ):
            run(embed[:, :65].contiguous(), ids, dtype)
        with pytest.raises(error, match="engram_gather: ids:? must have shape"):
            run(embed, ids[0], dtype)
        with pytest.raises(error, match="engram_gather: ids"):
            run(embed, ids.int(), dtype)
        with pytest.raises(error, match="engram_gather: out_dtype:? must be bfloat16 or float32"):
            run(embed, ids, torch.float16)
    for bad in (-1, 200, 2**40):
        ids[1, 2] = bad
        with pytest.raises(RuntimeError, match=f"engram_gather: ids must lie in 0 .. 199, got {bad}"):
            engram_gather.native(embed, ids, dtype)
