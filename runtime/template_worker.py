"""The process that renders chat templates: few rights, little memory, one template for its lifetime.

Run as a file, in an interpreter that sees the standard library and Jinja2. Reads JSON lines, the first
{"template": text, "memory_bytes": n, "cpu_seconds": n}, then {"values": {...}, "max_characters": n} for each
rendering; answers every line with {"text": ...} or {"error": ...}. Ends with its input.
"""

import json
import math
import resource
import sys

from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Refused(Exception):
    """The template itself rejects the messages."""


def _raise(message: object) -> None:
    raise _Refused(str(message))


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))


def _limit_time(cpu_seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + cpu_seconds  # the system counts whole ones
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def _answer(line: str, state: dict) -> dict:
    try:
        request = json.loads(line)
        if "template" in request:
            _limit(request["memory_bytes"])
            state["cpu_seconds"] = request["cpu_seconds"]
            state["template"] = _environment().from_string(request["template"])
            return {"text": ""}
        _limit_time(state["cpu_seconds"])
        text = state["template"].render(**request["values"])
        if len(text) > request["max_characters"]:
            return {"error": f"it makes {len(text)} characters, more than {request['max_characters']}"}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    except (_Refused, TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return {"error": f"{type(error).__name__.lstrip('_')}: {str(error)[:300]}"}
    return {"text": text}


def main() -> None:
    """Answer lines until there are none."""
    state: dict = {}
    for line in sys.stdin:
        print(json.dumps(_answer(line, state)), flush=True)


if __name__ == "__main__":
    main()
