"""Requests of many callers on one event loop, served by one engine on a thread of its own.

Owns the two threads' meeting: the event loop only queues and reads, the engine's thread alone touches the
engine. Prompts are encoded on a third thread, so nothing long runs on the loop. A slow reader holds nobody
up: what it has not read is joined. A reader that leaves ends its request.
"""

import asyncio
import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from deepinfer.errors import DeepInferError, EngineError, QueueFullError, RequestError, UsageError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.input_processor import InputProcessor
from deepinfer.runtime.output_collector import OutputCollector, merged
from deepinfer.runtime.outputs import Provenance, RequestOutput
from deepinfer.runtime.prompts import PromptLike, parse_prompts
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.runtime.llm import LLM

logger = logging.getLogger("deepinfer")

MAX_UNFINISHED: Final = 4096
MAX_UNREAD: Final = 256  # outputs of one request that are kept apart


class _Stream:
    """One request between the two threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, request_id: str) -> None:
        self.request_id = request_id
        self.request: Request | None = None  # the engine thread's
        self.collector: OutputCollector | None = None
        self.aborted = False  # perhaps before there is a request
        self._loop = loop
        self._news = asyncio.Event()
        self._lock = threading.Lock()
        self._unread: list[RequestOutput] = []
        self._error: BaseException | None = None

    @property
    def names(self) -> list[str]:
        """Ids of all continuations."""
        assert self.request is not None
        return [own.request_id for own in (self.request, *self.request.choices)]

    def put(self, output: RequestOutput | None, error: BaseException | None = None) -> None:
        """Called by the engine's thread; `wake` must follow on the loop."""
        with self._lock:
            if output is not None:
                self._unread.append(output)
            if len(self._unread) > MAX_UNREAD:
                self._unread = [merged(self._unread)]
            self._error = self._error or error

    def wake(self) -> None:
        """Called on the loop."""
        self._news.set()

    async def get(self) -> RequestOutput:
        """What is new, all of it as one. Raises what ended the request, once everything is read."""
        while True:
            with self._lock:
                unread, self._unread = self._unread, []
                error = self._error
            if unread:
                return merged(unread)
            if error is not None:
                raise error
            self._news.clear()
            await self._news.wait()


class AsyncEngine:
    """An engine for asyncio. Start it with `async with`, or `start` and `shutdown`, on one event loop.

    max_unfinished: further requests are refused with QueueFullError.
    """

    def __init__(
        self,
        engine: Engine,
        inputs: InputProcessor,
        provenance: Callable[[Request], Provenance] | None = None,
        *,
        max_unfinished: int = MAX_UNFINISHED,
    ) -> None:
        """The engine and what is said of its results; nobody else may use it meanwhile."""
        self.engine, self.inputs = engine, inputs
        self._provenance, self._max_unfinished = provenance, max_unfinished
        self._names = itertools.count()
        self._streams: dict[str, _Stream] = {}  # the loop's: unfinished requests by id
        self._serving: dict[str, _Stream] = {}  # the engine thread's: by the id of every continuation
        self._calls: deque[Callable[[], None]] = deque()
        self._called = threading.Event()
        self._waking = threading.Lock()
        self._to_wake: list[_Stream] = []
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._encoder = ThreadPoolExecutor(1, "deepinfer-encode")

    @classmethod
    def from_llm(cls, llm: "LLM", **options: Any) -> "AsyncEngine":
        """An engine that takes over from a loaded model."""
        return cls(*llm.parts, **options)

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended yet."""
        return len(self._streams)

    def start(self) -> None:
        """Starts the engine's thread, for the running event loop."""
        if self._thread is not None:
            raise UsageError("it runs already", where="AsyncEngine")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="deepinfer-engine", daemon=True)
        self._thread.start()

    async def shutdown(self, *, drain: bool = False) -> None:
        """Ends the engine's thread; refuses what comes later.

        drain: let unfinished requests end by themselves; they are aborted otherwise, and their readers get
        the outputs that say so.
        """
        self._stopping = True
        if self._thread is None:
            return
        if not drain:
            for request_id in list(self._streams):
                self.abort(request_id)
        self._called.set()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 1.0)
        self._encoder.shutdown()

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the engine's, which ends with what there is
    ) -> AsyncIterator[RequestOutput]:
        """Yields what becomes visible of one prompt, as it does, see `LLM.stream`.

        request_id: unique among unfinished requests; made up by default. timeout: seconds after which the
        request ends with what it has, as an abort whose `stop_reason` is "timeout". Closing the iterator, or
        cancelling the task that waits for it, ends the request.

        Raises RequestError, QueueFullError, EngineError if a step failed, and UsageError after `shutdown`.
        """
        stream = await self._submit(prompt, sampling_params or SamplingParams(), request_id, timeout)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            if self._streams.pop(stream.request_id, None) is not None:
                self._call(lambda: self._leave(stream))

    async def encode_chat(self, messages: object, **options: Any) -> list[int]:
        """Token ids of a conversation, see `LLM.encode_chat`."""
        assert self._loop is not None, "start it first"
        return await self._loop.run_in_executor(
            self._encoder, lambda: self.inputs.encode_chat(messages, **options)
        )

    def abort(self, request_id: str) -> None:
        """Ends a request: its reader gets a last output with the finish_reason "abort".

        Without effect on one that has ended or is unknown.
        """
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.aborted = True
            self._call(lambda: self._abort(stream))

    # -- on the loop

    async def _submit(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        request_id: str | None,
        timeout_seconds: float | None,
    ) -> _Stream:
        if self._loop is None or self._stopping:
            raise UsageError("it does not run", where="AsyncEngine")
        name = request_id if request_id is not None else f"request-{next(self._names)}"
        if name in self._streams:
            raise RequestError(f"{name!r} is unfinished already", where="request_id")
        if len(self._streams) >= self._max_unfinished:
            raise QueueFullError(
                f"{len(self._streams)} requests are unfinished", where="AsyncEngine", action="try again later"
            )
        stream = self._streams[name] = _Stream(self._loop, name)
        try:
            parsed = parse_prompts(prompt)
            if len(parsed) != 1:
                raise RequestError("one prompt at a time", where="prompt")
            token_ids, own = await self._loop.run_in_executor(
                self._encoder,
                lambda: (self.inputs.encode(parsed[0]), self.inputs.with_words_as_ids(params)),
            )
            admitted = self._loop.create_future()

            def add() -> None:
                try:
                    request = self.engine.add_request(
                        token_ids, own, request_id=name, timeout=timeout_seconds
                    )
                except Exception as error:  # whatever it is, it is this request's
                    self._settle(admitted, error)
                    return
                stream.request = request
                stream.collector = OutputCollector(request, parsed[0].text, self._provenance)
                self._serving |= dict.fromkeys(stream.names, stream)
                if stream.aborted:
                    self._abort(stream)
                self._settle(admitted, None)

            self._call(add)
            await admitted
        except BaseException:  # cancelled while it was queued, too
            del self._streams[name]
            self._call(lambda: self._leave(stream))
            raise
        return stream

    def _call(self, function: Callable[[], None]) -> None:
        """Has the engine's thread call a function, in order, before its next step."""
        self._calls.append(function)
        self._called.set()

    # -- on the engine's thread

    def _run(self) -> None:
        while True:
            self._called.clear()
            while self._calls:
                self._calls.popleft()()
            if not self.engine.has_work:
                if self._stopping and not self._calls:
                    break
                self._called.wait()
                continue
            self._step()
        self._fail(UsageError("it was shut down", where="AsyncEngine"))

    def _step(self) -> None:
        try:
            self._deliver(self.engine.step())
        except Exception as error:  # the thread goes on, or readers would wait for ever
            logger.exception("a step failed")
            self._fail(error)

    def _deliver(self, updated: list[Request]) -> None:
        woken = []
        for stream in {self._serving.get(request.request_id) for request in updated} - {None}:
            assert stream is not None and stream.collector is not None
            output = stream.collector.take()
            if output is not None:
                stream.put(output)
                woken.append(stream)
                if output.finished:
                    self._forget(stream)
        self._wake(woken)

    def _forget(self, stream: _Stream) -> None:
        for name in stream.names:
            self._serving.pop(name, None)

    def _fail(self, error: Exception) -> None:
        """Ends every request with an error."""
        self.engine.abort_all()
        streams, self._serving = list(set(self._serving.values())), {}
        for stream in streams:
            what = error if isinstance(error, DeepInferError) else EngineError(f"a step failed: {error}")
            stream.put(None, what)
        self._wake(streams)

    def _abort(self, stream: _Stream) -> None:
        if stream.request is not None:
            self.engine.abort(stream.request)

    def _leave(self, stream: _Stream) -> None:
        """The reader of this request is gone."""
        if self._serving.get(stream.request_id) is stream:
            self._forget(stream)
            self._abort(stream)

    def _settle(self, future: "asyncio.Future[None]", error: Exception | None) -> None:
        def settle() -> None:
            if future.cancelled():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._on_loop(settle)

    def _wake(self, streams: list[_Stream]) -> None:
        """Tells the loop, once for all that it has not noticed yet."""
        with self._waking:
            asleep = not self._to_wake
            self._to_wake += streams
        if asleep and streams:
            self._on_loop(self._wake_all)

    def _wake_all(self) -> None:
        with self._waking:
            streams, self._to_wake = self._to_wake, []
        for stream in streams:
            stream.wake()

    def _on_loop(self, function: Callable[[], None]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(function)
