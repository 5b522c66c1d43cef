"""The calls that `benchmarks/gpu_calls.json` holds, made from the released model's config."""

from model_dirs import release_config

from deepinfer.gpu_kernels import phase_calls, sampling_calls
from deepinfer.graphs.config import parse_config
from deepinfer.kernels.signature import CallSignature
from deepinfer.settings import CompileConfig

CONTEXT, ROWS = 65536, 8


def release_decode_calls() -> list[CallSignature]:
    """Every form of an operation in a decode step of 8 rows, in its head and in sampling."""
    config = parse_config(release_config())
    options = CompileConfig(
        target="cuda:sm_90",
        max_model_len=CONTEXT,
        max_num_seqs=ROWS,
        decode_rows=(ROWS,),
        logits_rows=(ROWS,),
    )
    calls = [*phase_calls(config, options, ("decode", "logits")), *sampling_calls(config.vocab_size, ROWS)]
    return list(dict.fromkeys(calls))
