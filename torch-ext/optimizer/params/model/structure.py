"""`Structure`: facts about a model, computed once, for the classification of its parameters.

Finds lists of layers, input sizes of layers, embeddings, adapters, outputs and experts, from module
types, shapes and paths alone: no forward pass, no source code. "Later" means later in the order of
registration, the best available guess at the order of execution.
"""

from __future__ import annotations

import collections
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

# fmt: off
# Names of modules that merely contain a model: a head beside them is a head of the model. The last
# two are names of peft and of trl.
TOPS = (
    "model", "transformer", "language_model", "net", "backbone", "base_model", "pretrained_model"
)
FEW = 16  # a gate has few rows if it has at most 1/16 as many as columns
NORM = re.compile(r"Norm(Gated)?\d*d?$")  # no LayerNormLinear, which is a linear layer as well
NUMBERED = re.compile(r"^(.*?)_?(\d+)$")  # "0", "layer1", "block_2"
# fmt: on


class Place(NamedTuple):
    """A name of a parameter, without wrappers' prefixes, and the module that holds the parameter.
    Tied parameters have several places.
    """

    name: str
    module: nn.Module


class Layer(NamedTuple):
    """A module with parameters of its own, not only in children."""

    path: str  # without wrappers' prefixes and adapters
    module: nn.Module
    inputs: frozenset[int]  # lengths of input vectors (channels of convolutions)
    matrices: int  # number of own parameters with two or more dims


class Structure:
    """The facts about a model on which the kind of a parameter depends.

    A path is the dotted name of a module without wrappers' prefixes. A list is a group of numbered
    children of a module (layers.0, layers.1, ...), an element a member of a list. A root is the
    path of a model; a composite model has several roots.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        """modules: {path: module} of all modules with parameters in or below the module, in the
        order of registration.
        """
        self.modules = modules
        self.children: dict[str, list[str]] = collections.defaultdict(list)  # path -> child paths
        for path in modules:
            if path:
                self.children[path.rpartition(".")[0]].append(path)
        # Path of a module with an adapter -> name of the child with the original layer
        self.hosts = {path: kind for path, module in modules.items() if (kind := _adapted(module))}
        self.layers = self._find_layers()
        # Path of an element -> whether all elements of the list are of one kind, as layers are,
        # unlike the steps of an nn.Sequential
        self.repeated: dict[str, bool] = {}
        for parent in list(self.children):
            self._find_lists(parent)
        self.roots = self._find_roots()
        # Cache of `_experts_in`: path -> numbers of experts
        self.experts: dict[str, set[int]] = {}

    def _find_lists(self, parent: str) -> None:
        """Add the lists among the children of `parent` to `self.repeated`: layers.0, layers.1, ...,
        or layer1, layer2, ... of one type.
        """
        lists = collections.defaultdict(list)
        for path in self.children[parent]:
            found = NUMBERED.match(path.rpartition(".")[2])
            if found:
                lists[found[1], None if found[1] == "" else type(self.modules[path])].append(path)
        for (stem, _), paths in lists.items():
            # Children named fc1, fc2 are single layers: elements of such a list have children
            if stem == "" or len(paths) > 1 and all(self.children[path] for path in paths):
                alike = len({self._signature(path) for path in paths}) == 1
                self.repeated.update(dict.fromkeys(paths, alike))

    def _signature(self, path: str) -> tuple:
        """A value that is equal for two modules of one kind: type and names of children, or, for a
        module without children, type and shapes of parameters.
        """
        module, children = self.modules[path], self.children[path]
        inner = [child[len(path) :] for child in children] or [
            tuple(p.shape) for p in own_parameters(module)
        ]
        return type(module), tuple(inner)

    def _find_roots(self) -> set[str]:
        """The paths of models: going down from "", modules without a matrix of their own are passed
        over while they hold a single child, or complete models only (a vision tower and a language
        model, for example).
        """
        roots: set[str] = set()
        paths = [""] if self.modules else []
        while paths:
            path = paths.pop()
            inner = [
                child for child in self.children[path] if self._has_matrix(child, recurse=True)
            ]
            alone = len(inner) == len(self.children[path]) == 1 and bool(self.children[inner[0]])
            models = len(inner) > 1 and all(self._is_model(child) for child in inner)
            if (alone or models) and not self._has_matrix(path, recurse=False):
                paths += inner
            else:
                roots.add(path)
        return roots

    def _has_matrix(self, path: str, recurse: bool) -> bool:
        """Whether a module has a parameter of two or more dims; `recurse`: also in children."""
        params = self.modules[path].parameters(recurse)
        return any(
            p.ndim > 1 for p in params if not isinstance(p, nn.parameter.UninitializedTensorMixin)
        )

    def _is_model(self, path: str) -> bool:
        """Whether a module has a list of layers inside, and is neither the container of the list
        (nn.ModuleList) nor an element of a list of equal elements.
        """
        is_list = any(self.repeated.get(child, False) for child in self.children[path])
        return self.has_list(path) and not is_list and not self.repeated.get(path, False)

    def root_of(self, path: str) -> str:
        """The path of the model to which the module at `path` belongs."""
        return next((above for above in upwards(path) if above in self.roots), "")

    def _find_layers(self) -> list[Layer]:
        """A `Layer` for each module with own parameters, in the order of registration.

        Adapters are left out: their sizes are LoRA ranks, not sizes of the model.
        """
        layers: dict[str, Layer] = {}
        for path, module in self.modules.items():
            host = self.host_of(path)
            inner = path if host in (None, path) else self._inner(path, host)
            if inner is not None and inner not in layers and own_parameters(module):
                layers[inner] = _layer(inner, module)
        return list(layers.values())

    def host_of(self, path: str) -> str | None:
        """The path of the innermost module, at or above `path`, to which an adapter was added
        (peft); None without adapter.
        """
        return next((above for above in upwards(path) if above in self.hosts), None)

    def _inner(self, path: str, host: str) -> str | None:
        """The path of a module in the model before the adapter was added, for a path below `host`,
        a module with an adapter; None for modules of the adapter.
        """
        # Number of path parts inserted by peft: "modules_to_save" is followed by the adapter's name
        rest = path[len(host) + 1 :].split(".")
        skip = {"base_layer": 1, "original_module": 1, "modules_to_save": 2}.get(rest[0])
        return None if skip is None else ".".join([host, *rest[skip:]])

    def place_in_model(self, place: Place) -> tuple[str, nn.Module | None]:
        """(path, module) of the layer of a parameter. For a tensor of an adapter: (path of the
        adapted layer, None).
        """
        path = place.name.rpartition(".")[0]
        host = self.host_of(path)
        if host is None or path == host:
            return path, place.module if host is None else None
        inner = self._inner(path, host)
        return (host, None) if inner is None else (inner, place.module)

    def base_of(self, host: str) -> nn.Module:
        """The original layer below `host`, the path of a module with an adapter; the module at
        `host` without adapter. Adapters may be nested.
        """
        module = self.modules[host]
        while kind := _adapted(module):
            module = module._modules[kind]
        return module

    def is_hidden_size(self, size: int, root: str) -> bool:
        """Whether `size` is a hidden size of the model at `root`: an input size of a layer in a
        list, or of a module without matrices (a norm) outside lists.
        """
        return any(
            size in layer.inputs
            for layer in self._layers_below.get(root, ())
            if (layer.matrices > 0 if self._is_listed(layer.path, root) else layer.matrices == 0)
        )

    def _is_listed(self, path: str, root: str) -> bool:
        """Whether the module at `path` is an element of a list below `root`, or in an element."""
        return any(above in self.repeated for above in upwards(path) if _is_inside(above, root))

    def is_in_list(self, path: str) -> bool:
        """Whether a module is an element of a list of its model, or inside an element."""
        return self._is_listed(path, self.root_of(path))

    def has_list(self, path: str, outside: str | None = None) -> bool:
        """Whether a list is inside the module at `path`; lists in or below the module at `outside`
        do not count.
        """
        return any(
            _is_inside(element, path) and (outside is None or not _is_below(element, outside))
            for element in self.repeated
        )

    def is_input_of_later_layer(self, size: int, path: str, root: str) -> bool:
        """Whether `size` is an input size of a layer below `root` and later than all layers of the
        module at `path`.
        """
        # Convolutions do not count, see `_inputs_beside`
        layers = self._layers_below.get(root, [])
        last = max(
            (i for i, layer in enumerate(layers) if _is_below(layer.path, path)),
            default=len(layers),
        )
        return any(
            size in layer.inputs
            for layer in layers[last + 1 :]
            if not isinstance(layer.module, nn.modules.conv._ConvNd)
        )

    def is_repeated(self, path: str) -> bool:
        """Whether the module at `path` is in a list of its model with elements of one kind: layers,
        not the unlike steps of an nn.Sequential.
        """
        root = self.root_of(path)
        return any(
            self.repeated.get(above, False) for above in upwards(path) if _is_inside(above, root)
        )

    def vocabulary(self, path: str) -> tuple[str, torch.Size] | None:
        """(root, shape): the nearest module at or above `path` with an nn.Embedding at or below it,
        and the shape of the largest embedding at or below it; None without embedding.
        """
        for root in upwards(path):
            shapes = [
                module.weight.shape
                for at, module in self.modules.items()
                if isinstance(module, nn.Embedding) and _is_below(at, root)
            ]
            if shapes:
                return root, max(shapes, key=math.prod)
        return None

    def is_placed_as_head(self, unit: str, rows: int, vague: bool) -> bool:
        """Whether the module at `unit` is beside the body of a model, where output layers are.

        rows: output size of the module; vague: whether hidden layers often have the module's name.
        At the top of a model the place decides, unless `rows` is an input size of a later layer.
        Below the top, a list must be beside the module, or `rows` must not be an input size of any
        layer beside the module.
        """
        holder = unit.rpartition(".")[0]
        root = self.root_of(unit)
        inside = holder[len(root) :].strip(".") if _is_below(holder, root) else ""
        if all(part in TOPS for part in inside.split(".") if part):
            # For a vague name only layers after the whole model count: layers of the model may well
            # have an input of the size of the model's output.
            return not self.is_input_of_later_layer(
                rows, root if vague else unit, "" if vague else holder
            )
        lists = (
            above for above in upwards(holder) if above in self.repeated and _is_inside(above, root)
        )
        element = next(lists, None)
        if not vague and holder != element and not any(self._inputs_beside(holder, unit)):
            # The module is alone in its holder: the place of the holder counts
            return self.is_placed_as_head(holder, rows, vague)
        has_list = self.has_list(holder, unit)
        first, others = self._inputs_beside(holder, unit)
        if element is None and has_list:
            if not vague:
                return not self.is_input_of_later_layer(rows, unit, holder)
            return not (
                rows in first
                or self.is_hidden_size(rows, holder)
                or self.is_input_of_later_layer(rows, unit, root)
            )
        if element is not None and not has_list and (element != holder or self.repeated[element]):
            return False
        return rows not in others and (
            bool(others) or not vague and bool(first) and rows not in first
        )

    def _inputs_beside(self, holder: str, unit: str) -> tuple[frozenset[int], set[int]]:
        """(input sizes of the first layer, input sizes of all further layers), of the layers below
        `holder` and outside `unit`. Norms before the first layer count in both.

        The first layer gets the input of the holder, and the output may well have an equal size.
        Convolutions are left out: the number of classes may equal the number of channels by chance.
        """
        layers = [
            layer
            for layer in self._layers_below.get(holder, ())
            if not _is_below(layer.path, unit)
            and not isinstance(layer.module, nn.modules.conv._ConvNd)
        ]
        first = next(
            (i for i, layer in enumerate(layers) if layer.matrices and layer.inputs), len(layers)
        )
        others = layers[:first] + layers[first + 1 :]
        return (
            frozenset().union(*(layer.inputs for layer in layers[: first + 1])),
            set().union(*(layer.inputs for layer in others)),
        )

    def is_output(self, path: str, unit: str, rows: int) -> bool:
        """Whether the layer at `path` makes the output of the module at `unit`: the layer with the
        only matrix; or a layer with an output size unlike all input sizes of the module and, inside
        a list, the last layer of an element.

        rows: output size of the layer; 0 for a tensor of no linear layer, accepted only as the only
        matrix.
        """
        layers = [layer for layer in self._layers_below.get(unit, ()) if layer.matrices]
        if sum(layer.matrices for layer in layers) < 2:
            return True
        # The first layer gets the input of the module, of any size
        others = layers if layers[0].path == path else layers[1:]
        if not rows or any(rows in layer.inputs for layer in others):
            return False
        inner = [
            above
            for above in upwards(path)
            if above in self.repeated and above.startswith(f"{unit}.")
        ]
        return (
            not inner
            or path == [layer.path for layer in layers if _is_below(layer.path, inner[-1])][-1]
        )

    def is_router(
        self, param: torch.Tensor, path: str, router: bool, gate: bool, linear: bool
    ) -> bool:
        """Whether `param`, a matrix at `path` with a row for each expert, is a router or a gate of
        few rows. A named tensor of no linear layer may also have a column for each expert.

        path: of the layer; of a bare tensor, its own name. router, gate: whether name or type say
        router or gate. linear: whether the matrix belongs to a linear layer of the model; a linear
        layer with as many rows as there are experts beside it is a router under any name.
        """
        named = router or gate
        rows, columns = param.shape
        # Beside many experts a gate of a gated linear unit may have a row for each of them
        if not (named or linear) or linear and not router and rows >= columns:
            return False
        counts = self.expert_counts(path, levels=2 if named else 1)
        # A 3-D parameter of the linear layer itself is no stack of experts beside it
        if linear and not named:
            counts = counts - {p.shape[0] for p in own_parameters(self.modules[path]) if p.ndim > 2}
        if not linear and columns < rows and rows not in counts:  # x @ W
            rows, columns = columns, rows
        by_experts = rows in counts
        is_small = rows < columns and (router or gate and rows * FEW <= columns)
        if not by_experts and not is_small:
            return False
        # A name and the number of experts decide, whatever is beside the matrix
        if rows == 1 or router and by_experts:
            return True
        parent = path.rpartition(".")[0]
        return not self._has_twin(param, path, parent) and (
            by_experts
            or not any(
                rows in layer.inputs and layer.path != path
                for layer in self._layers_below.get(parent, ())
            )
        )

    def _has_twin(self, param: torch.Tensor, path: str, parent: str) -> bool:
        """Whether a matrix of the shape of `param` is beside it, in the module at `parent` or in a
        child: the other half of a gated linear unit. Layers of experts, which are further down, and
        biases of a stack of experts do not count.
        """
        return any(
            p is not param and p.shape == param.shape and not is_bias_of_experts(p, layer.module)
            for layer in self._layers_near.get(parent, ())
            if layer.path != path
            for p in own_parameters(layer.module)
        )

    @functools.cached_property
    def _layers_near(self) -> dict[str, list[Layer]]:
        """Path -> layers at the path, or one step below."""
        # Every router asks: a search among all layers would take a time of layers x routers
        found = collections.defaultdict(list)
        for layer in self.layers:
            for path in {layer.path, layer.path.rpartition(".")[0]}:
                found[path].append(layer)
        return found

    @functools.cached_property
    def _layers_below(self) -> dict[str, list[Layer]]:
        """Path -> layers at the path or below."""
        found = collections.defaultdict(list)
        for layer in self.layers:
            for path in upwards(layer.path):
                found[path].append(layer)
        return found

    def is_without_decay(self, name: str) -> bool:
        """Whether a module of the model lists a parameter in its method `no_weight_decay`, as
        models of timm do: names within the module. Raises TypeError for a method that needs
        arguments or returns no names.
        """
        return name in self._without_decay

    @functools.cached_property
    def _without_decay(self) -> set[str]:
        """Names of parameters that methods `no_weight_decay` list."""
        found = set()
        for path, module in self.modules.items():
            listed = getattr(module, "no_weight_decay", None)
            if not callable(listed):
                continue
            try:
                names = set(listed() or ())
            except TypeError as error:
                raise TypeError(
                    f"no_weight_decay() of module {path or 'the model'} raised {error!r}: it must "
                    "take no arguments and return names of parameters within the module"
                ) from error
            found |= {f"{path}.{name}" if path else name for name in names}
        return found

    def expert_counts(self, path: str, levels: int) -> set[int]:
        """The possible numbers of experts beside the module at `path`: lengths of lists, first dims
        of 3-D stacks.

        levels: number of enclosing modules to search.
        """
        return set().union(*map(self._experts_in, list(upwards(path))[1 : levels + 1]))

    def _experts_in(self, root: str) -> set[int]:
        """The possible numbers of experts in the module at `root` and its children."""
        # Cached: every linear layer of every expert asks for the same module
        if root not in self.experts:
            paths = (root, *self.children[root])
            modules = [self.modules[path] for path in paths]
            stacks = [
                p
                for module in modules
                if not isinstance(module, nn.modules.conv._ConvNd)
                for p in own_parameters(module)
                if p.ndim == 3 and 1 not in p.shape
            ]
            lists = [
                len(self.children[path])
                for path in paths[1:]
                if "expert" in path.rpartition(".")[2]
            ]
            self.experts[root] = {p.shape[0] for p in stacks} | set(lists) - {0}
        return self.experts[root]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer, by type: nn.Linear, linear layers of tensor parallelism
    and of quantization (class name), Conv1D of transformers.
    """
    return (
        isinstance(module, nn.Linear)
        or re.search(r"Linear$|^Conv1D$", type(module).__name__) is not None
    )


def upwards(path: str) -> Iterator[str]:
    """Yield a path and the paths of all enclosing modules, up to the root, ""."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _is_below(path: str, root: str) -> bool:
    """Whether a path is `root` or below `root`."""
    return not root or path == root or path.startswith(f"{root}.")


def _is_inside(path: str, root: str) -> bool:
    """Whether a path is below `root`."""
    return path != root and _is_below(path, root)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module without its children, except lazy parameters (no shape)."""
    return [
        p
        for p in module.parameters(recurse=False)
        if not isinstance(p, nn.parameter.UninitializedTensorMixin)
    ]


def is_bias_of_experts(param: torch.Tensor, module: nn.Module) -> bool:
    """Whether `param`, of `module`, is 2-D with a row for each matrix of a stack (E, R, C) of the
    module, as long as a row or a column: (E, R) or (E, C).
    """
    stacks = [p.shape for p in own_parameters(module) if p.ndim == 3]
    return any(tuple(param.shape) in ((e, r), (e, c)) for e, r, c in stacks)


def _adapted(module: nn.Module) -> str | None:
    """The name of the child with the original layer of a module with an adapter (peft), or with the
    copy that is trained instead; None without adapter.
    """
    names = ("base_layer", "original_module", "modules_to_save")
    return next((name for name in names if module._modules.get(name) is not None), None)


def _layer(path: str, module: nn.Module) -> Layer:
    """The `Layer` of a module with own parameters."""
    params = own_parameters(module)
    matrices = [p for p in params if p.ndim > 1]
    if isinstance(module, nn.Embedding):
        sizes = set()
    elif isinstance(module, nn.modules.conv._ConvNd):
        sizes = {module.in_channels}
    elif is_linear(module):
        sizes = {p.shape[0 if type(module).__name__ == "Conv1D" else -1] for p in matrices}
    else:
        norm = NORM.search(type(module).__name__)
        # Norms: lengths of vectors. Unknown types: both sides of each matrix, also in stacks, since
        # either may be the input
        sizes = {size for p in (params if norm else matrices) for size in p.shape[-2:]}
    return Layer(path, module, frozenset(sizes), len(matrices))
