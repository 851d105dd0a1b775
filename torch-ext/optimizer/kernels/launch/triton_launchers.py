"""Launchers of Triton 3.6 get a module name each, so that threads that load two at a time cannot
confuse them.

Triton 3.6 builds a C extension for each signature of a kernel and loads all of them under one
module name. CPython keeps one module object per name: loading an extension that was loaded before
returns the object that has the name, with the functions of that extension put into it. A thread
that reads `launch` from it after another thread has loaded its own extension calls a kernel by the
launcher of another one. From Triton 3.7 on launchers are no modules.
"""

from __future__ import annotations

import functools
import os


@functools.cache
def name_launchers_apart() -> None:
    """Have this process load every C extension of Triton 3.6 under a name that holds the hash of
    its source.

    Replaces `triton.runtime.build._load_module_from_path`, through which all threads load, those
    that launch kernels of others too. Does nothing for other versions of Triton.
    """
    import triton
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is None or not triton.__version__.startswith("3.6."):
        return

    @functools.wraps(load)
    def load_apart(name: str, path: str):
        # Triton's cache names it by the hash of the source
        folder = os.path.basename(os.path.dirname(path))
        return load(f"{folder}.{name}", path)

    build._load_module_from_path = load_apart
