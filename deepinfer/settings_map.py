"""Where the settings of the original engine went: options here, fixed behaviour, or not available yet.

The original engine takes these from its environment or from engine arguments. Here each has one named option
or a fixed rule; an option listed as planned is refused when given, never ignored. docs/settings.md shows the
same table (a test compares them).
"""

from typing import Literal

import msgspec

Status = Literal["option", "fixed", "planned"]


class SourceSetting(msgspec.Struct, frozen=True):
    """One setting of the original engine.

    `source` is its environment variable or argument there, `name` the option here (or the rule's name),
    `meaning` what it does and, for fixed ones, what it is fixed to.
    """

    source: str
    name: str
    status: Status
    meaning: str


SOURCE_SETTINGS: tuple[SourceSetting, ...] = (
    SourceSetting(
        "DEEPINFER_ACCELERATOR", "compile.target", "option", "device to build for: cpu, or a graphics card"
    ),
    SourceSetting(
        "DEEPINFER_BATCH_INVARIANT",
        "batch_invariant",
        "fixed",
        "a request's answer never depends on its batch; always on",
    ),
    SourceSetting(
        "DEEPINFER_ENABLE_MTP_VARLEN",
        "serve.variable_draft_length",
        "planned",
        "choose the number of draft tokens per request and step",
    ),
    SourceSetting(
        "DEEPINFER_FORCE_LOAD_BALANCE",
        "compile.force_load_balance",
        "planned",
        "route to random experts, for benchmarks only",
    ),
    SourceSetting(
        "DEEPINFER_MAX_BACKTRACKING_TOKENS",
        "compile.max_backtracking_tokens",
        "planned",
        "spare ring positions for rejected draft tokens",
    ),
    SourceSetting(
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
        "compile.prefill_truncation",
        "planned",
        "skip upper layers for early prompt tokens; now always off",
    ),
    SourceSetting(
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
        "compile.prefill_keep_tokens",
        "planned",
        "prompt tokens that truncation leaves whole",
    ),
    SourceSetting(
        "DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
        "serve.async_scheduling",
        "planned",
        "queue the next step before the last one's results are read",
    ),
    SourceSetting(
        "prefill attempt interval",
        "serve.prefill_attempt_interval",
        "planned",
        "decode steps between two votes for a prefill step",
    ),
    SourceSetting(
        "prefill any-attempt interval",
        "serve.prefill_any_attempt_interval",
        "planned",
        "decode steps after which any waiting prompt starts a prefill step",
    ),
    SourceSetting(
        "graph interval",
        "compile.decode_rows, compile.prefill_tokens",
        "option",
        "the sizes graphs are built for, as explicit lists instead of a step width",
    ),
    SourceSetting(
        "cache threshold for prefill",
        "serve.prefill_cache_threshold",
        "planned",
        "share of used cache blocks above which no prefill starts",
    ),
    SourceSetting("block size", "block_tokens", "fixed", "token positions in a cache block; always 128"),
    SourceSetting("max_num_seqs", "compile.max_num_seqs", "option", "requests that can hold cache at once"),
    SourceSetting(
        "max_num_batched_tokens",
        "compile.prefill_tokens",
        "option",
        "the largest prefill size is the most prompt tokens that one step takes",
    ),
    SourceSetting("nextn", "serve.num_draft_tokens", "planned", "draft tokens per step; now always 0"),
    SourceSetting("forced top-k", "serve.force_top_k", "planned", "most candidates that sampling considers"),
    SourceSetting(
        "preemption mode",
        "serve.preemption",
        "planned",
        "what happens when cache blocks run out; now requests wait for admission instead",
    ),
    SourceSetting(
        "split-KV threshold",
        "split_kv",
        "fixed",
        "attention is never split by the size of the batch; always off",
    ),
    SourceSetting(
        "EPLB interval, window, redundant experts",
        "serve.expert_balancing",
        "planned",
        "move experts between devices as load shifts",
    ),
)


def not_available(option: str) -> str | None:
    """Why a known option of the original engine cannot be given here, or None for an unknown name."""
    for setting in SOURCE_SETTINGS:
        bare = setting.name.partition(".")[2] or setting.name
        if option.partition(".")[2] != bare and option != bare:
            continue
        if setting.status == "planned":
            return f"this version does not have it yet ({setting.meaning})"
        if setting.status == "fixed":
            return f"is not an option ({setting.meaning})"
    return None


def replacement_for(variable: str) -> str | None:
    """What to use instead of an environment variable of the original engine, or None if it never had it."""
    for setting in SOURCE_SETTINGS:
        if setting.source == variable:
            kind = {"option": "use the option", "fixed": "fixed here:", "planned": "not available yet:"}
            return f"{kind[setting.status]} {setting.name} ({setting.meaning})"
    return None
