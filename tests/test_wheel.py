"""The wheel `sharded_muon`: the files and names that `get_kernel` gives, equal bits, and both in one process."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "torch-ext" / "optimizer"

# Steps a model with the wheel, which needs no `kernels`, then with the build argv[1] and with the wheel again, and
# prints names, operators and bits of each.
STEP_BOTH = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import sharded_muon

assert "kernels" not in sys.modules

def bits(package):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    opt = package.NorMuon(package.get_default_muon_param_groups(model), lr=0.02)
    for _ in range(3):
        model(torch.arange(16)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    fresh = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()  # with a gradient: through torch's dispatcher
    weights = [*model.parameters(), package.orthogonalize(fresh)]
    return [weight.detach().flatten().tolist() for weight in weights]

def described(package):
    ops = sys.modules[package.__name__ + "._ops"].ops
    return [sorted(package.__all__), ops.name, bits(package)]

first = described(sharded_muon)
import kernels
build = kernels.get_local_kernel(Path(sys.argv[1]))
print(json.dumps([first, described(build), described(sharded_muon)]))
"""


@pytest.fixture(scope="module")
def backend():
    spec = importlib.util.spec_from_file_location("wheel_backend", ROOT / "tools" / "wheel_backend.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


@pytest.fixture(scope="module")
def wheel(backend, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return folder / backend.build_wheel(str(folder))


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


def test_a_wheel_holds_the_package(wheel):
    """All sources and tables, with the marker of annotations, under the new name, byte by byte."""
    shipped = {path.relative_to(SOURCE).as_posix(): path.read_bytes() for path in SOURCE.rglob("*")
               if path.suffix in (".py", ".json", ".typed") and path.name != "_ops.py"}
    files = {name: data for name, data in contents(wheel).items() if ".dist-info/" not in name}
    generated = files.pop("sharded_muon/_ops.py").decode()
    assert files == {f"sharded_muon/{name}": data for name, data in shipped.items()}
    assert "sharded_muon/py.typed" in files and any(name.endswith(".json") for name in files)
    assert re.search(r'_NAMESPACE = f"_sharded_muon_\{_backend\(\)\}_[0-9a-f]{7}(_dirty)?"', generated)


def test_its_record_names_every_file_with_its_digest(wheel):
    files = contents(wheel)
    (record,) = [name for name in files if name.endswith("/RECORD")]
    rows = [line.rsplit(",", 2) for line in files[record].decode().splitlines()]
    assert [row[0] for row in rows] == list(files)
    for name, digest, size in rows[:-1]:
        expected = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={expected}", len(files[name]))


def test_its_metadata_has_the_version_of_build_toml(wheel):
    (version,) = re.findall(r"^version = (\d+)$", (ROOT / "build.toml").read_text(), re.MULTILINE)
    folder = f"sharded_muon-{version}.0.dist-info"
    assert wheel.name == f"sharded_muon-{version}.0-py3-none-any.whl"
    said = message_from_string(contents(wheel)[f"{folder}/METADATA"].decode())
    assert (said["Name"], said["Version"], said["Requires-Dist"]) == ("sharded-muon", f"{version}.0", "torch>=2.11")
    assert contents(wheel)[f"{folder}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def test_two_wheels_of_one_tree_are_equal(backend, wheel, tmp_path):
    assert (tmp_path / backend.build_wheel(str(tmp_path))).read_bytes() == wheel.read_bytes()


def test_the_wheel_and_a_build_side_by_side(wheel, optimizer, tmp_path):
    """In one process: equal names and bits, and operators of their own."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", STEP_BOTH, str(Path(optimizer.__file__).parent)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (names, ops, bits), (build_names, build_ops, build_bits), (_, ops_again, bits_again) = json.loads(done.stdout)
    assert names == build_names == sorted(optimizer.__all__)
    assert bits == build_bits == bits_again and all(bits)
    assert ops == ops_again != build_ops
