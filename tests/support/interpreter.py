"""Two changes to Triton's interpreter; what it computes stays the same.

It replaces the functions of `triton.language` again whenever a kernel calls a helper, which takes longer than
the helper: here once a launch. And it turns an array of one element into an integer, which NumPy refuses
since 2.4: here the element, so that loops may end at a value that was loaded.
"""

from typing import Any

import triton.runtime.interpreter as interpreter


def patch_interpreter() -> None:
    """Change Triton's interpreter for the rest of the process."""
    patched: set[str] = set()
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
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
