"""Makes Triton's interpreter several times faster: its language is patched once a launch, not at every call.

The interpreter replaces the functions of `triton.language` again whenever a kernel calls a helper, which
takes longer than the helper. What is computed stays the same.
"""

from typing import Any

import triton.runtime.interpreter as interpreter


def patch_once_per_launch() -> None:
    """Change Triton's interpreter for the rest of the process."""
    patched: set[str] = set()
    run_grid = interpreter.GridExecutor.__call__

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return run_grid(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__globals__["__name__"]
        if module not in patched:
            patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = run
    interpreter.InterpretedFunction.__call__ = call
