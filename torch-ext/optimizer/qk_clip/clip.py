"""`QKClip`: threshold, attention layers and recorded maxima of QK-clip (arXiv 2507.20534).

The public class. hook.py scales the weights during a step. Sends nothing.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from ..params.dtensor import raw_locals
from ..params.errors import first_few, given_names, shortened, warn_caller
from . import logits, models
from .largest import LargestLogits
from .layers import SHARED_KEYS, AttentionLayer, parse_layer


class QKClip:
    """QK-clip (arXiv 2507.20534): after a step, queries and keys of each head with a logit above
    the threshold are scaled, such that the largest logit becomes the threshold.

    threshold (100.0): tau, above 0. May be changed between steps.
    layers: {layer: {"heads": n, "kv_heads": n, "weights": {parameter name: role or blocks}}}, see
        docs/qk_clip.md. `QKClip.of(model)` finds the layers of known attention modules.
    shared_keys ("keep"): factors where several query heads share a key head. With gamma = tau / S
        of a head: "keep" scales the head's queries by gamma and no keys. "shrink" scales the keys
        by the smallest sqrt(gamma) among their heads, and queries by the rest, at most 1.
    heads_dim (None): name of the mesh dim over which attention heads are sharded (TP). Needed only
        if a rank gives maxima of its own heads and sizes do not tell the dim.
    process_group (None): further ranks that see other batches of the same layers, for parameters
        that the optimizer steps without these ranks. The ranks of a DTensor's mesh, and of the
        process_group of a parameter group or the optimizer, are known.

    Belongs to one optimizer: `Muon(..., qk_clip=QKClip(...))`. Raises ValueError or TypeError for
    values that are not allowed.
    """

    def __init__(
        self,
        threshold: float = 100.0,
        layers: Mapping[str, Mapping] | None = None,
        *,
        shared_keys: str = "keep",
        heads_dim: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(layers, Mapping) or not layers:
            raise ValueError(
                "layers must be a dict {layer: heads and weights} with at least one layer, not "
                f"{shortened(repr(layers))}; QKClip.of(model) makes it for known attention modules"
            )
        if not isinstance(shared_keys, str) or shared_keys not in SHARED_KEYS:
            raise ValueError(
                f"shared_keys={shortened(repr(shared_keys))} must be one of {SHARED_KEYS}"
            )
        if heads_dim is not None and not isinstance(heads_dim, str):
            raise ValueError(
                f"heads_dim={shortened(repr(heads_dim))} must be the name of a mesh dim, or None"
            )
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(
                f"process_group={shortened(repr(process_group))} is no process group of which this "
                "rank is a member"
            )
        self.threshold = threshold
        self.shared_keys = shared_keys
        self.heads_dim = heads_dim
        self.process_group = process_group
        self.layers: dict[str, AttentionLayer] = {}  # in the order of their names
        for name in sorted(layers, key=str):
            if not isinstance(name, str):
                raise TypeError(f"the name of a layer must be text, not {shortened(repr(name))}")
            try:
                self.layers[name] = parse_layer(layers[name])
            except (TypeError, ValueError) as error:
                raise type(error)(f"layer {shortened(name)}: {error}") from None
        # Parameter name -> (index of the group, index in the group); set by `attach`
        self._places: dict[str, tuple[int, int]] = {}
        # By device. The step may read `_taken` on a stream of its own, while the next forward
        # already records
        self._recorded: dict[torch.device, LargestLogits] = {}  # by `record`, for the next step
        self._taken: dict[torch.device, LargestLogits] = {}  # by `take`, for the running step
        self.counts: dict[str, int] = {}  # heads of this rank, of each layer with maxima so far
        self._results: tuple[torch.Tensor, ...] | None = None  # see `set_results`
        self._silent_steps = 0  # steps before the first recorded maxima

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        threshold: float = 100.0,
        *,
        exclude: Iterable[str] = (),
        **options: object,
    ) -> QKClip:
        """A QKClip of all attention layers of `model`, as `models.find_layers` finds them.

        `exclude`: paths of modules to be left out, with everything below. `options`: further
        arguments of the class. Raises ValueError, naming the module, if queries and keys cannot be
        told, or if a norm between projection and logits makes scaling useless.
        """
        return cls(threshold, models.find_layers(model, exclude), **options)

    @property
    def threshold(self) -> float:
        """tau. Raises ValueError for anything but a finite number above 0."""
        return self._threshold

    @threshold.setter
    def threshold(self, value: float) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise ValueError(f"threshold={shortened(repr(value))} must be a finite number above 0")
        self._threshold = float(value)

    def __getstate__(self) -> dict:
        """For copies and pickles: a process group is kept by name."""
        group = getattr(self.process_group, "group_name", None)
        return {**vars(self), "process_group": group}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        if isinstance(self.process_group, str):
            self.process_group = dist.distributed_c10d._resolve_process_group(self.process_group)

    def attach(self, groups: Sequence[dict]) -> None:
        """Find the parameters of all layers in the parameter groups of an optimizer, by name.

        Raises ValueError, naming the parameter, for an unknown or doubled name, a parameter of two
        layers, or a wrong shape;
        RuntimeError if another optimizer has the object already.
        """
        if self._places:
            raise RuntimeError(
                "this QKClip belongs to another optimizer already: build one for each optimizer"
            )
        places: dict[str, tuple[int, int]] = {}
        doubled = set()
        for number, group in enumerate(groups):
            for index, name in enumerate(given_names(group)):
                doubled |= {name} & places.keys()
                places[name] = number, index
        found = {}
        for layer_name, layer in self.layers.items():
            for name in layer.weights:
                label = f"layer {shortened(layer_name)}: parameter {shortened(name)}"
                if name not in places or name in doubled:
                    what = "is twice" if name in doubled else "is not"
                    raise ValueError(
                        f"{label} {what} among the names of the optimizer. Pass named parameters, "
                        "such as model.named_parameters() or get_default_muon_param_groups(model)."
                        " Layers with frozen parameters must be left out"
                    )
                if name in found:
                    other = next(key for key, one in self.layers.items() if name in one.weights)
                    raise ValueError(
                        f"{label} is in layer {shortened(other)}, too: describe both by one layer, "
                        "which gets the maxima of both"
                    )
                found[name] = places[name]
                _check_shape(self.param(groups, name, found), layer, name, label, self.shared_keys)
        self._places = found

    def param(
        self, groups: Sequence[dict], name: str, places: Mapping[str, tuple] | None = None
    ) -> torch.Tensor:
        """The parameter of a name, which may have been replaced since `attach` (FSDP2)."""
        number, index = (places or self._places)[name]
        return groups[number]["params"][index]

    def group_index(self, name: str) -> int:
        """The index of the parameter group that holds the parameter of a name."""
        return self._places[name][0]

    @torch.no_grad()
    def record(self, layer: str, maxima: torch.Tensor) -> None:
        """Add the largest logits of the heads of a layer, over a batch, for the next step.

        `maxima`: (heads,), of all heads or of the heads of this rank (TP). May be called several
        times between steps (micro-batches): the largest counts. NaN and +Inf are left out, and
        counted in `nonfinite`; -Inf means no logit. Raises ValueError for an unknown layer or
        shape.
        """
        (maxima,) = raw_locals([maxima])
        values = self._checked(layer, maxima)
        self._on(values.device, self._recorded).add((layer,), (values,))

    def _checked(self, layer: str, maxima: torch.Tensor | Sequence[float]) -> torch.Tensor:
        """Return the maxima of a layer, given by this rank, as a tensor. Raises ValueError as
        `record` does.
        """
        known = self.layers.get(layer)
        if known is None:
            raise ValueError(
                f"there is no layer {shortened(repr(layer))}; there are {first_few(self.layers)}"
            )
        if not isinstance(maxima, torch.Tensor):
            maxima = torch.as_tensor(maxima, dtype=torch.float32, device="cpu")
        count = maxima.numel()
        if maxima.ndim != 1 or not 0 < count <= known.heads or known.heads % count:
            raise ValueError(
                f"maxima of layer {layer} have the shape {tuple(maxima.shape)}, not "
                f"({known.heads},): one for each query head (under TP: of this rank)"
            )
        before = self.counts.setdefault(layer, count)
        if before != count:
            raise ValueError(
                f"maxima of layer {layer} had {before} heads before, and now {count}: "
                "give maxima of as many heads in every call"
            )
        return maxima

    def _on(self, device: torch.device, kept: dict[torch.device, LargestLogits]) -> LargestLogits:
        """The part of `kept` on a device."""
        found = kept.get(device)
        if found is None:
            heads = {name: layer.heads for name, layer in self.layers.items()}
            found = kept[device] = LargestLogits(heads, device)
        return found

    @torch.no_grad()
    def take(self, given: Mapping[str, torch.Tensor] | None = None) -> None:
        """Give `given`, {layer: maxima}, and all recorded maxima to the step that begins. Raises
        TypeError if `given` is no mapping, and ValueError as `record` does.
        """
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"qk_logits must be a dict {{layer: maxima}}, not {type(given).__name__}"
            )
        given = {layer: maxima for layer, maxima in (given or {}).items() if maxima is not None}
        of_device: dict[torch.device, dict[str, torch.Tensor]] = {}
        for layer, maxima in zip(given, raw_locals(given.values())):
            values = self._checked(layer, maxima)
            of_device.setdefault(values.device, {})[layer] = values
        if not self.counts:
            self._count_silent_step()
        # Maxima that a failed step has not read are still in `_taken`: new maxima are added
        for device, maxima in of_device.items():
            self._on(device, self._taken).add(tuple(maxima), [*maxima.values()])
        for device, recorded in self._recorded.items():
            taken = self._on(device, self._taken).values
            torch.maximum(taken, recorded.values, out=taken)
            recorded.empty()

    def _count_silent_step(self) -> None:
        """Count a step before the first recorded maxima, and warn at the second one: the first may
        be the step by which get_optimizer_state_dict creates state.
        """
        self._silent_steps += 1
        if self._silent_steps == 2:
            warn_caller(
                "qk_clip has no attention logits on this rank, and without logits it scales no "
                "head: run the forward inside `with opt.qk_clip.recording(model):`, or give maxima "
                "to opt.qk_clip.record() or to opt.step(qk_logits=...)"
            )

    def taken_on(self, device: torch.device) -> LargestLogits:
        """The maxima of the running step, on `device`; `set_results` empties the maxima."""
        found = self._on(device, self._taken)
        for other in self._taken.values():
            if other is not found:
                torch.maximum(found.values, other.values.to(device), out=found.values)
        return found

    @torch.no_grad()
    def forget(self, layer: str) -> None:
        """Drop the maxima of a layer whose heads are unknown, so that new maxima can be given."""
        del self.counts[layer]
        for kept in (*self._recorded.values(), *self._taken.values()):
            kept.forget(layer)

    @torch.no_grad()
    def set_results(self, results: tuple[torch.Tensor, ...], offsets: Mapping[str, int]) -> None:
        """Called by a step. `results`: (maxima of all heads, number of clipped heads, number of
        heads with NaN or Inf). `offsets`: index in the first of the first head of each layer.
        """
        self._results = *results, offsets
        for taken in self._taken.values():
            taken.empty()

    @property
    def maxima(self) -> dict[str, torch.Tensor]:
        """{layer: fp32 (heads,)}: the largest logit of each head over all ranks in the last step,
        -inf without. Empty before the first step. Views, which the next step overwrites.
        """
        if self._results is None:
            return {}
        values, *_, offsets = self._results
        return {name: values[at : at + self.layers[name].heads] for name, at in offsets.items()}

    @property
    def clipped(self) -> torch.Tensor:
        """Number of heads that the last step has clipped, on all ranks: int64, on the device.
        The next step overwrites the tensor.
        """
        return _no_heads() if self._results is None else self._results[1]

    @property
    def nonfinite(self) -> torch.Tensor:
        """Number of heads for which NaN or Inf was recorded before the last step: int64, on the
        device. The next step overwrites the tensor.
        """
        return _no_heads() if self._results is None else self._results[2]

    def recording(self, model: torch.nn.Module) -> contextlib.AbstractContextManager:
        """Context manager: `scaled_dot_product_attention`, called in modules of `model` with the
        names of the layers, records maxima. Not for compiled modules, see docs/qk_clip.md.

        Raises ValueError if `model` has no module of a layer's name.
        """
        return logits.Recording(model, self.layers, self.record)

    def digest_text(self, names: Iterable[str]) -> str:
        """The settings, and the layers with a parameter among `names`: ranks compare the text."""
        names = set(names)
        layers = [item for item in self.layers.items() if names & item[1].weights.keys()]
        has_group = self.process_group is not None
        return repr((self.threshold, self.shared_keys, self.heads_dim, has_group, layers))


def unattached(clip: QKClip) -> QKClip:
    """Return a copy of `clip` that belongs to no optimizer, without logits and results."""
    found = copy.copy(clip)
    found._places, found._recorded, found._taken, found._results = {}, {}, {}, None
    found.counts = {}
    found._silent_steps = 0
    return found


def _check_shape(
    param: torch.Tensor, layer: AttentionLayer, name: str, label: str, shared_keys: str
) -> None:
    """Raise ValueError if a parameter cannot hold its blocks."""
    dim = layer.weights[name].dim
    if param.ndim not in (1, 2) or dim >= param.ndim:
        raise ValueError(
            f"{label} of shape {tuple(param.shape)} must be a matrix, or a vector with rows (bias)"
        )
    if not param.is_floating_point():
        raise ValueError(
            f"{label} has the dtype {param.dtype}, which cannot be scaled: leave the layer out"
        )
    try:
        layer.slots(name, param.shape[dim], shared_keys)
    except ValueError as error:
        raise ValueError(f"{label} of shape {tuple(param.shape)}: {error}") from None


def _no_heads() -> torch.Tensor:
    """The count of heads before the first step."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def attach_to(clip: object, groups: Sequence[dict]) -> None:
    """Give the argument `qk_clip` of an optimizer its parameters, see `QKClip.attach`. Raises
    TypeError unless it is a QKClip or None.
    """
    if clip is None:
        return
    if not isinstance(clip, QKClip):
        raise TypeError(
            f"qk_clip must be a QKClip or None, not {type(clip).__name__}: QKClip.of(model, "
            "threshold=...) makes one"
        )
    clip.attach(groups)
