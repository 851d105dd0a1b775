"""The optimizer classes `Muon` and `NorMuon`: arguments, `step`, state-dict methods, `release`,
`plan_report`.

A step plans (collectively, when parameters or placements changed), binds (on this rank, when memory
moved), and runs the bucket updates. The three are done by planning/, execution/ and pipeline.py.
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import replace

import torch
import torch.distributed as dist

from . import pipeline
from .communication.nonfinite import Unscaling, unscale
from .communication.owner_state import shown_as_row_dtensors
from .communication.process_groups import ProcessGroups, check_process_group, world_now
from .execution.cuda_graphs import Graphs, check_environment, current, release_before_groups
from .execution.fingerprint import StepFingerprint, memory_key
from .execution.overlap.backward import BackwardOverlap
from .execution.overlap.forward import ForwardOverlap, Returning, settled
from .execution.prepare import (
    OTHER_NUMBERS,
    OTHER_PARAMETERS,
    OTHER_PLACES,
    BoundStep,
    planned,
    stepped,
)
from .execution.report import Report, Stopwatch, report_of
from .kernels.backend import capturing
from .params.config import MuonConfig, spelled_out
from .params.dtensor import form_of
from .params.errors import in_group, names_in
from .params.layout import this_rank
from .params.validation import (
    Members,
    check_adamw,
    check_again,
    check_group,
    check_live,
    check_memory,
    check_together,
    check_unique,
    device_of,
    is_adamw,
)
from .planning.planner import warn_of_idle
from .rules.rule import host_constants
from .rules.schedules import Beta1, check_momentum, part_tensors
from .state.consolidated import check_target, consolidate
from .state.create import (
    adopt_state,
    complete_state,
    creates_state_only,
    is_state_missing,
    outside_inference_mode,
    refuse_inconsistent,
    warn_inconsistent,
)
from .state.state_dict import Loading, called_by_checkpoint


class Saving(Returning):
    """An optimizer that is saved and loaded on any layout."""

    @property
    def _torn(self) -> bool:
        """Whether a step failed half-way."""
        return self._half_way or self._early.failed

    def _hand_over(self) -> None:
        """Give state of parameters that were replaced to those in their place. Without state no
        parameter is kept in mind: who shards a model next wants the memory of the whole ones back.
        """
        members = adopt_state(self._members, self.param_groups, self.state)
        self._members = members if self.state else ()

    @settled
    def init_state(self) -> None:
        """Create zero state of every parameter that requires a gradient and has none: before the
        first step, for code that loads into the state that is there. Without a step, a plan or
        communication; call it on all ranks, once the model is sharded. RuntimeError while buckets
        have left during backward.
        """
        self._early.refuse("init_state")
        self._hand_over()
        self._find_world()
        with outside_inference_mode():
            complete_state(self.param_groups, self.state, self._options)
        self._hand_over()

    @settled
    def state_dict(self) -> dict:
        """As in torch. With shard_state or unreduced gradients collective over process_group, of
        which each rank has a part of the state: it comes as DTensors cut by rows, for any layout.
        Raises RuntimeError, before anything is sent, if not all of these ranks call it. After
        consolidate_state_dict, until the next step, it asks no other rank. Called by
        torch.distributed.checkpoint, it creates what state there is none of (`init_state`). Warns
        after a step that failed half-way.
        """
        self._judge_state()
        self._beta1.follow(self.param_groups)
        self._hand_over()
        create = called_by_checkpoint() and not self._torn and not self._early.begun
        if not self._options.owner_keeps_state:
            if create:
                self.init_state()
            return super().state_dict()
        named = self._named()
        # It saves all ranks' parts
        gathered = None if called_by_checkpoint() else self._consolidated
        if gathered is not None and gathered.is_current(named, self.state):
            return gathered.state_dict(self, named)
        self._find_world()
        with shown_as_row_dtensors(
            self, named, self._options.process_group, self.init_state if create else None
        ):
            return super().state_dict()

    @settled
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather the state that owners keep (shard_state, unreduced gradients) in the CPU memory of
        rank `to` of process_group, None: of every rank. One rank can then save it alone.

        Collective over process_group. Until the next step, load_state_dict or add_param_group,
        `state_dict()` returns whole tensors on rank `to`, without communication; on the others it
        returns a state dict without state, which load_state_dict refuses. Where owners keep no
        state this does nothing: state_dict() asks no other rank there. Raises ValueError if `to` is
        no rank of process_group, RuntimeError, before anything is sent, if not all ranks call it
        alike. Warns after a step that failed half-way.
        """
        check_target(to, self._options.process_group if self._options.owner_keeps_state else None)
        self._judge_state()
        if not self._options.owner_keeps_state:
            return
        self._find_world()
        self._consolidated = None  # should it fail
        group = self._options.process_group
        self._consolidated = consolidate(self.state, self._named(), group, to)

    def _judge_state(self) -> None:
        """Before the state is read: warn if a step has torn it, raise if gradients changed after
        they had left.
        """
        if not warn_inconsistent(self._torn):
            self._early.judge()

    def _named(self) -> dict:
        """{parameter: its name}."""
        return {p: name for group in self.param_groups for p, name in names_in(group).items()}

    @settled
    def load_state_dict(self, state_dict) -> None:
        """As in torch, from any layout: tensors that lie otherwise than the parameters are moved,
        and get the dtype of `state_dtype`. What the saved groups lack (those of torch.optim.Muon or
        AdamW, or of an older version) stays this optimizer's own. State goes by name where all
        groups of both sides have the same `param_names`, also in other groups; else by position.

        Raises, before anything is changed, ValueError for state of another shape or kind, and for a
        DTensor that holds another rank's shard; RuntimeError if the state has DTensors that ranks
        load together (those that are gathered, or that owners keep) and some of these ranks do not
        call this in time, or if process_group was destroyed.
        """
        self._half_way = self._half_way or self._early.begun  # should loading fail
        self._early.drain()
        self._find_world()
        with outside_inference_mode(), Loading(self.param_groups, self._options).hooked(self):
            super().load_state_dict(state_dict)
        self._beta1.forget()
        self._take_groups()
        self._half_way, self._consolidated = False, None
        if self._options.overlap_backward:  # not all ranks may have sent alike over these
            self._process_groups.release()
            self._process_groups = None
        self._forget()
        self._members = ()
        self._hand_over()
        self._unbound = "after load_state_dict(), which drops the plan"

    @settled
    def __getstate__(self):
        self._beta1.follow(self.param_groups)
        options = replace(
            self._options, process_group=getattr(self._options.process_group, "group_name", None)
        )
        return {
            **super().__getstate__(),
            "_options": options,
            "_adamw": self._adamw,
            "_skipped": self._skipped,
            "_half_way": self._torn,
            "_is_world": self._is_world,
        }

    def __setstate__(self, state) -> None:
        if "_itself" not in vars(self):  # a copy, for which `__init__` has not run
            self._start(state["_options"])
        super().__setstate__(state)
        if isinstance(self._options.process_group, str):
            group = dist.distributed_c10d._resolve_process_group(self._options.process_group)
            self._options = replace(self._options, process_group=group)
        self._has_all_groups = True
        self._forget()
        self._unbound = "in a copy, or after unpickling"


NEVER_BOUND = "before the first step, nor after release()"


class Muon(Saving):
    """Muon for hidden matrices and AdamW for the rest, on any sharding (Keller Jordan, 2024; arXiv
    2502.16982).

    params: parameters, named parameters or groups. Groups with use_muon=True (the default) hold
    parameters (..., R, C), each (R, C) a matrix; groups with use_muon=False go to AdamW. lr,
    weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
    torch.optim.Muon, settable per group. eps is in units of a matrix's largest element;
    ns_coefficients: the name of a set, a triple or ns_steps triples; adjust_lr_fn: None or
    "original", "match_rms_adamw" or "rms_norm", "spectral_norm" or "spectral_unclamped",
    "sqrt_max". adamw_betas, adamw_eps: defaults of `betas` and `eps` in AdamW groups, where
    `momentum` is beta1. A tensor given for several groups, as lr, stays that of the first; the
    others get copies.

    process_group (None): the ranks that hold copies of plain (non-DTensor) parameters, among which
    the work is then split; None means that every process steps its plain parameters alone.
    shard_state (False): True: owners alone keep the state of those. grads_are_reduced (True):
    False: their gradients have not been averaged over process_group; the optimizer does it, of
    matrices in fp32 after they are rounded to wire_dtype, and owners alone keep the state.
    state_dtype (fp32): of momentum_buffer, exp_avg and exp_avg_sq. wire_dtype (bf16): of updates
    between home and owner, on every layout, so that all give the same bits. ns_dtype (None): of
    products; None means fp16, fp32 on CPUs. workspace_bytes (None): bound on the memory of buckets
    and of the iteration, ValueError at the first step if one matrix per rank takes more; None means
    what pays, up to 2 GiB and 3 % of a GPU, 256 MiB on a CPU. capturable (False): True: on NVIDIA
    GPUs the step, its collectives included, is captured as a CUDA graph in the second step and
    replayed; False: the parts between collectives are. The bits are the same, and lr, weight_decay
    and momentum may change at every step. In AdamW groups a change of weight_decay or of momentum,
    which is beta1 there, costs a new capture (8 at most), and a change at every step keeps AdamW
    from being replayed. nonfinite ("propagate"): what NaN or Inf in a gradient does. "propagate":
    nothing is checked, NaN spoils its matrix. "skip": that matrix (under AdamW, that parameter)
    keeps its weight and state on every rank, and `skipped` counts it. "raise": nothing changes on
    any rank; the step waits for the device once and ends in a RuntimeError. overlap_backward
    (False): True: gradients leave for their owners during the backward that `last_backward` is put
    round; each bucket then has memory of its own. overlap_forward (False): True: on GPUs no stream
    waits for `step`; each module of a model given to `updates_return_during` waits for its own
    weights. With both the bits are the same.

    unscale_in_step (None): who acts on what a torch.amp.GradScaler finds. False: the scaler, as
    with torch.optim.Muon: it unscales, and does not call `step` where it found Inf. True: `step`,
    as with torch.optim.AdamW(fused=True): it unscales gradients in place and leaves itself out on
    all ranks if one found Inf, and no host waits. None: True only where scalers of several ranks
    may find unlike things, so that some ranks would wait for the others: with
    grads_are_reduced=False, and with DTensors that are sharded over unlike ranks.

    Raises ValueError, NotImplementedError or TypeError at construction for what could not be
    stepped.
    """

    # Of a group, besides those of Muon; a constant of the class, as all class attributes here
    _extra_keys = ()

    @spelled_out(MuonConfig, kind=inspect.Parameter.KEYWORD_ONLY)
    def __init__(
        self,
        params,
        lr=1e-3,
        weight_decay=0.1,
        momentum=0.95,
        nesterov=True,
        ns_coefficients="polar_express",
        eps=1e-7,
        ns_steps=5,
        adjust_lr_fn=None,
        *,
        adamw_betas=(0.9, 0.95),
        adamw_eps=1e-8,
        **options,
    ):
        extra = {key: options.pop(key) for key in self._extra_keys}
        self._adamw = {"betas": adamw_betas, "eps": adamw_eps}
        self._start(MuonConfig.of(options))
        self._options.check()
        check_adamw(adamw_betas, adamw_eps)
        self._is_world = (
            options.get("process_group") is not None
            and self._options.process_group is dist.group.WORLD
        )
        self._forget()
        super().__init__(
            params,
            {
                "lr": lr,
                "weight_decay": weight_decay,
                "momentum": momentum,
                "nesterov": nesterov,
                "ns_coefficients": ns_coefficients,
                "eps": eps,
                "ns_steps": ns_steps,
                "adjust_lr_fn": adjust_lr_fn,
                "use_muon": True,
                **extra,
            },
        )
        check_environment(device_of(self.param_groups))
        check_memory(self.param_groups)
        self._take_groups()
        self._has_all_groups = True
        self._first_members = Members()  # else it would keep parameters that leave their groups

    def _start(self, options: MuonConfig) -> None:
        """Set every attribute that the methods read, in `__init__` and in a copy, which is made
        without it.

        None of them is an attribute of the class: a wrapper of Lightning or Fabric derives a class
        from the optimizer's and asks the optimizer only for attributes that this class lacks.
        """
        # On which `settled` runs methods that are called on a wrapper
        self._itself = weakref.ref(self)
        self._options = options
        self._late = ForwardOverlap(options.overlap_forward)
        self._early = BackwardOverlap()
        self._beta1 = Beta1()
        self._has_all_groups = False  # whether those of the constructor are there
        self._first_members = Members()  # of the groups that the constructor has added so far
        self._unscaling = Unscaling()
        self._timing = False
        self._unbound = NEVER_BOUND  # why plan_report() finds no plan
        self._half_way = False  # whether a step began and did not end
        # The state gathered by consolidate_state_dict, until the next step
        self._consolidated = None
        self._skipped = None  # a count on the device, once a step has looked at gradients
        self._members = ()  # each group's parameters at the last step
        self._world = None  # torch.distributed's default group at the last step
        self._process_groups = None  # made by `_forget`, as are graphs
        self._graphs = None
        self._beside = None  # the graphs of `_alone`

    @property
    def timing(self) -> bool:
        """Whether steps are measured for `plan_report`."""
        return self._itself()._timing

    @timing.setter
    def timing(self, on: bool) -> None:
        self._itself()._timing = on

    @settled
    def add_param_group(self, param_group) -> None:
        """Add a group; see the class for what it may hold."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, not {type(param_group).__name__}")
        momentum = param_group.get("momentum")
        if is_adamw(param_group):
            for key, value in self._adamw.items():
                param_group.setdefault(key, value)
        count = len(self.param_groups)
        self._early.refuse("add_param_group")
        members = Members(self.param_groups) if self._has_all_groups else self._first_members
        try:
            with in_group(count, param_group):
                check_unique(param_group, self.param_groups, members)
                super().add_param_group(param_group)
                members.add(self.param_groups[-1])
                self._check_new(self.param_groups[-1], momentum, members.first)
            if self._has_all_groups:
                check_memory(self.param_groups)
        except Exception:
            del self.param_groups[count:]
            raise
        if self._has_all_groups:  # else once, at the end of `__init__`
            self._take_groups()
        if self._bound.all_jobs:
            self._unbound = "after add_param_group(), which drops the plan"
        self._forget()

    def _take_groups(self) -> None:
        """Give each group tensors of its own, and AdamW groups their `momentum`."""
        part_tensors(self.param_groups)
        self._beta1.follow(self.param_groups)

    def _check_new(self, group: dict, momentum: object, first: tuple | None) -> None:
        """Raise ValueError or NotImplementedError for a new group; `momentum`: what it was given,
        if anything; `first`: see `Members`.
        """
        wide = {f"adamw_{key}": value for key, value in self._adamw.items()}
        check_group(group, self._extra_keys, {**vars(self._options), **wide})
        check_together([group], self._options, first)
        if is_adamw(group):
            check_momentum(group, momentum, self.defaults["momentum"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling, and leaving out a step, to `step`, which
        it gives `grad_scale` and `found_inf`. Otherwise it calls `step` only where it found no Inf.
        """
        itself = self._itself()
        return itself._unscaling.in_step(itself.param_groups, itself._options)

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        itself = self._itself()
        itself._options = replace(itself._options, unscale_in_step=bool(value))
        itself._unscaling.answer = bool(value)

    @torch._disable_dynamo  # a compiled training step breaks here: this one's graphs are its own
    @torch.no_grad()
    def step(self, closure=None):
        """One step; returns the closure's loss. The first step plans: all ranks have to take it
        together.

        Raises RuntimeError, also for all later steps until `load_state_dict`, if it failed
        half-way.
        """
        itself = self._itself()
        refuse_inconsistent(itself._half_way or itself._early.failed)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        scaled = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        device = device_of(itself.param_groups)
        if device.type == "cpu" and not itself._late.on:
            itself._take(*scaled)
            return loss
        with current(device), itself._late.aside(device, wait_for_all=scaled != (None, None)):
            itself._take(*scaled)
        return loss

    def _take(self, grad_scale, found_inf) -> None:
        """Step, with what a GradScaler says of the gradients, or None."""
        self._read_groups()
        # Nothing leaves before the step without overlap_backward
        self._half_way = begun = self._options.overlap_backward and self._early.begun
        self._consolidated = None
        self._process_groups.begin_step()
        creates_state = not self.state and creates_state_only(self.param_groups, self.state)
        if begun:
            self._early.check(self._as_bound(), (grad_scale, found_inf) != (None, None))
        else:
            if self._options.overlap_backward:
                self._early.judge()  # binding anew would forget it
            stores = self._ready(found_inf is not None)
            if grad_scale is not None:
                unscale(stores, grad_scale)
        # The next step binds anew
        if self._bound.inputs.send(None if begun else self._seen, as_bound=begun):
            self._bound_for = self._seen = None
        if self._bound.missing.begin_step(creates_state):
            self._bound.inputs.tell()
        if self._bound.nonfinite is not None:
            self._bound.nonfinite.check(found_inf)
        with self._bound.missing.restoring():
            self._half_way = True
            self._launch()
        self._half_way = False
        self._process_groups.end_step()
        if self._late.on:
            self._late.keep(self._bound.stores)
        self._bound.inputs.forget()
        if self._bound.nonfinite is not None:
            self._note(found_inf is None)

    def _read_groups(self) -> None:
        """Take what schedules have put into the groups. Raises ValueError, with group and key, for
        what is not allowed.
        """
        check_live(self.param_groups)
        self._beta1.follow(self.param_groups)

    def _note(self, tell) -> None:
        """Count what was left alone; `tell`: raise for it with nonfinite="raise". Else a GradScaler
        has decided.
        """
        with outside_inference_mode():
            count = self._bound.nonfinite.flags.count_nonzero()
        self._skipped = (
            count if self._skipped is None else self._skipped.to(count.device).add_(count)
        )
        if tell and self._options.nonfinite == "raise":
            self._bound.nonfinite.raise_if_set()

    @property
    @settled
    def skipped(self) -> torch.Tensor:
        """How many matrices (AdamW: parameters) this rank left alone for NaN or Inf so far: int64,
        on the device.
        """
        if self._skipped is None:
            return torch.zeros((), dtype=torch.int64, device=device_of(self.param_groups))
        return self._skipped.clone()

    def _launch(self) -> None:
        """All work of the step; with `capturable`, as one graph and one for each AdamW group that
        knows no ranks.
        """
        if self._timing:
            self._watch = Stopwatch(self._bound.stores[0].device) if self._bound.stores else None
            return self._run(self._watch.over(self._bound.all_jobs) if self._watch else [])
        if not self._options.capturable:
            return self._run()
        key = [host_constants(store.hp, store.wide) for store in self._bound.together]
        pipeline.run_beside(
            lambda: self._graphs(self._run, key), self._bound.alone, self._beside.stream
        )

    def _run(self, jobs=None) -> None:
        jobs = self._bound.jobs if jobs is None else jobs
        with self._bound.missing.comparing() as closing:
            if self._options.overlap_backward:
                self._early.run(jobs, closing)
            else:
                pipeline.run(jobs, closing)

    @settled
    def last_backward(self):
        """Context manager for the backward of a step's last micro-batch: with
        overlap_backward=True, gradients leave for their owners as soon as all of a bucket are
        there. Otherwise, and before the first step, nothing happens. Then call `step` before
        gradients change. Raises RuntimeError if gradients have left already.
        """
        refuse_inconsistent(self._torn)
        self._read_groups()
        if ready := self._as_bound() and not self.timing:
            self._process_groups.begin_step()
        return self._early.opened(ready)

    def _as_bound(self) -> bool:
        """Whether all but the gradients is as the last step found it."""
        same = (
            world_now() is self._world and self._seen is not None and self._bound.nonfinite is None
        )
        return same and self._seen.at_rest(self.param_groups, self.state)

    def plan_report(self) -> Report:
        """The plan of the last step, as this rank knows it: print it, or draw its `figure()`. Not
        collective. Set the attribute `timing` to True before a step to have that step's times in
        it; such a step is not replayed from one graph. RuntimeError before the first step, which
        makes the plan, and from release(), load_state_dict() or add_param_group() to the next step.
        """
        if not self._bound.all_jobs:
            raise RuntimeError(
                f"nothing is bound {self._unbound}: call step() before plan_report()"
            )
        return report_of(self._bound.all_jobs, this_rank(), self._watch, self._early.order)

    @settled
    def release(self) -> None:
        """Let go of what is bound at this rank: the workspace, CUDA graphs, and the views that keep
        the memory of weights and state which you free or offload between steps. State and plan
        stay: the next step binds anew, with the same bits and without a word to other ranks.
        RuntimeError while buckets have left during backward.
        """
        self._early.refuse("release")
        self._bound.missing.wait()
        self._late.release()
        self._unbind()
        self._unbound = NEVER_BOUND

    def _ready(self, scaled=False):
        """The stores of this step. Planned anew if parameters changed, bound anew if memory or
        gradients' form did.
        """
        self._find_world()
        if self._uncompared:
            self._compare_again()
        if self._seen is not None and self._seen.holds(self.param_groups, self.state, scaled):
            return self._bound.stores
        with outside_inference_mode():
            return self._prepare(scaled)

    def _prepare(self, scaled: bool) -> list:
        """Plan and bind what has changed; return the stores."""
        check_again(self.param_groups, self._options)
        if None in self._planned_for.values():
            warn_of_idle(self.param_groups)
        self._members = adopt_state(self._members, self.param_groups, self.state)
        # What this process steps alone must not change what it steps with others
        for alone in (False, True):
            units, key = stepped(self.param_groups, self._options, alone)
            if key != self._planned_for[alone] or is_state_missing(self._plans[alone], self.state):
                # It may go
                self._late.share(
                    t for s in self.state.values() if isinstance(s, dict) for t in s.values()
                )
                options = self._unscaling.resolve(self._options)
                self._plans[alone], later = planned(
                    units, self.state, options, self._process_groups, alone
                )
                self._uncompared += later
                self._planned_for[alone], self._bound_for, self._forms, self._seen = (
                    key,
                    None,
                    None,
                    None,
                )
        plans = self._plans[False] + self._plans[True]
        params = [p for plan in plans for p in plan.params]
        key = *memory_key(params, self.state, self.param_groups), scaled
        if key != self._bound_for:
            # Should binding fail
            forms, self._bound_for, self._seen = [form_of(p) for p in params], None, None
            if self._forms not in (None, forms):
                self._forget()
                return self._prepare(scaled)
            self._bind(plans, "raise" if scaled else self._options.nonfinite)
            self._bound_for, self._forms = key, forms
        # With the state that there is now
        self._seen = StepFingerprint(self.param_groups, self.state, scaled)
        return self._bound.stores

    def _compare_again(self) -> None:
        """Do the comparisons that `check_plans` left for this step."""
        # A graph cannot be waited for
        if capturing(device_of(self.param_groups)):
            return
        later, self._uncompared = self._uncompared, []
        for compare in later:
            compare()

    def _bind(self, plans: list, nonfinite: str) -> None:
        self._bound.missing.wait()
        self._graphs.say(OTHER_PARAMETERS)
        for graphs in (self._graphs, self._beside):
            graphs.begin(device_of(self.param_groups))
        bound = BoundStep(
            plans,
            self.state,
            self._options,
            self._process_groups,
            (self._graphs, self._beside),
            nonfinite,
            self._late.bucket_written if self._late.on else None,
        )
        if self._options.capturable and self._graphs.on:
            self._process_groups.check_capturable()
            release_before_groups()
        if self._forms is None:  # the first time that kernels of these shapes are launched
            pipeline.precompile_kernels(bound.all_jobs, bound.missing.device)
        self._bound = bound
        self._watch = None
        overlapped = bound.jobs if self._options.overlap_backward else None
        self._early = BackwardOverlap(overlapped, bound.inputs)
        self._late.follow(bound.all_jobs, bound.stores)

    def _find_world(self) -> None:
        """Drop what was planned for process groups that were destroyed."""
        if (world := world_now()) is self._world:
            return
        if self._world is not None and self._options.process_group is not None:
            check_process_group(world, self._is_world)
            self._options = replace(self._options, process_group=world)
        self._world, self._process_groups = world, None
        self._forget()

    def _forget(self) -> None:
        """Drop plans and bound memory; the next step makes them anew. State stays."""
        self._planned_for, self._plans, self._forms = (
            {False: None, True: None},
            {False: [], True: []},
            None,
        )
        self._uncompared = []  # comparisons of gradients that `check_plans` left for the next step
        if self._process_groups is None:  # new ones at each plan would pile up
            self._process_groups = ProcessGroups(dedicated=self._options.overlaps)
        if self._graphs is None:
            self._graphs, self._beside = [
                Graphs(s * self._options.capturable) for s in (OTHER_NUMBERS, OTHER_PLACES)
            ]
        self._unbind()

    def _unbind(self) -> None:
        """Drop bound memory; plans stay."""
        self._bound_for = None
        self._seen = None
        self._watch = None
        self._bound = BoundStep()
        self._early = BackwardOverlap()
        for graphs in (self._graphs, self._beside):
            graphs.drop()


class NorMuon(Muon):
    """Muon whose update is divided, row by row, by the root of its mean square over time, and keeps
    its Frobenius norm (arXiv 2510.05491, in the form of its authors' code).

    beta2: decay of that mean square, kept in fp32 as `second_moment` (..., R, 1); all else as in
    `Muon`.
    """

    _extra_keys = ("beta2",)

    @spelled_out(Muon.__init__)
    def __init__(self, params, *args, beta2=0.95, **kwargs):
        super().__init__(params, *args, beta2=beta2, **kwargs)
