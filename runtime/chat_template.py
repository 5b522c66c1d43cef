"""A checkpoint's chat template, rendered in a process of its own with a limit on time, memory and output.

The template comes with the artifact, the values with a request. Text of a request never becomes a control
token: where it spells one, a mark that no message holds keeps the spelling apart until the text is cut there.
"""

import contextlib
import importlib.util
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deepinfer.errors import RequestError, TokenizerError

MAX_TEMPLATE_BYTES = 64 << 10
CPU_SECONDS = 1  # of one rendering, which a busy machine does not shorten
MAX_SECONDS = 20.0  # until an answer
MEMORY_BYTES = 256 << 20
_WORKER = Path(__file__).with_name("template_worker.py")
_MARKS = range(0xF0000, 0xF1000)  # private use: no text means anything by them


class ChatTemplate:
    """Renders one template. The process starts with the first rendering; it is not shared by forks."""

    def __init__(self, source: str, named_tokens: Mapping[str, str], control_tokens: Iterable[str]) -> None:
        """named_tokens: `bos_token` and the like, for the template. control_tokens: what no message can
        write. Raises TokenizerError for a template that is too long.
        """
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise TokenizerError(f"more than {MAX_TEMPLATE_BYTES} bytes", where="chat_template.jinja")
        self._source, self._named_tokens = source, dict(named_tokens)
        self._control = sorted(set(control_tokens), key=lambda token: (-len(token), token))
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._lock = threading.Lock()

    def render(self, values: Mapping[str, Any], max_characters: int, *, open_end: bool = False) -> list[str]:
        """The prompt as texts to be encoded one by one, each with the control tokens that the template wrote.

        values: what the template is given, as JSON has it: `messages` and more. open_end: cut behind the
        content of the last message. Raises RequestError if the template refuses the messages, fails, or
        exceeds a limit.
        """
        mark = _unused_mark(values)
        apart = {name: self._kept_apart(value, mark) for name, value in values.items()}
        request = {"values": {**apart, **self._named_tokens}, "max_characters": max_characters}
        with self._lock:
            try:
                text = self._ask(request)
            except BaseException:
                self._stop()
                raise
        if open_end:
            text = _cut_behind(text, apart["messages"][-1]["content"])
        return [part for part in text.split(mark) if part]

    def close(self) -> None:
        """Ends the process."""
        with self._lock:
            self._stop()

    def _kept_apart(self, value: Any, mark: str) -> Any:
        """`value` with a mark inside every control token that a text in it spells."""
        if isinstance(value, str):
            return _text_kept_apart(value, mark, self._control)
        if isinstance(value, Mapping):
            return {
                _text_kept_apart(str(key), mark, self._control): self._kept_apart(inner, mark)
                for key, inner in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._kept_apart(inner, mark) for inner in value]
        return value

    def _ask(self, request: Mapping[str, Any]) -> str:
        if self._process is None or self._process.poll() is not None:
            self._start()
        return self._exchange(request)

    def _start(self) -> None:
        self._stop()
        spec = importlib.util.find_spec("jinja2")
        if spec is None or spec.origin is None:
            raise TokenizerError("chat templates need Jinja2", action="pip install 'jinja2>=3.1.6'")
        where = str(Path(spec.origin).parents[1])
        start = (
            f"import runpy, sys; sys.path.append({where!r}); "
            f"runpy.run_path({str(_WORKER)!r}, run_name='__main__')"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONIOENCODING": "utf-8", "PYTHONHASHSEED": "0"},
            cwd="/",
        )
        self._unread = b""
        limits = {"memory_bytes": MEMORY_BYTES, "cpu_seconds": CPU_SECONDS}
        self._exchange({"template": self._source, **limits})

    def _exchange(self, request: Mapping[str, Any]) -> str:
        deadline = time.monotonic() + MAX_SECONDS
        process = self._process
        assert process is not None and process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says so
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        answer = json.loads(self._read_line(process, deadline))
        if "error" in answer:
            raise RequestError(answer["error"], where="chat template")
        return str(answer["text"])

    def _read_line(self, process: "subprocess.Popen[bytes]", deadline: float) -> bytes:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise RequestError(f"no answer within {MAX_SECONDS:g} s", where="chat template")
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    raise RequestError("it needs too much time or memory", where="chat template")
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                    stream.close()


def _text_kept_apart(text: str, mark: str, tokens: Iterable[str]) -> str:
    for token in tokens:
        text = text.replace(token, token[0] + mark + token[1:])
    # Two texts that a template joins must not make a token that neither holds.
    if any(text.endswith(token[:length]) for token in tokens for length in range(1, len(token))):
        text += mark
    return text


def _cut_behind(text: str, content: str) -> str:
    """`text` up to the end of its last message, which a template may have stripped of spaces."""
    place = text.rfind(content.strip())
    if not content.strip() or place < 0:
        raise RequestError(
            "the template changes the last message, so it cannot be continued", where="continue_final_message"
        )
    whole = text.startswith(content.lstrip(), place)
    return text[: place + len(content.lstrip() if whole else content.strip())]


def _unused_mark(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, ensure_ascii=False)
    return next(chr(code) for code in _MARKS if chr(code) not in text)
