"""Scripts run as `python script arguments` runs them, without a second for each import of torch."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from tests.ranks import PRELOADED


def run_script(script: Path, *arguments, timeout: float = 240.0) -> subprocess.CompletedProcess:
    """Run a script to its end, and return its exit status, output and errors.

    On a CPU in a process forked from one that has torch and the package, as the ranks that the script starts are from
    it; with GPUs by Python itself.
    """
    command = [sys.executable, str(script), *map(str, arguments)]
    if torch.cuda.is_available():
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("output", "errors")]
        process = context.Process(target=_run_here, args=(command[1:], files, dict(os.environ)))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"{script} took longer than {timeout:g} s")
        return subprocess.CompletedProcess(command, process.exitcode, *(file.read_text() for file in files))


def _run_here(argv: list[str], files: list[Path], environment: dict[str, str]) -> None:
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    start, sys.argv = mp.start_processes, argv

    def start_forked(work, arguments=(), *rest, start_method="spawn", **options):
        pickle.dumps((work, arguments))  # outside tests ranks are spawned, and receive both pickled
        return start(work, arguments, *rest, **options, start_method="fork")

    mp.start_processes = start_forked
    sys.path.insert(0, str(Path(argv[0]).parent))
    gc.freeze()  # a script's collections need not look at all of torch
    runpy.run_path(argv[0], run_name="__main__")
