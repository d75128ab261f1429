"""While tests run, every function of the package checks the types and shapes in its signature.

`--jaxtyping-packages` of pytest does the same in three times the time: it binds each call's
arguments once more, checks them twice, and makes the checks of a function within a function anew
each time that it is defined.
"""

import ast
import dataclasses
import functools
import gc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import torch
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, jaxtyped

# Kernels of Triton are interpreted, a program after the other; it decides when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
collect_ignore_glob = []
if importlib.util.find_spec("triton") is None:  # there is none for other systems than Linux
    collect_ignore_glob.append("src/coterie/engine/kernels/[a-z]*")
CONF = BeartypeConf(is_pep484_tower=True)
MADE: dict[types.CodeType, tuple[Callable[..., Any], bool]] = {}
"""The checks of functions that are defined within others, and whether there are shapes in them."""


def resolved(annotation: Any, names: dict[str, Any]) -> Any:
    """Return an annotation without the quotes in it; anything where a name is not known yet."""

    def probe(value: annotation) -> None: ...

    try:
        return typing.get_type_hints(probe, names, include_extras=True)["value"]
    except NameError:
        return Any


def has_shapes(annotation: Any) -> bool:
    """Whether there is the shape of an array in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, AbstractArray):
        return True
    return any(
        map(has_shapes, annotation if isinstance(annotation, list) else typing.get_args(annotation))
    )


def typed(thing: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """Return a function that checks types, and whether there are shapes among them."""
    if thing.__code__ in MADE:
        made, shapes = MADE[thing.__code__]
        again = types.FunctionType(made.__code__, made.__globals__)
        again.__kwdefaults__ = made.__kwdefaults__ | {"__beartype_func": thing}
        return functools.update_wrapper(again, thing), shapes
    written = thing.__annotations__
    thing.__annotations__ = {
        name: resolved(value, thing.__globals__) for name, value in written.items()
    }
    shapes = any(map(has_shapes, thing.__annotations__.values()))
    made = beartype(thing, conf=CONF)
    thing.__annotations__ = made.__annotations__ = written
    if "<locals>" in thing.__qualname__ and "__beartype_func" in (made.__kwdefaults__ or ()):
        MADE[thing.__code__] = made, shapes
    return made, shapes


def checked(thing: Any) -> Any:
    """Return a function or a dataclass that checks what it is given and returns; an axis has one length in all."""
    if isinstance(thing, type):
        refuses_itself = getattr(thing, "__no_type_check__", False)
        if dataclasses.is_dataclass(thing) and "__init__" in vars(thing) and not refuses_itself:
            thing.__init__ = checked(thing.__init__)
        return thing
    if isinstance(thing, classmethod | staticmethod):
        return type(thing)(checked(thing.__func__))
    if not getattr(thing, "__annotations__", None):
        return thing
    function, shapes = typed(thing)
    if not shapes:
        return function
    if inspect.isgeneratorfunction(thing):
        # Its arguments are checked when it is first asked, out of the context below.
        return jaxtyped(typechecker=beartype(conf=CONF))(thing)

    @functools.wraps(thing)
    def in_one_context(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped("context"):
            return function(*args, **kwargs)

    return in_one_context


class Decorator(ast.NodeTransformer):
    """Puts the check next to each function, and outermost on each class: a dataclass has its constructor by then."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # Triton compiles a kernel from its source, whose annotations are for Triton.
        if any(ast.unparse(one) == "triton.jit" for one in node.decorator_list):
            return node
        node.decorator_list.append(ast.copy_location(ast.Name("_checked_", ast.Load()), node))
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list.insert(0, ast.copy_location(ast.Name("_checked_", ast.Load()), node))
        return self.generic_visit(node)


class Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the source with its checks: the compiled file beside it has none."""
        tree = Decorator().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(tree, self.path, "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["_checked_"] = checked
        super().exec_module(module)


class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        spec = (
            super().find_spec(fullname, path, target)
            if fullname.partition(".")[0] == "coterie"
            else None
        )
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def pytest_collection_finish() -> None:
    """Search for garbage again, and less often than usual: most objects of this process stay."""
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


gc.disable()  # while a million objects are made that all stay
assert "coterie" not in sys.modules, "the package was imported before its checks were in place"
sys.meta_path.insert(0, Finder)
