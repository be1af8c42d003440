"""A mixed model from a formula and a frame: a Pyro program, built from values, and its arguments."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, Signature
from typing import Any

from pyro_evidence.errors import BadInput
from pyro_evidence.models.formula.design import Frame, FrameDesign, Response, columns_of, complete_rows
from pyro_evidence.models.formula.families import FAMILIES
from pyro_evidence.models.formula.priors import FLAT, WEAK, Priors, check_names, general, stated_prior, weak_priors
from pyro_evidence.models.formula.program import (
    TAKEN,
    Effects,
    Grouping,
    Predictor,
    Quantity,
    Sketch,
    identifier,
    suffixes,
)
from pyro_evidence.models.formula.terms import parsed

Arguments = tuple[Any, ...]


@dataclass(eq=False, repr=False)
class MixedModel:
    """A Pyro program made from a formula.  Call it, or give it to any engine, like one written by hand.

    :ivar formula: and ``family``: what it was made from.
    :ivar coords: names along the dimensions of its params and sites; ``dims`` says which has which, as in ArviZ.
    :ivar dropped: how many rows were left out because a value was missing.
    """

    formula: str
    family: str
    coords: Mapping[str, Sequence[str]]
    dims: Mapping[str, Sequence[str]]
    dropped: int
    classes: tuple[str, ...]
    _design: FrameDesign
    _sketch: Sketch

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the program."""
        names = self.__signature__.parameters
        if kwargs or len(args) < len(names) - 1 or len(args) > len(names):
            return self._sketch.run(self.__signature__.bind(*args, **kwargs).arguments)
        return self._sketch.run(dict(zip(names, args, strict=False)))

    @property
    def source(self) -> str:
        """Text of the program, for reading: it runs by itself, and is not what runs when the model is called."""
        return self._sketch.text()

    @cached_property
    def __signature__(self) -> Signature:
        *given, response = (Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in self._sketch.arguments)
        return Signature([*given, response.replace(default=None)])

    def __repr__(self) -> str:
        return f"MixedModel({self.formula!r}, family={self.family!r})"

    def arguments(self, frame: Frame) -> Arguments:
        """The program's arguments for new rows, without the response: for ``posterior.predict(*...)``.

        Groups that the fit has not seen get effects drawn from their distribution.

        :param frame: a ``pandas.DataFrame`` with the columns of the right-hand side.
        :raises BadInput: for a missing value, a column that is not there, a level of a fixed effect that is new.
        """
        formula = self._design.formula
        right_hand_side = {w for w in formula.words if w not in formula.response or w in formula.fixed}
        wanted = [c for c in self._design.frame.columns if c in right_hand_side]
        frame = columns_of(frame, wanted, wanted)
        gaps = [c for c in wanted if bool(frame[c].isna().any())]
        if gaps:
            raise BadInput(f"the new rows lack values of '{gaps[0]}'; expected none missing. Leave such rows out.")
        return tuple(_inputs(self._design, self._sketch.blocks, frame))


def mixed(
    formula: str, frame: Frame, *, family: str = "gaussian", priors: Priors | str | None = None
) -> tuple[MixedModel, Arguments]:
    """A mixed model as an ordinary Pyro program, and its arguments: ``LaplaceEvidence(model).run(*data)``.

    The formula is that of lme4 and brms: ``(days | subject)`` are correlated effects, ``(days || subject)`` independent
    ones, ``(1 | a / b)`` nested groups, ``x * z`` interactions, ``offset(x)`` a term with coefficient one.  Without
    priors fixed effects and spreads are params, found by maximum (marginal) likelihood.

    :param frame: a ``pandas.DataFrame``; rows with a missing value are left out, and counted in ``model.dropped``.
    :param family: gaussian, bernoulli, binomial, poisson, negative binomial or categorical; of times until an event,
        ``surv(time, event)`` or ``surv(start, stop, event)``, exponential, weibull, lognormal, loglogistic (``eta`` is
        the log of a typical time), gompertz (the log of the hazard at 0), or cox, Cox's partial likelihood with Efron's
        treatment of ties, "cox breslow" with Breslow's (the log of a ratio of hazards, no intercept).
    :param priors: of ``b`` (fixed effects), ``sd`` (spreads of groups, or ``sd_subject`` for one), ``L`` (their
        correlations), ``sigma``, ``shape``, ``growth``: what has one is a latent site.  ``{"b": "flat"}`` gives
        restricted maximum likelihood, ``"weak"`` priors in the data's units for all; ``model.source`` states them.
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
    if family not in FAMILIES:
        raise BadInput(f"family={family!r}; expected one of {list(FAMILIES)}.")
    kept = complete_rows(taken_apart, frame)
    design = FrameDesign(taken_apart, family, kept)
    response = design.response()
    sketch = _sketch(formula, design, response, priors)
    coords, dims = _names(sketch, design)
    model = MixedModel(formula, family, coords, dims, len(frame) - len(kept), response.classes, design, sketch)
    return model, (*_inputs(design, sketch.blocks), *response.given.values(), response.values)


def _sketch(formula: str, design: FrameDesign, response: Response, priors: Priors | str | None) -> Sketch:
    family, coefficients = FAMILIES[design.family], design.coefficients
    stated = _chosen(priors, design, response)
    endings = tuple(f"_{c}" for c in suffixes(response.classes)) if design.family == "categorical" else ("",)
    blocks = tuple(_blocks(design, endings))
    taken = TAKEN.union(*(_words(b.label, endings) for b in blocks))
    classes = f"; {', '.join(f'{i} is {c}' for i, c in enumerate(response.classes))}" if response.classes else ""
    predictors = []
    for ending in endings:
        shape = (len(coefficients),)
        b = _quantity(f"b{ending}", shape, "real", coefficients, stated) if coefficients else None
        effects = []
        for block in blocks:
            label, names, size = block.label + ending, block.coefficients, len(block.coefficients)
            sd = _quantity(f"sd_{label}", () if block.plain else (size,), "positive", names, stated)
            L = _quantity(f"L_{label}", (size, size), "corr_cholesky", names, stated) if block.correlated else None
            effects.append(Effects(block, label, sd, L))
        predictors.append(Predictor(f"eta{ending}", b, tuple(effects)))
    start = 1.0 / float(response.values.max()) if family.spread == "growth" else 1.0  # else its hazard overflows
    sketch = Sketch(
        f"{formula}  ({design.family}, {family.link} link{classes})".replace('"', "'").replace("\\", "/"),
        design.family,
        identifier(design.formula.response.partition("[")[0], taken | _own(endings)),
        blocks,
        tuple(predictors),
        _quantity(family.spread, (), "positive", (), stated, start) if family.spread else None,
        (*["offset"] * (design.offset() is not None), *response.given),
    )
    check_names(stated, {n for n in sketch.names.keys() | {general(n) for n in sketch.names} if n[0] != "u"})
    return sketch


def _quantity(
    name: str, shape: tuple[int, ...], constraint: str, labels: tuple[str, ...], priors: Priors, start: float = 1.0
) -> Quantity:
    return Quantity(name, shape, constraint, labels, stated_prior(name, shape, priors), start)


def _chosen(priors: Priors | str | None, design: FrameDesign, response: Response) -> Priors:
    if priors is None:
        return {}
    if isinstance(priors, Mapping):
        flat = [n for n, text in priors.items() if text == FLAT and general(n) != "b"]
        if flat:
            raise BadInput(f"priors[{flat[0]!r}]='flat'; expected it for b only. Leave it out: its maximum is taken.")
        return priors
    if priors != WEAK:
        raise BadInput(f"priors={priors!r}; expected a dict such as {{'b': 'Normal(0, 2.5)'}}, 'weak' or None.")
    found = weak_priors(design.fixed(), design.coefficients, FAMILIES[design.family], response.values)
    correlated = any(v.correlated and len(design.names(v.terms)) > 1 for v in design.formula.varying)
    absent = set() if correlated else {"L"}
    absent |= set() if design.formula.varying else {"sd"}
    return {n: text for n, text in found.items() if n not in absent}


def _blocks(design: FrameDesign, endings: Sequence[str]) -> Iterator[Grouping]:
    taken = set(TAKEN | _own(endings))
    for varying in design.formula.varying:
        coefficients = design.names(varying.terms)
        text = f"({varying.terms} {'|' if varying.correlated else '||'} {varying.group})"
        if not coefficients:
            raise BadInput(f"{text} has nothing that varies; expected terms such as (1 + x | group).")
        label = identifier(varying.group)
        if taken & _words(label, endings):
            label = identifier(f"{label}_{coefficients[0]}")
        while taken & _words(label, endings):
            label += "_"
        taken |= _words(label, endings)
        yield Grouping(text, label, coefficients, varying.correlated and len(coefficients) > 1)


def _own(endings: Sequence[str]) -> set[str]:
    """Names of the fixed effects and predictors."""
    return {f"{kind}{ending}" for kind in ("b", "eta") for ending in endings}


def _words(label: str, endings: Sequence[str]) -> set[str]:
    """Every name that groups of that label bring into the program."""
    sites = {f"{site}_{label}{ending}" for site in ("u", "sd", "L") for ending in endings}
    return sites | {f"{label}{ending}_groups" for ending in endings} | {label, f"num_{label}", f"Z_{label}"}


def _inputs(design: FrameDesign, blocks: Sequence[Grouping], frame: Frame | None = None) -> list[Any]:
    """The arguments up to the response, trials apart."""
    found: list[Any] = [design.fixed(frame)]
    for block, varying in zip(blocks, design.formula.varying, strict=True):
        found += design.index(varying, frame)
        if not block.plain:
            found.append(design.matrix(varying.terms, frame))
    offset = design.offset(frame)
    return found if offset is None else [*found, offset]


def _names(sketch: Sketch, design: FrameDesign) -> tuple[dict[str, Sequence[str]], dict[str, Sequence[str]]]:
    """Names along dimensions, and which site has which."""
    coords: dict[str, Sequence[str]] = {"coefficient": design.coefficients}
    for block, varying in zip(sketch.blocks, design.formula.varying, strict=True):
        coords |= {block.label: design.levels(varying), f"{block.label}_effect": block.coefficients}
    dims: dict[str, Sequence[str]] = {}
    for predictor in sketch.predictors:
        dims |= {predictor.b.name: ["coefficient"]} if predictor.b else {}
        for effects in predictor.effects:
            along = [] if effects.block.plain else [f"{effects.block.label}_effect"]
            dims |= {effects.sd.name: along} | ({effects.L.name: 2 * along} if effects.L else {})
            dims[f"u_{effects.label}"] = [effects.block.label, *along]
    return coords, {name: found for name, found in dims.items() if found}
