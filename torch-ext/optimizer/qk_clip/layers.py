"""`AttentionLayer`: which rows of which parameters hold the queries and keys of each head.

`parse_layer` checks the plain values that a user gives. `AttentionLayer.slots` tells for each row
of a parameter by which factor the row is scaled. Knows no memory and no ranks.

[Note: forms of a layer]
A layer is a dict of plain values, so that a config file can hold it:

    {"heads": 32, "kv_heads": 8, "weights": {name of a parameter: parts, ...}}

`kv_heads` is the number of key heads, by default `heads`. `parts` is a role for a parameter that is
one projection, or blocks of rows as in params/units.py, with a role for each block:

    "q"                                                            all rows are queries
    {"rows": [4096, 1024, 1024], "roles": ["q", "k", "v"]}         fused, one after another
    {"rows": [512, 128, 128], "repeat": 8, "roles": ["q", "k", "v"]}   fused, by key head
    {"rows": [128, 64], "repeat": 128, "roles": ["q", "q_rope"]}   MLA, by head
    {"columns": [4096], "roles": ["k"]}                            stored as (in, out)

Rows of one role, in the order of the parameter, are cut into equal heads.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from ..params.errors import shortened

# Roles of rows. "q", "k": queries and keys, in MLA the parts without rotary positions. "q_rope":
# rotary part of MLA's queries. Rows of the last two are never scaled: MLA's rotary keys, which all
# heads share, and everything else.
ROLES = ("q", "k", "q_rope", "k_rope", "v")
LAYER_KEYS = ("heads", "kv_heads", "weights")
PART_KEYS = ("rows", "columns", "repeat", "roles")
SHARED_KEYS = ("keep", "shrink")  # allowed values of `shared_keys`
# Kinds of factors of a head, see `HeadClipping` of hook.py
ROOT, WHOLE, SHARED_QUERY, SHARED_KEY, NONE = range(5)


@dataclass(frozen=True)
class Projection:
    """The blocks of one parameter.

    `dim`: 0 for blocks of rows, 1 for blocks of columns. `sizes`: of the blocks of one repetition;
    () for a single block. `roles`: of each block.
    """

    dim: int
    sizes: tuple[int, ...]
    repeat: int
    roles: tuple[str, ...]

    def roles_of(self, size: int) -> list[str]:
        """The role of each of the `size` indices of the dim. Raises ValueError if the sizes of the
        blocks do not add up.
        """
        sizes = self.sizes or (size,)
        if sum(sizes) * self.repeat != size:
            raise ValueError(
                f"{self.repeat} times {list(sizes)} makes {sum(sizes) * self.repeat} "
                f"{'columns' if self.dim else 'rows'}, not {size}"
            )
        once = [role for role, count in zip(self.roles, sizes) for _ in range(count)]
        return once * self.repeat


@dataclass(frozen=True)
class AttentionLayer:
    """An attention layer: numbers of heads, and {parameter name: `Projection`}."""

    heads: int
    kv_heads: int
    weights: Mapping[str, Projection]

    @property
    def has_shared_keys(self) -> bool:
        """Whether several query heads share a key head."""
        return self.kv_heads < self.heads

    def slots(self, name: str, size: int, shared_keys: str) -> torch.Tensor:
        """(kind of the factor, head) of each of the `size` rows (or columns) of parameter `name`:
        int64 (2, size). The head of SHARED_KEY is a key head.

        `shared_keys`: as in `QKClip`. Raises ValueError if heads do not divide the rows of a role.
        """
        factors = tuple((role, *self._factor(role, shared_keys)) for role in ROLES)
        return _slots(self.weights[name], size, factors)

    def _factor(self, role: str, shared_keys: str) -> tuple[int, int]:
        """(kind of the factor, number of heads) of rows of a role."""
        if role == "q_rope":
            return WHOLE, self.heads
        if role not in ("q", "k"):
            return NONE, 1
        if not self.has_shared_keys:
            return ROOT, self.heads
        if shared_keys == "keep":
            return (WHOLE, self.heads) if role == "q" else (NONE, 1)
        return (SHARED_QUERY, self.heads) if role == "q" else (SHARED_KEY, self.kv_heads)


# Most layers of a model are alike, and a layer has thousands of rows
@functools.lru_cache(maxsize=64)
def _slots(
    projection: Projection, size: int, factors: tuple[tuple[str, int, int], ...]
) -> torch.Tensor:
    """Return the result of `AttentionLayer.slots`, cached. `factors`: (role, kind of the factor,
    number of heads). Raises ValueError as `slots`.
    """
    roles = projection.roles_of(size)
    counts = Counter(roles)
    found: dict[str, Iterator[tuple[int, int]]] = {}
    for role, kind, heads in factors:
        if kind != NONE and counts[role] % heads:
            raise ValueError(
                f"{heads} heads do not divide its {counts[role]} rows of the role {role!r}"
            )
        length = max(1, counts[role] // heads)  # rows of a head
        rows = range(counts[role])
        found[role] = iter([(kind, 0 if kind == NONE else row // length) for row in rows])
    # On the CPU, whatever torch's default device is
    return torch.tensor([next(found[role]) for role in roles], device="cpu").T


def parse_layer(given: object) -> AttentionLayer:
    """The layer of plain values, see [Note: forms of a layer]. Raises TypeError or ValueError, with
    the allowed values in the message.
    """
    _check_keys(given, LAYER_KEYS, "a layer")
    heads = _count(given, "heads", None)
    kv_heads = _count(given, "kv_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} does not divide heads={heads}")
    weights = given.get("weights")
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise TypeError(
            'weights must be a dict {name of a parameter: role or blocks}, such as {"q.weight": '
            '"q", "k.weight": "k"}'
        )
    parsed = {}
    for name, parts in weights.items():
        try:
            parsed[name] = _parse_parts(parts)
        except (TypeError, ValueError) as error:
            raise type(error)(f"parameter {shortened(name)}: {error}") from None
    roles = {role for projection in parsed.values() for role in projection.roles}
    if not {"q", "k"} <= roles:
        raise ValueError(
            f"weights hold the roles {sorted(roles)}, but both queries (q) and keys (k) are needed"
        )
    return AttentionLayer(heads, kv_heads, parsed)


def _parse_parts(parts: object) -> Projection:
    """The blocks of a parameter. Raises TypeError or ValueError as `parse_layer`."""
    if isinstance(parts, str):
        parts = {"rows": [], "roles": [parts]}
    _check_keys(parts, PART_KEYS, "the blocks of a parameter")
    if ("rows" in parts) == ("columns" in parts):
        raise ValueError("blocks need either rows or columns, a list of sizes")
    key = "rows" if "rows" in parts else "columns"
    sizes, roles = parts[key], parts.get("roles")
    for name, value in ((key, sizes), ("roles", roles)):
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"{name} must be a list, not {shortened(repr(value))}")
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"{key}={list(sizes)} must be positive integers")
    if unknown := [role for role in roles if role not in ROLES]:
        raise ValueError(f"the role {shortened(repr(unknown[0]))} is unknown; allowed: {ROLES}")
    if len(roles) != max(1, len(sizes)):
        raise ValueError(f"{len(sizes)} blocks need as many roles, not {list(roles)}")
    return Projection(int(key == "columns"), tuple(sizes), _count(parts, "repeat", 1), tuple(roles))


def _check_keys(given: object, allowed: tuple[str, ...], what: str) -> None:
    """Raise TypeError or ValueError unless `given` is a mapping with keys in `allowed`."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{what} must be a dict with the keys {allowed}, not {type(given).__name__}"
        )
    if unknown := [key for key in given if key not in allowed]:
        raise ValueError(
            f"{what} has the unknown key {shortened(repr(unknown[0]))}; allowed: {allowed}"
        )


def _count(given: Mapping, key: str, default: int | None) -> int:
    """`given[key]`, or `default` without the key; None: the key is needed. Raises ValueError for
    anything but a positive integer.
    """
    value = given.get(key, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={shortened(repr(value))} must be a positive integer")
    return value
