"""Load the package from the Hub as a user does, take one step, and check its numbers. Exits with 1 and the reason.

    python .ci/load_published.py                          the repository and version of build.toml
    python .ci/load_published.py --repo you/optimizer     another repository
"""

from __future__ import annotations

import argparse
import platform
import re
from importlib import metadata
from pathlib import Path

import kernels
import torch

BUILD = Path(__file__).resolve().parents[1] / "build.toml"


def value_of(key: str) -> str:
    """The value of a key of build.toml, as text."""
    return re.search(rf'^{key} = "?([^"\n]+)"?$', BUILD.read_text(encoding="utf-8"), re.MULTILINE)[1]


def check_step(optimizer) -> str:
    """Take a step of a matrix and of a vector. Returns the largest error. Raises SystemExit for a wrong one."""
    torch.manual_seed(0)
    matrix, vector = (torch.nn.Parameter(torch.randn(shape)) for shape in ((48, 32), (32,)))
    theirs = torch.nn.Parameter(vector.detach().clone())
    matrix.grad, vector.grad = torch.randn(48, 32), torch.randn(32)
    theirs.grad = vector.grad.clone()
    before = matrix.detach().clone()
    groups = [{"params": [matrix], "lr": 1.0, "weight_decay": 0.0},
              {"params": [vector], "use_muon": False, "lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}]
    optimizer.Muon(groups, adjust_lr_fn=1.0, ns_steps=8).step()
    torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1).step()
    left, _, right = torch.linalg.svd(matrix.grad, full_matrices=False)
    polar = left @ right
    errors = float((before - matrix.detach() - polar).norm() / polar.norm()), float((vector - theirs).detach().norm())
    if not (errors[0] < 0.05 and errors[1] < 1e-6):
        raise SystemExit(f"wrong numbers: errors of the polar factor and of AdamW are {errors}")
    return f"{max(errors):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", default=value_of("repo-id"))
    parser.add_argument("--version", type=int, default=int(value_of("version")))
    options = parser.parse_args()
    with_what = f"torch {torch.__version__}, kernels {metadata.version('kernels')}, Python {platform.python_version()}"
    print(f"{options.repo} version {options.version} with {with_what}", flush=True)
    optimizer = kernels.get_kernel(options.repo, version=options.version, trust_remote_code=True)
    print(f"{optimizer.__name__}: a step with errors up to {check_step(optimizer)}")


if __name__ == "__main__":
    main()
