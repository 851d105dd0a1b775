"""`MuonConfig`: the arguments of `Muon` that hold for the whole optimizer, and their checks.

Parameters and groups are checked in validation.py.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from ..rules.rule import options_of
from .checks.group_keys import ALIASES
from .checks.rule_options import owners_in_words, owners_of_options
from .errors import shortened

NONFINITE = ("propagate", "skip", "raise")  # allowed values of `nonfinite`

# Arguments that belong elsewhere
OF_DEFAULT_GROUPS = (
    "adamw",
    "muon",
    "adamw_lr",
    "report",
    "split",
    "named_splits",
    "allow_no_matrices",
)
OF_NORMUON = ("beta2",)
OTHER_NAMES = {**ALIASES, "mu": "momentum"}

Function = TypeVar("Function", bound=Callable)


def _meant(
    argument: str, parameters: Mapping[str, inspect.Parameter], options: Iterable[str]
) -> str:
    """Advice, for a message, on an argument that is not in `parameters` of `Muon`.
    `options`: of the rule that was given with the argument.
    """
    if argument == "split":
        return (
            "it is a key of parameter groups. For models, get_default_muon_param_groups has "
            'split="auto", and named_splits for forms by name'
        )
    if argument == "use_muon":
        return "it is a key of parameter groups, False for groups of AdamW"
    if argument in OF_DEFAULT_GROUPS:
        return "pass it to get_default_muon_param_groups"
    if argument in OF_NORMUON:
        return "it is an option of NorMuon"
    if True in owners_of_options().get(argument, ()):
        return f"it is an option {owners_in_words(argument, True)}: pass the rule beside it"
    low = argument.lower()
    known = [name for name in parameters if name not in ("self", "params")]
    name = OTHER_NAMES.get(low)
    others = [*options, *OF_NORMUON, *OF_DEFAULT_GROUPS, *owners_of_options()]
    found = [name] if name else difflib.get_close_matches(low, known, 2, 0.6)
    found = found or difflib.get_close_matches(low, dict.fromkeys(others), 2, 0.8)
    if found:
        return f"did you mean {' or '.join(map(repr, found))}?"
    own = [name for name in known if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY]
    return f"leave it out. Besides torch.optim.Muon's there are {', '.join(own)}"


@dataclass(frozen=True)
class AssumedRanks:
    """Stands for the process group of ranks 0 to `count` - 1 in a forecast: there are no ranks."""

    count: int


@dataclass(frozen=True)
class MuonConfig:
    """The keyword arguments of `Muon` that hold for all parameter groups.

    Values are unchecked user input until `check` has been called. Meaning: docstring of `Muon`.
    """

    # Ranks that hold copies of the plain (non-DTensor) parameters; None: each rank alone. In a
    # pickle the name of the group. The only field that a parameter group can replace, see
    # own_process_groups.py.
    process_group: dist.ProcessGroup | AssumedRanks | str | None = None
    grads_are_reduced: bool = True  # False: the optimizer averages gradients over process_group
    shard_state: bool = False  # True: only the owner of a plain parameter keeps its state
    # True: state of DTensors that rules read at the owner of a matrix is stored there
    state_at_owners: bool = False
    # momentum_buffer, exp_avg, exp_avg_sq; int8: of momentum only
    state_dtype: torch.dtype = torch.float32
    wire_dtype: torch.dtype = torch.bfloat16  # updates in all-to-all buffers
    ns_dtype: torch.dtype | None = None  # matrix products; None: fp16, on CPUs fp32
    workspace_bytes: int | None = None  # limit on one rank; None: see `workspace_limit_bytes`
    capturable: bool = False  # True: the whole step is one CUDA graph
    # True: state per element lies in host memory; an int: except this number of bytes
    offload_state: bool | int = False
    nonfinite: str = "propagate"  # one of NONFINITE
    # True: gradients are sent to owners during backward, inside `Muon.last_backward`
    overlap_backward: bool = False
    # True: updates return during the next forward, see `Muon.updates_return_during`
    overlap_forward: bool = False
    # Whether `step`, not torch.amp.GradScaler, unscales gradients and skips steps with Inf; None:
    # chosen by `Unscaling` of communication/nonfinite.py
    unscale_in_step: bool | None = None
    # A QKClip, of a folder that this one must not import; None: no weight is scaled
    qk_clip: object = None

    @classmethod
    def of(cls, given: dict[str, object], function: Callable, rule: object = None) -> MuonConfig:
        """The config of the keyword arguments `given`; fields without an argument take defaults.
        `function`: `Muon.__init__`, whose parameters a message names. `rule`: given with them.

        A 1-D DeviceMesh as process_group is replaced by its process group. Raises TypeError for an
        unknown argument, ValueError for a mesh of several dims or a text as process_group.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise TypeError(
                f"there is no argument {shortened(repr(unknown[0]))}: "
                f"{_meant(unknown[0], inspect.signature(function).parameters, options_of(rule))}"
            )
        if isinstance(given.get("process_group"), str):
            raise ValueError(
                f"process_group={shortened(repr(given['process_group']))} is a text: pass the "
                "process group itself, such as dist.group.WORLD (names are for configs of "
                "MuonFactory)"
            )
        if "process_group" in given:
            given = {**given, "process_group": group_of_mesh(given["process_group"])}
        return cls(**given)

    def check(self, group_has_ranks: bool = False) -> None:
        """Raise ValueError for a value, or a combination of values, that is not allowed.

        The message gives key, value, allowed values and a remedy. `group_has_ranks`: whether a
        parameter group has a process_group of its own.
        """
        wide = (torch.float32, torch.bfloat16)
        for key, allowed in (
            ("state_dtype", (*wide, torch.int8)),
            ("wire_dtype", wide),
            ("ns_dtype", (None, *wide, torch.float16)),
        ):
            # `is`, not `in`: comparing an array with a dtype gives an array without truth value
            if all(getattr(self, key) is not dtype for dtype in allowed):
                raise self._refused(key, f"one of {allowed}")
        if not isinstance(self.nonfinite, str) or self.nonfinite not in NONFINITE:
            raise self._refused("nonfinite", f"one of {NONFINITE}")
        nbytes = self.workspace_bytes
        # `type` instead of isinstance: True is an int
        if nbytes is not None and (type(nbytes) is not int or nbytes < 1):
            raise self._refused("workspace_bytes", "a whole number >= 1, or None")
        for key in (
            "grads_are_reduced",
            "shard_state",
            "state_at_owners",
            "capturable",
            "overlap_backward",
            "overlap_forward",
        ):
            if type(getattr(self, key)) is not bool:
                raise self._refused(key, "True or False")
        if self.unscale_in_step is not None and type(self.unscale_in_step) is not bool:
            raise self._refused("unscale_in_step", "True, False or None")
        # Combinations. Each message starts with the argument to change.
        has_ranks = group_has_ranks or self.process_group is not None
        if not self.grads_are_reduced and not has_ranks:
            raise ValueError(
                "grads_are_reduced=False needs process_group, the ranks over which the optimizer "
                "averages gradients: pass process_group, or leave grads_are_reduced out"
            )
        if self.shard_state and not has_ranks:
            raise ValueError(
                "shard_state=True needs process_group, the ranks that hold copies of plain "
                "parameters: pass process_group, or leave shard_state out (the state of DTensors "
                "is sharded like the parameters without it)"
            )
        is_real = self.process_group is not None and not isinstance(
            self.process_group, AssumedRanks
        )
        if is_real and not dist.is_initialized():
            raise ValueError(
                "process_group was given, but torch.distributed is not initialized: call "
                "init_process_group first, or leave process_group out"
            )
        # dist.new_group returns an object of another type on ranks outside the group
        if is_real and not isinstance(self.process_group, dist.ProcessGroup):
            raise ValueError(
                f"process_group={shortened(repr(self.process_group))} is no process group of which "
                "this rank is a member: only its members may build the optimizer with it"
            )
        self._check_offload()
        self._check_overlap()

    def _refused(self, key: str, allowed: str) -> ValueError:
        """The error for the value of field `key`; `allowed`: the allowed values in words."""
        value = shortened(repr(getattr(self, key)))
        return ValueError(f"{key}={value} is not allowed: it must be {allowed}")

    def _check_offload(self) -> None:
        """Raise ValueError for a value of offload_state, or an argument that it excludes."""
        kept = self.offload_state
        if type(kept) is not bool and (type(kept) is not int or kept < 1):
            raise self._refused("offload_state", "True, False or a whole number of bytes >= 1")
        if kept and self.capturable:
            raise ValueError(
                "offload_state is not allowed with capturable=True, which makes the whole step one "
                "CUDA graph: state is copied by streams outside of it. Leave one of them out"
            )
        if kept and self.state_at_owners:
            raise ValueError(
                "offload_state is not allowed with state_at_owners=True, whose kernels step state "
                "where owners store it, on the device: leave one of them out"
            )

    def _check_overlap(self) -> None:
        """Raise ValueError for an argument that overlap_backward or overlap_forward excludes."""
        for key in ("overlap_backward", "overlap_forward"):
            if getattr(self, key) and self.capturable:
                raise ValueError(
                    f"{key}=True is not allowed with capturable=True, which makes the whole step "
                    "one CUDA graph: leave one of them out"
                )
        if self.overlap_forward and self.nonfinite == "raise":
            raise ValueError(
                "overlap_forward=True is not allowed with nonfinite='raise', which makes the host "
                "wait for the device at the end of the step: leave one of them out"
            )
        # The rest concerns buckets that are sent while backward still runs
        if not self.overlap_backward:
            return
        if self.nonfinite != "propagate":
            raise ValueError(
                f"overlap_backward=True is not allowed with nonfinite={self.nonfinite!r}, which "
                "checks all gradients before the first one is sent: leave one of them out"
            )
        self._check_reduced()

    def _check_reduced(self) -> None:
        """Raise ValueError for overlap_backward with reduced gradients of plain parameters."""
        if self.overlap_backward and self.process_group is not None and self.grads_are_reduced:
            raise ValueError(
                "overlap_backward=True is not allowed with process_group and grads_are_reduced="
                "True: gradients could be sent before DistributedDataParallel has reduced them. "
                "Use grads_are_reduced=False without DistributedDataParallel; if all parameters "
                "are DTensors, leave process_group out"
            )

    @property
    def owner_keeps_state(self) -> bool:
        """Whether only the owner keeps the state of a plain parameter, not every rank of
        process_group. True with unreduced gradients: only the owner has the averaged gradient.
        """
        return self.process_group is not None and (self.shard_state or not self.grads_are_reduced)

    @property
    def overlaps(self) -> bool:
        """Whether collectives of the model and of the optimizer may be in flight together."""
        return self.overlap_backward or self.overlap_forward

    def workspace_limit_bytes(self, device: torch.device, gpu_bytes: int | None = None) -> int:
        """The limit on the workspace of one rank, which all buckets share, in bytes. `gpu_bytes`:
        memory of an assumed GPU; None: that of `device`.

        Default: 3 % of the GPU's memory, at most 2 GiB; 256 MiB on other devices.
        """
        if self.workspace_bytes is not None:
            return self.workspace_bytes
        if gpu_bytes is None:
            if device.type != "cuda":
                return 256 << 20
            gpu_bytes = torch.cuda.get_device_properties(device).total_memory
        return min(2 << 30, gpu_bytes * 3 // 100)


# Arguments that no parameter group can change
ARGUMENTS = tuple(field.name for field in fields(MuonConfig) if field.name != "process_group")


def check_own_process_group(given: object, options: MuonConfig) -> None:
    """Raise ValueError unless `given` may be the process_group of a parameter group of an optimizer
    with `options`.
    """
    if given is None:
        return
    if not (dist.is_available() and isinstance(given, dist.ProcessGroup)):
        raise ValueError(
            f"process_group={shortened(repr(given))} is not allowed: it must be a process group of "
            "which this rank is a member, a 1-D DeviceMesh, or None (the parameters belong to this "
            "rank alone). Without the key, the argument of the optimizer holds for the group"
        )
    if not dist.is_initialized():
        raise ValueError(
            "the group has a process_group, but torch.distributed is not initialized: call "
            "init_process_group first, or remove the key"
        )
    replace(options, process_group=given)._check_reduced()


def group_of_mesh(given: object) -> object:
    """The process group of a 1-D DeviceMesh; any object but a DeviceMesh is returned unchanged.

    Raises ValueError for a DeviceMesh of several dims.
    """
    # While the module of DeviceMesh has not been imported, no mesh can exist; importing is slow
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is None or not isinstance(given, module.DeviceMesh):
        return given
    if given.ndim != 1:
        names = given.mesh_dim_names or tuple(range(given.ndim))
        raise ValueError(
            f"process_group is a DeviceMesh of {given.ndim} dims {names}, but only a process group "
            "or a 1-D DeviceMesh is allowed: pass the process group of the dim whose ranks hold "
            "copies of plain parameters, for example "
            f"mesh.get_group({names[0]!r})"
        )
    return given.get_group()


def with_parameters_of(
    source: Callable, **how: inspect._ParameterKind
) -> Callable[[Function], Function]:
    """A decorator for functions with *args or **options: `inspect.signature` and help() list the
    parameters of `source` instead of *args and **options.

    how: changes of each listed parameter, for `inspect.Parameter.replace` (kind=...). Sets
    `__signature__` only: calls work as before.
    """

    def decorate(init: Function) -> Function:
        """Set `__signature__` of `init`, and return `init`."""
        var = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        own = {
            name: p for name, p in inspect.signature(init).parameters.items() if p.kind not in var
        }
        others = [
            p.replace(**how)
            for name, p in inspect.signature(source).parameters.items()
            if name not in own
        ]
        # Signature demands parameters ordered by kind: keyword-only ones last
        init.__signature__ = inspect.Signature(
            sorted([*own.values(), *others], key=lambda p: p.kind)
        )
        return init

    return decorate
