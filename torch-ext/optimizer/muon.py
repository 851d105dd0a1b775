"""The optimizer classes `Muon` and `NorMuon`: arguments, groups, `step`, `release`. Further methods
are in state_dict_methods.py and report_methods.py.

A step has three stages. Planning is collective, at the first step and when parameters or placements
change (planning/). Binding is local, when memory has moved (execution/). Running launches kernels
and all-to-alls, in the order of pipeline.py. Without changes a step only runs.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from . import pipeline
from .communication.nonfinite import NonfiniteFlags, Unscaling, unscale
from .communication.process_groups import check_process_group, found_again, world_now
from .execution.cuda_graphs import check_environment, on_device
from .execution.offload.offload import state_place_for
from .execution.overlap.backward import BackwardOverlap
from .execution.overlap.forward import ForwardOverlap, waits_for_updates
from .execution.prepare.garbage import collection_paused
from .execution.prepare.preparation import Preparation
from .execution.prepare.step import BoundStep, StepSetup
from .params import units, validation
from .params.checks import group_keys, group_values, scheduled_values
from .params.checks.live_keys import LiveKeys
from .params.checks.memory import check_memory
from .params.config import MuonConfig, with_parameters_of
from .params.errors import in_group, names_in
from .params.own_process_groups import OwnProcessGroups, has_process_group
from .pipeline import Job
from .qk_clip.clip import QKClip, attach_to
from .report import Stopwatch
from .report_methods import ReportMethods
from .rules import check
from .rules.decay import DECOUPLED
from .rules.muon import (
    MASTER_KEY,
    MOMENTUM_FORMS,
    ROUNDINGS,
    STEPS_KEY,
    Scale,
    adopt_rounding,
    count_drawn,
    count_momentum,
    is_corrected,
)
from .rules.rule import Rule
from .rules.schedules import Beta1, check_momentum, unshare_tensors
from .state import checks, create

NEVER_BOUND = "before the first step, nor after release()"


class Muon(ReportMethods):
    """Muon for hidden matrices and AdamW for all remaining parameters, on any sharding (Keller
    Jordan, 2024; arXiv 2502.16982).

    Arguments, with defaults in parentheses. The arguments from lr to adjust_lr_fn are those of
    torch.optim.Muon, can be set per group, and are read from the live group in every step. Values
    that are not allowed raise ValueError, TypeError or NotImplementedError at construction.

    params: parameters, named parameters, or groups. A group with use_muon=True (the default) holds
        parameters (..., R, C), each (R, C) a matrix. A group with use_muon=False goes to
        AdamW, or with the key rule to "lion", "sgd" or "sign" (docs/rules.md).
    lr (1e-3): learning rate, a number or a CPU tensor. Groups get tensors of their own.
    weight_decay (0.1): W is multiplied by 1 - lr weight_decay.
    momentum (0.95): mu in M <- mu M + (1 - mu) G. In AdamW groups: beta1.
    nesterov (True): orthogonalize (1 - mu) G + mu M; False: M.
    ns_coefficients ("polar_express"): name of a set, a triple, or ns_steps triples.
    eps (1e-7): added to the norm before the iteration, in units of a matrix's largest element.
    ns_steps (5): Newton-Schulz steps.
    adjust_lr_fn (None): factor on lr of an (R, C) matrix. None or "original": sqrt(max(1, R / C)).
        "match_rms_adamw" or "rms_norm": 0.2 sqrt(max(R, C)). "spectral_norm" or
        "spectral_unclamped": sqrt(R / C). "sqrt_max": sqrt(max(R, C)). "shape_scaling" and
        "unit_rms_norm" are Megatron-LM's names of "original" and "spectral_norm". A number > 0 is
        the factor of all shapes; a function of (R, C) returns it.
    decay ("decoupled"): form of weight decay in Muon's and AdamW's groups (rules/decay.py).
        "cautious": only elements whose update has not the opposite sign. "independent": by
        weight_decay, not times lr. "lr_squared": by lr^2 weight_decay. "initial": towards the
        weights before the first step, kept as state `initial_weight`.
    momentum_form ("ema"): "sum": M <- mu M + G, nesterov: orthogonalize G + mu M, kept as state
        `momentum_sum`, as in Dion and Motif. Equal to "ema" while momentum is constant.
        "bias_corrected": Nesterov's mix as in optax.contrib.muon, which gives G more weight in
        early steps (docs/groups.md). The key `momentum_steps` of a group counts the steps.
    rounding ("nearest"), rounding_seed (0): of the bf16 weights of Muon's groups. "stochastic":
        up or down at random, so that many small updates move a weight as far as in fp32
        (docs/memory.md). Equal bits on all layouts; `state_dict` keeps seed and count of steps.
    master_weights (None): "split16": fp32 weights of bf16 parameters, in all groups. State
        `weight_rest` (int16) has the bits that bf16 lacks (docs/memory.md).
    rule (None): what a step computes, in groups without a key `rule`: a name of docs/rules.md or a
        subclass of `Rule`. Options of the rule are keys of groups, and arguments beside `rule`.
        None: "muon", in `NorMuon` "normuon".
    adamw_betas ((0.9, 0.95)), adamw_eps (1e-8): defaults of `betas` and `eps` in AdamW groups.
    process_group (None): ranks with copies of plain (non-DTensor) parameters, or a 1-D DeviceMesh.
        The ranks split the work. None: every process steps plain parameters alone. A group may have
        a "process_group" of its own, also None: for experts that differ by rank (docs/groups.md).
    shard_state (False): True: owners alone keep the state of plain parameters.
    state_at_owners (False): True: state of DTensors that a rule reads at owners is stored there
        (docs/rules.md), not sent. Equal bits; all ranks call `state_dict` together.
    grads_are_reduced (True): False: gradients of plain parameters are not averaged over
        process_group. The optimizer averages (matrices in fp32, after rounding to wire_dtype), and
        owners alone keep the state.
    state_dtype (torch.float32): of momentum_buffer, exp_avg and exp_avg_sq; or bf16. torch.int8:
        momentum in 8 bits, with an fp32 scale for each 64 columns as state `momentum_scale`;
        groups with use_muon=False stay fp32. Their own key `state_dtype` may ask for 8 bits.
    wire_dtype (torch.bfloat16): of updates in all-to-alls, and of rounding on every layout, hence
        equal bits on all layouts; or fp32.
    ns_dtype (None): of Newton-Schulz products: fp16, bf16 or fp32. None: fp16, on CPUs fp32.
    workspace_bytes (None): bound on the memory of buckets and of the iteration. ValueError at the
        first step if one matrix per rank needs more. None: what pays, up to 2 GiB and 3 % of a
        GPU, 256 MiB on a CPU.
    capturable (False): True: on NVIDIA GPUs the second step is captured as a CUDA graph, with all
        collectives, and replayed. False: the parts between collectives are. Equal bits. lr,
        weight_decay, momentum and NorMuon's beta2 may change in every step; in AdamW groups a
        change of weight_decay or momentum costs a new capture (at most 8), and changes in every
        step prevent replay.
    nonfinite ("propagate"): effect of NaN or Inf in a gradient. "propagate": nothing is checked, a
        NaN spoils its matrix. "skip": the matrix (AdamW: parameter) keeps weight and state on every
        rank, and `skipped` counts. "raise": nothing changes on any rank, and the step, which waits
        for the device, raises RuntimeError.
    offload_state (False): True: momentum and all other state per element lies in host memory,
        pinned on CUDA, and is copied to the GPU and back in every step; an int: so many bytes of it
        stay on the GPU. Equal bits. No CUDA graphs. Call `wait` before you read `state`.
    overlap_backward (False): True: gradients are sent to owners during the backward inside
        `last_backward`. Each bucket has memory of its own. Equal bits.
    overlap_forward (False): True: on GPUs no stream waits for `step`. Each module of a model given
        to `updates_return_during` waits for the module's weights. Equal bits.
    qk_clip (None): a QKClip. After each step, queries and keys of heads with a logit above a
        threshold are scaled (QK-clip, arXiv 2507.20534). Parameters need names.
    unscale_in_step (None): who acts on the result of a torch.amp.GradScaler. False: the scaler, as
        with torch.optim.Muon: no call of `step` after Inf. True: `step`, as with AdamW(fused=True):
        gradients are unscaled in place, and all ranks skip the step without a wait of the host.
        None: True only if scalers of several ranks may find different results, and ranks would wait
        for missing peers: with grads_are_reduced=False or DTensors sharded over different ranks.
    """

    # Keys of a group besides Muon's. Class attributes must be constants, see `_start`
    _extra_keys = ()

    @with_parameters_of(MuonConfig, kind=inspect.Parameter.KEYWORD_ONLY)
    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: str | Sequence = "polar_express",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Scale = None,
        *,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        rule: str | type[Rule] | None = None,
        decay: str = DECOUPLED,
        momentum_form: str = MOMENTUM_FORMS[0],
        rounding: str = ROUNDINGS[0],
        rounding_seed: int = 0,
        master_weights: str | None = None,
        **options: object,
    ) -> None:
        extra = {key: options.pop(key) for key in self._extra_keys}
        rule_options = check.take_options(rule, options)
        self._adamw = {"betas": adamw_betas, "eps": adamw_eps}
        self._start(MuonConfig.of(options, Muon.__init__, rule))
        self._rule, self._rule_options = rule, rule_options
        self._store_weights_by(rounding, rounding_seed, master_weights)
        params = validation.readable(params)
        self._options.check(group_has_ranks=has_process_group(params))
        validation.check_adamw(adamw_betas, adamw_eps)
        process_group = self._options.process_group
        self._is_world = process_group is not None and process_group is dist.group.WORLD
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
                **({} if decay == DECOUPLED else {"decay": decay}),
                **({} if momentum_form == MOMENTUM_FORMS[0] else {"momentum_form": momentum_form}),
                **extra,
            },
        )
        attach_to(self._options.qk_clip, self.param_groups)
        check_environment(validation.device_of(self.param_groups))
        check_memory(self.param_groups)
        self._init_groups()
        self._has_all_groups = True
        # Needed during construction only; dropped, since it holds parameters
        self._first_members = validation.Members()

    def _start(self, options: MuonConfig) -> None:
        """Set all attributes, for `__init__` and for a copy, which torch makes without `__init__`.

        No attribute may have a default on the class: a wrapper of Lightning or Fabric derives a
        class from the optimizer's, and forwards only attributes missing on the derived class.
        """
        # The optimizer itself, also for methods called on a wrapper (`waits_for_updates`)
        self._itself = weakref.ref(self)
        self._options = options
        self._forward_overlap = ForwardOverlap(options.overlap_forward)
        self._backward_overlap = BackwardOverlap()
        self._beta1 = Beta1()
        self._live_keys = LiveKeys()
        self._has_all_groups = False  # the constructor has added all groups
        self._first_members = validation.Members()  # of the groups added by the constructor so far
        self._unscaling = Unscaling()
        self._timing = False
        self._collects = False
        self._why_unbound = NEVER_BOUND  # why plan_report() finds no plan
        self._half_way = False  # a step has begun and not ended
        self._consolidated = None  # result of consolidate_state_dict, until the next step
        self._skipped: torch.Tensor | None = None  # int64 count, on the device
        self._watch: Stopwatch | None = None  # times of the last step, with `timing`
        self._preparation = Preparation(options, state_place_for(options))
        self._own_process_groups = OwnProcessGroups()
        self._rule: str | type[Rule] | None = None  # of groups without a key `rule`
        self._rounding = ROUNDINGS[0], 0  # (rounding, seed) of groups without these keys
        self._master_weights: str | None = None  # of groups without the key
        self._rule_options: dict[str, object] = {}  # of `_rule`, for groups without these keys

    def _store_weights_by(self, rounding: object, seed: object, master_weights: object) -> None:
        """Keep the arguments on how new weights are stored; raises ValueError for wrong ones."""
        given = {"rounding": rounding, "rounding_seed": seed, MASTER_KEY: master_weights}
        group_values.check_rounding(given)
        group_values.check_counts(given)
        self._rounding = rounding, seed
        self._master_weights = master_weights

    @property
    @waits_for_updates
    def qk_clip(self) -> QKClip | None:
        """The QKClip given at construction, with the results of the last step; None without."""
        return self._options.qk_clip

    @property
    def timing(self) -> bool:
        """Whether to measure steps for `plan_report`; measured steps use no graph of the step."""
        return self._itself()._timing

    @timing.setter
    def timing(self, on: bool) -> None:
        self._itself()._timing = on

    @property
    def collect_metrics(self) -> bool:
        """Whether steps collect sums for `metrics`. Read when a step begins, or its
        `last_backward`. A change binds the next step anew, on this rank alone, and drops CUDA
        graphs: leave it on, and call `metrics` when you log.
        """
        return self._itself()._collects

    @collect_metrics.setter
    def collect_metrics(self, on: bool) -> None:
        group_values.require(isinstance(on, bool), "collect_metrics", on, "True or False")
        self._itself()._collects = on

    @waits_for_updates
    def add_param_group(self, param_group: dict) -> None:
        """Add a group with the keys of the class docstring; drops the plan. Raises TypeError,
        ValueError or NotImplementedError as the constructor does, with the optimizer unchanged.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, not {type(param_group).__name__}")
        given = dict(param_group)
        count = len(self.param_groups)
        self._backward_overlap.raise_if_started("add_param_group")
        with in_group(count, param_group):
            param_group = self._own_process_groups.take_key(param_group, self._options)
        members = (
            validation.Members(self.param_groups) if self._has_all_groups else self._first_members
        )
        try:
            with in_group(count, param_group):
                if group_values.is_adamw(param_group):
                    check.adopt_elementwise(param_group, self._adamw)
                validation.check_param_list(param_group, self.param_groups, members)
                super().add_param_group(param_group)
                self._read_rule_and_splits(self.param_groups[-1])
                members.add(self.param_groups[-1])
                self._check_new(self.param_groups[-1], given.get("momentum"), members.first)
            if self._has_all_groups:
                check_memory(self.param_groups)
            self._live_keys.add(count, self.param_groups[count], given, self._written())
        except Exception:
            del self.param_groups[count:]
            self._own_process_groups.drop_last()
            raise
        # During construction `__init__` does the work of `_init_groups` once, at the end
        if self._has_all_groups:
            self._init_groups()
        if self._bound.all_jobs:
            self._why_unbound = "after add_param_group(), which drops the plan"
        self._drop_plans()

    def _read_rule_and_splits(self, group: dict) -> None:
        """Give a new group the name and the options of its rule, and its own `split`, with the
        attributes of parameters read into it.
        """
        if self._master_weights is not None:
            group.setdefault(MASTER_KEY, self._master_weights)
        if group_values.is_adamw(group):
            return
        check.adopt(group, self._rule, group_keys.GROUP_KEYS, self._rule_options)
        adopt_rounding(group, *self._rounding)
        if is_corrected(group):
            group.setdefault(STEPS_KEY, 0)
        # Without a split there is no key: checkpoints from before keys were added have none, and
        # torch.distributed.checkpoint refuses to load fewer keys than groups have
        if "split" in group:
            group["split"] = copy.deepcopy(group["split"])
        units.read_attributes(group, list(names_in(group).values()))

    def _init_groups(self) -> None:
        """Give each group own tensors (such as lr), and set `momentum` of AdamW groups."""
        unshare_tensors(self.param_groups)
        self._beta1.follow(self.param_groups)

    def _arguments(self) -> dict[str, object]:
        """{name: value} of the arguments that no group can change."""
        return vars(self._options) | {f"adamw_{key}": value for key, value in self._adamw.items()}

    def _written(self) -> dict[str, object]:
        """{key: value} of what the optimizer itself writes into groups."""
        return {**self._adamw, **self._rule_options, **self.defaults}

    def _check_new(self, group: dict, momentum: object, first: tuple | None) -> None:
        """Raise ValueError or NotImplementedError for a new group. `momentum`: as given by the
        user, None if not given. `first`: see `Members`.
        """
        validation.check_group(group, self._extra_keys, self._arguments())
        validation.check_across_params([group], [self._options], first)
        validation.check_with_options(group, self._own_process_groups.last_options(self._options))
        if group_values.is_adamw(group):
            check_momentum(group, momentum, self.defaults["momentum"])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by torch.amp.GradScaler. True: the scaler calls `step` in any case, with attributes
        `grad_scale` and `found_inf`. False: the scaler unscales, and skips `step` after Inf.
        """
        itself = self._itself()
        return itself._unscaling.in_step(
            itself.param_groups, itself._options, itself._options_by_group()
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        itself = self._itself()
        itself._options = replace(itself._options, unscale_in_step=bool(value))
        itself._unscaling.set_answer(bool(value))

    # A graph break in a compiled training step: the optimizer captures graphs itself
    @torch._disable_dynamo
    @torch.no_grad()
    def step(
        self,
        closure: Callable | None = None,
        *,
        qk_logits: Mapping[str, torch.Tensor] | None = None,
    ) -> object:
        """Step all parameters; return the closure's loss. All ranks take the first step together,
        which makes the plan, and each step after a change of parameters or placements.

        `qk_logits`: {layer: (heads,)}, the largest logit of each head, as in `QKClip.record`.

        An error half-way names its bucket; then `step` raises RuntimeError until `load_state_dict`.
        """
        itself = self._itself()
        # As `_is_inconsistent`, without a call in each step
        if itself._half_way or itself._backward_overlap.failed:
            raise checks.inconsistent_error()
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if itself._options.qk_clip is not None or qk_logits is not None:
            itself._take_logits(qk_logits)
        scaled = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        device = validation.device_of(itself.param_groups)
        # On a CPU neither of the two contexts would do anything
        if device.type == "cpu" and not itself._forward_overlap.on:
            itself._step(*scaled)
            return loss
        wait_for_all = scaled != (None, None)
        with on_device(device), itself._forward_overlap.on_side_stream(device, wait_for_all):
            itself._step(*scaled)
        return loss

    def _take_logits(self, qk_logits: Mapping[str, torch.Tensor] | None) -> None:
        """Give maxima to the step. Raises as `QKClip.take`; ValueError if no QKClip takes them."""
        clip = self._options.qk_clip
        if clip is not None:
            self._forward_overlap.wait()  # the last step may still read the clip's maxima
            clip.take(qk_logits)
        elif qk_logits is not None:
            raise ValueError("qk_logits needs an optimizer with qk_clip=QKClip(...)")

    def _step(self, grad_scale: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Step without closure; raises as `step`. `grad_scale`, `found_inf`: of a GradScaler."""
        self._read_groups()
        # With started buckets an error leaves peers with sent gradients: no later step may run
        begun = self._options.overlap_backward and self._backward_overlap.has_started
        self._half_way = begun
        self._consolidated = None
        self._preparation.process_groups.begin_step()
        creates_state = not self.state and create.creates_state_only(self.param_groups, self.state)
        if begun:
            is_scaled = (grad_scale, found_inf) != (None, None)
            as_bound = self._preparation.is_as_bound(self.param_groups, self.state)
            self._backward_overlap.check_unchanged(as_bound, is_scaled)
        else:
            if self._options.overlap_backward:
                # Before binding anew, which replaces `_backward_overlap`
                self._backward_overlap.raise_if_changed()
            self._prepare(found_inf is not None)
            if grad_scale is not None:
                unscale(self._preparation.bound.stores, grad_scale)
        bound = self._preparation.bound
        seen = None if begun else self._preparation.fingerprint
        # Gradients of another form were copied: started buckets need the bound views, so only the
        # next step binds anew
        if bound.inputs.read_and_upload(seen, begun, creates_state):
            self._preparation.forget_memory()
        for hook in bound.hooks:
            hook.before_buckets(found_inf)
        self._half_way = True
        try:
            self._launch(bound)
            for hook in bound.hooks:
                hook.after_buckets()
        except BaseException:
            for hook in bound.hooks:
                hook.on_error()
            raise
        self._half_way = False
        self._preparation.process_groups.end_step()
        bound.inputs.drop_gradients()
        if bound.nonfinite is not None:
            self._count_skipped(bound.nonfinite, found_inf is None)
        # A step that only creates state is not counted
        if (bound.counting_groups or bound.drawing_groups) and bound.missing.has_stepped():
            count_momentum(bound.counting_groups)
            count_drawn(bound.drawing_groups)

    def _read_groups(self) -> None:
        """Adopt changed values of groups. Raises ValueError, naming the group, for wrong ones."""
        scheduled_values.check_scheduled_values(self.param_groups)
        self._live_keys.check(self.param_groups, self._extra_keys, self._arguments, self._written)
        self._beta1.follow(self.param_groups)

    def _count_skipped(self, nonfinite: NonfiniteFlags, may_raise: bool) -> None:
        """Add the flagged matrices of the step to `skipped`. `may_raise`: with nonfinite="raise"
        raise RuntimeError; False if a GradScaler has decided.
        """
        with create.outside_inference_mode():
            count = nonfinite.flags.count_nonzero()
        self._skipped = (
            count if self._skipped is None else self._skipped.to(count.device).add_(count)
        )
        if may_raise and self._options.nonfinite == "raise":
            nonfinite.raise_if_set()

    @property
    @waits_for_updates
    def skipped(self) -> torch.Tensor:
        """Number of matrices (AdamW: parameters) that this rank has skipped for NaN or Inf so far:
        int64, on the device.
        """
        if self._skipped is None:
            return torch.zeros(
                (), dtype=torch.int64, device=validation.device_of(self.param_groups)
            )
        return self._skipped.clone()

    def _launch(self, bound: BoundStep) -> None:
        """Run all bucket updates; with `capturable`, as a CUDA graph, and AdamW's parameters
        stepped where stored as a second graph.
        """
        if self._timing:
            self._watch = Stopwatch(bound.stores[0].device) if bound.stores else None
            return self._run(bound, self._watch.over(bound.all_jobs) if self._watch else [])
        if not self._options.capturable:
            return self._run(bound, bound.jobs)
        key = [store.host_constants() for store in bound.graphed_stores]
        graphs, adamw_graphs = self._preparation.graphs, self._preparation.adamw_graphs
        pipeline.run_beside(
            lambda: graphs(self._run, key, bound, bound.jobs), bound.adamw_jobs, adamw_graphs.stream
        )

    def _run(self, bound: BoundStep, jobs: Sequence[Job]) -> None:
        """Run bucket updates through the pipeline, and compare missing gradients."""
        with bound.missing.comparing() as closing:
            if self._options.overlap_backward:
                self._backward_overlap.run(jobs, closing)
            else:
                pipeline.run(jobs, closing)

    @waits_for_updates(reads_state=False)
    def last_backward(self) -> contextlib.AbstractContextManager:
        """Context manager for the backward of the last micro-batch before a step.

        With overlap_backward=True, a bucket is sent to the owners once all gradients of the bucket
        are there; gradients must not change from then until `step`. Else, and before the first
        step, does nothing. Raises RuntimeError if buckets were already sent.
        """
        if self._is_inconsistent:
            raise checks.inconsistent_error()
        self._read_groups()
        as_bound = self._preparation.is_as_bound(self.param_groups, self.state)
        as_bound = as_bound and self._bound.collects == self._collects
        if ready := as_bound and not self.timing:
            self._preparation.process_groups.begin_step()
            if self._options.overlap_backward:
                self._preparation.place.prefetch()
        return self._backward_overlap.allow_start(ready)

    @waits_for_updates
    def release(self) -> None:
        """Free the workspace and CUDA graphs, and drop all views of weights and state: memory that
        is freed or offloaded between steps is free at once. State and plan stay. The next step
        binds anew, with equal bits and without communication. Raises RuntimeError if buckets have
        started during backward.
        """
        self._backward_overlap.raise_if_started("release")
        self._bound.missing.wait()
        self._forward_overlap.release()
        self._preparation.unbind()
        self._forget_bound()
        self._why_unbound = NEVER_BOUND

    @property
    def _bound(self) -> BoundStep:
        """The bound step; without plans if nothing is bound."""
        return self._preparation.bound

    def _prepare(self, scaled: bool) -> None:
        """Plan and bind if anything has changed. `scaled`: a GradScaler decides about the step."""
        self._find_world()
        if self._preparation.is_current(self.param_groups, self.state, scaled, self._collects):
            return
        before = self._preparation.bound
        with create.outside_inference_mode(), collection_paused():
            setup = StepSetup(
                groups=self.param_groups,
                options=self._options,
                options_by_group=self._options_by_group(),
                compared=self._unscaling.resolve(self._options),
                scaled=scaled,
                collects=self._collects,
                overlap=self._forward_overlap if self._forward_overlap.on else None,
            )
            self._preparation.prepare(setup, self.state)
        bound = self._preparation.bound
        if bound is not before:
            self._watch = None
            overlapped = bound.jobs if self._options.overlap_backward else None
            self._backward_overlap = BackwardOverlap(overlapped, bound.inputs)
            self._forward_overlap.bind(bound.all_jobs, bound.stores)

    def _find_world(self) -> None:
        """Drop plans if torch.distributed was initialized anew. Raises as `check_process_group`."""
        if (world := world_now()) is self._preparation.world:
            return
        if self._preparation.world is not None:
            if self._options.process_group is not None:
                check_process_group(world, self._is_world)
            own = self._own_process_groups.mapped(lambda choice: found_again(choice, world))
            # Set after all checks have passed: a check that raises changes nothing
            self._own_process_groups = own
            if self._options.process_group is not None:
                self._options = replace(self._options, process_group=world)
        self._preparation.follow_world(world)
        self._forget_bound()

    def _drop_plans(self) -> None:
        """Drop plans and bound memory; the next step makes them anew. State stays."""
        self._preparation.drop_plans()
        self._forget_bound()

    def _forget_bound(self) -> None:
        """Forget the buckets and measured times of a step that is no longer bound."""
        self._watch = None
        self._backward_overlap = BackwardOverlap()


class NorMuon(Muon):
    """Muon with NorMuon's row normalization (arXiv 2510.05491, in the form of its authors' code):
    each row of an update is divided by the root of the row's mean square over time, then the update
    is scaled back to its Frobenius norm.

    Arguments of `Muon`, and:

    beta2 (0.95): decay of the mean square, in [0, 1); may be set per group. The mean squares are
        kept in fp32 as `second_moment` (..., R, 1), with K blocks of columns (..., R, K).
    """

    _extra_keys = ("beta2",)

    @with_parameters_of(Muon.__init__)
    def __init__(
        self, params: Iterable, *args: object, beta2: float = 0.95, **kwargs: object
    ) -> None:
        super().__init__(params, *args, beta2=beta2, **kwargs)
