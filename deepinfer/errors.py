"""Every error a user can meet: what was wrong, where, and what to do.

This file is a leaf: it imports nothing of the project, so every package may import it. Programmer mistakes
are `assert`s; anything a file, an option or a request can cause is one of these classes.
"""


class DeepInferError(Exception):
    """Base of all errors of the project.

    `code` is stable and may be matched by tools; `exit_code` is what the command line tools return.
    `what` states the fault, `where` the file, tensor, field or option, `action` what to do about it.
    """

    code = "DI000"
    exit_code = 1

    def __init__(self, what: str, *, where: str | None = None, action: str | None = None) -> None:
        self.what, self.where, self.action = what, where, action
        text = f"[{self.code}] "
        if where:
            text += f"{where}: "
        text += what
        if action:
            text += f" ({action})"
        super().__init__(text)


class UsageError(DeepInferError):
    """The command line, or the arguments of a public function, cannot be used."""

    code = "DI100"
    exit_code = 2


class SettingsError(UsageError):
    """A settings file, a flag or an environment variable is wrong."""

    code = "DI110"


class RequestError(UsageError):
    """A request cannot be served: its prompt or its sampling parameters are out of range."""

    code = "DI120"


class ModelError(DeepInferError):
    """The model directory cannot be used."""

    code = "DI200"
    exit_code = 3


class ConfigError(ModelError):
    """A field of config.json is missing, malformed or inconsistent."""

    code = "DI201"


class UnsupportedModelError(ModelError):
    """The model is of a kind, or uses a feature, that this version does not implement."""

    code = "DI202"


class CheckpointError(ModelError):
    """A weight file or a tensor in it is missing, truncated, superfluous or of the wrong kind."""

    code = "DI210"


class TokenizerError(ModelError):
    """The tokenizer is missing where one is needed, or disagrees with the model."""

    code = "DI220"


class BuildError(DeepInferError):
    """A build step failed; nothing was written to the output directory."""

    code = "DI300"
    exit_code = 3


class CaptureError(BuildError):
    """Tracing the model gave a graph that may not be compiled."""

    code = "DI301"


class PassError(BuildError):
    """A compiler pass broke a rule, or fired another number of times than the model asks for."""

    code = "DI302"


class LoweringError(BuildError):
    """The compiler or the toolchain failed on a graph or an op library."""

    code = "DI303"


class ArtifactError(DeepInferError):
    """The artifact cannot be used."""

    code = "DI400"
    exit_code = 4


class ArtifactFormatError(ArtifactError):
    """The directory is not an artifact of a format that this version reads."""

    code = "DI401"


class ArtifactCorruptError(ArtifactError):
    """A file of the artifact is missing, truncated, changed or superfluous."""

    code = "DI402"


class ArtifactUntrustedError(ArtifactError):
    """The artifact holds native code that this user neither built nor trusted."""

    code = "DI403"


class ArtifactMismatchError(ArtifactError):
    """The artifact was built for another torch version, processor or graphics card."""

    code = "DI404"


class ArtifactWriteError(ArtifactError):
    """The artifact could not be written; the target is unchanged."""

    code = "DI405"


class ResourceError(DeepInferError):
    """Memory, cache blocks or a device are not to be had."""

    code = "DI500"
    exit_code = 5


class QueueFullError(ResourceError):
    """Too many requests are unfinished already; try again later."""

    code = "DI502"


class EngineError(DeepInferError):
    """A step failed: the requests that were unfinished have ended, later ones are served again."""

    code = "DI520"
    exit_code = 5


class NumericalError(DeepInferError):
    """A result is not a number: the request that met it ends, others go on."""

    code = "DI510"
    exit_code = 5
