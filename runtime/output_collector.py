"""Results out of requests: what is new since the last look, for streams, and all of it.

Reads what the engine's thread writes, so it is used by that thread, or between two of its steps.
"""

import dataclasses
from collections.abc import Callable, Sequence

from deepinfer.runtime.outputs import CompletionOutput, Logprobs, Provenance, RequestOutput, Usage
from deepinfer.runtime.request import Request
from deepinfer.runtime.timing import timing_of


class OutputCollector:
    """The results of one prompt, of all its continuations."""

    def __init__(
        self,
        request: Request,
        prompt: str | None = None,
        provenance: Callable[[Request], Provenance] | None = None,
    ) -> None:
        """prompt: its text, if it came as one. provenance: told of a request that has ended."""
        self._requests = (request, *request.choices)
        self._prompt, self._provenance = prompt, provenance
        self._num_taken = [0] * len(self._requests)  # tokens
        self._ended = [False] * len(self._requests)
        self._prompt_logprobs_taken = False

    @property
    def finished(self) -> bool:
        """Whether all continuations have ended."""
        return all(request.finished for request in self._requests)

    def take(self) -> RequestOutput | None:
        """What became visible since the last call; None if nothing did. The last output is `finished`."""
        news = [self._news(place) for place in range(len(self._requests))]
        outputs = tuple(output for output in news if output is not None)
        return self._request_output(outputs) if outputs else None

    def whole(self) -> RequestOutput:
        """Everything there is."""
        return self._request_output(tuple(self._completion(request) for request in self._requests))

    def _news(self, place: int) -> CompletionOutput | None:
        request, first = self._requests[place], self._num_taken[place]
        if self._ended[place]:
            return None
        ended = self._ended[place] = request.finished
        if request.text is None:
            text, count = None, len(request.output_token_ids) - first
        else:
            text, count = request.text.take()
        if not (text or count or ended):
            return None
        self._num_taken[place] += count
        output = self._completion(request, first, first + count)
        return dataclasses.replace(output, text=text)

    def _completion(self, request: Request, first: int = 0, last: int | None = None) -> CompletionOutput:
        """A continuation with its tokens from `first` up to `last`, and all of its text."""
        token_ids, stream = tuple(request.output_token_ids[first:last]), request.text
        found: tuple[Logprobs, ...] | None = None
        if request.params.logprobs is not None:
            found = tuple(request.logprobs[first:last])
        return CompletionOutput(
            index=request.index,
            text=stream.text if stream is not None and last is None else None,
            token_ids=token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            triggers=request.triggers,
            spans=None if stream is None else stream.spans(first, last),
            logprobs=found,
            logprobs_mode=None if found is None else request.params.logprobs_mode,
            cumulative_logprob=None if found is None else _sum(token_ids, found),
            seed=request.seed,
            num_positions_processed=request.num_positions_processed,
            num_preemptions=request.num_preemptions,
            num_peak_blocks=request.num_peak_blocks,
        )

    def _request_output(self, outputs: tuple[CompletionOutput, ...]) -> RequestOutput:
        first, finished = self._requests[0], self.finished
        output = RequestOutput(
            request_id=first.request_id,
            prompt=self._prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            seed=first.seed,
        )
        if not finished:
            return output
        timing = timing_of(first.times, first.visible_times)
        return dataclasses.replace(
            output,
            prompt_logprobs=None if first.params.prompt_logprobs is None else tuple(first.prompt_logprobs),
            timing=timing,
            timing_seconds=timing.seconds,
            usage=Usage(
                prompt_tokens=first.num_prompt_tokens,
                completion_tokens=sum(len(request.output_token_ids) for request in self._requests),
                positions_processed=sum(request.num_positions_processed for request in self._requests),
            ),
            provenance=None if self._provenance is None else self._provenance(first),
        )


def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Outputs of one stream that follow each other, as one."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    pieces: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for piece in output.outputs:
            pieces.setdefault(piece.index, []).append(piece)
    return dataclasses.replace(last, outputs=tuple(_joined(pieces[index]) for index in sorted(pieces)))


def _joined(pieces: Sequence[CompletionOutput]) -> CompletionOutput:
    last = pieces[-1]
    token_ids = tuple(token for piece in pieces for token in piece.token_ids)
    found = None if last.logprobs is None else tuple(one for piece in pieces for one in piece.logprobs or ())
    return dataclasses.replace(
        last,
        text=None if last.text is None else "".join(piece.text or "" for piece in pieces),
        token_ids=token_ids,
        spans=None if last.spans is None else tuple(span for piece in pieces for span in piece.spans or ()),
        logprobs=found,
        cumulative_logprob=None if found is None else _sum(token_ids, found),
    )


def _sum(token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> float:
    return sum((entry[token].logprob for token, entry in zip(token_ids, logprobs, strict=True)), 0.0)
