"""Fifteen steps of another package beside fifteen of this one, on a CPU: do mapped arguments give equal weights?

    python benchmarks/trajectories.py                                   # the packages that are installed
    python benchmarks/trajectories.py --peers dion timm --path dion=DIR # and those of a checkout or a wheel's folder

Each peer has a function below. It imports the peer's optimizer and yields cases: how to build the peer's optimizer, and
how to build ours with the arguments mapped. Both step copies of the weights with the same gradients. The deviation is
the norm of the difference of the weights after the last step, over the norm of the peer's movement; the largest one
among the shapes counts. A case agrees if it is at most TOLERANCE. A case that is known to differ says why.

Cautious decay leaves out elements whose update has the opposite sign. Where the update is 0 within rounding, rounding
decides its sign, and one package may decay an element that the other does not. Such an element is set to the peer's
value after the step, and counted in the column `reason` (`decayed_by_one`).

Most peers iterate in bf16. `InFloat32` turns their casts to bf16 into casts to fp32, so that the comparison is of
formulas; compiled functions run without the compiler. The column `deviation_bf16` is the deviation from the peer as it
is.

docs/peers.md explains the cases.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import math
import os
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from unittest import mock

import rows
import torch
from modded_nanogpt import NorMuon
from torch.overrides import TorchFunctionMode

os.environ.setdefault("LOCAL_KERNELS", f"org/optimizer={Path(__file__).resolve().parents[1]}")

COLUMNS = ("commit", "package", "version", "rule", "case", "shapes", "steps", "deviation", "deviation_bf16", "agrees",
           "reason", "torch")
SHAPES = (24, 40), (40, 24), (32, 32)
STEPS = 15
TOLERANCE = 1e-5
QUIET = 5e-7  # the movement of a weight whose update is 0 within rounding; others move by about lr / 5
ROUNDING = "elements that only one of the two decayed, since their update is 0 within rounding"
MOST_DECAYED_BY_ONE = 5  # elements of a case; in 50 steps of the shapes above there is one, or none
LR, DECAY, MOMENTUM, BETA2 = 0.02, 0.1, 0.9, 0.8  # no package's defaults, so that a default left in place is seen
OPTIONS = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM}

Weights = list[torch.nn.Parameter]
Build = Callable[[Weights], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    rule: str  # of this package
    name: str  # the arguments, in short
    theirs: Build
    ours: Build
    why: str = ""  # the reason why the two differ; empty if they are to agree
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    in_float32: tuple[object, ...] = ()  # patches of the peer for the comparison in fp32, beside `InFloat32`
    cautious: bool = False  # both decay cautiously
    fails: str = ""  # why the peer's optimizer does not run here: nothing is compared then


class Missing(Exception):
    """A peer cannot be compared here. The text is the reason."""


class InFloat32(TorchFunctionMode):
    """Casts to bf16 become casts to fp32, and new tensors in bf16 are in fp32. A cast stays a copy, since a peer may
    write into the result. Tensors meant for a GPU are on the CPU.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if torch.bfloat16 in (kwargs.get("dtype"), *args[1:2]):
            args = tuple(torch.float32 if value is torch.bfloat16 else value for value in args)
            kwargs.update({"dtype": torch.float32} if "dtype" in kwargs else {})
            kwargs.update({"copy": True} if func is torch.Tensor.to else {})
        return func(*args, **kwargs)


# Where packages are found


def alone(folder: Path, module: str) -> types.ModuleType:
    """Import a module of a package's folder without the package's __init__, which may import much more."""
    if not (folder / f"{module}.py").exists():
        raise Missing(f"there is no {folder.name}/{module}.py")
    package = f"peer_{folder.parent.name}_{folder.name}".replace("-", "_").replace(".", "_")
    if package not in sys.modules:
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(folder)]
    return importlib.import_module(f"{package}.{module}")


@dataclass(frozen=True)
class Place:
    """Where a peer is: a folder given by --path, or None for an installed package."""

    name: str
    folder: Path | None

    def root(self, package: str) -> Path:
        """The folder that holds the package's folder. Raises Missing."""
        if self.folder:
            return self.folder
        spec = importlib.util.find_spec(package)
        if spec is None or not (spec.origin or spec.submodule_search_locations):
            raise Missing(f"{package} is not installed, and no --path {self.name}=DIR is given")
        if spec.submodule_search_locations:  # a namespace package, such as megatron, has no other place
            return Path([*spec.submodule_search_locations][0]).parent
        return Path(spec.origin).parent

    def load(self, module: str) -> types.ModuleType:
        """Import a module of the package as usual. Raises Missing."""
        root = str(self.root(module.partition(".")[0]))
        if root not in sys.path:
            sys.path.insert(0, root)
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise Missing(f"{module} cannot be imported: {error}") from error

    def version(self, distribution: str) -> str:
        """The installed version, that of a wheel's folder, or the commit of a checkout."""
        if self.folder is None:
            return metadata.version(distribution)
        found = [d.version for d in metadata.distributions(path=[str(self.folder)])]
        if found:
            return found[0]
        command = ["git", "-C", self.folder, "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


# This package


@functools.cache
def package() -> types.ModuleType:
    """This package, loaded as a user loads it."""
    from kernels import get_kernel

    return get_kernel("org/optimizer", version=1)


def ours(**options: object) -> Build:
    """Our Muon for all weights, in fp32."""
    return lambda weights: package().Muon(weights, wire_dtype=torch.float32, **options)


def by_shape(keys: Callable[[int, int], dict], **options: object) -> Build:
    """Our Muon with a group for each weight: `keys` of the weight's rows and columns."""
    def build(weights):
        groups = [{"params": [weight], **keys(*weight.shape[-2:])} for weight in weights]
        return package().Muon(groups, wire_dtype=torch.float32, **options)

    return build


def split(form: str | dict, **options: object) -> Build:
    """Our Muon with weights cut into matrices."""
    return lambda weights: package().Muon([{"params": weights, "split": form}], wire_dtype=torch.float32, **options)


def elementwise(rule: str, **options: object) -> Build:
    """Our optimizer with a rule of groups with use_muon=False."""
    return lambda weights: package().Muon([{"params": weights, "use_muon": False, "rule": rule, **options}])


def unsigned(**options: object) -> Build:
    """Our AdaMuon without signs."""
    return by_shape(lambda *_: {"rule": "adamuon", "beta2": BETA2, "sign": False}, **options)


def original(rows_: int, columns: int) -> float:
    """Keller Jordan's factor on the learning rate."""
    return math.sqrt(max(1.0, rows_ / columns))


def decay_with_factor(rows_: int, columns: int) -> dict:
    """For peers that multiply weight decay, too, by the factor of the shape."""
    return {"weight_decay": DECAY * original(rows_, columns)}


ALONG_LONGER_SIDE = {"rule": "normuon_aspect", "beta2": BETA2}  # rows of tall and square matrices, columns of wide ones


# One function for each peer


def torch_muon(place: Place) -> Iterator[Case]:
    """torch.optim.Muon: the arguments are ours. A folder given by --path is that of another torch."""
    if place.folder:
        file = place.folder / "torch" / "optim" / "_muon.py"
        # A docstring that newer files import
        vars(importlib.import_module("torch.optim.optimizer")).setdefault("_functional_api_doc", "")
        spec = importlib.util.spec_from_file_location("torch.optim._muon_of_peer", file)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            raise Missing(f"this file does not run with torch {torch.__version__}: {error}") from error
        Muon = module.Muon
    else:
        Muon = torch.optim.Muon
    for nesterov in (True, False):
        for factor in ("original", "match_rms_adamw", "spectral_unclamped"):
            options = {**OPTIONS, "nesterov": nesterov, "adjust_lr_fn": factor}
            try:
                Muon([torch.nn.Parameter(torch.zeros(2, 2))], **options)
            except ValueError:  # an older version knows fewer factors
                continue
            yield Case("muon", f"nesterov={nesterov}, {factor}", functools.partial(Muon, **options),
                       ours(ns_coefficients="jordan", **options))


def torch_elementwise(place: Place) -> Iterator[Case]:
    """torch.optim.AdamW and torch.optim.SGD, whose weight decay is part of the gradient, so without decay."""
    for decay in (0.0, DECAY):
        options = {"lr": LR, "betas": (MOMENTUM, BETA2), "eps": 1e-8, "weight_decay": decay}
        yield Case("adamw", f"AdamW, weight_decay={decay}", functools.partial(torch.optim.AdamW, **options),
                   elementwise("adamw", **options))
    for options in ({"momentum": MOMENTUM, "nesterov": True}, {"momentum": MOMENTUM, "nesterov": False},
                    {"momentum": 0.0, "nesterov": False}):
        options = {"lr": LR, "weight_decay": 0.0, **options}
        yield Case("sgd", ", ".join(["SGD", *(f"{key}={options[key]}" for key in ("momentum", "nesterov"))]),
                   functools.partial(torch.optim.SGD, **options), elementwise("sgd", **options))
    options = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "nesterov": True}
    yield Case("sgd", "SGD, weight_decay", functools.partial(torch.optim.SGD, **options),
               elementwise("sgd", **options), why="its decay is part of the gradient")


def keller_jordan(place: Place) -> Iterator[Case]:
    """github.com/KellerJordan/Muon: always nesterov, factor "original", Jordan's triple."""
    module = place.load("muon")
    yield Case("muon", "SingleDeviceMuon", functools.partial(module.SingleDeviceMuon, **OPTIONS),
               ours(ns_coefficients="jordan", **OPTIONS))

    def with_adam(weights):
        return module.SingleDeviceMuonWithAuxAdam([{"params": weights, "use_muon": True, **OPTIONS}])

    yield Case("muon", "SingleDeviceMuonWithAuxAdam", with_adam, ours(ns_coefficients="jordan", **OPTIONS))


def normuon(place: Place) -> Iterator[Case]:
    """github.com/zichongli5/NorMuon, the code of the paper's authors."""
    module = place.load("normuon")
    yield Case("normuon", "SingleDeviceNorMuon",
               functools.partial(module.SingleDeviceNorMuon, beta2=BETA2, **OPTIONS),
               by_shape(lambda *_: {"rule": "normuon", "beta2": BETA2}, ns_coefficients="jordan", **OPTIONS))


def adamuon(place: Place) -> Iterator[Case]:
    """github.com/Chongjie-Si/AdaMuon, the code of the paper's authors: beta2 is the momentum."""
    module = alone(place.root("adamuon") / "gpt2" / "models" / "optimizers", "adamuon")

    def gather(out, tensor, async_op):
        """The collective for a single process."""
        out.copy_(tensor)
        return mock.Mock()

    yield Case("adamuon", "AdaMuon", functools.partial(module.AdaMuon, rank=0, world_size=1, **OPTIONS),
               by_shape(lambda *_: {"rule": "adamuon", "beta2": MOMENTUM}, adjust_lr_fn=0.2,
                        ns_coefficients="jordan", **OPTIONS),
               in_float32=(mock.patch.object(module.dist, "all_gather_into_tensor", gather),))


def muon_plus(place: Place) -> Iterator[Case]:
    """github.com/K1seki221/MuonPlus, the code of the paper's authors: the momentum is a sum; `rms_scaling` is
    "spectral_norm".
    """
    root = place.root("muon_plus")
    sys.path.insert(0, str(root))
    module = alone(root / "utils" / "optim", "muon_plus")
    orders = {"none": None, "row": "row", "col": "column", "row_col": "row_column", "col_row": "column_row"}
    for mode, order in orders.items():
        def theirs(weights, mode=mode):
            named = [(str(number), weight) for number, weight in enumerate(weights)]
            return module.MuonPlus(named, norm_mode=mode, **OPTIONS)

        def keys(*_, order=order):
            return {"rule": "muon_plus", "normalize": order}

        yield Case("muon_plus", f"norm_mode={mode}", theirs,
                   by_shape(keys, momentum_form="sum", adjust_lr_fn="spectral_norm", ns_coefficients="jordan",
                            **OPTIONS))


def scion(place: Place) -> Iterator[Case]:
    """github.com/LIONS-EPFL/scion, the code of the paper's authors: momentum is 1 - momentum, radius is scale."""
    module = place.load("scion")
    for unconstrained in (False, True):
        theirs = {"lr": LR, "momentum": 1 - MOMENTUM, "unconstrained": unconstrained}
        mine = {"lr": LR, "momentum": MOMENTUM, "weight_decay": 0.0 if unconstrained else 1.0}
        yield Case("scion", f"norm=Spectral, unconstrained={unconstrained}",
                   functools.partial(module.Scion, norm="Spectral", scale=3.0, **theirs),
                   ours(rule="scion", radius=3.0, ns_coefficients="jordan", **mine))
        yield Case("sign", f"norm=Sign, unconstrained={unconstrained}, columns alike",
                   functools.partial(module.Scion, norm="Sign", scale=120.0, **theirs),
                   elementwise("sign", radius=120.0 / 40, **mine), shapes=((24, 40), (32, 40)))
        yield Case("sign", f"norm=Sign, normalized=False, unconstrained={unconstrained}",
                   functools.partial(module.Scion, norm="Sign", norm_kwargs={"normalized": False}, scale=3.0, **theirs),
                   elementwise("sign", radius=3.0, **mine))


def with_override() -> None:
    """Emerging-Optimizers imports `override` from typing, which is there since Python 3.12."""
    if not hasattr(typing, "override"):
        typing.override = lambda function: function


def emerging_optimizers(place: Place) -> Iterator[Case]:
    """NVIDIA Emerging-Optimizers: `fp32_matmul_prec="highest"` iterates in fp32."""
    with_override()
    module = place.load("emerging_optimizers.orthogonalized_optimizers")
    utils = place.load("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    wide = {"fp32_matmul_prec": "highest"}
    scales = {"spectral": "sqrt_max", "shape_scaling": "shape_scaling", "unit_rms_norm": "unit_rms_norm"}
    for mode, factor in scales.items():
        yield Case("muon", f"Muon, scale_mode={mode}",
                   functools.partial(module.Muon, scale_mode=mode, **wide, **OPTIONS),
                   ours(nesterov=False, ns_coefficients="quintic", adjust_lr_fn=factor, **OPTIONS))
    for name, triples in utils._COEFFICIENT_SETS.items():
        steps = max(5, len(triples)) if len(triples) > 1 else 5
        steps = len(triples) if name == "aol" else steps
        triples = (list(triples) * 5)[:steps]
        yield Case("muon", f"Muon, coefficient_type={name}, {steps} steps, nesterov",
                   functools.partial(module.Muon, coefficient_type=name, num_ns_steps=steps, nesterov=True,
                                     extra_scale_factor=0.2, **wide, **OPTIONS),
                   ours(ns_coefficients=triples, ns_steps=steps, adjust_lr_fn="match_rms_adamw", **OPTIONS))
    for method, decay in {"independent": "independent", "palm": "lr_squared"}.items():
        yield Case("muon", f"Muon, weight_decay_method={method}",
                   functools.partial(module.Muon, weight_decay_method=method, **wide, **OPTIONS),
                   ours(nesterov=False, ns_coefficients="quintic", adjust_lr_fn="sqrt_max", decay=decay, **OPTIONS))
    yield Case("muon", "Muon, weight_decay_method=l2",
               functools.partial(module.Muon, weight_decay_method="l2", **wide, **OPTIONS),
               ours(nesterov=False, ns_coefficients="quintic", adjust_lr_fn="sqrt_max", **OPTIONS),
               why="l2 adds the decay to the gradient: no form of decay here does")

    def adaptive(method):
        return functools.partial(module.AdaptiveMuon, moment2_method=method, beta2=BETA2, scale_mode="shape_scaling",
                                 **wide, **OPTIONS)

    common = {"nesterov": False, "ns_coefficients": "quintic", **OPTIONS}
    yield Case("normuon_aspect", "AdaptiveMuon, normuon", adaptive("normuon"),
               by_shape(lambda *_: ALONG_LONGER_SIDE, **common))
    yield Case("normuon", "AdaptiveMuon, normuon, rows of all", adaptive("normuon"),
               by_shape(lambda *_: {"rule": "normuon", "beta2": BETA2}, **common),
               why="columns of wide matrices are normalized: give these rule='normuon_columns'")
    yield Case("adamuon", "AdaptiveMuon, adamuon", adaptive("adamuon"),
               by_shape(lambda *_: {"rule": "adamuon", "beta2": BETA2, "sign": False}, **common),
               why="the update is not scaled to a fixed RMS after the division")
    yield Case("adamuon", "AdaptiveMuon, namo", adaptive("namo"),
               by_shape(lambda *_: {"rule": "adamuon", "beta2": BETA2}, **common),
               why="namo (arXiv 2602.17080) is no rule here")
    yield Case("hyperball", "MuonHyperball",
               functools.partial(module.MuonHyperball, lr=LR, momentum=MOMENTUM, weight_decay=0.0, **wide),
               ours(rule="hyperball", nesterov=False, ns_coefficients="quintic", lr=LR, momentum=MOMENTUM))
    yield Case("hyperball", "MuonHyperball, weight_decay",
               functools.partial(module.MuonHyperball, **wide, **OPTIONS),
               ours(rule="hyperball", nesterov=False, ns_coefficients="quintic", lr=LR, momentum=MOMENTUM),
               why="its decay shrinks the radius, which it reads anew in every step; ours keeps the first radius")
    yield Case("scion", "Scion",
               functools.partial(module.Scion, lr=LR, momentum=MOMENTUM, spectral_radius=3.0, **wide),
               ours(rule="scion", radius=3.0, ns_coefficients="quintic", lr=LR, momentum=MOMENTUM, weight_decay=1.0))


def megatron(place: Place) -> Iterator[Case]:
    """Megatron-Core on one rank: Emerging-Optimizers, with q, k and v of the query groups of a fused weight apart."""
    with_override()
    module = place.load("megatron.core.optimizer.emerging_optimizers")
    if not module.HAVE_EMERGING_OPTIMIZERS:
        raise Missing("emerging_optimizers is not installed, and no --path emerging_optimizers=DIR is given")
    wide = {"fp32_matmul_prec": "highest", "tp_mode": "duplicated", **OPTIONS}
    common = {"ns_coefficients": "quintic", **OPTIONS}
    yield Case("muon", "TensorParallelMuon, extra_scale_factor=0.2",
               functools.partial(module.TensorParallelMuon, extra_scale_factor=0.2, **wide),
               ours(adjust_lr_fn="match_rms_adamw", **common))
    parts = [4, 2, 2]
    yield Case("muon", "TensorParallelMuon, split_qkv",
               functools.partial(module.TensorParallelMuon, split_qkv=True, is_qkv_fn=lambda weight: True,
                                 qkv_split_shapes=parts, **wide),
               split({"rows": parts, "repeat": 3}, adjust_lr_fn="sqrt_max", **common), shapes=((24, 40), (24, 10)))
    adaptive = functools.partial(module.TensorParallelAdaptiveMuon, moment2_method="normuon", beta2=BETA2, **wide)
    lacks = not hasattr(adaptive([torch.nn.Parameter(torch.ones(2, 2))]), "scale_mode")
    yield Case("normuon_aspect", "TensorParallelAdaptiveMuon, normuon", adaptive,
               by_shape(lambda *_: ALONG_LONGER_SIDE, adjust_lr_fn="sqrt_max", **common),
               fails="TensorParallelAdaptiveMuon lacks the attribute scale_mode that this version of "
                     "Emerging-Optimizers reads in every step" if lacks else "")


def timm(place: Place) -> Iterator[Case]:
    """timm: coefficients by other numbers under equal names, so the triples are passed."""
    module = alone(place.root("timm") / "timm" / "optim", "muon")
    for name, triples in module._COEFFICIENTS.items():
        five = (triples * 5)[:5]
        yield Case("muon", f"ns_coefficients={name}, nesterov",
                   functools.partial(module.Muon, ns_coefficients=name, nesterov=True, **OPTIONS),
                   ours(ns_coefficients=five, adjust_lr_fn="match_rms_adamw", **OPTIONS))
    factors = {"original": "original", "rms_to_rms": "spectral_norm", None: 1.0}
    quintic = {"nesterov": False, "ns_coefficients": "quintic", **OPTIONS}
    for theirs, factor in factors.items():
        yield Case("muon", f"adjust_lr_fn={theirs}",
                   functools.partial(module.Muon, adjust_lr_fn=theirs, **OPTIONS), ours(adjust_lr_fn=factor, **quintic))
    a, b, c = module._COEFFICIENTS["quintic"][0]
    divided = [(a / 1.1, b / 1.1**3, c / 1.1**5), *module._COEFFICIENTS["quintic"][1:]]
    yield Case("muon", "safety_factor=1.1", functools.partial(module.Muon, safety_factor=1.1, **OPTIONS),
               ours(adjust_lr_fn="match_rms_adamw", **{**quintic, "ns_coefficients": divided}))
    shapes = ((8, 6, 3, 3), (40, 4, 3, 3))
    yield Case("muon", "convolutions, conv_mode=flatten", functools.partial(module.Muon, **OPTIONS),
               split("flatten", adjust_lr_fn="match_rms_adamw", **quintic), shapes=shapes)
    yield Case("muon", "convolutions, conv_mode=batched",
               functools.partial(module.Muon, conv_mode="batched", **OPTIONS),
               split("taps", adjust_lr_fn=lambda r, c: 0.2 * math.sqrt(max(r, c)) / 3, **quintic), shapes=shapes)
    yield from lion(alone(place.root("timm") / "timm" / "optim", "lion"))
    theirs = functools.partial(module.Muon, algo="adamuon", betas=(0.9, BETA2), eps=1e-8, **OPTIONS)
    yield Case("adamuon", "algo=adamuon", theirs, unsigned(adjust_lr_fn=0.2, **quintic))
    yield Case("adamuon", "algo=adamuon, sign=True of ours", theirs,
               by_shape(lambda *_: {"rule": "adamuon", "beta2": BETA2}, adjust_lr_fn=0.2, **quintic),
               why="it orthogonalizes the momentum, not its signs: pass sign=False")
    yield Case("adamuon", "algo=adamuon, adjust_lr_fn=rms_to_rms",
               functools.partial(module.Muon, algo="adamuon", betas=(0.9, BETA2), adjust_lr_fn="rms_to_rms", **OPTIONS),
               unsigned(adjust_lr_fn="spectral_norm", **quintic),
               why="with other factors than match_rms_adamw the update is not scaled to a fixed RMS")


def lion(module: types.ModuleType) -> Iterator[Case]:
    """Lion of a module."""
    options = {"lr": LR, "betas": (MOMENTUM, BETA2), "weight_decay": DECAY}
    yield Case("lion", "Lion", functools.partial(module.Lion, **options), elementwise("lion", **options))


def pytorch_optimizer(place: Place) -> Iterator[Case]:
    """pytorch_optimizer: groups need `use_muon`."""
    module = place.load("pytorch_optimizer")

    def theirs(kind, **options):
        return lambda weights: getattr(module, kind)([{"params": weights, "use_muon": True}], foreach=False, **options)

    jordan = {"ns_coefficients": "jordan", **OPTIONS}
    for adjusted, factor in ((False, "original"), (True, "match_rms_adamw")):
        for nesterov in (True, False):
            options = {**OPTIONS, "use_adjusted_lr": adjusted, "nesterov": nesterov}
            yield Case("muon", f"Muon, use_adjusted_lr={adjusted}, nesterov={nesterov}", theirs("Muon", **options),
                       ours(adjust_lr_fn=factor, nesterov=nesterov, **jordan))
    rule = {"rule": "normuon", "beta2": BETA2}
    yield Case("normuon", "NorMuon", theirs("NorMuon", beta2=BETA2, **OPTIONS), by_shape(lambda *_: rule, **jordan))
    yield Case("normuon", "NorMuon, update_scale=match_rms",
               theirs("NorMuon", beta2=BETA2, update_scale="match_rms", **OPTIONS),
               by_shape(lambda *_: rule, adjust_lr_fn="match_rms_adamw", **jordan),
               why="its update has RMS 0.2; ours keeps the norm of O, which is near sqrt(min(R, C)), not equal")
    yield from lion(module)
    without = {"lr": LR, "weight_decay": DECAY}
    yield Case("adamuon", "AdaMuon", theirs("AdaMuon", betas=(MOMENTUM, BETA2), eps=1e-8, **without),
               unsigned(adjust_lr_fn=0.2, nesterov=False, **jordan))
    yield Case("adamuon", "AdaMuon, use_adjusted_lr=False",
               theirs("AdaMuon", betas=(MOMENTUM, BETA2), eps=1e-8, use_adjusted_lr=False, **without),
               unsigned(adjust_lr_fn=lambda r, c: original(r, c) / math.sqrt(max(r, c)), nesterov=False, **jordan))
    oracle = place.load("pytorch_optimizer.optimizer.scion").LMONorm.SPECTRAL
    for constraint in (True, False):
        options = {"lr": LR, "momentum": 1 - MOMENTUM, "constraint": constraint}
        yield Case("scion", f"SCION, SPECTRAL, constraint={constraint}",
                   functools.partial(module.SCION, norm_type=oracle, scale=3.0, foreach=False, **options),
                   ours(rule="scion", radius=3.0, ns_coefficients="jordan", lr=LR, momentum=MOMENTUM,
                        weight_decay=float(constraint)))


def heavyball(place: Place) -> Iterator[Case]:
    """heavyball: momentum is betas[0]. Its compiler is switched off by its own variable."""
    module = place.load("heavyball")
    module.utils.compile_mode = None

    def unrounded(old, new=None):
        """Stochastic rounding to bf16, without the rounding."""
        return (old if new is None else new).clone()

    exact = (mock.patch.object(module.utils, "stochastic_round_", unrounded),)
    common = {"lr": LR, "weight_decay": DECAY, "betas": (MOMENTUM, 0.99)}
    quintic = {"ns_coefficients": "quintic", **OPTIONS}
    for nesterov in (True, False):
        yield Case("muon", f"Muon, heavyball_momentum, nesterov={nesterov}",
                   functools.partial(module.Muon, heavyball_momentum=True, nesterov=nesterov, **common),
                   ours(momentum_form="sum", nesterov=nesterov, **quintic), in_float32=exact)
    yield Case("muon", "Muon, cautious_weight_decay",
               functools.partial(module.Muon, heavyball_momentum=True, cautious_weight_decay=True, **common),
               ours(momentum_form="sum", decay="cautious", **quintic), in_float32=exact, cautious=True)
    yield Case("muon", "Muon, defaults", functools.partial(module.Muon, **common), ours(**quintic), in_float32=exact,
               why="its nesterov adds the gradient and the mean with weights 1 and 1, not 1 - momentum and momentum")
    yield Case("scion", "Scion", functools.partial(module.Scion, lr=LR, betas=(MOMENTUM, 0.99), scale=3.0),
               ours(rule="scion", radius=3.0, ns_coefficients="quintic", lr=LR, momentum=MOMENTUM, weight_decay=0.0),
               in_float32=exact, why="its first step draws the weights anew, and its mean is divided by 1 - momentum^t")


def dion(place: Place) -> Iterator[Case]:
    """microsoft/dion: the momentum is a sum; its default coefficients are "polar_express_dion"."""
    folder = place.root("dion") / "dion"
    Muon, NorMuon = alone(folder, "muon").Muon, alone(folder, "normuon").NorMuon
    common = {"lr": LR, "weight_decay": DECAY, "mu": MOMENTUM}
    sums = {"momentum_form": "sum", **OPTIONS}
    for factor, name in (("spectral_norm", "spectral_norm"), ("rms_norm", "rms_norm"), (None, 1.0)):
        for nesterov in (True, False):
            yield Case("muon", f"Muon, adjust_lr={factor}, nesterov={nesterov}",
                       functools.partial(Muon, adjust_lr=factor, nesterov=nesterov, **common),
                       ours(adjust_lr_fn=name, nesterov=nesterov, ns_coefficients="polar_express_dion", **sums))
    sums.update(adjust_lr_fn="spectral_norm", nesterov=False)
    yield Case("muon", "Muon, use_polar_express=False", functools.partial(Muon, use_polar_express=False, **common),
               ours(ns_coefficients="quintic", **sums))
    sums.update(ns_coefficients="polar_express_dion")
    yield Case("muon", "Muon, cautious_wd", functools.partial(Muon, cautious_wd=True, **common),
               ours(decay="cautious", **sums), cautious=True)

    def theirs(weights):
        return Muon([{"params": weights, "split_sizes": [16, 8]}], **common)

    yield Case("muon", "Muon, split_sizes", theirs, split({"rows": [16, 8]}, **sums), shapes=((24, 40), (24, 12)))
    for cautious, decay in ((False, "decoupled"), (True, "cautious")):
        yield Case("normuon", f"NorMuon, cautious_wd={cautious}",
                   functools.partial(NorMuon, muon_beta2=BETA2, cautious_wd=cautious, **common),
                   by_shape(lambda *_: {"rule": "normuon", "beta2": BETA2}, decay=decay, **sums), cautious=cautious)
    del sums["nesterov"], sums["momentum_form"]
    common.pop("mu")
    for name, options in (("Dion2", {"ef_decay": MOMENTUM}), ("NorDion2", {"mu": MOMENTUM, "muon_beta2": BETA2})):
        rule = {"rule": "dion2"} if name == "Dion2" else {"rule": "dion3", "beta2": BETA2}
        for fraction in (0.25, 0.5):
            yield Case(rule["rule"], f"{name}, fraction={fraction}",
                       functools.partial(getattr(alone(folder, name.lower()), name), fraction=fraction, **options,
                                         **common),
                       by_shape(lambda *_, rule=rule, fraction=fraction: {**rule, "fraction": fraction}, **sums))


def muonium(place: Place) -> Iterator[Case]:
    """muonium: the momentum is a sum, decay is cautious by default and multiplied by the factor of the shape."""
    module = place.load("muonium")
    loops = place.load("muonium.orthogonalize.orthogonalize")
    # Its Triton kernels run on GPUs only; its loops in torch compute the same
    in_torch = (mock.patch.object(loops, "ns_loop_triton", loops.ns_loop),
                mock.patch.object(loops, "pe_loop_triton", loops.pe_loop))
    case = functools.partial(Case, in_float32=in_torch)
    common = {"lr": LR, "wd": DECAY, "momentum": MOMENTUM}
    sums = {"momentum_form": "sum", "ns_coefficients": "polar_express_dion", "lr": LR, "momentum": MOMENTUM}
    for cautious, decay in ((True, "cautious"), (False, "decoupled")):
        yield case("muon", f"Muon, use_cautious_wd={cautious}",
                   functools.partial(module.Muon, use_cautious_wd=cautious, **common),
                   by_shape(decay_with_factor, decay=decay, **sums), cautious=cautious)
    yield case("muon", "Muon, newton_schulz, nesterov=False",
               functools.partial(module.Muon, orthogonalization_strategy="newton_schulz", nesterov=False, **common),
               by_shape(decay_with_factor, decay="cautious", nesterov=False, **{**sums, "ns_coefficients": "jordan"}),
               cautious=True)
    yield case("muon", "Muon, equal weight_decay", functools.partial(module.Muon, use_cautious_wd=False, **common),
               ours(weight_decay=DECAY, **sums),
               why="it decays by lr wd sqrt(max(1, R/C)): multiply weight_decay of tall matrices by the factor")

    def theirs(weights):
        return module.Muon([{"params": weights, "algorithm": "normuon", "muon_beta2": BETA2}], **common)

    yield case("normuon", "Muon, algorithm=normuon", theirs,
               by_shape(lambda r, c: {"rule": "normuon", "beta2": BETA2, **decay_with_factor(r, c)}, decay="cautious",
                        **sums), cautious=True)


def nanochat(place: Place) -> Iterator[Case]:
    """karpathy/nanochat: MuonEq, Muon+ of the whole norm, and NorMuon along the longer side, by a rule of our own."""
    os.environ.setdefault("NANOCHAT_DTYPE", "float32")
    module = place.load("nanochat.optim")

    def theirs(weights):
        group = {"kind": "muon", "ns_steps": 5, "beta2": BETA2, **OPTIONS}
        return module.MuonAdamW([{"params": [weight], **group} for weight in weights])

    def keys(rows_, columns):
        per = "row" if rows_ >= columns else "column"
        return {"rule": nanochat_rule(per), "beta2": BETA2, **decay_with_factor(rows_, columns)}

    yield Case("a rule of one's own", "MuonAdamW", theirs,
               by_shape(keys, decay="cautious", ns_coefficients="polar_express_nanochat", lr=LR, momentum=MOMENTUM),
               cautious=True)


@functools.cache
def nanochat_rule(per: str) -> type:
    """The update of nanochat at 92d63d4 as a rule with the second moment per row or column."""
    optimizer = package()
    own, other = (1, 2) if per == "row" else (2, 1)

    class Nanochat(optimizer.Rule):
        name = f"nanochat_{per}s"
        state = (optimizer.State(f"nanochat_second_moment_of_{per}s", per=per),)
        options = {"beta2": 0.9}

        def before(self, U, units):
            return U / U.square().sum(2, keepdim=True).sqrt().clamp_min(1e-6)

        def after(self, O, units):
            V, numbers = units.state[self.state[0].key], units.numbers
            size = math.sqrt(min(O.shape[1:]))
            O = O * (size / O.square().sum((1, 2), keepdim=True).sqrt().clamp_min(1e-6))
            V.mul_(numbers.beta2).add_(O.square().mean(other, keepdim=True) * numbers.one_minus_beta2)
            N = O / V.clamp_min(1e-10).sqrt()
            return N * (size / N.square().sum((1, 2), keepdim=True).sqrt().clamp_min(1e-10))

    return Nanochat


def modded_nanogpt(place: Place) -> Iterator[Case]:
    """KellerJordan/modded-nanogpt: its decay is multiplied by lr twice."""
    file = (place.folder or Path()) / "train_gpt.py"
    if place.folder is None or not file.exists():
        raise Missing("it is no package: give its checkout by --path modded_nanogpt=DIR")
    hyper = {"lr": LR, "momentum": MOMENTUM}

    def keys(rows_, columns):
        return {**ALONG_LONGER_SIDE, "weight_decay": LR * DECAY * original(rows_, columns)}

    yield Case("normuon_aspect", "NorMuonAndAdam",
               functools.partial(NorMuon, file=file, beta2=BETA2, weight_decay=DECAY, **hyper),
               by_shape(keys, decay="cautious", ns_coefficients="polar_express_modded_nanogpt", **hyper), cautious=True)


def motif(place: Place) -> Iterator[Case]:
    raise Missing("the package is on the Hub only, as builds for GPUs; its update is momentum_form='sum', "
                  "adjust_lr_fn='match_rms_adamw'")
    yield


# name -> (function, distribution)
PEERS = {
    "torch": (torch_muon, "torch"),
    "torch_elementwise": (torch_elementwise, "torch"),
    "keller_jordan": (keller_jordan, "muon-optimizer"),
    "normuon": (normuon, "normuon"),
    "adamuon": (adamuon, "adamuon"),
    "muon_plus": (muon_plus, "muon_plus"),
    "scion": (scion, "scion"),
    "emerging_optimizers": (emerging_optimizers, "emerging-optimizers"),
    "megatron": (megatron, "megatron-core"),
    "timm": (timm, "timm"),
    "pytorch_optimizer": (pytorch_optimizer, "pytorch_optimizer"),
    "heavyball": (heavyball, "heavyball"),
    "dion": (dion, "dion"),
    "muonium": (muonium, "muonium"),
    "nanochat": (nanochat, "nanochat"),
    "modded_nanogpt": (modded_nanogpt, "modded-nanogpt"),
    "motif": (motif, "motif"),
}


# The comparison


def trajectory(build: Build, shapes: Iterable[tuple[int, ...]], steps: int,
               *modes: object) -> Iterator[list[torch.Tensor]]:
    """The weights before the first step and after each of `steps` steps, as views that the caller may write to. Part of
    each gradient is the weight, so a deviation is carried on.
    """
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(0.2 * torch.randn(shape, generator=generator)) for shape in shapes]
    yield [weight.detach() for weight in weights]
    with entered(modes):
        optimizer = build(weights)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator) + weight.detach()
        with entered(modes):
            optimizer.step()
        yield [weight.detach() for weight in weights]


@contextlib.contextmanager
def entered(modes: Iterable[object]) -> Iterator[None]:
    """Several context managers, entered in order, with compiled functions run without the compiler."""
    with contextlib.ExitStack() as stack:
        for mode in (torch.compiler.set_stance("force_eager"), *modes):
            stack.enter_context(mode)
        yield


def decayed_by_one(theirs: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """For the movements of a weight's elements in one step: where one of the two is 0 within rounding and the other is
    not. With cautious decay the first is an update of the opposite sign, and the second little more than decay.
    """
    return (torch.minimum(theirs.abs(), ours.abs()) <= QUIET) & ((theirs - ours).abs() > 10 * QUIET)


def difference(case: Case, steps: int, *modes: object) -> tuple[float, int]:
    """(|| ours - theirs || / || theirs - start ||, the largest of all shapes; how many elements only one of the two
    decayed). The latter are set to theirs after the step.
    """
    both = zip(trajectory(case.theirs, case.shapes, steps, *modes), trajectory(case.ours, case.shapes, steps))
    start, count = [weight.clone() for weight in next(both)[0]], 0
    before = [(weight, weight) for weight in start]
    for theirs, mine in both:
        if case.cautious:
            for a, b, (old_a, old_b) in zip(theirs, mine, before):
                one = decayed_by_one(a - old_a, b - old_b)
                count += int(one.sum())
                b.copy_(torch.where(one, a, b))
            before = [(a.clone(), b.clone()) for a, b in zip(theirs, mine)]
    return max(float((b - a).norm() / (a - s).norm()) for s, a, b in zip(start, theirs, mine)), count


def deviation(case: Case, steps: int, *modes: object) -> float:
    """The first number of `difference`."""
    return difference(case, steps, *modes)[0]


def as_it_is(case: Case, steps: int) -> str:
    """The deviation from the peer with its own dtypes; empty if it does not run with weights in fp32 on a CPU."""
    try:
        return f"{deviation(case, steps):.1e}"
    except (RuntimeError, AssertionError):
        return ""


def fields(case: Case, steps: int) -> dict[str, object]:
    """The fields of a case's row: what was compared, and what was found."""
    shapes = " ".join("x".join(map(str, shape)) for shape in case.shapes)
    row = {"rule": case.rule, "case": case.name, "shapes": shapes}
    if case.fails:
        return {**row, "agrees": "", "reason": case.fails}
    exact, count = difference(case, steps, InFloat32(), *case.in_float32)
    few = count <= MOST_DECAYED_BY_ONE
    reason = case.why or (f"{ROUNDING}: {count}" if count and few else "")
    return {**row, "deviation": f"{exact:.1e}", "deviation_bf16": as_it_is(case, steps),
            "agrees": exact <= TOLERANCE and few, "reason": reason}


def compared(name: str, folder: Path | None, steps: int = STEPS) -> Iterator[dict[str, object]]:
    """Rows of a peer: one for each case, or one with the reason why there is none."""
    function, distribution = PEERS[name]
    place = Place(name, folder)
    row = {"package": name, "torch": torch.__version__, "steps": steps}
    try:
        for case in function(place):
            row["version"] = place.version(distribution)
            yield {**row, **fields(case, steps)}
    except Missing as error:
        yield {**row, "agrees": "", "reason": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rows.add_output(parser, COLUMNS, "trajectories.csv")
    parser.add_argument("--peers", nargs="+", choices=[*PEERS], default=[*PEERS], help="which packages (default: all)")
    parser.add_argument("--path", nargs="+", default=[], metavar="NAME=DIR", help="a peer's checkout or wheel's folder")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    folders = {name: Path(folder).resolve() for name, _, folder in (text.partition("=") for text in given.path)}
    if unknown := sorted(folders.keys() - PEERS.keys()):
        parser.error(f"--path {unknown[0]}=...: there is no such peer, only {', '.join(PEERS)}")
    failed = False
    for name in given.peers:
        for row in compared(name, folders.get(name), given.steps):
            rows.append(given.out, COLUMNS, [{"commit": given.commit, **row}])
            print(f"{name:20}{row.get('case', ''):58}{row.get('deviation', ''):>9}{row.get('deviation_bf16', ''):>9}  "
                  f"{row['agrees']!s:6}{row['reason']}", flush=True)
            failed |= row["agrees"] is False and not row["reason"]
    sys.exit("a case differs without a known reason" if failed else 0)


if __name__ == "__main__":
    main()
