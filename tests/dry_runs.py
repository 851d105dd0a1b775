"""What processes compile, load and launch, and in which thread: `python -m tests.dry_runs <scenario> ...`.

Prints a line of JSON for each. Without a GPU, kernels are compiled for sm90 all the same, and a stub stands for the
driver: it loads and launches nothing. Processes of their own: Triton's interpreter, which other tests use, excludes its
compiler. What one scenario has compiled, the next reads from the cache; Triton tells of both alike.
"""
from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

os.environ["OPTIMIZER_KERNELS"] = "triton"
from tests.ranks import package, part  # noqa: E402

ON_GPU = torch.cuda.is_available()
NUMBER = 1  # the stub's current GPU
tl = None  # Triton's language, put here by jit
events: list[tuple[str, str, bool]] = []  # what, which kernel, whether in the main thread
devices, broken = [], []


def note(what: str, name: str) -> None:
    events.append((what, name, threading.current_thread() is threading.main_thread()))


class Stub:
    """A driver without a GPU, as far as Triton asks one."""

    def __init__(self):
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", 90, 32)
        self.utils = SimpleNamespace(load_binary=self.load, get_device_properties=lambda _: {"max_shared_mem": 232448})

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return NUMBER

    def get_current_stream(self, _):
        return 0

    def get_device_interface(self):
        return SimpleNamespace(set_device=devices.append)

    def launcher_cls(self, src, metadata):
        """As if another thread had put its own in the place: only what the main thread loads is right."""
        name = metadata.name if threading.current_thread() is threading.main_thread() else "another kernel's"
        return lambda *_: note("launch", name)

    def load(self, name, *_):
        note("load", name)
        if name in broken:
            broken.remove(name)
            raise RuntimeError("the driver is out of memory")
        return 1, 1, 32, 0, 1024


def end_with_llvm(backend=None, stages=None, *_):
    """End compilation with LLVM's text: the stub loads no code, and tests/compile_kernels.py writes code. Without
    arguments, as Triton 3.7 calls it, return the key and the hash for Triton's cache.
    """
    if backend is None:
        return "llvm", "llvm"

    def name(text, metadata):
        (metadata["name"],) = re.findall(r"define .*ptx_kernel void @(\w+)\(", text)
        return ""

    stages.update(ptx=name, cubin=lambda text, metadata: b"")


def watch() -> None:
    """Note every compilation; without a GPU, put the stub in the driver's place, and say that CPU tensors have one."""
    import triton
    from triton.runtime import driver

    triton.knobs.compilation.listener = lambda *, src, **_: note("compile", src.name)
    if not ON_GPU:
        driver.set_active(Stub())
        triton.knobs.runtime.add_stages_inspection_hook = end_with_llvm
        os.environ["DISABLE_LLVM_OPT"] = "1"
        part("kernels.launch.tile_config").architecture = lambda *_: "sm90"
        for name in ("kernels.launch.tile_scheduler", "kernels.onchip.gram_chain"):
            part(name).processors_of = lambda _: 132
        part("kernels.launch.precompile")._is_possible = lambda _: True
        part("kernels.launch.jit")._is_interpreted = lambda: True  # the stub takes launches on CPU tensors


def inputs() -> list[tuple]:
    """(stacks, set of coefficients): Gram and standard iteration, in place, transposed, on the chip, AOL, cubic."""
    torch.manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda" if ON_GPU else "cpu")

    return [([draw(1, 256, 512), draw(2, 512, 256), draw(1, 256, 256)], "polar_express"), ([draw(2, 64, 96)], "jordan"),
            ([draw(1, 192, 256)], "turbo"), ([draw(1, 192, 256)], "cubic")]


def orthogonalize(stacks, name) -> None:
    polar = part("newton_schulz.orthogonalize")
    polar.orthogonalize_(stacks, polar.steps_of(name), dtype=torch.float16)


def order() -> dict:
    """One call, in which no kernel is compiled before the rehearsal is through."""
    pool, turns = part("kernels.launch.precompile")._Pool, []
    start = pool.start

    def noted(self):
        note("wait", str(len(self.handed_over)))
        for _, compile_kernel, _ in self.handed_over:
            inside = dict(zip(compile_kernel.__code__.co_freevars, compile_kernel.__closure__))
            turns.append("make_ir" in vars(inside["src"].cell_contents))
        start(self)

    pool.start = noted
    stacks, name = inputs()[0]
    orthogonalize(stacks, name)
    first = list(events)
    orthogonalize(stacks, name)
    return {"first": first, "second": events[len(first):], "turns": turns}


def untouched() -> dict:
    """Rehearsals alone, and then steps whose launches do nothing: what of the caller's tensors has changed."""
    ahead, changed, polar = part("kernels.launch.precompile"), [], part("newton_schulz.orthogonalize")
    for stacks, name in inputs():
        before = [stack.clone() for stack in stacks]
        ahead._dry_run(lambda stacks=stacks, name=name: polar._launch(
            [(stack, stack) for stack in stacks], (polar.steps_of(name), 1e-7, torch.float16)))
        changed += [name for stack, b in zip(stacks, before) if not torch.equal(stack, b)]
    launched = [event for event in events if event[0] == "launch"]
    for kind, shape in (("Muon", (256, 512)), ("NorMuon", (3, 64, 96))):
        param = torch.nn.Parameter(torch.randn(shape))
        param.grad = torch.randn(shape)
        optimizer, before = getattr(package(), kind)([param]), [param.detach().clone(), param.grad.clone()]
        optimizer.step()
        now = [param.detach(), param.grad, *(t for t in optimizer.state[param].values())]
        before += [torch.zeros_like(t) for t in now[2:]]
        changed += [kind for a, b in zip(now, before) if not torch.equal(a, b)]
    from triton.runtime.cache import triton_key

    return {"changed": changed, "launched": launched, "events": events, "read": triton_key.cache_info().misses}


def akin(processors: int = 1) -> dict:
    """First calls of a square matrix, then of wide and tall ones four times as long, where so many processors are many.
    """
    polar, found = part("newton_schulz.orthogonalize"), []
    part("kernels.launch.precompile").MANY_PROCESSORS = processors
    for R, C in ((256, 256), (256, 1024), (1024, 256)):
        begin = len(events)
        X = torch.ones(1, R, C, dtype=torch.bfloat16)
        polar.polar_factor(X, polar.steps_of("polar_express"), 1e-7, torch.float16)
        found.append(events[begin:])
    return {"calls": found}


def akin_alone() -> dict:
    """The same with fewer than that."""
    return akin(processors=1 << 20)


def wrong_kernel(X):
    """A kernel that does not compile."""
    tl.static_assert(False, "wrong on purpose")


def plain_kernel(X):
    """A kernel that does."""
    tl.store(X, 0.0)


def errors() -> dict:
    """What a launch raises where its compilation, or its loading, failed in the rehearsal."""
    ahead, jit = part("kernels.launch.precompile"), part("kernels.launch.jit").jit
    wrong, plain, X, said = jit(wrong_kernel), jit(plain_kernel), torch.zeros(16), []

    def work():
        wrong.launch(1, "key", X)
        plain.launch(1, "key", X)

    broken.append("plain_kernel")
    ahead.precompile_kernels(X.device, work)
    rehearsed = list(events)
    for kernel in (wrong, plain):
        try:
            kernel.launch(1, "key", X)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    return {"rehearsed": rehearsed, "said": said, "after": events[len(rehearsed):]}


def turns() -> dict:
    """Two threads, as ranks may be, rehearse at the same time."""
    ahead, seen = part("kernels.launch.precompile"), []

    def work():
        seen.append("begin")
        time.sleep(0.5)  # in which the other one would begin, if it could
        seen.append("end")

    threads = [threading.Thread(target=ahead.precompile_kernels, args=(torch.device("cpu"), work)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"seen": seen}


def shares() -> dict:
    """What this process compiles, and what it has in the end, beside one that begins at the same time."""
    precompile = part("kernels.launch.precompile")
    import triton

    compiled, ready = [], []

    def listen(*, src, metadata_group, cache_hit, **_):
        (compiled if not cache_hit else []).append(kernel := src.name + src.hash())
        ready.append(kernel)

    triton.knobs.compilation.listener = listen
    precompile.preload_compiler(torch.device("cpu"))
    precompile._reader().join()
    Path(os.environ["MEET"], os.environ["LOCAL_RANK"]).touch()
    while len(list(Path(os.environ["MEET"]).glob("[01]"))) < 2:
        time.sleep(0.01)
    orthogonalize(*inputs()[0])
    return {"compiled": compiled, "ready": ready}


def fallback() -> dict:
    """An older Triton, and one whose driver is another: kernels are compiled by their launches."""
    import triton
    from triton.runtime import driver

    stacks, name = inputs()[3]
    del triton.AsyncCompileMode
    orthogonalize(stacks, name)
    first = list(events)
    triton.AsyncCompileMode, driver.active.get_device_interface = triton.runtime._async_compile.AsyncCompileMode, None
    orthogonalize(*inputs()[1])
    return {"first": first, "second": events[len(first):]}


def alike() -> dict:
    """Binaries for shares and tiles whose counts are 1, odd, and multiples of 16."""
    gram, norm = part("kernels.matmul.api"), part("kernels.elementwise.scaling")
    tiles = part("kernels.launch.tile_config")
    for shape in ((1, 256, 4096), (1, 16, 4096), (1, 16, 32768)):  # 128, 16 and 128 tiles
        norm.unit_norm(torch.ones(shape), torch.empty(shape, dtype=torch.float16), torch.ones(1), 1e-7)
    for loop in ["turns", "pingpong"][:1 + part("kernels.launch.replay").knows_triton()]:
        with tiles.force(tiles.Tile(128, 128, 64, 8, 4, 4, loop)):
            for N, n in ((1, 128), (16, 128), (1, 256), (16, 256)):
                gram.gram(torch.ones(N, n, 128, dtype=torch.float16), torch.empty(N, n, n, dtype=torch.float16))
    return {"events": events}


def bits(ahead: bool = True) -> dict:
    """On a GPU: a digest of all results of first and second calls, and what was compiled for each."""
    if not ahead:
        part("kernels.launch.precompile")._is_possible = lambda _: False
    digest, compiled, times = hashlib.sha256(), [], []
    param = torch.nn.Parameter(torch.randn(256, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(0)))
    optimizer = package().NorMuon([param])
    for _ in range(2):
        begin, start = len(events), time.perf_counter()
        param.grad = torch.sin(torch.arange(256 * 512, device="cuda").float()).view(256, 512)
        optimizer.step()
        for stacks, name in inputs():
            orthogonalize(stacks, name)
            for tensor in (*stacks, param.detach()):
                digest.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
        compiled.append([event for event in events[begin:] if event[0] == "compile"])
        times.append(time.perf_counter() - start)
    return {"digest": digest.hexdigest(), "compiled": compiled, "seconds": times}


def bits_without() -> dict:
    """The same without rehearsals."""
    return bits(ahead=False)


def run(name: str) -> None:
    """Run a scenario in this process."""
    watch()
    print(json.dumps({**globals()[name](), "devices": devices}), flush=True)


if __name__ == "__main__":
    *others, last = sys.argv[1:]
    package()
    if others:
        import torch._dynamo
        import triton  # noqa: F401

        gc.freeze()
    for number, name in enumerate(others):  # each in a process of its own, which imports nothing again
        # Each process hashes Triton's files once, 400 MB. The first scenario does so itself, and reports how often; the
        # others inherit the hash.
        if number == 1:
            from triton.runtime.cache import triton_key

            triton_key()
        if (child := os.fork()) == 0:
            run(name)
            os._exit(0)  # without Python's teardown, which takes a second
        assert os.waitpid(child, 0)[1] == 0, name
    run(last)
