"""Triton's CPU interpreter in a third of its time: what it works out anew at every operation is kept.

It computes and checks as before, but that masks may hold integers (`_mask_of_bools`). Most of its time goes into names
of types and shapes, into numbers in a kernel's text, into replacing the language anew whenever a kernel calls a
function, and into whether integers overflow, of which it makes nothing outside debug mode. Importing this module
chooses nothing: tests/paths.py does.
"""
from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

INTERPRETED = not torch.cuda.is_available()  # whether Triton's kernels run in the interpreter here
PATHS = ["torch", pytest.param("triton", marks=[pytest.mark.interpreter] if INTERPRETED else [])]


# Operations of the interpreter that take a mask -> its place among their arguments
MASKS = {"create_masked_load": 1, "create_masked_store": 2, "create_atomic_rmw": 3}


@functools.cache
def hasten() -> None:
    """Once, for all kernels of this process."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    core.tensor.__init__ = _tensor_init(core)
    core.block_type.__init__ = _block_type_init(core)
    core.block_type.with_element_ty = _kept_by_names(core.block_type.with_element_ty)
    core.dtype.__eq__ = _same_object_first(core.dtype.__eq__)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)
    interpreter._patch_attr = _set_direct(TritonSemantic)
    operations = interpreter.InterpreterBuilder
    for name, place in MASKS.items():
        setattr(operations, name, _mask_of_bools(getattr(operations, name), place))
    TritonSemantic.binary_op_type_checking_impl = _learnt(TritonSemantic.binary_op_type_checking_impl, core.tensor)
    TritonSemantic.broadcast_impl_value = _alike_first(TritonSemantic.broadcast_impl_value)
    TritonSemantic.scalar_constant = _kept_by_value(TritonSemantic.scalar_constant)
    patch, execute, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(fn):
        """What is replaced for a module's functions stays so until the kernel ends."""
        if id(fn.__globals__) in done:
            return None
        done.add(id(fn.__globals__))
        return patch(fn)

    def call(self, *args, **kwargs):
        done.clear()
        return execute(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, call


def _mask_of_bools(function, place):
    """The interpreter repeats the result of a comparison of numbers as integers. That of Triton 3.9 takes no mask of
    integers.
    """
    def call(self, *args, **kwargs):
        mask = args[place] if place < len(args) else None
        if mask is not None and mask.data.dtype != bool:
            mask = dataclasses.replace(mask, data=mask.data.astype(bool))
            args = *args[:place], mask, *args[place + 1:]
        return function(self, *args, **kwargs)

    return call


def _kept_by_name(function):
    known = {}

    def look_up(dtype):
        if dtype.name not in known:
            known[dtype.name] = function(dtype)
        return known[dtype.name]

    return look_up


def _kept_by_names(function):
    known = {}

    def look_up(self, other):
        key = self.name, other.name
        if key not in known:
            known[key] = function(self, other)
        return known[key]

    return look_up


def _learnt(check, tensor, most=4096):
    """Two sides of an operation get the types that others of their types got; what a number became beside a type is
    kept.
    """
    known = {}

    def name(side):
        kind = type(side)
        if kind is tensor:
            return side.type.name
        return (kind, side) if kind is int or kind is float and side else None  # 0.0 and -0.0 are equal

    def look(self, lhs, rhs, *flags, **more):
        key = name(lhs), name(rhs), flags
        if None in key or more:
            return check(self, lhs, rhs, *flags, **more)
        if key not in known:
            if len(known) == most:
                known.clear()
            found = check(self, lhs, rhs, *flags)
            known[key] = [_way(self, *pair) for pair in zip((lhs, rhs), found)]
            return found
        left, right = known[key]
        return left(lhs) if left else lhs, right(rhs) if right else rhs

    return look


def _way(semantic, side, found):
    """What makes a side of an operation what was found, None where nothing has to."""
    if side is found:
        return None
    if not isinstance(side, type(found)):
        return lambda number: found
    type_, builder, is_block = found.type, semantic.builder, side.type.is_block()
    shape = getattr(type_, "shape", ())
    if len(getattr(side.type, "shape", shape)) < len(shape):
        return lambda other: semantic.broadcast_impl_value(semantic.cast(other, type_.scalar), found)[0]
    if side.shape == found.shape:
        return lambda other: semantic.cast(other, type_.scalar)

    def grow(other):
        handle = semantic.cast(other, type_.scalar).handle
        grown = builder.create_broadcast(handle, shape) if is_block else builder.create_splat(type_, handle)
        return semantic.tensor(grown, type_)

    return grow


def _set_direct(semantic_of):
    """An operation of the language is called without the check that it was told who computes."""

    @functools.cache
    def direct(member, builder):
        function, semantic = getattr(member, "__wrapped__", member), semantic_of(builder)

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    return lambda obj, name, member, builder, scope: scope.set_attr(obj, name, direct(member, builder))


def _alike_first(broadcast):
    """Blocks of one shape stay as they are."""

    def look(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return look


def _kept_by_value(scalar_constant):
    known = {}

    def look_up(self, value, dtype):
        key = type(value), value, dtype.name
        if key not in known:
            known[key] = scalar_constant(self, value, dtype)
        return known[key]

    return look_up


def _same_object_first(equal):
    return lambda self, other: self is other or equal(self, other)


def _tensor_init(core):
    init, known = core.tensor.__init__, {}

    def fill(self, handle, type):
        key = type.name  # of a block with its shape
        if key not in known:
            init(self, handle, type)
            known[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[key]

    return fill


def _block_type_init(core):
    init, known = core.block_type.__init__, {}

    def fill(self, element_ty, shape):
        key = element_ty.name, *(getattr(side, "value", side) for side in shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return fill
