"""Numbers of a loaded state that the host has to see, read from each device all at once."""

from __future__ import annotations

from collections.abc import Callable

import torch


class DeviceValues:
    """Context manager that reads numbers from devices at its end, and calls a function with each,
    in the order of `read_later`.

    The host waits once for each device and dtype, and not once for each number, as with `item()`.
    If the body raises ValueError, the numbers of before are read all the same, and a function that
    raises comes first: messages are those of numbers that are read one by one. After any other
    error nothing is read.
    """

    def __init__(self) -> None:
        """Start without numbers."""
        self._values: list[torch.Tensor] = []
        self._judges: list[Callable[[float], None]] = []

    def read_later(self, value: torch.Tensor, judge: Callable[[float], None]) -> None:
        """Call `judge` with the number in `value`, a tensor of one element, at the end."""
        self._values.append(value)
        self._judges.append(judge)

    def __enter__(self) -> DeviceValues:
        return self

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:
        """Read all numbers; raises what the functions raise."""
        if kind is not None and not issubclass(kind, ValueError):
            return
        for judge, number in zip(self._judges, _numbers(self._values)):
            judge(number)


def _numbers(values: list[torch.Tensor]) -> list[float]:
    """The numbers in tensors of one element, in order."""
    together: dict[tuple, list[int]] = {}  # (device, dtype) -> indices in `values`
    for i, value in enumerate(values):
        together.setdefault((value.device, value.dtype), []).append(i)
    found = [0.0] * len(values)
    for indices in together.values():
        numbers = torch.stack([values[i].reshape(()) for i in indices]).tolist()
        for i, number in zip(indices, numbers):
            found[i] = number
    return found
