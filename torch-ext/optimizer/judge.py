"""Classify one parameter of a model: a hidden matrix for Muon, or one of the kinds that AdamW steps.

`Structure` describes the model once: its lists of layers, the sizes that its layers take as input, its embeddings, its
adapters. `classify` decides about one parameter from shapes and module types first, from the parameter's place in the
model second, and from names last. Knows neither parameter groups nor ranks.
"""
from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

# Parts of a split, in the order of the groups.
MUON, EMBEDDINGS, HEADS, OTHER, NO_DECAY = PARTS = ("muon", "embeddings", "heads", "other", "no_decay")

# Output layers under any module: of language models, of question answering, BERT's next sentence, ELECTRA, DiT and
# Flux, DeepSeek's next tokens.
HEAD_NAMES = ("lm_head", "embed_out", "unembed", "output_layer", "to_logits", "qa_outputs", "seq_relationship",
              "dense_prediction", "final_layer.linear", "shared_head.head")
# Output layers only beside the body of a model, since layers inside a model have such names as well.
PLACED = re.compile(r"^(heads?|head_dist|score|classifier(_\w+)?|aux\d)$|_(heads?|classifier|predictor|pred|logits)$")
VAGUE_NAMES = ("output",)  # there, too, unless the output has the size that the first layer beside it takes
# Vague as well, and only where the module is the layer itself and no container.
LONE_NAMES = ("fc", "proj_out", "decoder", "last_linear", "classif", "final_layer", "final_linear", "head_linear")
NO_OUTPUTS = ("proj", "projection", "projector", "pooler")  # words in the names of layers between parts of a model
# Modules around a model that are no part of its structure. The last two are those of peft and of trl.
TOPS = ("model", "transformer", "language_model", "net", "backbone", "base_model", "pretrained_model")

EMBEDDING_NAMES = ("wte", "wpe")  # besides names with "embed" in them
# Last words in the names of tensors whose rows are vectors that are learned one by one.
LEARNED = ("latents", "latent", "queries", "query", "table", "codebook", "codevectors", "prompt", "prompts", "probe",
           "prototypes", "centroids", "slots", "registers", "ape")
# Tensors of Mamba, S4 and RWKV that multiply states element by element, and of graph attention.
ELEMENTWISE = ("A_log", "A_real", "log_A_real", "inv_A_real", "A_imag", "time_faaaa", "time_decay", "time_first", "r_k",
               "att", "att_src", "att_dst", "att_edge", "attn_l", "attn_r")
SCALES = ("scale", "scales", "alpha", "beta", "gamma", "gain", "logits")  # last words in names of others
# Tensors of adapters (peft) that hold vectors, logits or packed blocks: OFT (triangles of skew-symmetric matrices),
# C3A (first columns of circulant blocks), HRA (Householder vectors), VB-LoRA (a bank of vectors, logits), RandLoRA.
PACKED = ("oft_R", "c3a_kernel", "hra_u", "vblora_logits_A", "vblora_logits_B", "vblora_vector_bank",
          "randlora_lambda", "randlora_gamma")
ROUTERS, GATES = ("router", "routers", "gating"), ("gate", "gates", "wg")  # words in names
FEW = 16  # a gate has few rows if it has at most 1/16 as many as columns
NORM = re.compile(r"Norm(Gated)?\d*d?$")  # no LayerNormLinear, which is a linear layer as well
NORM_NAME = re.compile(r"(^|_)norm\d*$")
LOSS = re.compile(r"Loss$|ArcFace|CosFace|AMSoftmax")  # modules whose matrices are output layers
NUMBERED = re.compile(r"^(.*?)_?(\d+)$")


class Kind(NamedTuple):
    """A decision: the part of the split that takes a parameter, and the reason in words."""
    part: str
    why: str


class Place(NamedTuple):
    """One of the names of a parameter, without wrappers' prefixes, and the module that holds it."""
    name: str
    module: nn.Module


class Layer(NamedTuple):
    """A module with parameters of its own: its path without adapters, the sizes that it takes as input, and how many
    matrices it holds.
    """
    path: str
    module: nn.Module
    inputs: frozenset[int]
    matrices: int


class Structure:
    """The parts of a model that decide what a parameter is. Paths are without the prefixes of wrappers.

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
        self.repeated: dict[str, bool] = {}  # path of an element of a list -> whether all elements are of one kind
        for parent in list(self.children):
            self._find_lists(parent)
        self.roots = self._find_roots()
        self.experts: dict[str, set[int]] = {}  # path -> numbers of experts there, of paths that were asked for

    def _find_lists(self, parent: str) -> None:
        """Note the numbered children of a module: layers.0, layers.1, or layer1, layer2 of one type."""
        lists = collections.defaultdict(list)
        for path in self.children[parent]:
            found = NUMBERED.match(path.rpartition(".")[2])
            if found:
                lists[found[1], None if found[1] == "" else type(self.modules[path])].append(path)
        for (stem, _), paths in lists.items():
            if stem == "" or len(paths) > 1 and all(self.children[path] for path in paths):  # not fc1, fc2
                alike = len({self._signature(path) for path in paths}) == 1
                self.repeated.update(dict.fromkeys(paths, alike))

    def _signature(self, path: str) -> tuple:
        """Equal for two modules of one kind: the type and the children, or the shapes where there are none."""
        module, children = self.modules[path], self.children[path]
        inner = [child[len(path):] for child in children] or [tuple(p.shape) for p in _own_parameters(module)]
        return type(module), tuple(inner)

    def _find_roots(self) -> set[str]:
        """The paths of models. A module that holds nothing but models, or a single module, is no part of them."""
        roots, paths = set(), [""] if self.modules else []
        while paths:
            path = paths.pop()
            inner = [child for child in self.children[path] if self._has_matrix(child, recurse=True)]
            alone = len(inner) == len(self.children[path]) == 1 and bool(self.children[inner[0]])
            models = len(inner) > 1 and all(self._is_model(child) for child in inner)
            if (alone or models) and not self._has_matrix(path, recurse=False):
                paths += inner
            else:
                roots.add(path)
        return roots

    def _has_matrix(self, path: str, recurse: bool) -> bool:
        params = self.modules[path].parameters(recurse)
        return any(p.ndim > 1 for p in params if not isinstance(p, nn.parameter.UninitializedTensorMixin))

    def _is_model(self, path: str) -> bool:
        """Whether a module has lists of layers, and is neither such a list nor one of its layers."""
        is_list = any(self.repeated.get(child, False) for child in self.children[path])
        return self.has_list(path) and not is_list and not self.repeated.get(path, False)

    def root_of(self, path: str) -> str:
        """The path of the model that a module belongs to."""
        return next((above for above in _upwards(path) if above in self.roots), "")

    def _find_layers(self) -> list[Layer]:
        """One layer for each path, without the tensors of adapters, whose sizes (ranks) say nothing about the model."""
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
        """The path that a module below an adapted one would have without the adapter; None for the adapter's own."""
        rest = path[len(host) + 1:].split(".")
        skip = {"base_layer": 1, "original_module": 1, "modules_to_save": 2}.get(rest[0])
        return None if skip is None else ".".join([host, *rest[skip:]])

    def place_in_model(self, place: Place) -> tuple[str, nn.Module | None]:
        """(path, module) of the layer that a parameter belongs to. An adapter belongs to the layer that it was added
        to: the path is that layer's, and the module None.
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
        """Whether a size is one of the hidden sizes of a model: that which a layer in its lists takes, or a norm beside
        these lists.
        """
        return any(size in layer.inputs for layer in self.layers if _is_below(layer.path, root) and (
            layer.matrices > 0 if self._is_listed(layer.path, root) else layer.matrices == 0))

    def _is_listed(self, path: str, root: str) -> bool:
        return any(above in self.repeated for above in _upwards(path) if _is_inside(above, root))

    def is_in_list(self, path: str) -> bool:
        """Whether a module is, inside of its model, an element of a list, or in one."""
        return self._is_listed(path, self.root_of(path))

    def has_list(self, path: str, outside: str | None = None) -> bool:
        """Whether a list of layers is inside of a module, and not inside of `outside`, one of the modules there."""
        return any(_is_inside(element, path) and (outside is None or not _is_below(element, outside))
                   for element in self.repeated)

    def is_taken_later(self, size: int, path: str, root: str) -> bool:
        """Whether a layer behind the module at `path`, below `root`, takes `size` as input. Convolutions do not count,
        for the reason given in `_inputs_beside`.
        """
        layers = [layer for layer in self.layers if _is_below(layer.path, root)]
        last = max((i for i, layer in enumerate(layers) if _is_below(layer.path, path)), default=len(layers))
        return any(size in layer.inputs for layer in layers[last + 1:]
                   if not isinstance(layer.module, nn.modules.conv._ConvNd))

    def is_repeated(self, path: str) -> bool:
        """Whether a path is, inside of its model, in a list of modules of one kind, as layers are, unlike parts of a
        pipeline.
        """
        root = self.root_of(path)
        return any(self.repeated.get(above, False) for above in _upwards(path) if _is_inside(above, root))

    def vocabulary(self, path: str) -> tuple[str, torch.Size] | None:
        """(path of the nearest module around a path that has an nn.Embedding, shape of the largest one there)."""
        for root in _upwards(path):
            shapes = [module.weight.shape for at, module in self.modules.items()
                      if isinstance(module, nn.Embedding) and _is_below(at, root)]
            if shapes:
                return root, max(shapes, key=math.prod)
        return None

    def is_placed_as_head(self, unit: str, rows: int, vague: bool) -> bool:
        """Whether a module stands beside the body of a model, where output layers are.

        unit: the path of the module; rows: the size of its output; vague: whether hidden layers often have its name.
        At the top of a model the place decides, unless a later layer takes the output. (A vague name is decided by the
        layers behind the whole model there, since its own may take the size of its output as input, too.) Below the
        top, a list of layers must be beside the module, or its output must be of a size that no layer beside takes.
        """
        holder = unit.rpartition(".")[0]
        root = self.root_of(unit)
        inside = holder[len(root):].strip(".") if _is_below(holder, root) else ""
        if all(part in TOPS for part in inside.split(".") if part):
            return not self.is_taken_later(rows, root if vague else unit, "" if vague else holder)
        lists = (above for above in _upwards(holder) if above in self.repeated and _is_inside(above, root))
        element = next(lists, None)
        if not vague and holder != element and not any(self._inputs_beside(holder, unit)):
            return self.is_placed_as_head(holder, rows, vague)  # alone in a module: that one's place counts
        has_list = self.has_list(holder, unit)
        first, others = self._inputs_beside(holder, unit)
        if element is None and has_list:
            if not vague:
                return not self.is_taken_later(rows, unit, holder)
            return not (rows in first or self.is_taken_inside(rows, holder) or self.is_taken_later(rows, unit, root))
        if element is not None and not has_list and (element != holder or self.repeated[element]):
            return False
        return rows not in others and (bool(others) or not vague and bool(first) and rows not in first)

    def _inputs_beside(self, holder: str, unit: str) -> tuple[frozenset[int], set[int]]:
        """The sizes that the first layer below `holder` and outside `unit` takes, and those that the others take. The
        first one takes what comes from outside, which the output may well have the size of. Convolutions do not count,
        whose few channels may be as many as there are classes.
        """
        layers = [layer for layer in self.layers if _is_below(layer.path, holder) and not _is_below(layer.path, unit)
                  and not isinstance(layer.module, nn.modules.conv._ConvNd)]
        first = next((i for i, layer in enumerate(layers) if layer.matrices and layer.inputs), len(layers))
        others = layers[:first] + layers[first + 1:]
        return (frozenset().union(*(layer.inputs for layer in layers[:first + 1])),
                set().union(*(layer.inputs for layer in others)))

    def is_output(self, path: str, unit: str, rows: int) -> bool:
        """Whether the layer at `path` is an output of the module `unit`: the module itself, or a layer in it whose
        output is of a size that no layer of the module takes, and that ends its element of a list.

        rows: the size of the output; 0 for a tensor that is no linear layer's, which must be the only matrix.
        """
        layers = [layer for layer in self.layers if _is_below(layer.path, unit) and layer.matrices]
        if sum(layer.matrices for layer in layers) < 2:
            return True
        others = layers if layers[0].path == path else layers[1:]  # the first one takes what comes from outside
        if not rows or any(rows in layer.inputs for layer in others):
            return False
        inner = [above for above in _upwards(path) if above in self.repeated and above.startswith(f"{unit}.")]
        return not inner or path == [layer.path for layer in layers if _is_below(layer.path, inner[-1])][-1]

    def is_router(self, param: torch.Tensor, path: str, router: bool, gate: bool, linear: bool) -> bool:
        """Whether the matrix (rows, columns) at a path is a router or a gate of few rows.

        router, gate: what its name or type says; linear: whether it is a linear layer of the model, which the number
        of experts beside may show to be a router.
        """
        rows, columns = param.shape
        named = router or gate
        if not (named or linear) or rows >= columns:
            return False
        by_experts = rows in self.expert_counts(path, levels=2 if named else 1)
        if not (by_experts or router or gate and rows * FEW <= columns):
            return False
        parent = path.rpartition(".")[0]
        beside = [layer for layer in self.layers if _is_below(layer.path, parent) and layer.path != path]
        twins = [p for layer in beside for p in _own_parameters(layer.module)
                 if p.shape == param.shape and p is not param]
        return rows == 1 or not twins and (by_experts or not any(rows in layer.inputs for layer in beside))

    def expert_counts(self, path: str, levels: int) -> set[int]:
        """How many experts there are beside a module: lengths of lists, first dimensions of 3-D stacks.

        levels: how many of the modules around it are searched.
        """
        return set().union(*map(self._experts_in, list(_upwards(path))[1:levels + 1]))

    def _experts_in(self, root: str) -> set[int]:
        """The numbers of experts of a module and its children; kept, since each expert may ask for them."""
        if root not in self.experts:
            paths = (root, *self.children[root])
            modules = [self.modules[path] for path in paths]
            stacks = [p for module in modules if not isinstance(module, nn.modules.conv._ConvNd)
                      for p in _own_parameters(module) if p.ndim == 3 and 1 not in p.shape]
            lists = [len(self.children[path]) for path in paths[1:] if "expert" in path.rpartition(".")[2]]
            self.experts[root] = {p.shape[0] for p in stacks} | set(lists) - {0}
        return self.experts[root]


def classify(param: nn.Parameter, places: list[Place], structure: Structure) -> Kind:
    """The part of the split that takes a parameter. Raises ValueError for a lazy parameter, which has no shape.

    places: the names of a (tied) parameter and the modules there, at least one. An embedding or a head at one of the
    places decides for all.
    """
    if isinstance(param, nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"parameter {places[0].name} has no shape yet: call the model once before its parameters are "
                         "split")
    kind = _by_shape(param, "_".join(place.name.rpartition(".")[2] for place in places))
    if kind is not None:
        return kind
    for rule in RULES:
        for place in places:
            kind = rule(param, place, structure)
            if kind is not None:
                return kind
    if param.ndim > 3:
        return Kind(OTHER, f"{param.ndim}-D")
    return Kind(MUON, "matrix" if param.ndim == 2 else "stack of matrices")


def output_size(param: torch.Tensor, module: nn.Module) -> int:
    """The output size of a linear layer's weight; 0 for a tensor that is no linear layer's."""
    if not is_linear(module) or param.ndim != 2:
        return 0
    return param.shape[1 if type(module).__name__ == "Conv1D" else 0]  # GPT-2 of transformers keeps (in, out)


def is_linear(module: nn.Module) -> bool:
    """By type: nn.Linear, the linear layers of tensor parallelism and of quantization, Conv1D of transformers."""
    return isinstance(module, nn.Linear) or re.search(r"Linear$|^Conv1D$", type(module).__name__) is not None


def _by_shape(param: torch.Tensor, leaves: str) -> Kind | None:
    """The kind of a parameter that is no matrix by its shape. leaves: the last parts of its names, joined by _."""
    if param.ndim < 2:
        return Kind(NO_DECAY, f"{param.ndim}-D")
    if param.numel() == 1:
        return Kind(NO_DECAY, "scalar")
    if param.numel() == max(param.shape) and (param.ndim > 2 or "weight" not in leaves):
        return Kind(NO_DECAY, "vector")  # (1, 1, C), or (C, 1) that is no layer's weight
    return Kind(NO_DECAY, "bias") if any(word.startswith("bias") for word in leaves.split("_")) else None


def _embedding(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Embeddings by type, also those to which an adapter was added; then by the names of the parameter, of its module
    and of the module around. Deeper inside of a module with such a name is a tower, which holds matrices.
    """
    path, module = structure.place_in_model(place)
    module = structure.base_of(path) if module is None else module
    kinds = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or re.search(
        r"Embedding(s|Bag)?$", type(module).__name__)
    parts = place.name.split(".")
    named = bool({"emb", "pos"} & set(parts[-1].split("_"))) or any(
        "embed" in part or part in EMBEDDING_NAMES for part in parts[-3:])
    return Kind(EMBEDDINGS, "embedding") if kinds or named else None


def _learned(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Tokens, queries, tables and the like: bare tensors whose rows are vectors."""
    parts = place.name.split(".")
    leaves = parts[-2:] if isinstance(place.module, nn.ParameterDict) else parts[-1:]
    if any("token" in leaf or "position" in leaf or leaf.rpartition("_")[2] in LEARNED for leaf in leaves):
        return Kind(EMBEDDINGS, "learned vectors")
    if len(parts) > 1 and parts[-2].endswith("_bias") and "pos" in parts[-2]:  # LayoutLMv3: (heads, buckets)
        return Kind(EMBEDDINGS, "learned vectors")
    if param.ndim == 3 and 1 in param.shape[1:]:
        return Kind(OTHER, "stack of vectors")
    bare = not is_linear(place.module) and not isinstance(place.module, nn.modules.conv._ConvNd)
    if param.ndim == 3 and param.shape[0] == 1 and bare and not re.search(r"expert|moe", place.name.lower()):
        return Kind(EMBEDDINGS, "learned vectors")  # (1, N, C): one vector for each position
    return None


def _head(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Output layers, by type, by rows that are the vocabulary, by name and place."""
    path, module = structure.place_in_model(place)
    if any(LOSS.search(type(structure.modules.get(above)).__name__) for above in _upwards(path)):
        return Kind(HEADS, "head")
    weight = param
    if module is None:  # an adapter
        module = structure.base_of(path)
        weight = getattr(module, "weight", param)
    rows = output_size(weight, module)
    leaf = [] if is_linear(module) else [place.name.rpartition(".")[2]]
    parts = [*path.split("."), *leaf] if path else leaf
    named = place.name.endswith(".weight") and not isinstance(module, nn.ParameterDict)
    found = _has_vocabulary_rows(weight, rows, path, structure) or named and _is_last(
        weight, rows, path, structure) or any(
        _is_head_of(".".join(parts[:i + 1]), path, rows or weight.shape[0], bool(rows), structure)
        for i in range(len(parts)))
    return Kind(HEADS, "head") if found else None


def _is_head_of(unit: str, path: str, rows: int, linear: bool, structure: Structure) -> bool:
    """Whether the layer at `path` is an output of `unit`, and `unit` has the name and the place of a head."""
    name = unit.rpartition(".")[2]
    known = any(f".{unit}".endswith(f".{head}") for head in HEAD_NAMES)
    placed = PLACED.search(name) is not None
    vague = name in VAGUE_NAMES or name in LONE_NAMES and unit == path
    if not (known or placed or vague) or not structure.is_output(path, unit, rows if linear else 0):
        return False
    return known or structure.is_placed_as_head(unit, rows, vague)


def _has_vocabulary_rows(weight: torch.Tensor, rows: int, path: str, structure: Structure) -> bool:
    """Whether a linear layer has as many rows as the largest embedding around it, is not repeated, is not square, and
    nothing behind it takes its output.
    """
    if not rows or structure.is_repeated(path) or weight.shape[0] == weight.shape[1]:
        return False
    found = structure.vocabulary(path)
    return found is not None and found[1][0] == rows and not structure.is_taken_later(rows, path, found[0])


def _is_last(weight: torch.Tensor, rows: int, path: str, structure: Structure) -> bool:
    """Whether a linear layer beside the lists of layers of a model makes fewer numbers than it takes, of a size that is
    none of the model's hidden sizes and that nothing behind takes: an output layer by use.
    """
    holder, _, name = path.rpartition(".")
    words = name.split("_")
    if not rows or rows >= weight.numel() // rows or structure.is_in_list(path) or (
            set(words) & set(NO_OUTPUTS) and not set(words) & {"out", "logits"}):
        return False
    return (structure.has_list(holder, path) and not structure.is_taken_inside(rows, holder)
            and not structure.is_taken_later(rows, path, structure.root_of(path)))


def _module_type(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Convolutions and norms, by type."""
    if isinstance(place.module, nn.modules.conv._ConvNd):
        return Kind(OTHER, "convolution")
    names = place.name.split(".")[-2:-1]
    norm = NORM.search(type(place.module).__name__) or names and NORM_NAME.search(names[0])
    return Kind(NO_DECAY, "norm") if norm and not is_linear(place.module) else None


def _elementwise(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Tensors that multiply element by element, biases (E, R) beside a stack (E, R, C), parts of parametrizations."""
    *path, leaf = place.name.split(".")
    state = leaf in ("B", "C", "P") and hasattr(place.module, "A_imag")  # of S4
    if leaf in ELEMENTWISE or leaf.rpartition("_")[2] in SCALES or state:
        return Kind(OTHER, "elementwise")
    beside = [p.shape[:2] for p in _own_parameters(place.module) if p.ndim == 3]
    if param.ndim == 2 and "weight" not in leaf and param.shape in beside:
        return Kind(NO_DECAY, "bias")
    scale = leaf.endswith("_g") and hasattr(place.module, f"{leaf[:-1]}v")  # of weight_norm without parametrizations
    if 1 in param.shape and (scale or "parametrizations" in path):
        return Kind(OTHER, "part of a parametrization")
    return None


def _packed(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Tensors of adapters that are no matrices, and a matrix that is kept in three dimensions (XLNet)."""
    if set(place.name.split(".")[-3:]) & set(PACKED):
        return Kind(OTHER, "packed")
    attention = re.search(r"att(ention|n)", f"{place.name} {type(place.module).__name__}".lower())
    if param.ndim == 3 and attention and "expert" not in place.name.lower() and param.shape[0] > param.shape[1]:
        return Kind(OTHER, "one matrix in three dimensions")  # (model, heads, size of a head)
    return None


def _router(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Routers and gates of few rows.

    By use: as many rows as there are experts beside. By type or name: a router, or a gate with at most 1/FEW as many
    rows as columns, unless a layer beside takes the output (a bottleneck) or has the same shape (a gated linear unit).
    """
    if param.ndim != 2:
        return None
    path, leaf = place.name.rpartition(".")[::2]
    linear = is_linear(place.module)
    at = path if linear or leaf == "weight" else place.name
    host = structure.host_of(path) or ""
    names = [part for part in at[len(host):].split(".") if part][-2:]
    words = {word for name in names for word in name.lower().split("_")}
    kinds = " ".join(type(structure.modules[above]).__name__ for above in list(_upwards(path))[:2])
    router = bool(words & set(ROUTERS)) or re.search(r"Router\b|Gating", kinds) is not None
    gate = bool(words & set(GATES)) or re.search(r"Gate\b", kinds) is not None
    found = structure.is_router(param, at, router, gate, linear and not host)
    return Kind(OTHER, "router or gate") if found else None


def _single(param: torch.Tensor, place: Place, structure: Structure) -> Kind | None:
    """Weights of linear layers that are vectors."""
    return Kind(OTHER, "single row or column") if is_linear(place.module) and 1 in param.shape else None


RULES: tuple[Callable[[torch.Tensor, Place, Structure], Kind | None], ...] = (
    _module_type, _embedding, _learned, _router, _head, _elementwise, _packed, _single)


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
    return [p for p in module.parameters(recurse=False) if not isinstance(p, nn.parameter.UninitializedTensorMixin)]


def _adapted(module: nn.Module) -> str | None:
    """The name of the child that an adapter (peft) was added to, or that is trained in its place; None: no adapter."""
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
        sizes = {size for p in (params if norm else matrices) for size in p.shape[-2:]}  # of a stack, those of one
    return Layer(path, module, frozenset(sizes), len(matrices))
