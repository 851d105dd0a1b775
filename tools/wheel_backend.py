"""Write the wheel `sharded_muon`, the package of torch-ext/optimizer under a name that can be imported.

The functions of PEP 517, which pip calls as pyproject.toml says. They need nothing but Python, and write nothing to the
repository. A wheel is a zip file: the package's files, a generated `_ops.py` and the metadata. One commit always gives
the same bytes. setuptools would need a list of all folders of the package, because the package changes its name.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from make_build import OPS, build_id, is_source, tomllib  # noqa: E402

TAG = "py3-none-any"
WHEEL = f"Wheel-Version: 1.0\nGenerator: wheel_backend\nRoot-Is-Purelib: true\nTag: {TAG}\n"
DATE = (1980, 1, 1, 0, 0, 0)  # the first that a zip file can name
KINDS = {".py", ".pyi", ".json", ".typed"}


def settings() -> tuple[dict, dict, str]:
    """Return the tables `project` and `tool.wheel_backend` of pyproject.toml, and the version, from build.toml."""
    given = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    general = tomllib.loads((ROOT / "build.toml").read_text(encoding="utf-8"))["general"]
    return given["project"], given["tool"]["wheel_backend"], f"{general['version']}.0"


def dist_info() -> dict[str, bytes]:
    """Return the files of the folder .dist-info, but RECORD, by their paths in the wheel."""
    project, _, version = settings()
    lines = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {version}",
             f"Summary: {project['description']}", f"License-Expression: {project['license']}",
             *(f"License-File: {name}" for name in project["license-files"]),
             f"Requires-Python: {project['requires-python']}",
             *(f"Requires-Dist: {name}" for name in project["dependencies"])]
    folder = f"{project['name'].replace('-', '_')}-{version}.dist-info"
    licenses = {f"{folder}/licenses/{name}": (ROOT / name).read_bytes() for name in project["license-files"]}
    return {f"{folder}/METADATA": ("\n".join(lines) + "\n").encode(), f"{folder}/WHEEL": WHEEL.encode(), **licenses}


def package_files() -> dict[str, bytes]:
    """Return the files of the package by their paths in the wheel, with a generated `_ops.py`.

    Its operators have a namespace of their own: a build for `get_kernel` can be loaded in the same process.
    """
    _, where, _ = settings()
    source, module = ROOT / where["source"], where["module"]
    paths = [path for path in sorted(source.rglob("*")) if path.suffix in KINDS and is_source(path)]
    files = {f"{module}/{path.relative_to(source).as_posix()}": path.read_bytes() for path in paths}
    return {**files, f"{module}/_ops.py": OPS.format(name=module, uid=build_id(ROOT)).encode()}


def build_wheel(wheel_directory: str, config_settings: object = None, metadata_directory: object = None) -> str:
    """Write the wheel to the folder `wheel_directory`; return its file name."""
    project, _, version = settings()
    metadata = dist_info()
    files = {**package_files(), **metadata}
    record = f"{next(iter(metadata)).partition('/')[0]}/RECORD"
    digests = {path: base64.urlsafe_b64encode(hashlib.sha256(data).digest()) for path, data in files.items()}
    lines = [f"{path},sha256={digests[path].rstrip(b'=').decode()},{len(files[path])}" for path in files]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    name = f"{project['name'].replace('-', '_')}-{version}-{TAG}.whl"
    with zipfile.ZipFile(Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, DATE)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            wheel.writestr(entry, data)
    return name


def build_sdist(sdist_directory: str, config_settings: object = None) -> str:
    raise NotImplementedError("there is no source distribution: install from a clone, or build a wheel (make wheel)")


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist")
    out.mkdir(parents=True, exist_ok=True)
    print(out / build_wheel(str(out)))
