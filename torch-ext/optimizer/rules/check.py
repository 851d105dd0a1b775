"""Checks of a class of rules at the construction of an optimizer with the class: declarations, a
trial of each phase on small CPU tensors, and a trial on tensors without values. The second trial
finds operations with which the host would wait for a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .elementwise import DEFAULT, elementwise_of
from .phases import in_whole_vectors
from .rule import (
    PER,
    RULES,
    Numbers,
    Rule,
    State,
    Units,
    device_scalars,
    options_of,
    overrides,
    register,
    rule_name,
    shape_per,
)

SENT_PER = ("row", "column", "matrix")  # allowed values of `Rule.sends`
# Of the stack of the trial: matrices, and rows, of whole vectors of a CPU (`in_whole_vectors`)
SHAPE = 3, 128, 64
# Attributes of `Rule` that the trial does not check, and the engine relies on
INNER = ("selection", "has_radius", "adjust_lr_fn")
PACKAGE = __name__.rsplit(".", 2)[0]
# Names of `Rule` for rules of users, and words close to them that may be names of helpers
OVERRIDABLE = ("update", "before", "after", "write", "check", "state", "options", "sends",
               "reads_weight", "batched")  # fmt: skip
HELPERS = {"updates", "updated", "updater", "writes", "writer", "checks", "checked", "checker",
           "batches"}  # fmt: skip


def take_options(rule: object, arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a rule, a name or a class of rules, from the arguments of an optimizer,
    and return them. {} for any other value of `rule`, which `adopt` refuses.
    """
    keys = [key for key in options_of(rule) if key in arguments]
    return {key: arguments.pop(key) for key in keys}


def adopt(
    group: dict[str, Any],
    default: str | type[Rule] | None,
    taken: Collection[str],
    options: Mapping[str, Any] | None = None,
) -> None:
    """Replace `rule` of a new Muon group, a name or a class of rules, by its name, and add the
    rule's options with their defaults; in place. `default`: of the optimizer; with None a group
    without the key gets none. `options`: defaults of the optimizer for groups with the rule
    `default`.

    `taken`: keys that groups have without a rule. Raises TypeError or ValueError for any other
    value, and as `check_rule` for a class. The name of a class is allowed after an optimizer of
    this process was given the class.
    """
    given = group.pop("rule", None) or default
    if given is None:
        return
    if isinstance(given, type) and issubclass(given, Rule):
        if type(RULES.get(rule_name(given))) is not given:
            check_rule(given, taken)
            register(given)
        given = rule_name(given)
    if not isinstance(given, str):
        raise TypeError(
            f"rule={given!r} must be one of {sorted(RULES)} or a subclass of Rule, the class itself"
        )
    if given not in RULES:
        raise ValueError(
            f"there is no rule {given!r}: pass one of {sorted(RULES)}, or the class of a rule of "
            "your own, a subclass of Rule"
        )
    group["rule"] = given
    defaults = RULES[given].options
    if isinstance(default, type):
        default = rule_name(default)
    if given == default:
        defaults = {**defaults, **(options or {})}
    for key, value in defaults.items():
        group.setdefault(key, copy.deepcopy(value))


def adopt_elementwise(group: dict[str, Any], of_adamw: Mapping[str, Any]) -> None:
    """Add the options of the rule of a new group with use_muon=False, in place. `of_adamw`: the
    optimizer's defaults for AdamW. Raises TypeError or ValueError for an unknown rule.
    """
    if isinstance(group.get("rule"), type):
        raise TypeError(
            f"rule={group['rule']!r} in a group with use_muon=False: a class steps matrices; pass "
            "the name of a rule for such groups"
        )
    rule = elementwise_of(group)
    defaults = of_adamw if rule.name == DEFAULT else rule.options
    for key, value in defaults.items():
        group.setdefault(key, value)


def check_rule(rule: type[Rule], taken: Collection[str]) -> None:
    """Raise ValueError or TypeError, saying the fault, for a class that cannot step matrices on
    every layout. `taken`: as in `adopt`.
    """
    name = rule_name(rule)
    # The package calls the kernels of fused rules in place and reads no result of their phases
    if rule.fused and not rule.__module__.startswith(f"{PACKAGE}."):
        raise ValueError(
            f"rule {name!r} inherits the kernels of a built-in rule (`fused`), which ignore what "
            "its phases return: subclass Rule, or set fused = False and write `before` and "
            "`after` in plain torch"
        )
    own = set().union(*(vars(c) for c in rule.__mro__ if c not in (Rule, object)))
    inner = sorted(own & set(INNER))
    if inner and not rule.__module__.startswith(f"{PACKAGE}."):
        raise ValueError(
            f"rule {name!r} inherits `{inner[0]}` of a built-in rule, which only rules of this "
            "package have: subclass Rule"
        )
    _check_spelling(own, name)
    _check_declarations(rule, name, taken)
    trial = _Trial(rule)
    try:
        with _NoCollectives(name), torch.no_grad(), torch.device("cpu"):
            trial.run()
            trial.run_without_values()
    except _WrongRule as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        if _is_raised_by_distributed(error):
            raise ValueError(_collective_text(name, f"torch.distributed ({error})")) from error
        raise ValueError(
            f"rule {name!r} fails in a trial on small tensors: {error}{_hint(error, rule)}"
        ) from error
    if vars(trial.rule):
        raise ValueError(
            f"rule {name!r} keeps {sorted(vars(trial.rule))[0]!r} on itself, where no checkpoint "
            "and no other layout would find it: declare it in `state`"
        )


def _hint(error: Exception, rule: type[Rule]) -> str:
    """Return the likely cause of an error in a phase, the end of a message; "" if unknown."""
    if isinstance(error, AttributeError) and isinstance(error.obj, Units):
        if error.name in rule.options:
            return f". Options are read as units.numbers.{error.name}"
        known = [f.name for f in dataclasses.fields(Units) if f.repr]
        return f". Units have {', '.join(known)}"
    if isinstance(error, KeyError):
        declared = [state.key for state in rule.state]
        return f". Declared in `state` are {declared}, in `sends` {list(rule.sends)}"
    if isinstance(error, (TypeError, AttributeError)) and "NoneType" in str(error):
        if not rule.reads_weight and None not in rule.options.values():
            return ". units.weight is None without reads_weight = True"
    return ""


def _check_spelling(own: set[str], name: str) -> None:
    """Raise ValueError if a class has an attribute that is close to a name of `Rule`, and would
    therefore step as plain Muon. `own`: the attributes of the class and its bases below `Rule`.
    """
    for key in sorted(own - vars(Rule).keys() - HELPERS):
        close = difflib.get_close_matches(key.lower(), OVERRIDABLE, 1, 0.85)
        if close and not key.startswith("_"):
            raise ValueError(
                f"rule {name!r} has `{key}`, which the package never reads: did you mean "
                f"`{close[0]}`? Let the names of helpers begin with an underscore"
            )


def _check_declarations(rule: type[Rule], name: str, taken: Collection[str]) -> None:
    """Raise ValueError or TypeError, saying the fault, for a wrong `state`, `options` or `sends`.
    `taken`: as in `adopt`.
    """
    kinds = {
        "state": (Sequence, "a tuple of State"),
        "options": (Mapping, "a dict of defaults"),
        "sends": (Mapping, "a dict"),
    }
    for attribute, (kind, meaning) in kinds.items():
        value = getattr(rule, attribute)
        if not isinstance(value, kind) or isinstance(value, str):
            raise TypeError(f"rule {name!r}: `{attribute}` is {value!r}, but must be {meaning}")
    if rule.sends and rule.after is Rule.after:
        raise ValueError(
            f"rule {name!r} has `sends` but no `after`, which fills units.sent: override `after`, "
            "or leave out `sends`"
        )
    for state in rule.state:
        if not isinstance(state, State):
            raise TypeError(f"rule {name!r}: {state!r} in `state` must be a State")
        _require(name, f"per of state {state.key!r}", state.per, PER)
        wide = torch.float32, torch.bfloat16
        _require(name, f"dtype of state {state.key!r}", state.dtype, wide)
    for key, per in rule.sends.items():
        _require(name, f"sends[{key!r}]", per, SENT_PER)
    if clash := sorted(set(rule.options) & set(taken)):
        raise ValueError(
            f"rule {name!r}: option {clash[0]!r} is a key of every group: give it another name"
        )


def _collective_text(name: str, called: str) -> str:
    """The message for a rule that calls a collective."""
    return (
        f"rule {name!r} calls {called}: phases run for different matrices on "
        "each rank, and the package sends what `state`, `reads_weight` and `sends` declare"
    )


def _is_raised_by_distributed(error: Exception) -> bool:
    """Whether torch.distributed has raised: without a process group a collective fails before it
    is an operation that `_NoCollectives` sees.
    """
    module = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
    return module.startswith("torch.distributed")


def _require(name: str, what: str, value: object, allowed: Collection) -> None:
    """Raise ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"rule {name!r}: {what} is {value!r}, but must be one of {allowed}")


class _WrongRule(ValueError):
    """A fault that the trial has found."""


class _NoCollectives(TorchDispatchMode):
    """Refuses collectives: ranks call a phase for different matrices, and would wait forever."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        """Run an operation. Raises ValueError for a collective."""
        if "c10d" in func.namespace:
            raise _WrongRule(_collective_text(self.name, f"the collective {func}"))
        return func(*args, **(kwargs or {}))


# What makes the host wait for a GPU -> the way out
READS = "reads a value of a tensor on the host (.item(), float(), bool(), if, .tolist(), .cpu())"
CUTS = "makes a tensor whose shape depends on values"
COPIES = "copies numbers of the host to the device"
VERIFIES = "has torch check a result on the host"
WAYS_OUT = {
    READS: "compute with 0-D tensors, and choose by torch.where",
    CUTS: "keep the shape, and choose by torch.where",
    COPIES: "use Python numbers, or torch.full with the device",
    VERIFIES: "call the function that ends in _ex, such as torch.linalg.inv_ex, or take "
    "torch.linalg.qr or products of matrices in place of svd, eigh, eig, pinv and lstsq",
}
# Operations that read values inside, which no operation on the meta device shows, by torch's
# `aten/src/ATen/native/BatchLinearAlgebra.cpp` and `LinearAlgebra.cpp` (matrix_exp)
READ_INSIDE = {
    **dict.fromkeys(("_linalg_svd", "_linalg_eigh", "linalg_eig", "_linalg_eigvals"), VERIFIES),
    **dict.fromkeys(("linalg_eigvals", "linalg_pinv", "linalg_lstsq", "cholesky"), VERIFIES),
    "linalg_matrix_sqrt": VERIFIES,  # of torch after 2.13
    "linalg_matrix_exp": READS,
}
TO_NUMPY = torch.Tensor.numpy, torch.Tensor.__array__
FROM_NUMBERS = torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor


def _is_without_values(value: object) -> bool:
    """Whether `value` is a tensor on the meta device, in the place of one on a GPU."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _wait_in(func: Any, args: tuple, kwargs: Mapping) -> str:
    """Return why the host waits in an operation of torch, a key of WAYS_OUT; "" for no wait."""
    name, tensors = func.name().partition(".")[0], [a for a in args if isinstance(a, torch.Tensor)]
    if name in ("aten::_to_copy", "aten::copy_"):
        source = tensors[-1]
        to = tensors[0].device if name == "aten::copy_" else kwargs.get("device") or source.device
        if torch.device(to).type == source.device.type:
            return ""
        return READS if source.is_meta else COPIES
    if not any(map(_is_without_values, tensors)):
        return ""
    given = {a.name: value for a, value in zip(func._schema.arguments, args)} | {**kwargs}
    if name == "aten::_linalg_check_errors" or given.get("check_errors"):
        return VERIFIES
    if name.removeprefix("aten::") in READ_INSIDE:
        return READ_INSIDE[name.removeprefix("aten::")]
    if torch.Tag.data_dependent_output in func.tags:
        return READS
    if name == "aten::index_put_":
        # torch sets a number where a mask is true by masked_fill
        return CUTS if args[2].numel() > 1 and _has_mask(args[1]) else ""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return ""
    if name == "aten::index":
        return CUTS if _has_mask(args[1]) else ""
    return CUTS if kwargs.get("output_size") is None else ""


def _has_mask(index: Sequence) -> bool:
    """Whether a mask is among the indices of a tensor: torch looks for its true elements."""
    masks = torch.bool, torch.uint8
    return any(isinstance(i, torch.Tensor) and i.dtype in masks for i in index)


class _Waits:
    """Finds operations with which the host would wait for a GPU. Tensors of the GPU are on the meta
    device. `found`: (key of WAYS_OUT, line of the rule) of the first wait; None: no wait.
    """

    def __init__(self) -> None:
        self.found: tuple[str, str] | None = None

    def record(self, wait: str) -> None:
        """Record a wait, a key of WAYS_OUT, and raise ValueError to end the phase; "": no wait."""
        if not wait:
            return
        frame = sys._getframe(1)
        inner = "torch.", f"{PACKAGE}."
        while frame.f_back and f"{frame.f_globals.get('__name__')}.".startswith(inner):
            frame = frame.f_back
        where = f"line {frame.f_lineno} of {Path(frame.f_code.co_filename).name}"
        self.found = self.found or (wait, where)
        raise _WrongRule(wait)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that records waits of operations and functions of torch."""
        with _Operations(self), _Functions(self):
            yield


class _Operations(TorchDispatchMode):
    """Records waits of operations (ATen)."""

    def __init__(self, waits: _Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        """Run an operation with which the host does not wait."""
        self.waits.record(_wait_in(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Records waits of torch functions that no operation on the meta device shows."""

    def __init__(self, waits: _Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Mapping | None = None
    ) -> Any:
        """Run a function with which the host does not wait."""
        given = args[0] if args else None
        if func in TO_NUMPY and _is_without_values(given):
            self.waits.record(READS)
        if func is torch.Tensor.__setitem__ and _is_without_values(args[2]):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.waits.record(CUTS if _has_mask(index) else "")
        if func in (torch.as_tensor, torch.asarray) and isinstance(given, torch.Tensor):
            # A tensor stays on its device, also inside of `torch.device("cpu")`, where phases run
            kwargs = {"device": given.device, **(kwargs or {})}
        result = func(*args, **(kwargs or {}))
        is_copy = func is torch.Tensor.new_tensor or not isinstance(given, torch.Tensor)
        if func in FROM_NUMBERS and is_copy and _is_without_values(result):
            self.waits.record(COPIES)
        return result


class _Trial:
    """Calls of every overridden phase, twice: on whole tensors and on parts."""

    def __init__(self, rule: type[Rule]) -> None:
        self.rule = rule()
        self.name = rule_name(rule)
        self.random = torch.Generator("cpu").manual_seed(0)
        usual = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "eps": 1e-7}
        self.group = {"use_muon": True, **usual, **rule.options}
        self.scalars = torch.tensor(device_scalars(self.group), dtype=torch.float32, device="cpu")
        self.numbers = Numbers(self.rule, self.group, self.scalars)

    def run(self) -> None:
        """Raise ValueError for a phase that breaks a promise of `Rule`."""
        W, O, G, M = (self._random(SHAPE[1:]) for _ in range(4))
        if overrides(self.rule, "update"):
            self._elementwise("update", {"G": G, "M": M})
        units = self._units()
        if overrides(self.rule, "write"):
            sent = {key: self._random(t.shape[1:]).abs() for key, t in units.sent.items()}
            self._elementwise("write", {"W": W, "O": O}, sent)

    def run_without_values(self) -> None:
        """Raise ValueError for a phase in which the host would wait for a GPU."""
        # Kernels of the package need memory, and read no value on the host
        if self.rule.fused:
            return
        matrix = torch.empty((1, *SHAPE[1:]), dtype=torch.float32, device="meta")
        numbers = Numbers(self.rule, self.group, self.scalars.to("meta"))
        units = self._make(self._random(matrix.shape))
        state, sent = ({k: t.to("meta") for k, t in d.items()} for d in (units.state, units.sent))
        units = Units(numbers, state, matrix if self.rule.reads_weight else None, sent, 0.5)
        of_piece = {key: t[0].clone() for key, t in sent.items()}
        calls = {
            "update": (matrix[0], matrix[0].clone(), numbers),
            "before": (matrix.clone(), units),
            "after": (matrix.clone(), units),
            "write": (matrix[0], matrix[0].clone(), 0.5, of_piece, numbers),
        }
        for method in [method for method in calls if overrides(self.rule, method)]:
            waits = _Waits()
            # An operation that cannot run without values ends the phase, and tells nothing
            with contextlib.suppress(Exception), waits.recording():
                getattr(self.rule, method)(*calls[method])
            if waits.found:
                wait, where = waits.found
                raise _WrongRule(
                    f"rule {self.name!r}: {method} {wait}, in {where}, so the host would wait for "
                    "the GPU in every step, and no CUDA graph could hold the phase: "
                    f"{WAYS_OUT[wait]}"
                )

    def _random(self, shape: Sequence[int]) -> torch.Tensor:
        """Normal numbers in fp32 on the CPU, whatever torch's defaults and global generator."""
        return torch.randn(shape, generator=self.random, dtype=torch.float32, device="cpu")

    def _elementwise(
        self,
        method: str,
        named: Mapping[str, torch.Tensor],
        sent: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Call `update` or `write` with tensors, and `write` with `sent` and a scale. Raises
        ValueError if the method changes an argument, if a result has another shape, or if parts of
        the tensors give other results than the whole.
        """
        sent, tensors = sent or {}, list(named.values())

        def call(*arguments: Any) -> tuple[torch.Tensor, ...]:
            *some, numbers = arguments
            if method == "update":
                return self.rule.update(*some, self.numbers)
            return (self.rule.write(*some, 0.5, numbers, self.numbers),)

        given = {name: t.clone() for name, t in named.items()}
        copies = list(given.values())
        given |= {f"sent[{key!r}]": t for key, t in sent.items()}
        before = {name: t.clone() for name, t in given.items()}
        results = call(*copies, sent)
        for name, t in given.items():
            if not torch.equal(t, before[name]):
                raise _WrongRule(
                    f"rule {self.name!r}: {method} changes {name} in place, which is read again in "
                    "a step, and may be the gradient, the state or the weight itself: return new "
                    "tensors"
                )
        if not isinstance(results, tuple) or len(results) != (2 if method == "update" else 1):
            raise _WrongRule(f"rule {self.name!r}: update must return (U, the new M)")
        for result in results:
            self._shape(method, result, tensors[0])
        whole = in_whole_vectors(call, tensors, sent, self.rule.sends)
        # A part from the top would not show sums over the rows above, or numbers of rows
        for rows, cols in ((slice(1, 3), slice(None)), (slice(None), slice(1, 3))):
            part = [t[rows, cols].clone() for t in tensors]
            some = in_whole_vectors(call, part, _cut(sent, rows, cols), self.rule.sends)
            for a, b in zip(some, whole):
                if not torch.equal(a, b[rows, cols]):
                    raise _WrongRule(
                        f"rule {self.name!r}: {method} is not elementwise, a part of a matrix "
                        "gets another result than in the whole: it runs on shards. Compute on "
                        "whole matrices in `before` or `after`, and send numbers to `write` by "
                        "`sends`"
                    )

    def _shape(self, method: str, result: object, like: torch.Tensor) -> None:
        """Raise ValueError unless a result is a tensor with the shape of `like`, of floats."""
        if not isinstance(result, torch.Tensor) or result.shape != like.shape:
            raise _WrongRule(
                f"rule {self.name!r}: {method} returned "
                f"{tuple(getattr(result, 'shape', ())) or type(result).__name__} for a tensor of "
                f"shape {tuple(like.shape)}: it has to return a tensor of equal shape"
            )
        if not result.is_floating_point():
            raise _WrongRule(
                f"rule {self.name!r}: {method} returned {result.dtype}: it has to return a "
                "floating-point tensor"
            )

    def _units(self) -> Units:
        """Call `before` and `after` on a stack, and with `batched` on each matrix alone. Raises
        ValueError if results have another shape, or other bits in a stack than alone, if a number
        to send is not filled, or if a tensor of state or to send is replaced.
        """
        U, O, W = (self._random(SHAPE) for _ in range(3))
        together = self._make(W)
        parts = [self._make(W[i : i + 1]) for i in range(SHAPE[0])]
        if self.rule.fused:
            return together
        for method, stack in (("before", U), ("after", O)):
            if not overrides(self.rule, method):
                continue
            call = getattr(self.rule, method)
            alone = [call(stack[i : i + 1].clone(), units) for i, units in enumerate(parts)]
            for result in alone:
                self._shape(method, result, stack[:1])
            whole = call(stack.clone(), together) if self.rule.batched else torch.cat(alone)
            self._shape(method, whole, stack)
            if not torch.equal(whole, torch.cat(alone)):
                raise _WrongRule(
                    f"rule {self.name!r}: {method} gives a matrix other bits in a stack than "
                    "alone: leave out `batched`"
                )
        for key in self.rule.sends if overrides(self.rule, "after") else ():
            if any(units.sent[key].isnan().any() for units in parts):
                raise _WrongRule(f"rule {self.name!r}: after has to fill units.sent[{key!r}]")
        pers = [("state", state.key, state.per) for state in self.rule.state]
        pers += [("sent", key, per) for key, per in self.rule.sends.items()]
        for kind, key, per in pers:
            shape = self._state(1, per).shape
            if any(getattr(units, kind)[key].shape != shape for units in parts):
                what = f"state {key!r}" if kind == "state" else f"units.sent[{key!r}]"
                raise _WrongRule(f"rule {self.name!r}: {what} was replaced: change it in place")
        return together

    def _make(self, W: torch.Tensor) -> Units:
        """Units of the trial, with zero state and with NaN in numbers to send."""
        rule, N = self.rule, W.shape[0]
        state = {s.key: self._state(N, s.per) for s in rule.state}
        sent = {key: self._state(N, per).fill_(torch.nan) for key, per in rule.sends.items()}
        return Units(self.numbers, state, W.clone() if rule.reads_weight else None, sent, 0.5)

    def _state(self, N: int, per: str) -> torch.Tensor:
        """Zero state of N matrices."""
        _, R, C = SHAPE
        return torch.zeros((N, *shape_per(per, R, C)), dtype=torch.float32, device="cpu")


def _cut(sent: Mapping[str, torch.Tensor], rows: slice, cols: slice) -> dict[str, torch.Tensor]:
    """Cut the numbers of `sends` like a matrix."""
    return {
        key: t[rows if t.shape[0] > 1 else slice(None), cols if t.shape[1] > 1 else slice(None)]
        for key, t in sent.items()
    }
