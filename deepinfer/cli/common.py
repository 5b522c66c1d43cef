"""What all commands share: the environment, strict argument parsing, one-line errors and exit codes.

stdout carries the result and nothing else; progress and errors go to stderr. No command shows a traceback
unless DEEPINFER_LOG=debug.
"""

import argparse
import contextlib
import difflib
import io
import json
import logging
import math
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from deepinfer import __version__
from deepinfer.errors import DeepInferError, ResourceError, SettingsError, UsageError
from deepinfer.progress import Progress, TerminalProgress
from deepinfer.settings_map import replacement_for

EXIT_DIFFERENT = 1
EXIT_INTERNAL = 70  # sysexits' EX_SOFTWARE: 1 would read as "different"
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # what a shell reports for a program that SIGPIPE ended

LogLevel = Literal["debug", "info", "warning"]
_VARIABLES = ("DEEPINFER_CACHE", "DEEPINFER_LOG", "DEEPINFER_DUMP")


class Environment(msgspec.Struct, frozen=True):
    """The three environment variables, checked."""

    cache_dir: Path | None = None
    log: LogLevel = "warning"
    dump_dir: Path | None = None


def read_environment(variables: Mapping[str, str]) -> Environment:
    """Check every `DEEPINFER_*` variable; raises SettingsError for an unknown one or a bad value."""
    for name in sorted(variables):
        if not name.startswith("DEEPINFER_") or name in _VARIABLES:
            continue
        raise SettingsError(
            "unknown environment variable",
            where=name,
            action=replacement_for(name) or f"known are {', '.join(_VARIABLES)}",
        )
    log = variables.get("DEEPINFER_LOG", "warning")
    if log not in ("debug", "info", "warning"):
        raise SettingsError(f"must be debug, info or warning, not {log!r}", where="DEEPINFER_LOG")
    return Environment(
        cache_dir=_folder(variables, "DEEPINFER_CACHE"),
        log=log,  # type: ignore[arg-type]
        dump_dir=_folder(variables, "DEEPINFER_DUMP"),
    )


def _folder(variables: Mapping[str, str], name: str) -> Path | None:
    value = variables.get(name)
    if value is None:
        return None
    if not value or not Path(value).is_absolute():
        raise SettingsError("must be an absolute path", where=name)
    return Path(value)


class StrictParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of printing, and takes no abbreviated flags."""

    def __init__(self, **options: object) -> None:
        super().__init__(allow_abbrev=False, **options)  # type: ignore[arg-type]

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse everything. Raises UsageError, which names the nearest flag if an unknown one was given."""
        options, extra = self.parse_known_args(args, namespace)
        if extra:
            self.error(f"unrecognized arguments: {' '.join(extra)}{self._hint(extra[0])}")
        return options

    def _hint(self, argument: str) -> str:
        """What may have been meant by an argument that no flag takes."""
        flag = argument.replace("=", " ").partition(" ")[0]
        parsers = [self]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
        known = {name for parser in parsers for name in parser._option_string_actions if name[:2] == "--"}
        if flag in known:
            return f", give {flag} and its value as two arguments" if " " in argument else ""
        near = difflib.get_close_matches(flag, sorted(known), n=1) if flag[:2] == "--" else []
        return f", did you mean {near[0]}?" if near else ""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where=self.prog, action=f"see {self.prog} --help")


def add_output_flags(parser: argparse.ArgumentParser, json_help: str) -> None:
    """`--json`, `-q` and `--version`, the same for every command."""
    add_version_flag(parser)
    parser.add_argument("--json", action="store_true", help=json_help)
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")


def add_version_flag(parser: argparse.ArgumentParser) -> None:
    """`--version`, which prints and exits 0."""
    parser.add_argument("--version", action="version", version=f"deepinfer {__version__}")


def existing_folder(path: Path, what: str) -> Path:
    """`path` itself; raises UsageError when it is not a folder."""
    if not path.exists():
        raise UsageError("does not exist", where=f"{what} {path}")
    if not path.is_dir():
        raise UsageError("is not a folder", where=f"{what} {path}")
    return path


def integer_list(text: str) -> list[int]:
    """Comma-separated integers. Raises ArgumentTypeError, with the item at fault."""
    numbers = []
    for item in text.split(","):
        word = item.strip()
        if not word.lstrip("+-").isdecimal() or len(word) > 20:
            raise argparse.ArgumentTypeError(f"expected integers separated by commas, got {word[:40]!r}")
        numbers.append(int(word))
    return numbers


_UNITS = {"": 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}


def size_in_bytes(text: str) -> int:
    """A number of bytes, as `1000000` or `2GiB` (KiB, MiB, GiB, TiB). Raises ArgumentTypeError."""
    found = re.fullmatch(r"([0-9]{1,15})\s*([KMGT]iB)?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected bytes or a size such as 2GiB, got {text[:40]!r}")
    return int(found[1]) << _UNITS[found[2] or ""]


def join_lists(arguments: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Let `--rows 4 8` mean `--rows 4,8`: numbers after one of `flags` become a single argument."""
    joined: list[str] = []
    collecting = False
    for argument in arguments:
        number = argument.replace(",", "").isdecimal()
        if collecting and number and joined[-1] not in flags:
            joined[-1] += f",{argument}"
        else:
            joined.append(argument)
            collecting = argument in flags or (collecting and number)
    return joined


def progress_for(arguments: argparse.Namespace) -> Progress:
    """Progress on stderr, or none with `-q`."""
    return Progress() if arguments.quiet else TerminalProgress()


def writable_report(path: Path | None, artifact: Path) -> Path | None:
    """The path itself; raises UsageError at once, not after the work, when no file can be written there.

    Nor may it lie in the artifact, whose files are not to be replaced.
    """
    if path is not None and path.resolve().is_relative_to(artifact.resolve()):
        raise UsageError("lies in the artifact itself", where=str(path), action="name a file elsewhere")
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UsageError(
            "cannot be written: there is no such folder, or it is one itself",
            where=str(path),
            action="name a file in a folder",
        )
    return path


def write_report(path: Path, text: str) -> None:
    """Write a report file; raises UsageError naming it when that fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot be written: {error.strerror}", where=str(path)) from error


def to_json(value: object, *, indent: int | None = None) -> str:
    """JSON of plain data; numbers that JSON does not have (NaN, infinities) become null."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def run_command(command: Callable[[Sequence[str], Environment], int], arguments: Sequence[str] | None) -> int:
    """Run a command's body and turn whatever goes wrong into one line and an exit code."""
    _open_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in given
    debug = os.environ.get("DEEPINFER_LOG") == "debug"
    try:
        if arguments is None and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal cannot show
        environment = read_environment(os.environ)
        _start_logging(environment.log)
        with _sigterm_unwinds():
            code = command(given, environment)
        sys.stdout.flush()
    except BrokenPipeError:
        _abandon_stdout()
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        if arguments is None:  # the process ends here: a further interrupt would only break its ending
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except DeepInferError as error:
        return _report(error, as_json=as_json, debug=debug)
    except MemoryError:
        return _report(ResourceError("memory ran out"), as_json=as_json, debug=debug)
    except OSError as error:
        place = str(error.filename) if error.filename is not None else None
        failure = ResourceError(f"the system refused: {error.strerror or error}", where=place)
        return _report(failure, as_json=as_json, debug=debug)
    except Exception as error:  # the last line of defence: a user never meets a traceback
        return _report(error, as_json=as_json, debug=debug)
    return code


def _start_logging(level: LogLevel) -> None:
    """The project's log lines go to stderr, from `level` on."""
    logger = logging.getLogger("deepinfer")
    logger.setLevel(level.upper())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.handlers = [handler]


def _report(error: Exception, *, as_json: bool, debug: bool) -> int:
    """Print an error on stderr (and as an object on stdout for machines); returns the exit code."""
    if debug:
        traceback.print_exc(file=sys.stderr)
    if isinstance(error, DeepInferError):
        code, text = error.code, str(error)
        exit_code = error.exit_code if error.exit_code != EXIT_DIFFERENT else EXIT_INTERNAL
        fields = {"code": code, "what": error.what, "where": error.where, "action": error.action}
    else:
        exit_code = EXIT_INTERNAL
        what = f"unexpected {type(error).__name__}: {error}"
        action = "this is a defect: report it as CONTRIBUTING.md says, with the output of DEEPINFER_LOG=debug"
        text = f"[DI999] {what} ({action})"
        fields = {"code": "DI999", "what": what, "where": None, "action": action}
    with contextlib.suppress(OSError):  # nowhere to say it; the exit code still does
        print(" ".join(text.split()), file=sys.stderr)
    if as_json:
        with contextlib.suppress(OSError):
            print(to_json({"error": {**fields, "exit_code": exit_code}}), flush=True)
    try:
        sys.stdout.flush()
    except OSError:
        _abandon_stdout()
    return exit_code


def _open_closed_streams() -> None:
    """Give a process that was started without stdout or stderr one that leads nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for the life of the process


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let a request to end unwind the block like an error, so that nothing half-written is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signal_number: int, _: object) -> NoReturn:
        print("terminated", file=sys.stderr)
        sys.exit(128 + signal_number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _abandon_stdout() -> None:
    """The reader of stdout is gone: point it nowhere, so that the flush at exit stays silent."""
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is not a real file, in tests
        pass
    finally:
        os.close(null)
