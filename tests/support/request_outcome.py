"""What tests of engines compare of a request."""

from deepinfer.runtime.request import Request


def outcome(request: Request) -> tuple:
    """All that a request gives, exactly."""
    return (
        request.output_token_ids,
        request.logprobs,
        request.prompt_logprobs,
        request.finish_reason,
        request.stop_reason,
    )
