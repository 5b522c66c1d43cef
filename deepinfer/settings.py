"""The one schema of every option: what `deepinfer-compile` builds and how `deepinfer generate` serves.

A setting has one name, in the YAML file, in Python and (with dashes) on the command line. Values are checked
once, when a config is made; whatever holds a `CompileConfig` or a `ServeConfig` may rely on it. Precedence:
flag, then file, then default. This file does not know how a setting is used. docs/settings.md is its manual.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import UNSET, Meta, UnsetType

from deepinfer.errors import SettingsError
from deepinfer.runtime.threads import physical_cores
from deepinfer.settings_map import not_available
from deepinfer.target import TargetName
from deepinfer.yaml_loader import read_yaml

BLOCK_TOKENS = 128  # token positions of one cache block
DEFAULT_MAX_MODEL_LEN = 1024  # keeps the default pools of a large model within a laptop's memory

Rows = tuple[Annotated[int, Meta(ge=1, le=16384)], ...]
PassName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]

# Left out of the artifact's options: the first changes how long a build takes, never its result; the second
# has a place of its own in the manifest; of the third follows `num_blocks`.
_NOT_AN_OPTION = ("jobs", "target", "kv_cache_memory_bytes")
_ROW_LISTS = ("decode_rows", "prefill_tokens", "logits_rows")


class CompileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to build. Raises SettingsError, naming the field, for a value outside its range.

    Row lists are kept sorted and without repetitions. `None` means "derive it": see `resolved`.
    """

    target: TargetName = "cpu"
    precision: Literal["native", "float32"] = "native"
    decode_rows: Annotated[Rows, Meta(min_length=1, max_length=64)] = (1, 2, 4, 8)
    prefill_tokens: Annotated[Rows, Meta(min_length=1, max_length=64)] = (16, 64, 256)
    logits_rows: Annotated[Rows, Meta(min_length=1, max_length=64)] | None = None
    max_model_len: Annotated[int, Meta(ge=2, le=1 << 22)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] = 8
    num_blocks: Annotated[int, Meta(ge=2, le=1 << 24)] | None = None
    kv_cache_memory_bytes: Annotated[int, Meta(ge=1, le=1 << 50)] | None = None
    jobs: Annotated[int, Meta(ge=1, le=256)] | None = None
    isa: Literal["auto", "avx2", "avx512"] = "auto"
    taps: Literal["auto", "on", "off"] = "auto"
    disabled_passes: tuple[PassName, ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self, "compile")
        if self.num_blocks is not None and self.kv_cache_memory_bytes is not None:
            raise SettingsError(
                "says the same as num_blocks in another way",
                where="compile.kv_cache_memory_bytes",
                action="give one of the two",
            )
        for name in _ROW_LISTS:
            rows = getattr(self, name)
            if rows is not None:
                msgspec.structs.force_setattr(self, name, tuple(sorted(set(rows))))
        msgspec.structs.force_setattr(self, "disabled_passes", tuple(sorted(set(self.disabled_passes))))

    @property
    def blocks_per_request(self) -> int:
        """Cache blocks that a request of the full length occupies; needs a resolved config."""
        assert self.max_model_len is not None, "resolve the config first"
        return -(-self.max_model_len // BLOCK_TOKENS)

    def _default_logits_rows(self) -> tuple[int, ...]:
        """A head for full steps, and one of a single row where a step may be that small."""
        return tuple(sorted({max(self.decode_rows)} | ({1} & set(self.decode_rows))))

    def resolved(self, *, max_position_embeddings: int) -> "CompileConfig":
        """The same config with every derived value filled in for a model of that context length.

        Raises SettingsError when the length or the block pool cannot serve a single request.
        """
        length = self.max_model_len or min(max_position_embeddings, DEFAULT_MAX_MODEL_LEN)
        if length > max_position_embeddings:
            raise SettingsError(
                f"{length} is beyond the model's {max_position_embeddings} positions",
                where="compile.max_model_len",
            )
        needed = -(-length // BLOCK_TOKENS)
        blocks = self.num_blocks or 1 + self.max_num_seqs * needed  # block 0 belongs to padding rows
        if blocks < 1 + needed:
            raise SettingsError(
                f"{blocks} blocks cannot hold one request of {length} tokens",
                where="compile.num_blocks",
                action=f"give at least {1 + needed}, or a smaller max_model_len",
            )
        return msgspec.structs.replace(
            self,
            logits_rows=self.logits_rows or self._default_logits_rows(),
            max_model_len=length,
            num_blocks=blocks,
            jobs=self.jobs or physical_cores(),
        )

    def effective(self) -> dict[str, object]:
        """Plain data for the manifest: what can change the artifact (but the target), in a fixed order."""
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _NOT_AN_OPTION}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to run an artifact. Raises SettingsError, naming the field, for a value outside its range."""

    num_threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096)] | None = None

    def __post_init__(self) -> None:
        _check_fields(self, "serve")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The two sections of a settings file."""

    compile: CompileConfig
    serve: ServeConfig


Section = TypeVar("Section", CompileConfig, ServeConfig)


def load_settings(
    path: Path | None = None,
    *,
    compile_flags: Mapping[str, object] | None = None,
    serve_flags: Mapping[str, object] | None = None,
) -> Settings:
    """Read a settings file, lay the flags over it and check everything.

    A flag whose value is `UNSET` was not given. Raises SettingsError for an unreadable file, an unknown
    section or key (with the nearest known one), an option this version lacks, or a value out of range.
    """
    document = read_yaml(path) if path is not None else {}
    source = str(path) if path is not None else "settings"
    _refuse_unknown(document, ("compile", "serve"), source, prefix="")
    return Settings(
        compile=_section(CompileConfig, "compile", document, compile_flags or {}, source),
        serve=_section(ServeConfig, "serve", document, serve_flags or {}, source),
    )


def _section(
    kind: type[Section],
    name: str,
    document: Mapping[str, object],
    flags: Mapping[str, object],
    source: str,
) -> Section:
    values = document.get(name)
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise SettingsError("must be a mapping of settings", where=f"{source}: {name}")
    _refuse_unknown(values, kind.__struct_fields__, source, prefix=f"{name}.")
    given = {key: value for key, value in flags.items() if not isinstance(value, UnsetType)}
    return kind(**{**values, **given})


def _refuse_unknown(given: Mapping[str, object], known: tuple[str, ...], source: str, *, prefix: str) -> None:
    for key in given:
        if key in known:
            continue
        reason = not_available(prefix + key)
        if reason:
            raise SettingsError(reason, where=f"{source}: {prefix}{key}")
        near = difflib.get_close_matches(key, known, n=1)
        action = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        raise SettingsError("unknown setting", where=f"{source}: {prefix}{key}", action=action)


def _check_fields(config: CompileConfig | ServeConfig, section: str) -> None:
    """Convert every field to its declared type; Struct constructors themselves check nothing."""
    for field in msgspec.structs.fields(type(config)):
        value = getattr(config, field.name)
        try:
            converted = msgspec.convert(value, field.type, strict=True)
        except msgspec.ValidationError as error:
            reason = _reason(error, field.type)
            raise SettingsError(
                f"{reason}, given {_shown(value)}", where=f"{section}.{field.name}"
            ) from error
        msgspec.structs.force_setattr(config, field.name, converted)


def _reason(error: msgspec.ValidationError, kind: object) -> str:
    if get_origin(kind) is Literal:
        return f"must be one of {', '.join(get_args(kind))}"
    text = str(error).split(" - at ")[0].replace("`", "")
    return text[:1].lower() + text[1:]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


__all__ = ["UNSET", "CompileConfig", "ServeConfig", "Settings", "load_settings"]
