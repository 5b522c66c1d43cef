"""The text of a request: made from its parameters, grown with its tokens, ended with it."""

from collections.abc import Sequence

from deepinfer.runtime.finish import LENGTH, STOP, Trigger, token_triggers
from deepinfer.runtime.request import Request
from deepinfer.runtime.stop_strings import stop_strings
from deepinfer.runtime.text_stream import TextStream
from deepinfer.runtime.token_bytes import TokenBytes


def make_text(request: Request, token_bytes: TokenBytes) -> TextStream:
    """The stream of a request's text, up to the outputs that it begins with."""
    params = request.params
    stream = TextStream(
        token_bytes,
        request.prompt_token_ids,
        stops=stop_strings(params.stop) if params.stop else None,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
    )
    for token_id in request.output_token_ids:
        stop = stream.push(token_id)
        assert stop is None, "a request that goes on has not reached a stop string"
    return stream


def num_visible(request: Request) -> int:
    """Characters that may be shown, or tokens where there is no text."""
    return len(request.output_token_ids) if request.text is None else request.text.num_visible


def triggers_of(request: Request, eos_token_ids: Sequence[int]) -> list[Trigger]:
    """Adds a request's newest token to its text; the reasons to end that the token brings."""
    outputs = request.output_token_ids
    triggers = token_triggers(outputs[-1], len(outputs), request.params, eos_token_ids)
    stop = None if request.text is None else request.text.push(outputs[-1])
    return triggers if stop is None else [*triggers, Trigger("stop_string", stop)]


def end_text(request: Request) -> None:
    """Ends the text of a request that has just ended.

    A token that stopped it is left out, unless that was asked for. If it was cut off, by an abort, a timeout
    or an error, nothing more becomes visible.
    """
    if request.text is not None:
        drops = request.finish_reason == STOP and not request.params.include_stop_str_in_output
        request.text.end(drop_last_token=drops, release=request.finish_reason in (STOP, LENGTH))
