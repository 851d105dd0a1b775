"""The protocol of update rules: the state that a rule keeps, and what a step computes from it.

A step of a Muon group has four phases. `Rule` says what the middle ones compute; a class that
overrides nothing is Muon's rule. With G gradient, M momentum, U update, O orthogonalized update and
W weight of a matrix:

1. `update`: M and U from G and M, element by element, where the momentum is stored.
2. `before`: on whole matrices U, at the owner; then Newton-Schulz, from U to O; then `after`, on
   whole matrices O.
3. `write`: W from W and O, element by element, where the weight is stored, with the numbers that
   `after` has sent.

Layouts, batching, buffers, all-to-alls, overlap, CUDA graphs, checkpoints and faults are the work
of planning/, communication/ and execution/. A rule sees tensors, and knows no ranks. Phases 1 and 3
of Muon are fused kernels (kernels/elementwise/), used by every rule that does not override them.

State, by the part of a parameter (..., R, C) that one number belongs to:

| key                | rules             | a number per | shape       | dtype                  |
|--------------------|-------------------|--------------|-------------|------------------------|
| `momentum_buffer`  | of matrices; sign | element      | (..., R, C) | `state_dtype`, or fp64 |
| `momentum_sum`     | of matrices       | element      | (..., R, C) | `state_dtype`          |
| `momentum_scale`   | of matrices       | block        | see below   | fp32                   |
| `second_moment`    | NorMuon           | row          | (..., R, 1) | fp32                   |
| keys of a `Rule`   | its own           | see `State`  | see `State` | see `State`            |
| `exp_avg`          | adamw, lion       | element      | (..., R, C) | `state_dtype`, or fp64 |
| `exp_avg_sq`       | adamw             | element      | (..., R, C) | `state_dtype`, or fp64 |
| `exp_avg_8bit`     | adamw             | element      | (..., R, C) | int8                   |
| `exp_avg_sq_8bit`  | adamw             | element      | (..., R, C) | uint8                  |
| `exp_avg_scale`    | adamw             | block        | see below   | fp32                   |
| `exp_avg_sq_scale` | adamw             | block        | see below   | fp32                   |
| `step`             | adamw             | parameter    | ()          | fp32                   |
| `initial_weight`   | all               | element      | (..., R, C) | of the weight          |
| `weight_rest`      | all               | element      | (..., R, C) | int16                  |

`momentum_sum` takes the place of `momentum_buffer` with `momentum_form="sum"`, and in sgd. Only
groups with `decay="initial"` keep `initial_weight`, and only bf16 parameters with
`master_weights="split16"` a `weight_rest`. `state_dtype` is fp32, bf16 or int8; state of fp64
parameters is fp64. `momentum_scale` exists only with int8, of shape (..., R, ceil(C / 64)), see
kernels/quantized/blocks.py; groups with use_muon=False keep fp32. Groups of AdamW with a key
`state_dtype` of int8 keep the four states in 8 bits in place of `exp_avg` and `exp_avg_sq`, with
scales of that shape, see `elementwise.is_8bit`. State is sharded like the parameter; state per
parameter is equal on every rank. Rules of groups with use_muon=False step weight and state in a
single elementwise phase (elementwise.py), and are no `Rule`.

A rule reads two kinds of numbers. `host_constants` are arguments of launches; a CUDA graph keeps
the values of its capture, so a change means a new capture. `device_scalars` are uploaded before a
step, so schedules may change lr, weight decay, momentum and beta2 without a new capture.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from ..kernels.elementwise.weight_update import ALL
from ..kernels.quantized.blocks import BLOCK, is_quantized
from ..newton_schulz import coefficients
from ..newton_schulz.selection import Selection
from ..params.errors import warn_caller
from ..params.units import WHOLE, Split
from .decay import INITIAL_KEY, form_of, rate_of
from .elementwise import DTYPE_KEY, averages_of, elementwise_of, step_size
from .muon import (
    MASTER_KEY,
    MOMENTUM_FORMS,
    REST_KEY,
    SUM_KEY,
    is_split,
    is_stochastic,
    is_sum,
    nesterov_weight,
)

PER = ("element", "row", "column", "matrix")  # allowed values of `State.per`
SCALE_KEY = "momentum_scale"  # state of 8-bit momentum, beside the numbers: a scale for each block
# Entry beside state at owners (`state_at_owners`): the owner of each matrix of the parameter, then
# a number for the split, int64 on the CPU, in no state dict
OWNERS_KEY = "matrix_owners"


@dataclass(frozen=True)
class State:
    """A tensor of state of each parameter, beside the momentum, that a rule reads and writes in
    `before` and `after`. Zero at the start.

    `per`: which part of an (R, C) matrix a number belongs to: "element" (R, C), "row" (R, 1),
    "column" (1, C) or "matrix" (1, 1). `dtype`: as stored, fp32 or bf16; phases see fp32. State per
    element is sent to the owner and back in fp32 in every step, 8 bytes of traffic per element,
    unless owners store it (`state_at_owners`).

    `of_matrix`: the number belongs to the whole matrix and is only repeated. It begins anew, at
    zero, where `split` cuts a weight otherwise than before: the shape would fit.
    """

    key: str
    per: str = "element"
    dtype: torch.dtype = torch.float32
    of_matrix: bool = False


class Numbers:
    """The numbers of a parameter group: attributes `lr`, `weight_decay`, `decay` (1 - lr
    weight_decay), `momentum` and `one_minus_momentum` are fp32 tensors on the device, as are
    `beta2` and `one_minus_beta2` with the option beta2; `nesterov` and every other option of
    `Rule.options` are values of the live group.

    The tensors are 0-D, or (N, 1, 1) for N matrices of several groups. A captured CUDA graph reads
    the tensors anew in every replay. A change of another number is a new capture.
    """

    def __init__(self, rule: Rule, group: Mapping[str, Any], scalars: torch.Tensor) -> None:
        """`scalars`: `device_scalars` of one group (12,), or of the group of each matrix (N, 12),
        in fp32 on the device. `group`: the live group, one of several with equal options.
        """
        self._group = group
        self._options = rule.options
        if scalars.ndim > 1:
            scalars = scalars.T.unsqueeze(-1).unsqueeze(-1)
        self.lr, self.decay, beta2, one_minus_beta2, self.one_minus_momentum = scalars[:5]
        self.momentum, _, self.weight_decay = scalars[5:8]
        if "beta2" in rule.options:
            self.beta2, self.one_minus_beta2 = beta2, one_minus_beta2

    def __getattr__(self, key: str) -> Any:
        """Return an option of the live group. Raises AttributeError for other keys of groups: a
        CUDA graph would keep the value of its capture.
        """
        # Private names are not options: copy and pickle ask for them before `__init__`
        if not key.startswith("_") and (key == "nesterov" or key in self._options):
            return self._group[key]
        raise AttributeError(f"a rule has no number {key!r}: add it to Rule.options")


@dataclass
class Units:
    """The matrices of a call of `Rule.before` or `Rule.after`, besides U or O (N, R, C).

    `state`: key -> fp32 (N, R, C), (N, R, 1), (N, 1, C) or (N, 1, 1) by `State.per`, changed in
    place. `weight`: W in fp32 (N, R, C) with `Rule.reads_weight`, else None. `sent`: name -> fp32,
    shaped like state; `after` fills every one. `scale`: the factor on lr by `adjust_lr_fn`.
    """

    numbers: Numbers
    state: dict[str, torch.Tensor]
    weight: torch.Tensor | None
    sent: dict[str, torch.Tensor]
    scale: float
    # For built-in rules: numbers of all groups that are stepped together, and the place of each
    # matrix's group in it (None: 0), see `device_scalars`
    scalars: torch.Tensor | None = field(default=None, repr=False)
    groups: torch.Tensor | None = field(default=None, repr=False)


class Rule:
    """A rule that steps matrices; subclass it, and pass the class as `rule` of an optimizer or a
    parameter group. docs/rules.md has a complete example.

    Override any of the four methods. Each gets tensors and must return a tensor of equal shape;
    fp32 arithmetic is rounded once, by the package. No method may call a collective, keep a tensor
    for the next step (state is declared in `state`), or read a value of a tensor on the host.
    """

    # Name in `rule=`, messages, reports and checkpoints; by default the class's
    name: ClassVar[str] = ""
    state: ClassVar[tuple[State, ...]] = ()
    # Keys that groups of the rule have besides Muon's, with defaults. `beta2` is read on the device
    options: ClassVar[dict[str, Any]] = {}
    # Numbers that `after` sends to `write`: name -> "row", "column" or "matrix"
    sends: ClassVar[dict[str, str]] = {}
    # Whether `before` and `after` read the whole weight: sent to the owner in fp32, 4 bytes per
    # element; of a fused rule as in `weight_dtype`
    reads_weight: ClassVar[bool] = False
    # Whether `before` and `after` give a matrix equal bits whatever the other matrices of the call:
    # then N is any number on GPUs. Without it, and on CPUs, N is 1. Elementwise operations do;
    # torch's sums do not, since the order of a sum depends on the shape.
    batched: ClassVar[bool] = False
    # Of built-in rules with kernels: `before` and `after` work in place on stacks as they lie in
    # the workspace, in wire_dtype, and read `Units.scalars` and `Units.groups`. Weights and state
    # per element are stacks, or `ScatteredMatrices` where a rank stores whole matrices
    fused: ClassVar[bool] = False
    # Name of an option, a bool: True has the kernel of the momentum write the signs of U
    sends_signs: ClassVar[str] = ""
    # Of a fused rule: names in `sends` that the kernel of the weight update reads. (f,), per row or
    # matrix: factors of O beside lr and scale. (f, k), per matrix: W <- W k - O f
    write_factors: ClassVar[tuple[str, ...]] = ()
    # Whether a fused rule also takes stacks of scattered rows, see [Note: direct matrices]
    takes_scattered_rows: ClassVar[bool] = False
    # The keys of `options` that plans depend on, see `selection` and `sends_signs`
    planned: ClassVar[tuple[str, ...]] = ()
    # Of built-in rules: whether the key `nesterov` is read; whether lr is multiplied by the option
    # `radius`; `adjust_lr_fn` in place of the group's
    has_nesterov: ClassVar[bool] = True
    has_radius: ClassVar[bool] = False
    adjust_lr_fn: ClassVar[str | None] = None

    @classmethod
    def check(cls, group: Mapping[str, Any]) -> None:
        """Raise ValueError for a wrong value of an option in a group; by default nothing is
        checked.
        """

    @classmethod
    def selection(cls, group: Mapping[str, Any]) -> Selection | None:
        """Return which part of each matrix of a group is orthogonalized; None: the whole. Only of
        fused rules without `before` and with state per row or without state. The momentum is then
        that of `Pack` with form "feedback".
        """
        return None

    def __repr__(self) -> str:
        """Return the name, equal on all ranks: ranks order groups by it."""
        return f"<rule {rule_name(type(self))}>"

    def update(
        self, G: torch.Tensor, M: torch.Tensor, numbers: Numbers
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (U, the new M) of a piece, elementwise. G and M: fp32, of any shape; may be the
        gradient and the state themselves, so they must stay as they are. Default: Muon's momentum.
        """
        M = M + numbers.one_minus_momentum * (G - M)
        return (M + numbers.one_minus_momentum * (G - M) if numbers.nesterov else M), M

    def before(self, U: torch.Tensor, units: Units) -> torch.Tensor:
        """Return U (N, R, C) for Newton-Schulz. U: fp32, may be changed in place."""
        return U

    def after(self, O: torch.Tensor, units: Units) -> torch.Tensor:
        """Return O (N, R, C) for `write`. O: fp32, may be changed in place."""
        return O

    def write(
        self,
        W: torch.Tensor,
        O: torch.Tensor,
        scale: float,
        sent: Mapping[str, torch.Tensor],
        numbers: Numbers,
    ) -> torch.Tensor:
        """Return the new W of a piece (r, c), elementwise. W and O: fp32; W may be the weight
        itself, so both must stay as they are. `scale`: as in `Units`. `sent`: name -> fp32 (r, 1),
        (1, c) or (1, 1), read by further pieces, so it must stay, too. Default: Muon's.
        """
        return W * numbers.decay - O * (scale * numbers.lr)


def overrides(rule: Rule, method: str) -> bool:
    """Whether the class of `rule` has a method of its own."""
    return getattr(type(rule), method) is not getattr(Rule, method)


def sends_signs(group: Mapping[str, Any]) -> bool:
    """Whether the kernel of the momentum writes the signs of U, for Newton-Schulz."""
    option = rule_of(group).sends_signs
    return bool(option) and group[option]


def weight_dtype(rule: Rule, wire_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of weights that a rule reads at the owner. Kernels of fused rules take norms
    of weights, for which bf16 is enough: rounding to nearest changes a sum of squares by a part of
    1e-6 at most. fp16 has too narrow a range.
    """
    return torch.bfloat16 if rule.fused and wire_dtype == torch.bfloat16 else torch.float32


def writes_weights(rule: Rule) -> bool:
    """Whether a rule computes weights by formulas of its own, without Muon's fused kernels."""
    has_own = overrides(rule, "update") or overrides(rule, "write") or bool(rule.sends)
    return has_own and not (rule.fused and len(rule.write_factors) == 1)


def reads_gradients(rule: Rule) -> bool:
    """Whether torch reads gradients in a step of a rule: where they lie is then part of each CUDA
    graph. The momentum is written along with the weight, by the fused kernel or by torch.
    """
    return writes_weights(rule) and not rule.fused


def selection_of(group: Mapping[str, Any]) -> Selection | None:
    """Return which part of each matrix of a group is orthogonalized; None: the whole."""
    return rule_of(group).selection(group) if group["use_muon"] else None


def changes_at_lr_0(rule: Rule) -> bool:
    """Whether a step with lr 0 and gradients of zero may change weights or state of a rule. State
    of fused rules stays zero in such a step.
    """
    return writes_weights(rule) or bool(rule.state) and not rule.fused


# Name -> rule, of built-in rules and of all classes that an optimizer of the process was given
RULES: dict[str, Rule] = {}
# Options of all of `RULES` that plans depend on
PLANNED_OPTIONS: set[str] = set()
# State key -> State, of all of `RULES` and `ELEMENTWISE`
STATES: dict[str, State] = {
    "momentum_buffer": State("momentum_buffer"),
    "exp_avg": State("exp_avg"),
    "exp_avg_sq": State("exp_avg_sq"),
    INITIAL_KEY: State(INITIAL_KEY),
    SUM_KEY: State(SUM_KEY),
    REST_KEY: State(REST_KEY, "element", torch.int16),
    SCALE_KEY: State(SCALE_KEY, "block"),
    "exp_avg_8bit": State("exp_avg_8bit", "element", torch.int8),
    "exp_avg_sq_8bit": State("exp_avg_sq_8bit", "element", torch.uint8),
    "exp_avg_scale": State("exp_avg_scale", "block"),
    "exp_avg_sq_scale": State("exp_avg_sq_scale", "block"),
}
WIDE_KEYS = "exp_avg", "exp_avg_sq"
# Keys of AdamW in place of WIDE_KEYS: numbers of each, then scales of each
QUANTIZED_KEYS = "exp_avg_8bit", "exp_avg_sq_8bit", "exp_avg_scale", "exp_avg_sq_scale"
# Keys of Muon, NorMuon and elementwise rules, which a state may have from an earlier use of its
# parameter
BASE_KEYS = frozenset(("momentum_buffer", SCALE_KEY, "second_moment", *WIDE_KEYS, *QUANTIZED_KEYS))
# Keys of the package in `STATES`, kinds of pieces in planning/rank_plan.py, and keys of AdamW and
# of checkpoints. A rule with the state `momentum_buffer` would write the momentum twice
OTHER_KEYS = "matrix", "weight", "chunk", "step", "param", "params", OWNERS_KEY
RESERVED_KEYS = frozenset((*STATES, *OTHER_KEYS))


def rule_name(rule: type[Rule]) -> str:
    """Return the name of a class of rules."""
    return rule.name or rule.__name__


def options_of(rule: object) -> Mapping[str, Any]:
    """Return {option: default} of an argument `rule`, a name or a class of rules; {} for any other
    value.
    """
    known = RULES.get(rule) if isinstance(rule, str) else rule
    return getattr(known, "options", {})


def register(rule: type[Rule]) -> type[Rule]:
    """Add a class to `RULES` and its state to `STATES`; return the class.

    A class of equal module and name is replaced, as after an edit in a notebook, with a warning if
    it has other values. Raises ValueError for a name, or a state key with another meaning, that
    another rule has, and for a class that a function has defined anew with other values: groups
    know rules by name.
    """
    name = rule_name(rule)
    known = RULES.get(name)
    if known is not None and _origin(type(known)) != _origin(rule):
        raise ValueError(
            f"rule {name!r} of {rule.__module__} has the name of a rule of "
            f"{type(known).__module__}: give the class another `name`"
        )
    is_changed = known is not None and not _is_alike(type(known), rule)
    if is_changed and "<locals>" in rule.__qualname__:
        raise ValueError(
            f"rule {name!r}: {rule.__qualname__} is defined again with other values, and groups "
            "know rules by name: give each such class a `name` of its own, or make the values "
            "`options`"
        )
    for state in rule.state:
        other = STATES.get(state.key, state)
        is_own = known is not None and other in known.state
        if other != state and not is_own or state.key in RESERVED_KEYS:
            raise ValueError(
                f"state {state.key!r} of rule {name!r} is in use by another rule, or by the "
                "package: give it another key"
            )
    if is_changed:
        warn_caller(
            f"rule {name!r}: {rule.__qualname__} is defined again with other values. Optimizers "
            "that exist know rules by name, and take the new class when they plan anew, for "
            "example as soon as other parameters have gradients: build them again, or give the "
            "class another `name`"
        )
    STATES.update({state.key: state for state in rule.state})
    RULES[name] = rule()
    PLANNED_OPTIONS.update(rule.planned)
    return rule


def _origin(rule: type[Rule]) -> tuple[str, str]:
    """Module and name of a class."""
    return rule.__module__, rule.__qualname__


def _is_alike(one: type[Rule], other: type[Rule]) -> bool:
    """Whether two classes have equal attributes, and functions with equal code and closures."""
    ours, theirs = _attributes(one), _attributes(other)
    if ours.keys() != theirs.keys():
        return False
    # `bool` of a comparison of tensors may raise
    with contextlib.suppress(Exception):
        return all(
            bool(value is theirs[key] or value == theirs[key]) for key, value in ours.items()
        )
    return False


def _attributes(rule: type[Rule]) -> dict[str, Any]:
    """Attributes of a class, with the contents of functions; the class itself, in a closure for
    `super`, is replaced by None.
    """
    found = {}
    for key, value in vars(rule).items():
        if key.startswith("__"):
            continue
        value = getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            cells = [None if cell is rule else cell for cell in cells]
            value = value.__code__, value.__defaults__, cells
        found[key] = value
    return found


def rule_of(group: Mapping[str, Any]) -> Rule:
    """Return the rule of a Muon group. Without a key `rule`, groups with `beta2` are NorMuon's.
    Raises ValueError for a name that this process does not know.
    """
    name = group.get("rule") or ("normuon" if "beta2" in group else "muon")
    if name not in RULES:
        raise ValueError(
            f"there is no rule {name!r} in this process, which has {sorted(RULES)}. Pass the class "
            "of your own rule to an optimizer once, as `rule` of a group, before a checkpoint or a "
            "pickle with its name is loaded"
        )
    return RULES[name]


def host_options(rule: Rule) -> list[str]:
    """Return the options that launches take from the host: all that `device_scalars` lack."""
    on_device = ("beta2", "radius") if rule.has_radius else ("beta2",)
    return [key for key in rule.options if key not in on_device]


def option_keys(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the `host_options` of the rules that groups name."""
    names = set(map(dict.get, groups, itertools.repeat("rule"))) & RULES.keys()
    return sorted({key for name in names for key in host_options(RULES[name])})


def origins(groups: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return name -> (module, qualified name) of the classes of rules of groups, for pickles."""
    names = {group.get("rule") for group in groups} & RULES.keys()
    return {name: _origin(type(RULES[name])) for name in sorted(names)}


def register_origins(found: Mapping[str, tuple[str, str]]) -> None:
    """Import and register the classes of `origins` that this process does not know. Raises
    ValueError for a class that cannot be imported.
    """
    for name, (module, qualified) in found.items():
        if name in RULES:
            continue
        try:
            value: Any = importlib.import_module(module)
            for part in qualified.split("."):
                value = getattr(value, part)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"rule {name!r} of the pickled optimizer is {qualified} of the module {module}, "
                "which cannot be imported here: define the class at the top level of a module"
            ) from error
        register(value)


def sharded_keys(groups: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the keys of state that is sharded like the parameter, in an order equal on all ranks
    with equal groups: other optimizers of a process may have further rules.
    """
    keys = {key for group in groups for key in state_keys(group)} - {"step"}
    return tuple(sorted(keys | BASE_KEYS))


def row_sharded_keys() -> tuple[str, ...]:
    """Return the keys of `STATES`, for work of this process alone; see `sharded_keys`."""
    return tuple(sorted(STATES))


def all_state_keys() -> tuple[str, ...]:
    """Return all keys of this package in the state of a parameter. Users may add keys there."""
    return (*row_sharded_keys(), "step")


def matrix_keys() -> set[str]:
    """Return the keys of state that are `State.of_matrix`."""
    return {key for key, state in STATES.items() if state.of_matrix}


def device_scalars(group: Mapping[str, Any]) -> list[float]:
    """Return the numbers of a group that schedules change, for device memory in fp32:
    [step size, 1 - rate, beta2, 1 - beta2, 1 - momentum, momentum, rate, weight_decay, weight of G
    in Nesterov's mix, 0, 0, 0]. The step size is lr, times the option `radius` of rules with one;
    the rate of decay is lr weight_decay, see decay.py. Elementwise rules read the step size, and
    the rate where they do not decay themselves.
    """
    lr = float(group["lr"])
    weight_decay = float(group["weight_decay"])
    rate = lr * weight_decay if "decay" not in group else rate_of(group)
    beta2 = float(group.get("beta2", 0.0))
    momentum = float(group["momentum"])
    # The weight update reads from element 0, the momentum from element 4. Both addresses are
    # multiples of 16 bytes: Triton would compile each kernel anew for an unaligned pointer
    if has_radius(group):
        lr *= float(group["radius"])
    mix = nesterov_weight(group) if "momentum_form" in group else 1.0 - momentum
    means = [beta2, 1.0 - beta2, 1.0 - momentum, momentum]
    return [lr, 1.0 - rate, *means, rate, weight_decay, mix, 0.0, 0.0, 0.0]


def has_radius(group: Mapping[str, Any]) -> bool:
    """Whether the rule of a group multiplies lr by the option `radius`."""
    if "radius" not in group:
        return False
    return (rule_of if group["use_muon"] else elementwise_of)(group).has_radius


class MuonConstants(NamedTuple):
    """Numbers of a Muon group that launches take as arguments from the host."""

    steps: coefficients.Steps
    eps: float
    rule: Rule
    nesterov: bool
    options: tuple  # values of `host_options`
    decay: int  # form of decay of the weight update
    momentum_form: str  # one of MOMENTUM_FORMS
    is_stochastic: bool  # weights are rounded stochastically
    master_weights: str | None  # one of MASTER_WEIGHTS


def frozen(value: object) -> object:
    """Return a copy with tuples in place of lists, and texts in place of dicts, which a user could
    change in place.
    """
    if isinstance(value, dict):
        return repr(value)
    return tuple(map(frozen, value)) if isinstance(value, (list, tuple)) else value


def number_of(value: object) -> float:
    """Return a number, or a tensor of one element, as a float; NaN for anything else, such as
    "1e-3" or true from a YAML file.
    """
    try:
        # float() takes texts and booleans, too
        is_other = isinstance(value, (str, bytes, bytearray, bool))
        return math.nan if is_other else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def truth_of(value: object) -> float:
    """Return 0.0 or 1.0 for a boolean, and `number_of` for anything else, such as 1 or a tensor."""
    return float(value) if isinstance(value, bool) else number_of(value)


def host_constants(group: Mapping[str, Any], wide: bool = False) -> tuple:
    """Return the numbers of a group that launches take as arguments from the host.

    A Muon group: `MuonConstants`. Another group: (`Elementwise.constants`, weight_decay, lr or
    None, decay, name of the rule). A captured CUDA graph is valid as long as these numbers are
    equal. `wide`: steps in fp64, in which torch's fused kernel takes lr from the host only.
    """
    if group["use_muon"]:
        rule = rule_of(group)
        steps = coefficients.steps_of(group["ns_coefficients"], group["ns_steps"])
        options = ()
        if rule.options:
            options = tuple(frozen(group[key]) for key in host_options(rule))
        nesterov = bool(group["nesterov"]) and rule.has_nesterov
        # Without a call for groups without these keys: each part of a bucket reads the constants
        decay = form_of(group) if "decay" in group else ALL
        form = group["momentum_form"] if "momentum_form" in group else MOMENTUM_FORMS[0]
        rounds = "rounding" in group and is_stochastic(group)
        masters = group[MASTER_KEY] if MASTER_KEY in group else None
        return MuonConstants(
            steps, float(group["eps"]), rule, nesterov, options, decay, form, rounds, masters
        )
    rule = elementwise_of(group)
    lr = step_size(group) if wide else None
    weight_decay = float(group["weight_decay"])
    return *rule.constants(group), weight_decay, lr, group.get("decay"), rule.name


def momentum_key(group: Mapping[str, Any]) -> str:
    """Return the key of the momentum in the state of a Muon group."""
    return SUM_KEY if is_sum(group) else "momentum_buffer"


def state_keys(group: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> tuple[str, ...]:
    """Return the keys of the state that every parameter of a group has, see `keys_of`. `dtype`: the
    option `state_dtype`.
    """
    if not group["use_muon"]:
        rule = elementwise_of(group)
        keys = ("step", *rule.averages) if rule.counts else rule.averages
    else:
        scale = (SCALE_KEY,) if is_quantized(dtype) else ()
        keys = (momentum_key(group), *scale, *(state.key for state in rule_of(group).state))
    return (*keys, INITIAL_KEY) if group.get("decay") == "initial" else keys


def keys_of(group: Mapping[str, Any], param: torch.Tensor, dtype: torch.dtype) -> tuple[str, ...]:
    """Return the keys of the state of a parameter of a group: `state_keys`, those of averages in 8
    bits in place of the averages, and REST_KEY of a split weight.
    """
    keys = state_keys(group, dtype)
    if not group["use_muon"]:
        wide, averages = elementwise_of(group).averages, averages_of(group, param)
        keys = (*(key for key in keys if key not in wide), *averages)
    return (*keys, REST_KEY) if is_split(group, param) else keys


def group_state_dtype(group: Mapping[str, Any], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of momentum and averages of a group. `dtype`: the option `state_dtype`;
    8 bits apply to the momentum of matrices only. fp32 for a group whose averages are in 8 bits:
    some of its parameters keep wide averages.
    """
    if group["use_muon"]:
        return dtype
    own = group.get(DTYPE_KEY)
    dtype = dtype if own is None else own
    return torch.float32 if is_quantized(dtype) else dtype


def is_offloaded(key: str) -> bool:
    """Whether the option `offload_state` moves state `key`: all with a number per element."""
    return key in STATES and STATES[key].per == "element"


def state_device_and_dtype(
    key: str, param: torch.Tensor, dtype: torch.dtype, offloads: bool = False
) -> tuple[torch.device, torch.dtype]:
    """Return (device, dtype) of a parameter's state; `dtype`: of `group_state_dtype`. `offloads`:
    whether the option `offload_state` is on.

    `step` lies on the GPU of a parameter there, since torch's fused AdamW reads it on the device;
    otherwise on the CPU, as in torch.
    """
    if offloads and is_offloaded(key):
        return torch.device("cpu"), state_device_and_dtype(key, param, dtype)[1]
    # fp32: bf16 has too few bits to count beyond 256
    if key == "step":
        return param.device if param.is_cuda else torch.device("cpu"), torch.float32
    # A copy of the weight is exact only in the weight's dtype
    if key == INITIAL_KEY:
        return param.device, param.dtype
    if key in ("momentum_buffer", SUM_KEY, "exp_avg", "exp_avg_sq"):
        return param.device, torch.float64 if param.dtype == torch.float64 else dtype
    return param.device, STATES[key].dtype


def shape_per(per: str, R: int, C: int) -> tuple[int, int]:
    """Return the shape of the state of an (R, C) matrix with one number for each `per`, one of
    PER.
    """
    return R if per in ("element", "row") else 1, C if per in ("element", "column") else 1


def state_shape(param: torch.Tensor, key: str, split: Split = WHOLE) -> tuple[int, ...]:
    """Return the global shape of a parameter's state, by the table of the module. `split`: how the
    parameter is cut into matrices.
    """
    if key == "step":
        return ()
    per = STATES[key].per
    if per == "block":
        return split.block_shape(param.shape, BLOCK)
    return tuple(param.shape) if per == "element" else split.state_shape(param.shape, per)
