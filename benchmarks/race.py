"""Timing of several ways to compute the same thing, in turns, so that clocks and power limits hit all of them alike."""

from __future__ import annotations

import ctypes
import itertools
import statistics
import time
from dataclasses import dataclass, field

import torch


@dataclass
class Times:
    """ms of every call, and microseconds that the host spent in it."""

    ms: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def summary(self) -> tuple[float, float, float]:
        """(median, 20th percentile, 80th percentile) in ms."""
        quantiles = statistics.quantiles(self.ms, n=5, method="inclusive")
        return statistics.median(self.ms), quantiles[0], quantiles[3]


def race(calls: dict, refill, rounds: int, burst_ms: float, rest_ms: float) -> dict[object, Times]:
    """Time every call in short bursts, `rounds` times each, and let the GPU rest before each burst.

    calls: key -> function without arguments. refill() puts fresh random numbers into their inputs before each round,
    and each round begins with another call. A call is repeated until a burst lasts about burst_ms, 2 to 20 times.
    """
    times = {key: Times() for key in calls}
    lengths = {}
    for key, call in calls.items():
        burst(call, 1)
        lengths[key] = min(20, max(2, round(burst_ms / max(min(burst(call, 2).ms), 1e-3))))
    keys = list(calls)
    for number in range(rounds):
        refill()
        for key in keys[number % len(keys):] + keys[:number % len(keys)]:
            _rest(1e-3 * rest_ms)
            result = burst(calls[key], lengths[key])
            times[key].ms += result.ms
            times[key].host_us += result.host_us
    return times


def _rest(seconds) -> None:
    """Launch nothing, but stay awake, as a training loop does: a CPU that slept may be slow for milliseconds."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def burst(call, length: int) -> Times:
    """Time `length` calls, one after another without waiting; one more before them fills the GPU's queue."""
    if not torch.cuda.is_available():
        ms = [1e3 * _host_s(call) for _ in range(length)]
        return Times(ms, [1e3 * x for x in ms])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(length + 1)]
    torch.cuda.synchronize()
    call()
    events[0].record()
    host_us = []
    for event in events[1:]:
        host_us.append(1e6 * _host_s(call))
        event.record()
    torch.cuda.synchronize()
    return Times([first.elapsed_time(second) for first, second in itertools.pairwise(events)], host_us)


def _host_s(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def captured(call):
    """(a replay of one call as a CUDA graph, its number of launches or "" where it cannot be counted)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        kept = call()
    launches = _nodes(graph)
    graph.instantiate()

    def replay():
        graph.replay()
        return kept

    return replay, launches


def _nodes(graph):
    """Ask the CUDA driver for the number of nodes: kernels, copies and fills."""
    count = ctypes.c_size_t()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(
            ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    except (OSError, AttributeError, RuntimeError):  # no driver of that name, or no such function
        return ""
    return "" if failed else count.value
