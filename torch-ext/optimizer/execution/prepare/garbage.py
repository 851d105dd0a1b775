"""A pause of Python's garbage collector, for code that creates objects by the hundred thousand."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Context manager: reference cycles are not collected meanwhile, in no thread of the process. A
    collector that is off stays off.

    Plans and views of tens of thousands of matrices are objects that stay, but the collector looks
    at all of them again and again while they are created: a third of the time.
    """
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()
