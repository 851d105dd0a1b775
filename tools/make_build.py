"""Write build/torch-<backend>/ as the Hub's builder does for a noarch kernel, for tests, the demo and local use.

A build is the package's files, a generated `_ops.py` and `metadata.json`. Its id ends in the git tree hash of
torch-ext/ (computed here, so a checkout without git gives the same id), plus `_dirty` where the files differ from the
commit: one commit always gives the same bytes. Published builds come from the Nix build, never from here.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; `kernels` brings tomli there
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent

OPS = '''"""Generated: the namespace under which this build registers its torch operators."""

import torch


def _backend() -> str:
    accelerator = torch.accelerator.current_accelerator() if hasattr(torch, "accelerator") else None
    if accelerator is not None and accelerator.type == "tpu":
        return "tpu"
    if hasattr(torch, "neuron"):  # before the rest: the Neuron extension also loads into CUDA builds
        return "neuron"
    if torch.version.cuda is not None:
        return "cuda"
    if torch.version.hip is not None:
        return "rocm"
    if torch.backends.mps.is_available():
        return "metal"
    return "xpu" if getattr(torch.version, "xpu", None) is not None else "cpu"


_NAMESPACE = f"_{name}_{{_backend()}}_{uid}"
ops = getattr(torch.ops, _NAMESPACE)


def add_op_namespace_prefix(op_name: str) -> str:
    """Return the name of an operator, qualified by this build's namespace."""
    return f"{{_NAMESPACE}}::{{op_name}}"
'''


CACHES = ("__pycache__", ".ruff_cache", ".pytest_cache", ".hypothesis")  # folders of tools, in .gitignore


def is_source(path: Path) -> bool:
    """Whether git would track this entry of torch-ext/ (see .gitignore)."""
    generated = path.name == "_ops.py" or path.name.startswith("metadata-")
    return not (generated or path.name in CACHES or path.suffix == ".pyc")


def blob_hash(path: Path) -> bytes:
    """Return the hash that git gives to a file, 20 bytes."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).digest()


def tree_hash(folder: Path) -> bytes:
    """Return the hash that git gives to the tree `folder`, 20 bytes."""
    entries = []
    for path in filter(is_source, folder.iterdir()):
        if path.is_dir():
            if any(is_source(inner) for inner in path.iterdir()):  # git knows no empty folders
                entries.append((path.name + "/", b"40000", tree_hash(path)))
        else:
            mode = b"100755" if path.stat().st_mode & 0o100 else b"100644"
            entries.append((path.name, mode, blob_hash(path)))
    data = b"".join(mode + b" " + name.rstrip("/").encode() + b"\0" + sha for name, mode, sha in sorted(entries))
    return hashlib.sha1(b"tree %d\0" % len(data) + data).digest()


def build_id(root: Path) -> str:
    """Return the last part of a build's id: 7 characters of its sources' hash, `_dirty` if they are not committed.

    Sources are torch-ext/ and build.toml; the Hub's builder takes the hash of the whole repository.
    """
    hashes = {"torch-ext": tree_hash(root / "torch-ext").hex(), "build.toml": blob_hash(root / "build.toml").hex()}
    uid = hashlib.sha1("".join(hashes.values()).encode()).hexdigest()[:7]
    if not (root / ".git").exists():
        return uid
    command = ["git", "-C", str(root), "rev-parse", *(f"HEAD:{name}" for name in hashes)]
    committed = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return uid + ("" if committed == list(hashes.values()) else "_dirty")


def metadata(general: dict, name: str, uid: str, backend: str, files: dict[str, bytes]) -> bytes:
    """Return metadata.json of one variant; `files` maps relative paths to contents."""
    digests = {path: base64.b64encode(hashlib.sha256(files[path]).digest()).decode() for path in sorted(files)}
    optional = {key: general[key] for key in ("upstream", "source") if key in general}
    content = {
        "name": general["name"],
        "id": f"_{name}_{backend}_{uid}",
        "version": general["version"],
        "license": general["license"],
        **optional,
        "python-depends": general.get("python-depends", []),
        "kernel-depends": general.get("kernel-depends", []),
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return (json.dumps(content, indent=2) + "\n").encode()


def write_variant(variant: Path, files: dict[str, bytes]) -> None:
    """Replace the folder `variant` by `files`."""
    if variant.exists():
        shutil.rmtree(variant)
    for path, data in files.items():
        (variant / path).parent.mkdir(parents=True, exist_ok=True)
        (variant / path).write_bytes(data)


def build(root: Path, out: Path, backends: list[str] | None = None) -> str:
    """Write a variant for each backend (all of build.toml's by default) to `out`; return the build's id."""
    config = tomllib.loads((root / "build.toml").read_text())
    general = config["general"]
    name = general["name"].replace("-", "_")
    kinds = {"." + kind for kind in config["torch-noarch"].get("pyext", ["py", "pyi"])}
    package = root / "torch-ext" / name
    sources = [path for path in sorted(package.rglob("*")) if path.suffix in kinds and is_source(path)]
    files = {path.relative_to(package).as_posix(): path.read_bytes() for path in sources}
    uid = build_id(root)
    files["_ops.py"] = OPS.format(name=name, uid=uid).encode()
    for backend in backends or general["backends"]:
        described = metadata(general, name, uid, backend, files)
        write_variant(out / f"torch-{backend}", {**files, "metadata.json": described})
    return uid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the source repository (default: this one)")
    parser.add_argument("--out", type=Path, help="where the variants go (default: build/ of the repository)")
    parser.add_argument("--backend", action="append", help="a backend to write, repeatable (default: all)")
    options = parser.parse_args()
    out = options.out or options.root / "build"
    print(f"build {build(options.root, out, options.backend)} written to {out}")


if __name__ == "__main__":
    main()
