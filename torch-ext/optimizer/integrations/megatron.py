"""`register_megatron_muon`: `Muon` as an optimizer of Megatron-Core 0.19.

Megatron's optimizers hold plain tensors: shards of tensor parallelism with attributes that say so,
and later fp32 copies in their places. `MegatronMuon` has the parameter groups and the state that
Megatron reads and writes, and steps views of the same memory, DTensors of the whole parameters.
"""

from __future__ import annotations

import enum
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..communication.redistribute import sharded_view
from ..muon import Muon
from .config import (
    ConfigError,
    dtype_of,
    in_config_terms,
    near,
    refuse_text,
    refuse_unknown,
    trial_matrix,
)

WHERE = "register_megatron_muon"
# Arguments of `Muon` that a user may give, besides the values of Megatron's config
OPTIONS = {
    "ns_coefficients": None,
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": None,
    "wire_dtype": None,
    "ns_dtype": None,
    "workspace_bytes": 0,
    "capturable": False,
    "nonfinite": None,
}
# Argument of `Muon` -> key of OptimizerConfig, for messages
CALLED = {
    "momentum": "muon_momentum",
    "nesterov": "muon_nesterov",
    "ns_coefficients": "muon_coefficient_type",
    "ns_steps": "muon_num_ns_steps",
    "adjust_lr_fn": "muon_scale_mode",
}
COEFFICIENTS = {
    "simple": "jordan",
    "quintic": "quintic",
    "polar_express": "polar_express",
    "cans": "cans",
    "aol": "aol",
    "deepseekv4": "deepseek_v4",
}
SCALES = {
    "spectral": lambda R, C: math.sqrt(max(R, C)),
    "shape_scaling": lambda R, C: math.sqrt(max(1.0, R / C)),
    "unit_rms_norm": lambda R, C: math.sqrt(R / C),
}
PRECISIONS = {"medium": None, "high": torch.float32, "highest": torch.float32}
# Names with which Megatron reads muon_scalar_optimizer
WITH_SCALAR_OPTIMIZER = "muon", "adaptive_muon"
NUMBERS = "lr", "weight_decay", "momentum"  # of a group, which schedules change
STATE = "momentum_buffer"  # also the name that Megatron's own muon uses
WITHOUT_SPLIT = "set muon_split_qkv=False to orthogonalize the whole matrix"
GATE_UP = re.compile(r"(^|\.)linear_fc1\.weight\d*$")


def register_megatron_muon(
    name: str = "muon", *, split_gate_up: bool = False, **options: object
) -> None:
    """Have Megatron-Core build `Muon` of this package for OptimizerConfig(optimizer=name), in place
    of an entry of that name. Call on every rank before Megatron builds the optimizer.

    Values come from the keys `muon_*` of OptimizerConfig. split_gate_up: orthogonalize gate and up
    of gated MLPs as two matrices. options: arguments of `Muon` from `OPTIONS`, which come before
    the config. Raises ImportError without Megatron-Core 0.19, ConfigError (a ValueError) or
    TypeError for arguments that are not allowed.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{WHERE}: name={name!r} is not allowed: it must be a text, the value of "
            "OptimizerConfig.optimizer"
        )
    if not isinstance(split_gate_up, bool):
        raise ConfigError(
            f"{WHERE}: split_gate_up={split_gate_up!r} is not allowed: it must be True or False"
        )
    registry = _registry()
    refuse_unknown(options, OPTIONS, WHERE)
    with in_config_terms(WHERE, called={key: key for key in OPTIONS}):
        for key, value in options.items():
            refuse_text(key, value, OPTIONS[key])
        options = {
            key: dtype_of(key, value) if key.endswith("_dtype") else value
            for key, value in options.items()
        }
        _try(options)
    registry._EMERGING_OPTIMIZERS[name] = registry.EmergingOptimizerEntry(
        optimizer_cls=MegatronMuon,
        init_state_fn=_init_state,
        config_to_kwargs=functools.partial(_arguments, split_gate_up, options),
    )


def _registry() -> ModuleType:
    """The module of Megatron-Core with the entries of optimizers. Raises ImportError without
    Megatron-Core, and for a version without the module.
    """
    try:
        import megatron.core
        import megatron.core.optimizer
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "megatron":
            raise  # a package that Megatron needs
        raise ImportError(
            f"{WHERE}: Megatron-Core cannot be imported ({error}): install megatron-core 0.19 or "
            "newer, or put its folder on PYTHONPATH"
        ) from error

    module = getattr(megatron.core.optimizer, "emerging_optimizers", None)
    if not hasattr(module, "EmergingOptimizerEntry"):
        version = getattr(megatron.core, "__version__", "this one")
        raise ImportError(
            f"{WHERE}: Megatron-Core {version} has no registry of optimizers: install "
            "megatron-core 0.19 or newer"
        )
    return module


def _try(arguments: Mapping) -> None:
    """Try arguments of `Muon`. Raises ValueError as the constructor does, without the number of a
    group.
    """
    try:
        Muon([trial_matrix()], **arguments)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("in group 0 (#0): ")) from error


def _init_state(optimizer: MegatronMuon, config: object = None) -> None:
    """Create missing state, which Megatron asks for before it loads a checkpoint."""
    optimizer.init_state()


def _arguments(
    split_gate_up: bool,
    options: Mapping,
    config: Any,
    model_chunks: Sequence[nn.Module],
    pg_collection: object,
) -> dict[str, object]:
    """The arguments of `MegatronMuon` for a config and a model of Megatron. The first two arguments
    are those of `register_megatron_muon`. Raises ConfigError, naming keys of the config.
    """
    is_layer_wise = config.use_layer_wise_distributed_optimizer
    is_layer_wise = is_layer_wise or config.optimizer.startswith("dist_")
    _check_scalar_optimizer(config)
    _check_data_parallel(model_chunks, is_layer_wise)
    given = {**_values(config), **options}
    numbers = {"lr": config.lr, "weight_decay": config.weight_decay}
    numbers["momentum"] = config.muon_momentum
    with in_config_terms("OptimizerConfig", called=CALLED):
        # Without lr the scheduler writes one into each group
        _try({**given, **numbers, "lr": 0.0 if config.lr is None else config.lr})
    traits = _traits_of_model(model_chunks, config.muon_split_qkv, split_gate_up)
    _check_query_groups(traits, functools.partial(_axes, pg_collection, False))
    return {
        **numbers,
        **given,
        "traits": traits,
        "groups": pg_collection,
        "has_copies": not is_layer_wise,
    }


def _check_scalar_optimizer(config: Any) -> None:
    """Raise ConfigError if Megatron does not read muon_scalar_optimizer."""
    name = config.optimizer.removeprefix("dist_")
    if config.muon_scalar_optimizer != "adam" and name not in WITH_SCALAR_OPTIMIZER:
        raise ConfigError(
            f"muon_scalar_optimizer={config.muon_scalar_optimizer!r} has no effect with "
            f"optimizer={name!r}: Megatron reads it for {' and '.join(WITH_SCALAR_OPTIMIZER)} "
            f"only. Call {WHERE} without name=, or leave muon_scalar_optimizer at 'adam'"
        )


def _check_data_parallel(model_chunks: Sequence[nn.Module], is_layer_wise: bool) -> None:
    """Raise ConfigError if ranks have parts of gradients, or of parameters, that are no shards."""
    ddp = getattr(model_chunks[0], "ddp_config", None)
    if getattr(ddp, "use_megatron_fsdp", False):
        raise ConfigError(
            "use_megatron_fsdp=True is not supported: parameters are ranges of flat buffers. Use "
            "use_layer_wise_distributed_optimizer=True"
        )
    if getattr(ddp, "use_distributed_optimizer", False) and not is_layer_wise:
        raise ConfigError(
            "use_distributed_optimizer=True of the DDP config needs "
            "use_layer_wise_distributed_optimizer=True of the optimizer config: without it a rank "
            "has the reduced gradients of a range of the buffer only"
        )


def _values(config: Any) -> dict[str, object]:
    """Arguments of `Muon` that Megatron's config names. Raises ConfigError for values that are not
    allowed.
    """
    scale = SCALES[_known(config, "muon_scale_mode", SCALES)]
    extra = config.muon_extra_scale_factor
    is_number = isinstance(extra, (int, float)) and not isinstance(extra, bool)
    if not (is_number and 0 < extra < math.inf):
        raise ConfigError(
            f"muon_extra_scale_factor={extra!r} is not allowed: it must be a finite number > 0"
        )
    if not isinstance(config.muon_split_qkv, bool):
        raise ConfigError(
            f"muon_split_qkv={config.muon_split_qkv!r} is not allowed: it must be True or False"
        )
    precision = _known(config, "muon_fp32_matmul_prec", PRECISIONS)
    return {
        "nesterov": config.muon_nesterov,
        "ns_coefficients": COEFFICIENTS[_known(config, "muon_coefficient_type", COEFFICIENTS)],
        "ns_steps": config.muon_num_ns_steps,
        "adjust_lr_fn": lambda R, C: extra * scale(R, C),
        "ns_dtype": PRECISIONS[precision],
    }


def _known(config: Any, key: str, allowed: Mapping[str, object]) -> str:
    """The value of a key of the config. Raises ConfigError unless it is one of `allowed`."""
    value = getattr(config, key)
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{key}: {value!r} is not allowed; {near(str(value), allowed)}")
    return value


@dataclass(frozen=True)
class Traits:
    """Facts about a parameter, from the attributes that Megatron's model sets on it."""

    name: str
    dim: int | None = None  # sharded by tensor parallelism; None: not sharded
    parts: int = 1  # matrices along `dim`, each of which is sharded
    is_expert: bool = False  # tensor parallelism is that of experts
    has_expert_copies: bool = False  # gradients are averaged over the copies of an expert
    is_gtp: bool = False  # rows are sharded by generalized tensor parallelism, too
    qkv: tuple[int, ...] | None = None  # rows of q, k and v in a query group, if they are units
    is_gate_up: bool = False  # gate and up are units
    padding: int = 0  # rows of zeros that GTP has added on each rank of tensor parallelism

    def split(self, rows: int) -> dict | None:
        """The key `split` of a parameter with `rows` rows on all ranks together. Raises ConfigError
        if the rows are no whole number of query groups.
        """
        if self.qkv is not None:
            if rows % sum(self.qkv):
                padded = f", of which {self.padding} are padding" if self.padding else ""
                raise ConfigError(
                    f"parameter {self.name}: it has {rows} rows{padded}, which are no multiple of "
                    f"the {sum(self.qkv)} rows {self.qkv} of a query group; {WITHOUT_SPLIT}"
                )
            return {"rows": list(self.qkv), "repeat": rows // sum(self.qkv)}
        return {"rows": [rows // 2, rows // 2]} if self.is_gate_up else None


def _traits_of_model(
    model_chunks: Sequence[nn.Module], split_qkv: bool, split_gate_up: bool
) -> dict[torch.Tensor, Traits]:
    """The traits of all parameters of the chunks of a model. Raises ConfigError, naming the
    parameter, if gate and up are interleaved with `split_gate_up`, and as `_traits`.
    """
    found = {}
    for number, chunk in enumerate(model_chunks):
        config = getattr(chunk, "config", None)
        qkv = _qkv_rows(config) if split_qkv else None
        for name, param in chunk.named_parameters():
            label = re.sub(r"^(module\.)+", "", name)
            label = label if len(model_chunks) == 1 else f"{number}.{label}"
            gated = _gated_kind(name, config)
            if split_gate_up and gated is Gated.INTERLEAVED:
                raise ConfigError(
                    f"parameter {label}: split_gate_up=True is not supported with "
                    "moe_mlp_glu_interleave_size, with which rows of gate and up take turns: leave "
                    "it out"
                )
            is_qkv = "linear_qkv.weight" in name or getattr(param, "is_qkv", False)
            is_split = split_qkv and is_qkv and _is_stepped(param)
            rows = _own_qkv_rows(param, label, qkv) if is_split else None
            found[param] = _traits(param, label, gated, rows, split_gate_up)
    return found


def _is_stepped(param: torch.Tensor) -> bool:
    """Whether Megatron gives a parameter to this optimizer, and not to Adam."""
    is_matrix = param.ndim == 2 and not getattr(param, "is_embedding_or_output_parameter", False)
    return param.requires_grad and is_matrix and getattr(param, "use_muon", True)


def _check_query_groups(
    traits: Mapping[torch.Tensor, Traits], axes_of: Callable[[Traits], Sequence]
) -> None:
    """Raise ConfigError if q, k and v of a parameter cannot be units. `axes_of`: the axes of a
    parameter, as of `_axes`.
    """
    for param, of in traits.items():
        if of.qkv is None:
            continue
        by_tp = [dim for _, dim in axes_of(replace(of, is_gtp=False))]
        if of.padding and 0 in by_tp:
            raise ConfigError(
                f"parameter {of.name}: muon_split_qkv=True is not supported with rows of padding "
                "(pad_length) on each rank of tensor parallelism, which would be taken for rows "
                f"of q, k and v; {WITHOUT_SPLIT}, or choose sizes that need no padding"
            )
        ranks = math.prod(group.size() for group, dim in axes_of(of) if dim == 0)
        of.split(param.shape[0] * ranks)


class Gated(enum.Enum):
    """How gate and up lie in a weight."""

    NONE = "another weight"
    IN_BLOCKS = "rows of gate, then rows of up"
    INTERLEAVED = "rows of gate and up take turns"


def _gated_kind(name: str, config: object) -> Gated:
    """How gate and up lie in the weight of a name."""
    if not GATE_UP.search(name) or not getattr(config, "gated_linear_unit", False):
        return Gated.NONE
    kinds = ("shared_experts", "moe_shared_expert"), ("experts", "moe_mlp")
    prefix = next((prefix for kind, prefix in kinds if kind in name), None)
    takes_turns = getattr(config, f"{prefix}_glu_interleave_size", None) is not None
    return Gated.INTERLEAVED if takes_turns else Gated.IN_BLOCKS


def _qkv_rows(config: Any) -> tuple[int, ...] | None:
    """Rows of q (and of its gate), k and v in a query group, for the config of a model."""
    heads = getattr(config, "num_attention_heads", None)
    groups = getattr(config, "num_query_groups", None)
    if not heads or not groups or getattr(config, "kv_channels", None) is None:
        return None
    query = heads // groups * config.kv_channels
    gate = (query,) if getattr(config, "attention_output_gate", False) else ()
    return (query, *gate, config.kv_channels, config.kv_channels)


def _own_qkv_rows(
    param: torch.Tensor, name: str, of_model: tuple[int, ...] | None
) -> tuple[int, ...]:
    """Rows of q, k and v in a query group of a parameter; `of_model`: by the config of its model.
    Raises ConfigError if they are unknown.
    """
    rows = getattr(param, "qkv_split_shapes", None) or of_model
    if rows is None:
        raise ConfigError(
            f"parameter {name}: the rows of q, k and v in a query group are unknown: the config of "
            "the model needs num_attention_heads, num_query_groups and kv_channels, or the "
            f"parameter qkv_split_shapes; {WITHOUT_SPLIT}"
        )
    return tuple(rows)


def _traits(
    param: torch.Tensor,
    name: str,
    gated: Gated = Gated.NONE,
    qkv: tuple[int, ...] | None = None,
    split_gate_up: bool = False,
) -> Traits:
    """The traits of a parameter by Megatron's attributes. Raises ConfigError if split_gate_up
    cannot be done.
    """
    dim = getattr(param, "partition_dim", -1)
    is_sharded = getattr(param, "tensor_model_parallel", False) and dim in range(param.ndim)
    is_gtp = getattr(param, "is_gtp_weight_remat", False)
    is_gate_up = split_gate_up and gated is Gated.IN_BLOCKS
    if is_gate_up and is_gtp:
        raise ConfigError(
            f"parameter {name}: split_gate_up=True is not supported with generalized tensor "
            "parallelism, which cuts through gate and up of a rank: leave it out"
        )
    # Muon steps a matrix with its rows in another order alike: interleaved rows need no own case
    parts = 2 if gated is Gated.IN_BLOCKS else getattr(param, "partition_stride", 1)
    return Traits(
        name,
        dim if is_sharded else None,
        # The order of rows does not matter for a whole matrix
        parts if is_sharded and not is_gtp else 1,
        getattr(param, "expert_tp", False),
        not getattr(param, "allreduce", True),
        is_gtp,
        qkv,
        is_gate_up,
        getattr(param, "pad_length", 0) if is_gtp else 0,
    )


class View(NamedTuple):
    """A parameter of Megatron, and the tensor that `Muon` steps in place of the parameter."""

    local: torch.Tensor  # of Megatron's groups
    # A view of `local` as a DTensor; `local` itself if it is whole, or a parameter in its memory:
    # fp32 main parameters do not require a gradient
    param: torch.Tensor
    grad: torch.Tensor | None  # a DTensor for the gradient of a view
    placed: Callable[[torch.Tensor], torch.Tensor]  # a plain tensor in the form of `param`
    name: str

    def lend_gradient(self) -> None:
        """Give `param` the memory and the gradient that `local` has now."""
        grad = self.local.grad
        if self.grad is None:
            self.param.data = self.local.data
        elif grad is not None:
            self.grad._local_tensor = grad
            grad = self.grad
        self.param.grad = grad

    def drop_gradient(self) -> None:
        """Take the gradient from `param`, so that Megatron can free it."""
        self.param.grad = None
        if self.grad is not None:
            self.grad._local_tensor = self.local


class MegatronMuon(torch.optim.Optimizer):
    """The optimizer that Megatron wraps. Megatron replaces parameters in its groups after the
    constructor, so the first step makes `muon`, and any step after a change makes it anew.

    State of a parameter is `momentum_buffer`, of the shape of the local shard.
    """

    def __init__(
        self,
        params: Sequence[dict],
        *,
        lr: float | None = None,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        traits: Mapping[torch.Tensor, Traits] | None = None,
        groups: Any = None,
        has_copies: bool = True,
        **options: object,
    ) -> None:
        """params: groups of Megatron. traits: of the parameters of the model. groups: Megatron's
        ProcessGroupCollection. has_copies: ranks of data parallelism hold the same parameters, and
        share the work. options: arguments of `Muon`.
        """
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self.muon: Muon | None = None  # None before the first step, and on ranks without parameters
        self._traits = dict(traits or {})
        self._groups = groups
        self._has_copies = has_copies
        self._options = options
        self._meshes: dict[tuple, object] = {}
        self._stepped: list[torch.Tensor] | None = None  # parameters of `muon`
        self._views: list[View] = []
        self._numbers: list[int] = []  # for each group of `muon`, the group of Megatron
        self._momenta: dict[torch.Tensor, torch.Tensor] = {}  # that `muon` knows

    def release(self) -> None:
        """Free the workspace, and drop views of weights and state: memory that is offloaded until
        the next step is free at once.
        """
        if self.muon is not None:
            self.muon.release()

    def init_state(self) -> None:
        """Create missing state, as zeros."""
        for group in self.param_groups:
            for param in group["params"]:
                self._momentum(param)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step all parameters by their attribute `grad`. Collective over tensor parallelism, and
        over data parallelism without Megatron's distributed optimizer. Raises ValueError for a
        closure, and for momentum of a wrong shape.
        """
        if closure is not None:
            raise ValueError("step: a closure is not supported, Megatron has computed the loss")
        params = [param for group in self.param_groups for param in group["params"]]
        if self._stepped is None or list(map(id, params)) != list(map(id, self._stepped)):
            self._bind(params)
        if self.muon is None:
            return
        for number, group in zip(self._numbers, self.muon.param_groups):
            group.update({key: self.param_groups[number][key] for key in NUMBERS})
        for view in self._views:
            self._follow_state(view)
        lent = [view for view in self._views if view.param is not view.local]
        for view in lent:
            view.lend_gradient()
        self.muon.step()
        for view in lent:
            view.drop_gradient()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict) -> None:
        """As in torch, but momentum becomes fp32, also for parameters of another dtype."""
        super().load_state_dict(state_dict)
        saved = state_dict["state"]
        for group, of in zip(self.param_groups, state_dict["param_groups"]):
            for param, number in zip(group["params"], of["params"]):
                momentum = saved.get(number, {}).get(STATE)
                # torch has rounded the momentum to the dtype of the parameter
                if momentum is not None and param.dtype != torch.float32:
                    self.state[param][STATE] = momentum.to(param.device, torch.float32, copy=True)

    def _momentum(self, param: torch.Tensor) -> torch.Tensor:
        """The momentum of a parameter in fp32, created if missing."""
        state = self.state[param]
        if STATE not in state:
            state[STATE] = torch.zeros_like(param, dtype=torch.float32, requires_grad=False)
        if state[STATE].dtype != torch.float32:
            state[STATE] = state[STATE].float()
        return state[STATE]

    def _follow_state(self, view: View) -> None:
        """Give `muon` the momentum, if it was created, loaded or moved. Raises ValueError for a
        momentum of another shape than the shard.
        """
        momentum = self._momentum(view.local)
        if self._momenta.get(view.local) is not momentum:
            if momentum.shape != view.local.shape:
                raise ValueError(
                    f"parameter {view.name}: its {STATE} has the shape {tuple(momentum.shape)}, "
                    f"but this rank holds a shard of shape {tuple(view.local.shape)}: load a "
                    "checkpoint of the same tensor parallelism, or one in Megatron's format "
                    "torch_dist"
                )
            self._momenta[view.local] = momentum
            self.muon.state[view.param] = {STATE: view.placed(momentum)}

    def _bind(self, params: list[torch.Tensor]) -> None:
        """Make `muon` of the parameters that the groups hold now."""
        models = {
            id(param.main_param): param for param in self._traits if hasattr(param, "main_param")
        }
        self._views, self._numbers, groups, self._momenta = [], [], [], {}
        for number, group in enumerate(self.param_groups):
            members = []
            for param in group["params"]:
                traits = self._traits.get(models.get(id(param), param))
                if traits is None:
                    traits = _traits(param, f"#{len(self._views)}")
                view = self._place(param, traits)
                self._views.append(view)
                members.append((traits.name, view.param, traits.split(view.param.shape[0])))
            if members:
                self._numbers.append(number)
                numbers = {key: group[key] for key in NUMBERS}
                groups.append({"params": [member[:2] for member in members], **numbers})
                if any(split for *_, split in members):
                    groups[-1]["split"] = [split for *_, split in members]
        self.muon = Muon(groups, **self._options) if groups else None
        self._stepped = params

    def _place(self, param: torch.Tensor, traits: Traits) -> View:
        """The view of a parameter."""
        axes = _axes(self._groups, self._has_copies, traits)
        if not axes:
            whole = param if param.requires_grad else nn.Parameter(param.detach())
            return View(param, whole, None, lambda tensor: tensor, traits.name)
        groups, dims = zip(*axes)
        if groups not in self._meshes:
            self._meshes[groups] = _mesh_of(groups, param.device.type)

        parts = 1 if dims[-1] is None else traits.parts

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            """Return the DTensor whose shard is `tensor`, also after `tensor.data` has moved."""
            found = sharded_view(tensor, self._meshes[groups], dims, parts).detach()
            found._local_tensor = tensor
            return found

        view = sharded_view(param, self._meshes[groups], dims, parts)
        return View(param, view, view.detach(), placed, traits.name)


def _axes(
    groups: Any, has_copies: bool, traits: Traits
) -> list[tuple[dist.ProcessGroup, int | None]]:
    """[(process group of Megatron, dim that its ranks shard, None: copies)] of a parameter,
    without groups of one rank. Arguments: as of `MegatronMuon`.
    """
    prefix = "expt_" if traits.is_expert else ""
    named = []
    if has_copies:
        named.append(("expt_dp" if traits.has_expert_copies else "dp_cp", None))
    if traits.dim is not None:
        named.append((f"{prefix}tp", traits.dim))
    if traits.is_gtp:
        named.append((f"{prefix}gtp_remat", 0))
    found = [(getattr(groups, name, None), dim) for name, dim in named]
    return [(group, dim) for group, dim in found if group is not None and group.size() > 1]


def _mesh_of(groups: Sequence[dist.ProcessGroup], device_type: str) -> object:
    """The DeviceMesh with one axis for each of `groups`. The ranks of Megatron's groups are sums of
    one term for each kind of parallelism, so the ranks of the mesh are sums, too.
    """
    from torch.distributed.device_mesh import DeviceMesh

    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device_type)
    here = dist.get_rank()
    ranks = torch.tensor(here, device="cpu")
    for group in groups:
        members = torch.tensor(dist.get_process_group_ranks(group), device="cpu")
        ranks = ranks[..., None] + members - here
    names = tuple(f"axis{i}" for i in range(len(groups)))
    return DeviceMesh.from_group(list(groups), device_type, ranks, mesh_dim_names=names)
