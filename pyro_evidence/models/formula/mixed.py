"""The door: a formula and a frame in, a Pyro program and its arguments out."""

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Signature, signature
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.models.formula.design import Design, Frame, Response, complete_rows
from pyro_evidence.models.formula.families import FAMILIES
from pyro_evidence.models.formula.priors import FLAT, WEAK, Priors, check_names, general, weak_priors
from pyro_evidence.models.formula.source import Block, Sketch, identifier, program, spread_names, suffix
from pyro_evidence.models.formula.terms import parsed

Arguments = tuple[Any, ...]


@dataclass(eq=False, repr=False)
class MixedModel:
    """A Pyro program made from a formula.  Call it, or give it to any engine, like one written by hand.

    :ivar source: its text, which runs by itself.
    :ivar formula: and ``family``: what it was made from.
    :ivar coords: names along the dimensions of its params and sites; ``dims`` says which has which, as in ArviZ.
    :ivar dropped: how many rows were left out because a value was missing.
    """

    source: str
    formula: str
    family: str
    coords: Mapping[str, Sequence[str]]
    dims: Mapping[str, Sequence[str]]
    dropped: int
    classes: tuple[str, ...]
    _design: Design
    _blocks: tuple[Block, ...]
    _run: Callable[..., None] = field(init=False)

    def __post_init__(self) -> None:
        self._run = _compiled(self.source)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_run"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._run = _compiled(self.source)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the program."""
        self._run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"MixedModel({self.formula!r}, family={self.family!r})"

    @property
    def __signature__(self) -> Signature:
        return signature(self._run)

    def arguments(self, frame: Frame) -> Arguments:
        """The program's arguments for new rows, without the response: for ``posterior.predict(*...)``.

        Groups that the fit has not seen get effects drawn from their distribution.

        :param frame: a ``pandas.DataFrame`` with the columns of the right-hand side.
        :raises BadInput: for a missing value, a column that is not there, a level of a fixed effect that is new.
        """
        wanted = [c for c in self._design.frame.columns if c in self._right_hand_side]
        lacking = [c for c in wanted if c not in frame.columns]
        if lacking:
            raise BadInput(f"the new rows have no column '{lacking[0]}'; expected {wanted}.")
        gaps = [c for c in wanted if bool(frame[c].isna().any())]
        if gaps:
            raise BadInput(f"the new rows lack values of '{gaps[0]}'; expected none missing. Leave such rows out.")
        return tuple(_inputs(self._design, self._blocks, frame))

    @property
    def _right_hand_side(self) -> set[str]:
        response = self._design.formula.response
        return {w for w in self._design.formula.words if w not in response or w in self._design.formula.fixed}


def mixed(
    formula: str, frame: Frame, *, family: str = "gaussian", priors: Priors | str | None = None
) -> tuple[MixedModel, Arguments]:
    """A mixed model as an ordinary Pyro program, and its arguments: ``LaplaceEvidence(model).run(*data)``.

    The formula is that of lme4 and brms: ``(days | subject)`` are correlated effects, ``(days || subject)`` independent
    ones, ``(1 | a / b)`` nested groups, ``x * z`` interactions, ``offset(x)`` a term with coefficient one.  Without
    priors fixed effects and spreads are params, found by maximum (marginal) likelihood.

    :param frame: a ``pandas.DataFrame``; rows with a missing value are left out, and counted in ``model.dropped``.
    :param family: gaussian, bernoulli, binomial, poisson, negative binomial or categorical.
    :param priors: of ``b`` (fixed effects), ``sd`` (spreads of groups, or ``sd_subject`` for one), ``L`` (their
        correlations), ``sigma``, ``shape``: what has one is a latent site.  ``{"b": "flat"}`` gives restricted maximum
        likelihood, ``"weak"`` priors in the data's units for all; ``model.source`` states them.
    :return: the program, and its arguments, response last.
    :raises BadInput: for a formula, a frame, a family or a prior that cannot be used.

    >>> import pandas
    >>> from pyro_evidence import LaplaceEvidence
    >>> frame = pandas.DataFrame({"y": [1.0, 3.0, 2.0, 4.5, 0.5, 2.5], "x": [0, 1, 0, 1, 0, 1], "g": list("aabbcc")})
    >>> model, data = mixed("y ~ x + (1 | g)", frame)
    >>> print(model.source.splitlines()[6])
    def model(X, g, num_g, y=None):
    >>> intercept, slope = LaplaceEvidence(model).run(*data).hyperparameters["b"].tolist()
    >>> round(slope, 4)
    2.1667
    """
    taken_apart = parsed(formula)
    _check_family(family)
    kept = complete_rows(taken_apart, frame)
    design = Design(taken_apart, family, kept)
    response = design.response()
    sketch = _sketch(formula, design, response, priors)
    source = program(sketch)
    coords, dims = _names(sketch, design)
    model = MixedModel(
        source, formula, family, coords, dims, len(frame) - len(kept), response.classes, design, sketch.blocks
    )
    return model, (*_inputs(design, sketch.blocks), *_trials(response), response.values)


def _check_family(family: str) -> None:
    if family not in FAMILIES:
        raise BadInput(f"family={family!r}; expected one of {list(FAMILIES)}.")


def _sketch(formula: str, design: Design, response: Response, priors: Priors | str | None) -> Sketch:
    coefficients = design.names(design.formula.fixed)
    blocks = tuple(_blocks(design))
    name = identifier(design.formula.response.partition("[")[0], {a for b in blocks for a in b.arguments})
    sketch = Sketch(
        _title(formula, design, response),
        design.family,
        name,
        coefficients,
        blocks,
        design.offset() is not None,
        tuple(suffix(c) for c in response.classes[1:]) if design.family == "categorical" else (),
        _chosen(priors, design, response),
    )
    names = spread_names(sketch)
    check_names(sketch.priors, {n for n in (set(names) | {general(n) for n in names}) if not n.startswith("u")})
    return sketch


def _chosen(priors: Priors | str | None, design: Design, response: Response) -> Priors:
    if priors is None:
        return {}
    if isinstance(priors, Mapping):
        flat = [n for n, text in priors.items() if text == FLAT and general(n) != "b"]
        if flat:
            raise BadInput(f"priors[{flat[0]!r}]='flat'; expected it for b only. Leave it out: its maximum is taken.")
        return priors
    if priors != WEAK:
        raise BadInput(f"priors={priors!r}; expected a dict such as {{'b': 'Normal(0, 2.5)'}}, 'weak' or None.")
    fixed = design.formula.fixed
    found = weak_priors(design.matrix(fixed), design.names(fixed), design.family, response.values)
    correlated = any(v.correlated and len(design.names(v.terms)) > 1 for v in design.formula.varying)
    absent = set() if correlated else {"L"}
    absent |= set() if design.formula.varying else {"sd"}
    absent |= set() if FAMILIES[design.family].spread else {"shape"}
    return {n: text for n, text in found.items() if n not in absent}


def _title(formula: str, design: Design, response: Response) -> str:
    link = FAMILIES[design.family].link
    classes = f"; {', '.join(f'{i} is {c}' for i, c in enumerate(response.classes))}" if response.classes else ""
    return f"{formula}  ({design.family}, {link} link{classes})".replace('"', "'").replace("\\", "/")


def _blocks(design: Design) -> list[Block]:
    taken: set[str] = set()
    found = []
    for varying in design.formula.varying:
        coefficients = design.names(varying.terms)
        text = f"({varying.terms} {'|' if varying.correlated else '||'} {varying.group})"
        if not coefficients:
            raise BadInput(f"{text} has nothing that varies; expected terms such as (1 + x | group).")
        label = identifier(varying.group, set())
        if label in taken:
            label = identifier(f"{label}_{coefficients[0]}", taken)
        taken |= {label}
        found.append(Block(text, label, coefficients, varying.correlated and len(coefficients) > 1))
    return found


def _inputs(design: Design, blocks: Sequence[Block], frame: Frame | None = None) -> list[Any]:
    """The arguments up to the response, trials apart."""
    found: list[Any] = [design.matrix(design.formula.fixed, frame)]
    for block, varying in zip(blocks, design.formula.varying, strict=True):
        found += design.index(varying, frame)
        if not block.plain:
            found.append(design.matrix(varying.terms, frame))
    offset = design.offset(frame)
    return found if offset is None else [*found, offset]


def _trials(response: Response) -> list[Tensor]:
    return [] if response.trials is None else [response.trials]


def _names(sketch: Sketch, design: Design) -> tuple[dict[str, Sequence[str]], dict[str, Sequence[str]]]:
    """Names along dimensions, and which site has which."""
    coords: dict[str, Sequence[str]] = {"coefficient": sketch.coefficients}
    labels: dict[str, Block] = {}
    for block, varying in zip(sketch.blocks, design.formula.varying, strict=True):
        coords |= {block.label: design.levels(varying), f"{block.label}_effect": block.coefficients}
        labels |= {block.label + suffix: block for suffix in [f"_{c}" for c in sketch.classes] or [""]}
    dims = {name: _dims(name, labels) for name in spread_names(sketch)}
    return coords, {name: found for name, found in dims.items() if found}


def _dims(name: str, labels: Mapping[str, Block]) -> list[str]:
    kind, _, label = name.partition("_")
    if kind == "b":
        return ["coefficient"]
    if label not in labels:
        return []
    block = labels[label]
    effect = [] if block.plain else [f"{block.label}_effect"]
    return {"u": [block.label, *effect], "L": 2 * effect}.get(kind, effect)


def _compiled(source: str) -> Callable[..., None]:
    """The function ``model`` of a program, whose lines tracebacks can show."""
    name = f"<mixed model {hash(source):x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"dist": dist, "torch": torch}
    exec(compile(source, name, "exec"), space)
    return space["model"]
