"""A module name of its own for each launcher of Triton 3.6: a fix for kernels mixed up by threads.

Triton 3.6 builds a C extension for each signature of a kernel and loads all extensions under a
single module name. CPython keeps one module object per name: loading a known extension again
returns the object with the name, and puts the functions of the extension into the object. If two
threads load extensions at a time, the first can read `launch` after the second has loaded, and then
calls a kernel by the launcher of another kernel. From Triton 3.7 on launchers are no modules.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType


@functools.cache
def name_launchers_apart() -> None:
    """Make Triton 3.6 load each C extension under a module name with the hash of its source.

    Replaces `triton.runtime.build._load_module_from_path` in the whole process: the fix holds for
    all threads, and for kernels of other packages. Does nothing for other versions of Triton.
    """
    import triton
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is None or not triton.__version__.startswith("3.6."):
        return

    @functools.wraps(load)
    def load_apart(name: str, path: str) -> ModuleType:
        # Triton's cache has a folder per extension, named by the hash of the source
        folder = os.path.basename(os.path.dirname(path))
        return load(f"{folder}.{name}", path)

    build._load_module_from_path = load_apart
