"""The public entry: an artifact's directory in, `generate` out. In vLLM's shape.

Owns text, progress, threads and the order of results; the work is the engine's.
"""

import contextlib
import dataclasses
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from deepinfer.artifacts import TrustStore
from deepinfer.errors import RequestError, UsageError
from deepinfer.runtime.engine import Engine
from deepinfer.runtime.input_processor import InputProcessor
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.loader import load_artifact
from deepinfer.runtime.output_collector import OutputCollector
from deepinfer.runtime.outputs import Provenance, RequestOutput
from deepinfer.runtime.prompts import PromptLike, parse_params, parse_prompts
from deepinfer.runtime.provenance import provenance_of
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler_config import SchedulerConfig
from deepinfer.runtime.scoring import Score, score_of
from deepinfer.runtime.step_runner import step_runner
from deepinfer.runtime.threads import WAIT_POLICY, checked_num_threads, waits_passively

logger = logging.getLogger("deepinfer")

_Admitted = tuple[str | None, Sequence[int], SamplingParams]  # a prompt's text, its ids, its parameters


@contextlib.contextmanager
def _naming_prompt(index: int, count: int) -> Iterator[None]:
    """Say in a RequestError which of several prompts it is about."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        where = f"prompts[{index}]" + (f" {error.where}" if error.where else "")
        raise RequestError(error.what, where=where, action=error.action) from error


class LLM:
    """A loaded artifact that generates text or tokens.

    artifact_dir: directory that deepinfer-compile wrote. num_threads: threads of the numerics, set once for
    the process; a thread per physical core of this process by default. max_num_seqs: run at most so many
    requests at a time, up to what the artifact was built for. trust_store: whose artifacts to run; the user's
    own store by default. scheduler_config: the policy of steps and memory.

    Raises ArtifactError and its kinds, ResourceError and UsageError. `generate` may be called from several
    threads: calls wait for each other.
    """

    def __init__(
        self,
        artifact_dir: Path | str,
        *,
        num_threads: int | None = None,
        max_num_seqs: int | None = None,
        trust_store: TrustStore | None = None,
        scheduler_config: SchedulerConfig | None = None,
    ) -> None:
        self.num_threads = checked_num_threads(num_threads)
        torch.set_num_threads(self.num_threads)
        if self.num_threads > 1 and not waits_passively():
            logger.warning(
                "torch was imported before deepinfer.runtime, so idle threads spin, which is slow on a "
                "busy machine: import deepinfer.runtime first, or set %s=PASSIVE",
                WAIT_POLICY,
            )
        self._loaded = load_artifact(artifact_dir, trust_store)
        tokenizer = self._loaded.tokenizer
        self._runner = runner = step_runner(self._loaded, _limited(self._loaded.limits, max_num_seqs))
        self._inputs = InputProcessor(tokenizer, self._loaded.chat, runner.limits.max_model_len)
        token_bytes = None if tokenizer is None else tokenizer.token_bytes
        self._engine = Engine(runner, scheduler_config, token_bytes=token_bytes)
        settings = {"num_threads": self.num_threads, "max_num_seqs": runner.limits.num_slots - 1}
        self._provenance = provenance_of(
            self.artifact_id, self._loaded.manifest, self._engine.sampler.name, settings
        )
        self._lock = threading.RLock()
        summary = self._loaded.report.summary()
        logger.info("loaded %s\n%s\n%s", self.artifact_id, self._loaded.cache_summary(), summary)

    @property
    def artifact_id(self) -> str:
        """Identity of the artifact: everything that can change a result is in it."""
        return self._loaded.artifact_id

    @property
    def limits(self) -> Limits:
        """Sizes in force."""
        return self._engine.runner.limits

    @property
    def parts(self) -> tuple[Engine, InputProcessor, Callable[[Request], Provenance]]:
        """What an `AsyncEngine` takes over: nothing else may use this object meanwhile."""
        return self._engine, self._inputs, self._provenance

    @property
    def load_summary(self) -> str:
        """Bytes and milliseconds of each part of loading, as text."""
        return self._loaded.report.summary()

    @property
    def counters(self) -> dict[str, int]:
        """Steps, rows and tokens so far, and what would show that something was compiled (always 0)."""
        return {**self._engine.counts, **self._loaded.watch.counts()}

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for all prompts together; results are in the order of the prompts.

        prompts: text, a list of token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a list of these.
        sampling_params: for all prompts, or one entry per prompt. use_tqdm: a progress bar on stderr, if that
        is a terminal. A request whose logits turn out not to be numbers ends with finish_reason "error";
        others are not affected.

        Raises RequestError before any work if a prompt or a parameter cannot be served. After any other
        exception, an interrupt from the keyboard included, the object can be used again.
        """
        with self._lock:
            collectors, requests = self._add(prompts, sampling_params)
            with self._ending(requests), self._bar(len(requests), use_tqdm) as bar:
                while unfinished := sum(not collector.finished for collector in collectors):
                    self._engine.step()
                    bar.update(unfinished - sum(not collector.finished for collector in collectors))
            return [collector.whole() for collector in collectors]

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Generates for all prompts together; yields what becomes visible, as it does.

        Each output holds what is new of one prompt, named by its `request_id`: "0" for the first prompt, "1"
        for the next. The pieces of `text` in sum are the text that `generate` returns. The last output of a
        prompt is `finished`. Leaving the loop early ends the requests.

        Raises RequestError at once if a prompt or a parameter cannot be served.
        """
        with self._lock:
            admitted = self._checked(prompts, sampling_params)
        return self._stream(admitted)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """`generate` for one conversation, or a list of them; see `encode_chat` for the options."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if several else [messages]
        prompts = [self.encode_chat(conversation, **options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def encode_chat(self, messages: object, **options: Any) -> list[int]:
        """Token ids of a conversation: dicts with `role` and `content`.

        options: tools, add_generation_prompt (True), continue_final_message (False), reasoning_effort, see
        `ChatFormat.encode`. Raises RequestError.
        """
        known = [
            name for name in inspect.signature(self._inputs.encode_chat).parameters if name != "messages"
        ]
        if unknown := [name for name in options if name not in known]:
            raise RequestError(
                f"{unknown[0]!r} is no option", where="chat", action=f"one of {', '.join(known)}"
            )
        return self._inputs.encode_chat(messages, **options)

    def answer_message(self, text: str) -> dict[str, str]:
        """An answer as the assistant's message of a conversation that goes on."""
        if self._inputs.chat is None:
            return {"role": "assistant", "content": text}
        return self._inputs.chat.answer_message(text)

    def score(self, prompts: PromptLike | Sequence[PromptLike], use_tqdm: bool = True) -> list[Score]:
        """Log-probabilities that the model gives to texts, or to token ids, token by token.

        Of the model's own distribution, at temperature 1 and without filters. Raises RequestError.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, logprobs_mode="raw")
        token_bytes = None if self._inputs.tokenizer is None else self._inputs.tokenizer.token_bytes
        return [score_of(output, token_bytes) for output in self.generate(prompts, params, use_tqdm)]

    def _add(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[OutputCollector], list[Request]]:
        """Queues all prompts, or, if one cannot be served, none."""
        return self._queue(self._checked(prompts, sampling_params))

    def _checked(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[_Admitted]:
        """Prompts that can be served, each as text, ids and parameters. Raises RequestError."""
        parsed = parse_prompts(prompts)
        params = parse_params(sampling_params, len(parsed))
        token_ids = []
        for index, (prompt, own) in enumerate(zip(parsed, params, strict=True)):
            with _naming_prompt(index, len(parsed)):
                params[index] = own = self._inputs.with_words_as_ids(own)
                token_ids.append(self._inputs.encode(prompt))
                self._engine.validate(token_ids[-1], own)
        return [(prompt.text, ids, own) for prompt, ids, own in zip(parsed, token_ids, params, strict=True)]

    def _queue(self, admitted: list[_Admitted]) -> tuple[list[OutputCollector], list[Request]]:
        requests: list[Request] = []
        with self._ending(requests, only_on_error=True):
            for _, ids, own in admitted:
                requests.append(self._engine.add_request(ids, own))
        collectors = [
            OutputCollector(request, text, self._provenance)
            for (text, _, _), request in zip(admitted, requests, strict=True)
        ]
        return collectors, requests

    def _stream(self, admitted: list[_Admitted]) -> Iterator[RequestOutput]:
        with self._lock:  # only now: an iterator that nobody asks holds nothing
            collectors, requests = self._queue(admitted)
        left = dict(enumerate(collectors))
        with self._ending(requests):
            while left:
                with self._lock:
                    self._engine.step()
                    news = [(index, collector.take()) for index, collector in left.items()]
                for index, output in news:
                    if output is not None:
                        if output.finished:
                            del left[index]
                        yield dataclasses.replace(output, request_id=str(index))

    @contextlib.contextmanager
    def _ending(self, requests: list[Request], *, only_on_error: bool = False) -> Iterator[None]:
        """End what is unfinished when the work on these requests is left, however that happens."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException:
            with self._lock:
                self._engine.abort_all()  # an interruption may have left the engine anywhere
            raise
        finally:
            if not only_on_error:
                with self._lock:
                    for request in requests:
                        if not request.finished:
                            self._engine.abort(request)

    def _bar(self, total: int, use_tqdm: bool) -> "tqdm[NoReturn]":
        return tqdm(total=total, desc="requests", disable=None if use_tqdm else True, dynamic_ncols=True)


def _limited(limits: Limits, max_num_seqs: int | None) -> Limits:
    """Limits with fewer requests at a time. Raises UsageError for more than the artifact was built for."""
    built_for = limits.num_slots - 1
    if max_num_seqs is None:
        return limits
    if (
        isinstance(max_num_seqs, bool)
        or not isinstance(max_num_seqs, int)
        or not 1 <= max_num_seqs <= built_for
    ):
        raise UsageError(
            f"{max_num_seqs!r} is not possible",
            where="max_num_seqs",
            action=f"the artifact allows 1 to {built_for}",
        )
    return dataclasses.replace(limits, num_slots=max_num_seqs + 1)
