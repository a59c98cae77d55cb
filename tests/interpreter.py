"""Triton's interpreter in a quarter of its time. It makes the language its own anew for every call inside a kernel, where once
a launch would do; it checks every sum of integers for overflow, which the sizes of tests are far from; and it works out for
every value what its type says, where the few types of a kernel can be remembered. Under `make soak` sums are checked and
nothing is remembered."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from seeds import SOAK
from triton.language import core
from triton.runtime import interpreter


def make_fast() -> None:
    """For the life of this process."""
    original, call, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[tuple[bool, bool]]()

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        call(self, *args, **kwargs)

    def patched(function: Any) -> Any:
        seen = {id(value) for value in function.__globals__.values()}
        key = id(interpreter.tl) in seen, id(interpreter.tl.core) in seen
        if key in done:
            return None
        done.add(key)
        return original(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, patched
    _keep_masks()
    if not SOAK and "scope" in inspect.signature(interpreter._patch_attr).parameters:  # from Triton 3.6 on
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=False)
        _remember_types()
        _skip_what_changes_nothing()


def _keep_masks() -> None:
    """Masks made of a comparison of two numbers: the interpreter says of its result that it has the numbers' own type, by which
    a block of it is one of integers, and Triton 3.9's loads take no such mask."""
    splat = interpreter.InterpreterBuilder.create_splat

    def of_its_data(value: Any) -> Any:
        boolean = isinstance(value, interpreter.TensorHandle) and value.data.dtype == bool
        return interpreter.TensorHandle(value.data, core.int1) if boolean else value

    interpreter.InterpreterBuilder.create_splat = lambda self, *args: splat(self, *map(of_its_data, args))


def _remember_types() -> None:
    """Of blocks: their sizes, names and NumPy's types, by the type's name; and the type of a sum, by those of its parts."""
    semantic = interpreter.interpreter_semantic
    to_numpy, make_block, common = interpreter._get_np_dtype, core.block_type.__init__, semantic.computation_type_impl
    numpy_types: dict[str, Any] = {}
    blocks: dict[Any, Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    commons: dict[Any, Any] = {}

    def numpy_type(of: Any) -> Any:
        if of.name not in numpy_types:
            numpy_types[of.name] = to_numpy(of)
        return numpy_types[of.name]

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple([getattr(size, "value", size) for size in shape])
        if key in blocks:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = blocks[key]
        else:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in shapes:
            numel = 1
            for size in sizes:
                numel *= size
            shapes[sizes] = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    def common_type(a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in commons:
            commons[key] = common(a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return commons[key]

    interpreter._get_np_dtype, semantic.computation_type_impl = numpy_type, common_type
    core.block_type.__init__, core.tensor.__init__ = block, tensor


def _skip_what_changes_nothing() -> None:
    """Broadcasts of blocks of one shape, casts to a value's own type, and a look at every argument of a function."""
    semantic = interpreter.interpreter_semantic
    broadcast, cast, unwrap = semantic.broadcast_impl_value, semantic.cast, core._unwrap_if_constexpr
    plain = (int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor)

    def broadcast_values(lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(lhs, rhs)

    def cast_to(value: Any, type: Any, *args: Any, **kwargs: Any) -> Any:
        if value.type.scalar is type.scalar:
            return value
        return cast(value, type, *args, **kwargs)

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)  # within the check that a kernel is being run

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(owner, name, called)

    semantic.broadcast_impl_value, semantic.cast = broadcast_values, cast_to
    core._unwrap_if_constexpr, interpreter._patch_attr = unwrapped, patch
