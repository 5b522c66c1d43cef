"""A serving process that could not cheat: generates with everything a compiler would need out of reach.

Run as a script. Reads {"artifact": ..., "calls": [[request, ...], ...]} as JSON from stdin, where a request
has `prompt_token_ids` and sampling parameters, and every call is one `LLM.generate`. Writes what was
generated, and what was seen of compilers, as one JSON object to stdout.
"""

import importlib
import importlib.abc
import json
import subprocess
import sys

FORBIDDEN_PACKAGES = (
    "deepinfer.graphs",
    "deepinfer.passes",
    "deepinfer.compile",
    "torch._inductor",
    "triton",
)
FORBIDDEN_EVENTS = (
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "os.system",
    "pty.spawn",
)
refused: list[str] = []


class Refuse(importlib.abc.MetaPathFinder):
    """Makes the packages that know models or compile them impossible to import."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in FORBIDDEN_PACKAGES:
            refused.append(f"import {name}")
            raise ImportError(f"{name} must not be imported here")


def forbid_processes(event: str, _arguments: tuple[object, ...]) -> None:
    """An audit hook that lets no process start."""
    if event in FORBIDDEN_EVENTS:
        refused.append(event)
        raise PermissionError(f"{event} must not happen here")


def guards_hold() -> bool:
    """Try what is forbidden, so that a guard that guards nothing is noticed."""
    try:
        importlib.import_module("deepinfer.graphs")
    except ImportError:
        pass
    else:
        return False
    try:
        subprocess.run(["true"], check=True)
    except PermissionError:
        pass
    else:
        return False
    held = refused == ["import deepinfer.graphs", "subprocess.Popen"]
    refused.clear()
    return held


def main() -> None:
    """Generate for every call; the answer goes to stdout."""
    work = json.load(sys.stdin)
    from end_to_end import Recorder  # tests/support is on the path

    from deepinfer.runtime.llm import LLM
    from deepinfer.runtime.sampling_params import SamplingParams

    llm = LLM(work["artifact"], num_threads=1)
    recorder = Recorder(llm)
    calls = []
    for requests in work["calls"]:
        prompts = [request.pop("prompt_token_ids") for request in requests]
        results = recorder.generate(prompts, [SamplingParams(**request) for request in requests])
        calls.append(
            [
                {
                    "token_ids": result.token_ids,
                    "finish_reason": result.finish_reason,
                    "logits": result.digest,
                }
                for result in results
            ]
        )
    loaded = [name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo", "triton"))]
    loaded += [name for name in sys.modules if name.startswith(FORBIDDEN_PACKAGES)]
    json.dump(
        {
            "calls": calls,
            "counters": llm.counters,
            "load_counts": dict(llm._loaded.report.counts),
            "refused": refused,
            "compiler_modules": loaded,
            "guards_hold": guarded,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    sys.meta_path.insert(0, Refuse())
    sys.addaudithook(forbid_processes)
    guarded = guards_hold()
    main()
