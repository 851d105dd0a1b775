"""A model described once, for the classification of its parameters: its lists of layers, the sizes
that its layers take as input, its embeddings, its adapters, and where its outputs are. Knows
neither parameter groups nor ranks.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

# fmt: off
# Modules around a model that are no part of its structure. The last two are those of peft and of
# trl.
TOPS = (
    "model", "transformer", "language_model", "net", "backbone", "base_model", "pretrained_model"
)
FEW = 16  # a gate has few rows if it has at most 1/16 as many as columns
NORM = re.compile(r"Norm(Gated)?\d*d?$")  # no LayerNormLinear, which is a linear layer as well
NUMBERED = re.compile(r"^(.*?)_?(\d+)$")
# fmt: on


class Place(NamedTuple):
    """One of the names of a parameter, without wrappers' prefixes, and the module that holds it."""

    name: str
    module: nn.Module


class Layer(NamedTuple):
    """A module with parameters of its own: its path without adapters, the sizes that it takes as
    input, and how many matrices it holds.
    """

    path: str
    module: nn.Module
    inputs: frozenset[int]
    matrices: int


class Structure:
    """The parts of a model that decide what a parameter is. Paths are without the prefixes of
    wrappers.

    modules: {path: module} of all modules with parameters in or below them, in the model's order.
    """

    def __init__(self, modules: dict[str, nn.Module]):
        self.modules = modules
        self.children: dict[str, list[str]] = collections.defaultdict(list)
        for path in modules:
            if path:
                self.children[path.rpartition(".")[0]].append(path)
        self.hosts = {path: kind for path, module in modules.items() if (kind := _adapted(module))}
        self.layers = self._find_layers()
        # Path of an element of a list -> whether all elements are of one kind
        self.repeated: dict[str, bool] = {}
        for parent in list(self.children):
            self._find_lists(parent)
        self.roots = self._find_roots()
        # Path -> numbers of experts there, of paths that were asked for
        self.experts: dict[str, set[int]] = {}

    def _find_lists(self, parent: str) -> None:
        """Note the numbered children of a module: layers.0, layers.1, or layer1, layer2 of one
        type.
        """
        lists = collections.defaultdict(list)
        for path in self.children[parent]:
            found = NUMBERED.match(path.rpartition(".")[2])
            if found:
                lists[found[1], None if found[1] == "" else type(self.modules[path])].append(path)
        for (stem, _), paths in lists.items():
            # Not fc1, fc2
            if stem == "" or len(paths) > 1 and all(self.children[path] for path in paths):
                alike = len({self._signature(path) for path in paths}) == 1
                self.repeated.update(dict.fromkeys(paths, alike))

    def _signature(self, path: str) -> tuple:
        """Equal for two modules of one kind: the type and the children, or the shapes where there
        are none.
        """
        module, children = self.modules[path], self.children[path]
        inner = [child[len(path) :] for child in children] or [
            tuple(p.shape) for p in _own_parameters(module)
        ]
        return type(module), tuple(inner)

    def _find_roots(self) -> set[str]:
        """The paths of models. A module that holds nothing but models, or a single module, is no
        part of them.
        """
        roots, paths = set(), [""] if self.modules else []
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
        params = self.modules[path].parameters(recurse)
        return any(
            p.ndim > 1 for p in params if not isinstance(p, nn.parameter.UninitializedTensorMixin)
        )

    def _is_model(self, path: str) -> bool:
        """Whether a module has lists of layers, and is neither such a list nor one of its layers."""
        is_list = any(self.repeated.get(child, False) for child in self.children[path])
        return self.has_list(path) and not is_list and not self.repeated.get(path, False)

    def root_of(self, path: str) -> str:
        """The path of the model that a module belongs to."""
        return next((above for above in _upwards(path) if above in self.roots), "")

    def _find_layers(self) -> list[Layer]:
        """One layer for each path, without the tensors of adapters, whose sizes (ranks) say nothing
        about the model.
        """
        layers: dict[str, Layer] = {}
        for path, module in self.modules.items():
            host = self.host_of(path)
            inner = path if host in (None, path) else self._inner(path, host)
            if inner is not None and inner not in layers and _own_parameters(module):
                layers[inner] = _layer(inner, module)
        return list(layers.values())

    def host_of(self, path: str) -> str | None:
        """The innermost module at or above a path to which an adapter was added (peft)."""
        return next((above for above in _upwards(path) if above in self.hosts), None)

    def _inner(self, path: str, host: str) -> str | None:
        """The path that a module below an adapted one would have without the adapter; None for the
        adapter's own.
        """
        rest = path[len(host) + 1 :].split(".")
        skip = {"base_layer": 1, "original_module": 1, "modules_to_save": 2}.get(rest[0])
        return None if skip is None else ".".join([host, *rest[skip:]])

    def place_in_model(self, place: Place) -> tuple[str, nn.Module | None]:
        """(path, module) of the layer that a parameter belongs to. An adapter belongs to the layer
        that it was added to: the path is that layer's, and the module None.
        """
        path = place.name.rpartition(".")[0]
        host = self.host_of(path)
        if host is None or path == host:
            return path, place.module if host is None else None
        inner = self._inner(path, host)
        return (host, None) if inner is None else (inner, place.module)

    def base_of(self, host: str) -> nn.Module:
        """The layer to which an adapter was added."""
        module = self.modules[host]
        while kind := _adapted(module):
            module = module._modules[kind]
        return module

    def is_taken_inside(self, size: int, root: str) -> bool:
        """Whether a size is one of the hidden sizes of a model: that which a layer in its lists
        takes, or a norm beside these lists.
        """
        return any(
            size in layer.inputs
            for layer in self.layers
            if _is_below(layer.path, root)
            and (layer.matrices > 0 if self._is_listed(layer.path, root) else layer.matrices == 0)
        )

    def _is_listed(self, path: str, root: str) -> bool:
        return any(above in self.repeated for above in _upwards(path) if _is_inside(above, root))

    def is_in_list(self, path: str) -> bool:
        """Whether a module is, inside of its model, an element of a list, or in one."""
        return self._is_listed(path, self.root_of(path))

    def has_list(self, path: str, outside: str | None = None) -> bool:
        """Whether a list of layers is inside of a module, and not inside of `outside`, one of the
        modules there.
        """
        return any(
            _is_inside(element, path) and (outside is None or not _is_below(element, outside))
            for element in self.repeated
        )

    def is_taken_later(self, size: int, path: str, root: str) -> bool:
        """Whether a layer behind the module at `path`, below `root`, takes `size` as input.
        Convolutions do not count, for the reason given in `_inputs_beside`.
        """
        layers = [layer for layer in self.layers if _is_below(layer.path, root)]
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
        """Whether a path is, inside of its model, in a list of modules of one kind, as layers are,
        unlike parts of a pipeline.
        """
        root = self.root_of(path)
        return any(
            self.repeated.get(above, False) for above in _upwards(path) if _is_inside(above, root)
        )

    def vocabulary(self, path: str) -> tuple[str, torch.Size] | None:
        """(path of the nearest module around a path that has an nn.Embedding, shape of the largest
        one there).
        """
        for root in _upwards(path):
            shapes = [
                module.weight.shape
                for at, module in self.modules.items()
                if isinstance(module, nn.Embedding) and _is_below(at, root)
            ]
            if shapes:
                return root, max(shapes, key=math.prod)
        return None

    def is_placed_as_head(self, unit: str, rows: int, vague: bool) -> bool:
        """Whether a module stands beside the body of a model, where output layers are.

        unit: the path of the module; rows: the size of its output; vague: whether hidden layers
        often have its name. At the top of a model the place decides, unless a later layer takes the
        output. (A vague name is decided by the layers behind the whole model there, since its own
        may take the size of its output as input, too.) Below the top, a list of layers must be
        beside the module, or its output must be of a size that no layer beside takes.
        """
        holder = unit.rpartition(".")[0]
        root = self.root_of(unit)
        inside = holder[len(root) :].strip(".") if _is_below(holder, root) else ""
        if all(part in TOPS for part in inside.split(".") if part):
            return not self.is_taken_later(rows, root if vague else unit, "" if vague else holder)
        lists = (
            above
            for above in _upwards(holder)
            if above in self.repeated and _is_inside(above, root)
        )
        element = next(lists, None)
        if not vague and holder != element and not any(self._inputs_beside(holder, unit)):
            # Alone in a module: that one's place counts
            return self.is_placed_as_head(holder, rows, vague)
        has_list = self.has_list(holder, unit)
        first, others = self._inputs_beside(holder, unit)
        if element is None and has_list:
            if not vague:
                return not self.is_taken_later(rows, unit, holder)
            return not (
                rows in first
                or self.is_taken_inside(rows, holder)
                or self.is_taken_later(rows, unit, root)
            )
        if element is not None and not has_list and (element != holder or self.repeated[element]):
            return False
        return rows not in others and (
            bool(others) or not vague and bool(first) and rows not in first
        )

    def _inputs_beside(self, holder: str, unit: str) -> tuple[frozenset[int], set[int]]:
        """The sizes that the first layer below `holder` and outside `unit` takes, and those that
        the others take. The first one takes what comes from outside, which the output may well have
        the size of. Convolutions do not count, whose few channels may be as many as there are
        classes.
        """
        layers = [
            layer
            for layer in self.layers
            if _is_below(layer.path, holder)
            and not _is_below(layer.path, unit)
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
        """Whether the layer at `path` is an output of the module `unit`: the module itself, or a
        layer in it whose output is of a size that no layer of the module takes, and that ends its
        element of a list.

        rows: the size of the output; 0 for a tensor that is no linear layer's, which must be the
        only matrix.
        """
        layers = [layer for layer in self.layers if _is_below(layer.path, unit) and layer.matrices]
        if sum(layer.matrices for layer in layers) < 2:
            return True
        # The first one takes what comes from outside
        others = layers if layers[0].path == path else layers[1:]
        if not rows or any(rows in layer.inputs for layer in others):
            return False
        inner = [
            above
            for above in _upwards(path)
            if above in self.repeated and above.startswith(f"{unit}.")
        ]
        return (
            not inner
            or path == [layer.path for layer in layers if _is_below(layer.path, inner[-1])][-1]
        )

    def is_router(
        self, param: torch.Tensor, path: str, router: bool, gate: bool, linear: bool
    ) -> bool:
        """Whether the matrix (rows, columns) at a path is a router or a gate of few rows.

        router, gate: what its name or type says; linear: whether it is a linear layer of the model,
        which the number of experts beside may show to be a router.
        """
        rows, columns = param.shape
        named = router or gate
        if not (named or linear) or rows >= columns:
            return False
        by_experts = rows in self.expert_counts(path, levels=2 if named else 1)
        if not (by_experts or router or gate and rows * FEW <= columns):
            return False
        parent = path.rpartition(".")[0]
        beside = [
            layer for layer in self.layers if _is_below(layer.path, parent) and layer.path != path
        ]
        twins = [
            p
            for layer in beside
            for p in _own_parameters(layer.module)
            if p.shape == param.shape and p is not param
        ]
        return (
            rows == 1
            or not twins
            and (by_experts or not any(rows in layer.inputs for layer in beside))
        )

    def expert_counts(self, path: str, levels: int) -> set[int]:
        """How many experts there are beside a module: lengths of lists, first dimensions of 3-D
        stacks.

        levels: how many of the modules around it are searched.
        """
        return set().union(*map(self._experts_in, list(_upwards(path))[1 : levels + 1]))

    def _experts_in(self, root: str) -> set[int]:
        """The numbers of experts of a module and its children; kept, since each expert may ask for
        them.
        """
        if root not in self.experts:
            paths = (root, *self.children[root])
            modules = [self.modules[path] for path in paths]
            stacks = [
                p
                for module in modules
                if not isinstance(module, nn.modules.conv._ConvNd)
                for p in _own_parameters(module)
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
    """By type: nn.Linear, the linear layers of tensor parallelism and of quantization, Conv1D of
    transformers.
    """
    return (
        isinstance(module, nn.Linear)
        or re.search(r"Linear$|^Conv1D$", type(module).__name__) is not None
    )


def _upwards(path: str) -> Iterator[str]:
    """A path, the path of the module around it, and so on up to the root, ""."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _is_below(path: str, root: str) -> bool:
    """Whether a path is `root` or below it."""
    return not root or path == root or path.startswith(f"{root}.")


def _is_inside(path: str, root: str) -> bool:
    """Whether a path is below `root`."""
    return path != root and _is_below(path, root)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module itself, without lazy ones, which have no shape."""
    return [
        p
        for p in module.parameters(recurse=False)
        if not isinstance(p, nn.parameter.UninitializedTensorMixin)
    ]


def _adapted(module: nn.Module) -> str | None:
    """The name of the child that an adapter (peft) was added to, or that is trained in its place;
    None: no adapter.
    """
    names = ("base_layer", "original_module", "modules_to_save")
    return next((name for name in names if module._modules.get(name) is not None), None)


def _layer(path: str, module: nn.Module) -> Layer:
    """The record of a module that has parameters of its own."""
    params = _own_parameters(module)
    matrices = [p for p in params if p.ndim > 1]
    if isinstance(module, nn.Embedding):
        sizes = set()
    elif isinstance(module, nn.modules.conv._ConvNd):
        sizes = {module.in_channels}
    elif is_linear(module):
        sizes = {p.shape[0 if type(module).__name__ == "Conv1D" else -1] for p in matrices}
    else:
        norm = NORM.search(type(module).__name__)
        # Of a stack, those of one
        sizes = {size for p in (params if norm else matrices) for size in p.shape[-2:]}
    return Layer(path, module, frozenset(sizes), len(matrices))
