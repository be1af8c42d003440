"""A mixed model as values: what it is made of, how it runs in Pyro, and the same as the text of a program for reading.

Each part has both beside each other: ``value`` runs, ``text`` writes.  The text is never executed here.
"""

import keyword
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence.models.counts import ZeroTruncated
from pyro_evidence.models.formula.expressions import Expression, call
from pyro_evidence.models.formula.families import GLMFamily
from pyro_evidence.models.formula.priors import Prior
from pyro_evidence.models.formula.structures import Structure

ZEROS = ("zi", "hurdle")  # log odds of a zero beside those that counts have, or of every zero
HEAD = """import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints
"""
TAKEN = frozenset(
    {"pyro", "dist", "torch", "constraints", "model", "len", "X", "b", "eta", "u", "scale", "sigma", "shape"}
    | {"trials", "offset", "rows", "weights", "event", "entry", "growth", "phi", "df", "cutpoints", "threshold", *ZEROS}
    | {"Censored", "CoxPartialLikelihood", "Gompertz", "LogLogistic", "ZeroTruncated"}
    | {"autoregressive_tril", "exchangeable_tril", "spectral_scale"}
)


@dataclass(frozen=True)
class Quantity:
    """A param of the model, or a latent site where it has a prior.

    :ivar shape: of its value.
    :ivar constraint: ``real``, ``positive``, ``corr_cholesky``, ``correlation``, ``length`` or ``ordered``.
    :ivar labels: what its elements are called.
    :ivar start: where it begins, if it is no correlation or length, of which this is the smallest value: these begin
        at zero, and at five times that.  ``1.0`` of real numbers is for all at zero.
    """

    name: str
    shape: tuple[int, ...]
    constraint: str
    labels: tuple[str, ...]
    prior: Prior | None
    start: float | tuple[float, ...] = 1.0

    def value(self, X: Tensor) -> Tensor:
        """Its value in this run."""
        if self.prior is not None:
            return pyro.sample(self.name, self._distribution(self.prior).value({"X": X}))
        first, _, constraint = self._param
        return pyro.param(self.name, first.value({"X": X}), constraint=constraint)

    def _distribution(self, prior: Prior) -> Expression:
        """The prior; of ordered numbers it is of the first, and of logarithms of their differences."""
        made = prior.distribution(self.shape)
        if self.constraint != "ordered":
            return made
        return call(dist.TransformedDistribution, made, call(dist.transforms.OrderedTransform))

    @cached_property
    def _param(self) -> tuple[Expression, str, constraints.Constraint]:
        """Where a param begins, and what it may be in words and as a constraint; correlations begin at none."""
        X, size, start = Expression("X"), self.shape[0] if self.shape else (), self.start
        match self.constraint:
            case "real":
                return X.new_zeros(size) if start == 1.0 else X.new_tensor(start), "", constraints.real
            case "positive":
                ones = X.new_ones(size)
                return ones if start == 1.0 else start * ones, "constraints.positive", constraints.positive
            case "ordered":
                return X.new_tensor(start), "dist.constraints.ordered_vector", dist.constraints.ordered_vector
            case "correlation":
                limits = constraints.interval(start, 1.0)
                return X.new_zeros(()), f"constraints.interval({start!r}, 1.0)", limits
            case "length":
                above = constraints.greater_than(start)
                return 5.0 * X.new_tensor(start), f"constraints.greater_than({start!r})", above
        return call(torch.eye, size).to(X), "constraints.corr_cholesky", constraints.corr_cholesky

    def text(self) -> str:
        """A line of the program that states this param or site."""
        if self.prior is not None:
            return f'{self.name} = pyro.sample("{self.name}", {self._distribution(self.prior).text})'
        first, limits, _ = self._param
        return f'{self.name} = pyro.param("{self.name}", {first.text}{f", constraint={limits}" if limits else ""})'


@dataclass(frozen=True, eq=False)
class Grouping:
    """The groups of one ``(terms | group)``, or the columns of a smooth, as the program names them.

    :ivar text: as the formula has it, ``(days | subject)``.
    :ivar label: the grouping as an identifier; effects are ``u_label``, their spreads ``sd_label``.
    :ivar coefficients: names of the effects of a group.
    :ivar structure: how those of one group vary together, or the columns of a smooth.
    :ivar smooth: how many columns a smooth has; every row has a number for every effect then, instead of one group.
    :ivar width: of the range of a Gaussian process.
    """

    text: str
    label: str
    coefficients: tuple[str, ...]
    structure: Structure
    smooth: int = 0
    width: float = 1.0

    @property
    def size(self) -> int:
        """Number of effects that have a scale together."""
        return self.smooth or len(self.coefficients)

    @property
    def plain(self) -> bool:
        """Whether a group has one effect, its intercept."""
        return self.coefficients == ("Intercept",)

    @property
    def plate(self) -> str:
        """Ending of the name of the plate of its effects."""
        return "functions" if self.smooth else "groups"

    @property
    def arguments(self) -> list[str]:
        """Names of its arguments: the group of each row, the number of groups, the columns that vary."""
        if self.smooth:
            return [f"Z_{self.label}"]
        return [self.label, f"num_{self.label}", *([] if self.plain else [f"Z_{self.label}"])]


@dataclass(frozen=True, eq=False)
class Effects:
    """The effects of one block on one linear predictor.

    :ivar label: ends the names of its sites: that of the block, and of the class where there are several predictors.
    :ivar sd: standard deviations of the effects.
    :ivar parameter: of their structure, where it has one: ``L``, a Cholesky factor of correlations, ``rho``, ``ell``.
    """

    block: Grouping
    label: str
    sd: Quantity
    parameter: Quantity | None

    @property
    def quantities(self) -> list[Quantity]:
        """The params and sites that their distribution is made of."""
        return [self.sd] if self.parameter is None else [self.sd, self.parameter]

    @cached_property
    def scale(self) -> Expression:
        """Standard deviations of the effects, or a factor of their covariance."""
        p = None if self.parameter is None else Expression(self.parameter.name)
        sd, block = Expression(self.sd.name), self.block
        return block.structure.scale.with_names(sd=sd, p=p, size=block.size, width=block.width)

    @cached_property
    def distribution(self) -> Expression:
        """The distribution of the effects of a group, or of one column of a smooth."""
        if self.block.structure.outside:
            return call(dist.Normal, Expression("X").new_zeros(()), 1.0)
        centre = Expression("X").new_zeros(len(self.block.coefficients))
        if self.block.structure.factor:
            return call(dist.MultivariateNormal, centre, scale_tril=self.scale)
        if self.block.plain:
            return call(dist.Normal, 0.0, self.scale)
        return call(dist.Normal, centre, self.scale).to_event(1)

    def value(self, X: Tensor, given: Mapping[str, Any]) -> Tensor:
        """Contribution to the predictor, ``(N,)``."""
        first, *others = (given[name] for name in self.block.arguments)
        values = {"X": X} | {q.name: q.value(X) for q in self.quantities}
        effect = self.distribution.value(values)
        with pyro.plate(f"{self.label}_{self.block.plate}", first.shape[-1] if self.block.smooth else others[0]):
            u = pyro.sample(f"u_{self.label}", effect)
        if self.block.smooth:
            return first @ (self.scale.value(values) * u if self.block.structure.outside else u)
        return u[first] if self.block.plain else (others[1] * u[first]).sum(-1)

    def text(self, eta: str) -> Iterator[str]:
        """Lines of the program that add these effects to the predictor called ``eta``."""
        yield f"# {one_line(self.block.text)}"
        yield self.sd.text() + ("" if self.block.plain else _comment(self.sd.labels))
        if self.parameter is not None:
            yield self.parameter.text()
        first, *others = self.block.arguments
        num = f"{first}.shape[-1]" if self.block.smooth else others[0]
        yield f'with pyro.plate("{self.label}_{self.block.plate}", {num}):'
        yield f'    u = pyro.sample("u_{self.label}", {self.distribution.text})'
        times = f"({self.scale.text} * u)" if self.block.structure.outside else "u"
        each = f"{first} @ {times}" if self.block.smooth else f"u[{first}]"
        yield f"{eta} = {eta} + {each if self.block.plain else f'({others[1]} * {each}).sum(-1)'}"


@dataclass(frozen=True, eq=False)
class Columns:
    """Arguments of the program for linear predictors: columns, groups, an offset.

    :ivar X: the name of the fixed effects' columns: ``X``, or ``X_parameter`` of a parameter with a formula.
    :ivar offset: the name of the column with coefficient one; empty where there is none.
    """

    X: str
    blocks: tuple[Grouping, ...]
    offset: str

    @property
    def arguments(self) -> list[str]:
        """Names of the program's arguments, for the rows that it is run on."""
        found = [self.X, *(name for block in self.blocks for name in block.arguments)]
        return [*found, self.offset] if self.offset else found


@dataclass(frozen=True, eq=False)
class Predictor:
    """One linear predictor: fixed effects and those of groups.

    :ivar name: ``eta``, ``eta_class`` where each class but the first has its own, or a parameter of the family.
    :ivar b: coefficients of the fixed effects, if there are any.
    :ivar exponential: whether the parameter is positive, so that the predictor is of its logarithm.
    """

    name: str
    columns: Columns
    b: Quantity | None
    effects: tuple[Effects, ...]
    exponential: bool = False

    def value(self, given: Mapping[str, Any]) -> Tensor:
        """Its value for each row, ``(N,)``."""
        X = given[self.columns.X]
        eta = X.new_zeros(len(X)) if self.b is None else X @ self.b.value(X)
        if self.columns.offset:
            eta = eta + given[self.columns.offset]
        for effects in self.effects:
            if given[effects.block.arguments[0]] is not None:  # else those of the population, for a prediction
                eta = eta + effects.value(X, given)
        return eta.exp() if self.exponential else eta

    def text(self) -> Iterator[str]:
        """Lines of the program that compute this predictor."""
        if self.b is not None:
            yield self.b.text() + _comment(self.b.labels)
        start = "X.new_zeros(len(X))" if self.b is None else f"{self.columns.X} @ {self.b.name}"
        yield f"{self.name} = {start}{f' + {self.columns.offset}' if self.columns.offset else ''}"
        for effects in self.effects:
            yield from effects.text(self.name)
        if self.exponential:
            yield f"{self.name} = {self.name}.exp()"


@dataclass(frozen=True, eq=False)
class Sketch:
    """All that a mixed model is made of.

    :ivar title: the program's first line.
    :ivar response: the name of the observed site, and of the argument with its values.
    :ivar columns: of the response's predictors first, then of each parameter that has a formula.
    :ivar predictors: one, or of categories one for each class but the first.
    :ivar parameters: the family's, in its order: one number each, or a predictor.
    :ivar zeros: the log odds of a zero beside those that counts have (``zi``) or of every zero (``hurdle``).
    :ivar given: further arguments with a number for each row: what is known of the response beside its values.
    :ivar seen: what stands in the response's place without noise, from the linear predictor and the distribution of the
        response, in a prediction of it; not in the text.
    """

    title: str
    family: GLMFamily
    response: str
    columns: tuple[Columns, ...]
    predictors: tuple[Predictor, ...]
    parameters: tuple[Quantity | Predictor, ...]
    zeros: Predictor | None
    given: tuple[str, ...]
    seen: Callable[[Tensor, Any], Tensor] | None = None

    @property
    def arguments(self) -> list[str]:
        """Names of the program's arguments, the response last."""
        return [*(name for part in self.columns for name in part.arguments), *self.given, self.response]

    @property
    def every_predictor(self) -> list[Predictor]:
        """Those of the response, of parameters, and of zeros."""
        of_parameters = [p for p in self.parameters if isinstance(p, Predictor)]
        return [*self.predictors, *of_parameters, *([self.zeros] if self.zeros else [])]

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of every param or site of the program but the response, and what its elements are called."""
        found: dict[str, tuple[str, ...]] = {}
        for predictor in self.every_predictor:
            if predictor.b is not None:
                found[predictor.b.name] = predictor.b.labels
            for effects in predictor.effects:
                found |= {q.name: q.labels for q in effects.quantities}
                found[f"u_{effects.label}"] = effects.block.coefficients
        return found | {p.name: p.labels for p in self.parameters if isinstance(p, Quantity)}

    @cached_property
    def distribution(self) -> Expression:
        """The distribution of the response from ``eta``, the family's parameters, and what is known of it."""
        fn = self.family.distribution
        if self._known:
            fn = fn.also(**{name: Expression(name) for name in self._known})
        if self.zeros is None:
            return fn
        base = call(ZeroTruncated, fn) if self.zeros.name == "hurdle" else fn
        return call(dist.ZeroInflatedDistribution, base, gate_logits=Expression(self.zeros.name))

    def run(self, given: Mapping[str, Any]) -> None:
        """The model on its arguments, by name; the response may be missing."""
        X, family = given["X"], self.family
        etas = [predictor.value(given) for predictor in self.predictors]
        eta = torch.stack([X.new_zeros(len(X)), *etas], -1) if family.response == "classes" else etas[0]
        values = {p.name: p.value(X) if isinstance(p, Quantity) else p.value(given) for p in self.parameters}
        zeros = {} if self.zeros is None else {self.zeros.name: self.zeros.value(given)}
        fn = self.distribution.value(dict.fromkeys(self._known) | dict(given) | values | zeros | {"eta": eta})
        if self.seen is not None:
            value = self.seen(eta, fn)
            fn = dist.Delta(value, event_dim=value.dim())
        weights = given.get("weights")  # not those of new rows
        in_plate = self.seen is None and family.response != "order"
        with (
            pyro.plate("rows", len(X)) if in_plate else nullcontext(),
            poutine.scale(scale=1.0 if weights is None else weights),
        ):
            pyro.sample(self.response, fn, obs=given.get(self.response))

    @property
    def _known(self) -> tuple[str, ...]:
        """Names of what is known of times: event, entry."""
        return tuple(name for name in self.given if name in ("event", "entry"))

    def text(self) -> str:
        """The program, for reading: run by its reader, it has the log joint of :meth:`run`."""
        *given, response = self.arguments
        lines = [f'"""{one_line(self.title)}"""', *(line for p in self.predictors for line in p.text())]
        if self.family.response == "classes":
            etas = ", ".join(["X.new_zeros(len(X))", *(p.name for p in self.predictors)])
            lines.append(f"eta = torch.stack([{etas}], -1)  # the first class is the baseline")
        for parameter in self.parameters:
            lines += [parameter.text()] if isinstance(parameter, Quantity) else parameter.text()
        lines += self.zeros.text() if self.zeros else ()
        in_plate = self.family.response != "order"
        counted = ", pyro.poutine.scale(scale=weights)" if "weights" in self.given else ""
        lines += [f'with pyro.plate("rows", len(X)){counted}:'] * in_plate
        sample = f'pyro.sample("{response}", {self.distribution.text}, obs={response})'
        lines.append(f"    {sample}" if in_plate else sample)
        effects = [effects for predictor in self.every_predictor for effects in predictor.effects]
        imports = set[str]().union(self.distribution.imports, *(part.scale.imports for part in effects))
        body = "\n".join(f"    {line}" for line in lines)
        return f"{HEAD}{''.join(sorted(imports))}\n\ndef model({', '.join(given)}, {response}=None):\n{body}\n"


def identifier(text: str, taken: set[str] | frozenset[str] = TAKEN) -> str:
    """A name for a column that is a word of Python and not taken."""
    name = suffix(text) or "y"
    name = f"_{name}" if not name.isidentifier() else name
    while name in taken or keyword.iskeyword(name):
        name += "_"
    return name


def suffix(text: str) -> str:
    """The text with every character replaced that cannot stand in an identifier."""
    normal = unicodedata.normalize("NFKC", text)  # as Python reads names
    return re.sub(" +", "_", "".join(c if f"_{c}".isidentifier() else " " for c in normal)).strip("_")


def suffixes(classes: Sequence[str]) -> tuple[str, ...]:
    """One for each class but the first: its name, or the codes of all where two would be the same (``-1``, ``1``)."""
    found = tuple(suffix(c) for c in classes[1:])
    return found if len(set(found)) == len(found) else tuple(str(code) for code in range(1, len(classes)))


def one_line(text: str) -> str:
    """A text that comes from a formula or a frame, as it may stand in a comment or docstring of one line."""
    text = text.replace("\\", "/").replace('"', "'")
    return "".join(c if c.isprintable() else f"<{ord(c):x}>" for c in text)


def _comment(names: tuple[str, ...]) -> str:
    text = one_line(", ".join(names))
    return f"  # {text}" if 0 < len(text) <= 60 else ""
