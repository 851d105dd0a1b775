"""Clock, power and energy of a GPU while something runs, by NVML. Where there is no NVML, nothing is sampled."""

from __future__ import annotations

import bisect
import ctypes
import statistics
import threading
import time

SM_CLOCK = 1  # NVML_CLOCK_SM
POWER_CAP = 0x4  # nvmlClocksEventReasonSwPowerCap: the clock is low since the power limit is reached
REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")  # by age of NVML


class Clocks:
    """Samples one GPU from a thread, until `stop`: time.perf_counter(), MHz of the SMs, watts (on Hopper NVML's mean
    over the last second), and whether the power limit holds the clock down.
    """

    def __init__(self, device, every_s: float = 0.02):
        self.samples: list[tuple[float, float, float, bool]] = []
        self.every_s, self.running, self.thread = every_s, False, None
        try:
            self.library = ctypes.CDLL("libnvidia-ml.so.1")
            self.gpu = self.handle(device)
            self.reasons = next(name for name in REASONS if hasattr(self.library, name))
            self.samples = [self.sample()]
        except (OSError, AttributeError, RuntimeError, StopIteration) as error:
            print(f"no clocks and no power: {error!r}", flush=True)
            return
        self.running, self.thread = True, threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def handle(self, device):
        """NVML's handle of torch's device, by its UUID: NVML numbers GPUs in its own order."""
        import torch

        found = ctypes.c_void_p()
        self.call("nvmlInit_v2")
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self.call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(found))
        return found

    def call(self, name, *arguments) -> None:
        if code := getattr(self.library, name)(*arguments):
            raise RuntimeError(f"{name}: NVML's error {code}")

    def number(self, name, kind, *arguments) -> int:
        value = kind()
        self.call(name, self.gpu, *arguments, ctypes.byref(value))
        return value.value

    def sample(self):
        mhz = self.number("nvmlDeviceGetClockInfo", ctypes.c_uint, ctypes.c_uint(SM_CLOCK))
        watts = 1e-3 * self.number("nvmlDeviceGetPowerUsage", ctypes.c_uint)
        capped = bool(self.number(self.reasons, ctypes.c_ulonglong) & POWER_CAP)
        return time.perf_counter(), float(mhz), watts, capped

    def run(self) -> None:
        while self.running:
            try:
                self.samples.append(self.sample())
            except RuntimeError:  # one sample less
                pass
            time.sleep(self.every_s)

    def stop(self) -> None:
        self.running = False
        if self.thread:
            self.thread.join()

    def joules(self) -> float:
        """The energy that the GPU has taken so far; nan where it is not counted."""
        try:
            return 1e-3 * self.number("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
        except (AttributeError, RuntimeError):
            return float("nan")

    def during(self, spans) -> tuple[float, float, float]:
        """(MHz, watts, share of samples with a clock that the power limit holds down), means over the samples in any
        of these (begin, end) of time.perf_counter(); nan where there is none.
        """
        times = [sample[0] for sample in self.samples]
        found = [sample[1:] for begin, end in spans
                 for sample in self.samples[bisect.bisect_left(times, begin):bisect.bisect_left(times, end)]]
        return tuple(map(statistics.fmean, zip(*found))) if found else (float("nan"),) * 3
