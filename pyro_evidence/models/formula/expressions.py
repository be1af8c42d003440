"""Expressions of named tensors that run and are written: one object for the value and for its text in a program."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch

# as the program for reading imports them
MODULES = {"dist": dist, "dist.transforms": dist.transforms, "torch.special": torch.special, "torch": torch}


@dataclass(frozen=True, eq=False)
class Expression:
    """A name, an operation, a method's result, or a call: ``Expression("shape") / Expression("eta").exp()``.

    :ivar form: the name, or how the texts of the parts are put together.
    :ivar function: of the parts; None for a name.
    :ivar parts: other expressions and numbers; the last ones stand by ``keywords``.
    :ivar called: whether it is a call, whose parts need no brackets.
    """

    form: str
    function: Callable[..., Any] | None = None
    parts: tuple[Any, ...] = ()
    keywords: tuple[str, ...] = ()
    called: bool = False

    def value(self, given: Mapping[str, Any]) -> Any:
        """Its value where the names have these."""
        if self.function is None:
            return given[self.form]
        found = [part.value(given) if isinstance(part, Expression) else part for part in self.parts]
        if not self.keywords:
            return self.function(*found)
        return self.function(*found[: self._first], **dict(zip(self.keywords, found[self._first :], strict=True)))

    @property
    def _first(self) -> int:
        return len(self.parts) - len(self.keywords)

    @property
    def text(self) -> str:
        """Python code of it, as a program has it."""
        if self.function is None:
            return self.form
        return self.form.format(*(_text(part, brackets=not self.called) for part in self.parts))

    @property
    def inside(self) -> "list[Expression]":
        """All expressions that it is made of, and itself."""
        return [self, *(e for part in self.parts if isinstance(part, Expression) for e in part.inside)]

    @property
    def names(self) -> tuple[str, ...]:
        """The names in it, each once."""
        return tuple(dict.fromkeys(e.form for e in self.inside if e.function is None))

    @property
    def imports(self) -> set[str]:
        """Lines of import that its text needs beside those of every program."""
        called = [e.function for e in self.inside if e.function is not None and e.called]
        return {f"from {f.__module__} import {f.__name__}\n" for f in called if "." not in _name(f)}

    def with_names(self, **names: Any) -> Any:
        """This expression with others, or numbers, for some names."""
        if self.function is None:
            return names.get(self.form, self)
        parts = (part.with_names(**names) if isinstance(part, Expression) else part for part in self.parts)
        return replace(self, parts=tuple(parts))

    def also(self, **keywords: Any) -> "Expression":
        """This call with more keyword arguments."""
        own = dict(zip(self.keywords, self.parts[self._first :], strict=True))
        assert self.function is not None
        return call(self.function, *self.parts[: self._first], **own, **keywords)

    def __neg__(self) -> "Expression":
        return Expression("-{}", operator.neg, (self,))

    def __add__(self, other: Any) -> "Expression":
        return Expression("{} + {}", operator.add, (self, other))

    def __sub__(self, other: Any) -> "Expression":
        return Expression("{} - {}", operator.sub, (self, other))

    def __mul__(self, other: Any) -> "Expression":
        return Expression("{} * {}", operator.mul, (self, other))

    def __rmul__(self, other: Any) -> "Expression":
        return Expression("{} * {}", operator.mul, (other, self))

    def __truediv__(self, other: Any) -> "Expression":
        return Expression("{} / {}", operator.truediv, (self, other))

    def __rtruediv__(self, other: float) -> "Expression":
        return Expression("{} / {}", operator.truediv, (other, self))

    def __getattr__(self, method: str) -> "Callable[..., Expression]":
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(_of_method, self, method)


def call(function: Callable[..., Any], *parts: Any, **keywords: Any) -> Expression:
    """A function's value or a distribution."""
    slots = ["{}"] * len(parts) + [f"{name}={{}}" for name in keywords]
    form = f"{_name(function)}({', '.join(slots)})"
    return Expression(form, function, (*parts, *keywords.values()), tuple(keywords), called=True)


def _text(part: Any, brackets: bool) -> str:
    if not isinstance(part, Expression):
        return repr(part)
    operation = part.function is not None and part.form[-1] != ")"
    return f"({part.text})" if brackets and operation else part.text


def _name(function: Callable[..., Any]) -> str:
    name = function.__name__.removeprefix("special_")  # as torch calls what stands in torch.special
    return next((f"{m}.{name}" for m, found in MODULES.items() if getattr(found, name, None) is function), name)


def _of_method(part: Expression, name: str, *arguments: Any) -> Expression:
    form = f"{{}}.{name}({', '.join(['{}'] * len(arguments))})"
    return Expression(form, partial(_invoked, name), (part, *arguments))


def _invoked(name: str, value: Any, *arguments: Any) -> Any:
    return getattr(value, name)(*arguments)
