"""The public entry: an artifact's directory in, `generate` out. In vLLM's shape.

Owns text, progress, threads and the order of results; the work is the engine's.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from deepinfer.artifacts import TrustStore
from deepinfer.errors import RequestError, UsageError
from deepinfer.runtime.engine import Engine, timing_seconds
from deepinfer.runtime.finish import STOP
from deepinfer.runtime.limits import Limits
from deepinfer.runtime.loader import load_artifact
from deepinfer.runtime.outputs import CompletionOutput, RequestOutput
from deepinfer.runtime.prompts import Prompt, PromptLike, parse_params, parse_prompts
from deepinfer.runtime.request import Request
from deepinfer.runtime.sampling_params import SamplingParams
from deepinfer.runtime.scheduler_config import SchedulerConfig
from deepinfer.runtime.threads import WAIT_POLICY, checked_num_threads, waits_passively

logger = logging.getLogger("deepinfer")


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
        runner = self._loaded.runner
        runner.limits = _limited(runner.limits, max_num_seqs)
        self._engine = Engine(runner, scheduler_config)
        self._lock = threading.Lock()
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
        parsed = parse_prompts(prompts)
        params = parse_params(sampling_params, len(parsed))
        token_ids = []
        with self._lock:
            params = [self._with_words_as_ids(own) for own in params]
            for index, (prompt, own) in enumerate(zip(parsed, params, strict=True)):
                with _naming_prompt(index, len(parsed)):
                    token_ids.append(self._encode(prompt))
                    self._engine.validate(token_ids[-1], own)
            try:
                requests = [
                    self._engine.add_request(ids, own) for ids, own in zip(token_ids, params, strict=True)
                ]
                self._run(requests, use_tqdm)
            except BaseException:
                self._engine.abort_all()
                raise
        return [self._output(prompt, request) for prompt, request in zip(parsed, requests, strict=True)]

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        with tqdm(
            total=len(requests), desc="requests", disable=None if use_tqdm else True, dynamic_ncols=True
        ) as bar:
            while self._engine.has_work:
                bar.update(sum(request.finished for request in self._engine.step()))

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if prompt.token_ids is not None:
            return prompt.token_ids
        assert prompt.text is not None
        if self._loaded.tokenizer is None:
            raise RequestError(
                "the artifact has no tokenizer, so text cannot be used",
                where="prompt",
                action='give token ids: {"prompt_token_ids": [...]}',
            )
        return self._loaded.tokenizer.encode(prompt.text, self.limits.max_model_len)

    def _with_words_as_ids(self, params: SamplingParams) -> SamplingParams:
        """Parameters whose `bad_words` are token ids; without a tokenizer the engine refuses text."""
        tokenizer = self._loaded.tokenizer
        if tokenizer is None or not any(isinstance(word, str) for word in params.bad_words):
            return params
        words = [
            ids
            for word in params.bad_words
            for ids in (tokenizer.encode_word(word) if isinstance(word, str) else [word])
        ]
        return dataclasses.replace(params, bad_words=tuple(words))

    def _output(self, prompt: Prompt, request: Request) -> RequestOutput:
        params = request.params
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt.text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple(self._completion(own) for own in (request, *request.choices)),
            finished=all(own.finished for own in (request, *request.choices)),
            seed=request.seed,
            prompt_logprobs=None if params.prompt_logprobs is None else tuple(request.prompt_logprobs),
            timing_seconds=timing_seconds(request),
        )

    def _completion(self, request: Request) -> CompletionOutput:
        token_ids = tuple(request.output_token_ids)
        text = None
        if self._loaded.tokenizer is not None:
            visible = token_ids[:-1] if request.finish_reason == STOP else token_ids
            text = self._loaded.tokenizer.decode(visible)
        completion = CompletionOutput(
            request.index,
            text,
            token_ids,
            request.finish_reason,
            request.stop_reason,
            seed=request.seed,
            num_positions_processed=request.num_positions_processed,
            num_preemptions=request.num_preemptions,
            num_peak_blocks=request.num_peak_blocks,
        )
        if request.params.logprobs is None:
            return completion
        of_tokens = zip(token_ids, request.logprobs, strict=True)
        return dataclasses.replace(
            completion,
            logprobs=tuple(request.logprobs),
            logprobs_mode=request.params.logprobs_mode,
            cumulative_logprob=sum((entry[token].logprob for token, entry in of_tokens), 0.0),
        )


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
