"""Builds the package from torch-ext/ at the start of a test session and lets tests load it through `get_kernel`.

The build lies in a folder of this session's own, so sessions do not disturb each other, nor build/. Where LOCAL_KERNELS
already names a build (the Hub's CI, an xdist worker), that one is tested instead, whatever its owner is called.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"  # read when huggingface_hub is imported

import pytest
import torch

from tests import ranks
from tests.interpreter import PATHS

ROOT = Path(__file__).resolve().parent.parent
LONG = ("test_tile_config.py", "test_random.py", "test_soak.py", "test_demo.py", "test_benchmarks.py")

try:
    import hypothesis
except ModuleNotFoundError:  # a bare GPU machine: only the property tests need it
    pass
else:
    hypothesis.settings.register_profile("here", deadline=None, database=None)
    hypothesis.settings.load_profile("here")


# The Hub's CI gets the package and the tests, but neither documents nor benchmarks (nor pytest.ini).
collect_ignore = [] if (ROOT / "benchmarks").is_dir() else ["test_docs.py", "test_plan.py"]
MARKERS = ("gpu: needs a GPU (skipped where there is none)", "gpus(n=2): needs n GPUs",
           "kernels_ci: the subset of under 60 s that the Hub's CI runs (`pytest -m kernels_ci`)",
           "interpreter: runs Triton kernels in Triton's CPU interpreter")


def pytest_configure(config: pytest.Config) -> None:
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # tests are collected in two thirds of the time
    torch.set_num_threads(1)  # the same bits on every machine, and xdist workers that do not compete
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    builds = dict(entry.split("=", 1) for entry in os.environ.get("LOCAL_KERNELS", "").split(":") if "=" in entry)
    others = (folder for name, folder in builds.items() if name.endswith("/optimizer"))
    if build := builds.get("org/optimizer") or next(others, None):
        os.environ["LOCAL_KERNELS"] = f"org/optimizer={build}"
        return
    folder = tempfile.mkdtemp(prefix="optimizer-build-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    make_build = [sys.executable, ROOT / "tools" / "make_build.py", "--out", folder]
    subprocess.run(make_build, check=True, stdout=subprocess.DEVNULL)
    os.environ["LOCAL_KERNELS"] = f"org/optimizer={folder}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and collected tests live until the end: collections that look through them take a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def pytest_report_header() -> list[str]:
    count = torch.cuda.device_count()
    return [f"torch {torch.__version__}, {count} GPU{'' if count == 1 else 's'}, {os.environ['LOCAL_KERNELS']}"]


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine has no GPUs for; where there is one, tests on `device` are GPU tests. Long tests first."""
    count = torch.cuda.device_count()
    for item in items:
        if count and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        several = item.get_closest_marker("gpus")
        needed = (several.args or (2,))[0] if several else int(item.get_closest_marker("gpu") is not None)
        if needed > count:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {count}"))
    items.sort(key=lambda item: item.path.name not in LONG)  # else one worker ends with them while the others wait


@pytest.fixture(scope="session")
def optimizer():
    """The package under test."""
    return ranks.package()


@pytest.fixture(scope="session")
def part(optimizer):
    """A function: part("newton_schulz.orthogonalize") is the module `polar` of the package under test."""
    return ranks.part


@pytest.fixture(params=PATHS)
def path(request, monkeypatch) -> str:
    """Each path of the kernels, taken by all operations of the test. Files with such tests import tests.paths, which
    chooses Triton's interpreter for the whole session: imported here, it would do so for every session.
    """
    from tests.paths import take

    return take(request.param, monkeypatch)


@pytest.fixture
def small_tiles(part):
    """Many tiles in a small matrix, for the interpreter."""
    tiles = part("kernels.launch.tile_config")
    with tiles.force(tiles.Tile(16, 16, 16, 2, 2, 4)):
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
