"""A mixed model from a formula and a frame: a Pyro program, built from values, and its arguments."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter, Signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.models.formula.design import Frame, FrameDesign, Response, columns_of, complete_rows, row_weights
from pyro_evidence.models.formula.expressions import Expression
from pyro_evidence.models.formula.families import CUTPOINTS, Family, GLMFamily, chosen_family
from pyro_evidence.models.formula.priors import (
    FLAT,
    WEAK,
    Priors,
    general,
    stated_prior,
    weak_coefficients,
    weak_priors,
)
from pyro_evidence.models.formula.program import (
    TAKEN,
    ZEROS,
    Columns,
    Effects,
    Grouping,
    Predictor,
    Quantity,
    Sketch,
    identifier,
    suffixes,
)
from pyro_evidence.models.formula.structures import PROCESS, STRUCTURES
from pyro_evidence.models.formula.terms import parsed

Arguments = tuple[Any, ...]
POSITIVE = "positive parameter"


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
    _designs: tuple[FrameDesign, ...]
    _sketch: Sketch

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the program."""
        names = self.__signature__.parameters
        if kwargs or len(args) < len(names) - 1 or len(args) > len(names):
            try:
                bound = self.__signature__.bind(*args, **kwargs)
            except TypeError as error:
                raise BadInput(
                    f"the model of {self.formula!r} was called with {len(args)} argument(s), {error}; expected "
                    f"{', '.join(names)}. Write model, data = mixed(...), then run(*data)."
                ) from error
            return self._sketch.run(bound.arguments)
        return self._sketch.run(dict(zip(names, args, strict=False)))

    @property
    def source(self) -> str:
        """Text of the program, for reading: it runs by itself, and is not what runs when the model is called."""
        return self._sketch.text()

    @property
    def heading(self) -> tuple[str, ...]:
        """First lines of a summary: formula, family, method of estimation, numbers of rows and of groups."""
        coefficients = [predictor.b.prior for predictor in self._sketch.predictors if predictor.b is not None]
        flat = [prior is not None and prior.name == FLAT for prior in coefficients]
        how = (
            "maximum likelihood" if None in coefficients else "restricted maximum likelihood" if any(flat) else "Bayes"
        )
        rows, dropped = len(self._designs[0].frame), f", {self.dropped} more left out" if self.dropped else ""
        blocks = [block for columns in self._sketch.columns for block in columns.blocks]
        groups = "".join(f"; {len(self.coords[block.label])} {block.label}" for block in blocks if not block.smooth)
        named = f"{self.formula}   ({self.family}, {self._sketch.family.link} link; {how})"
        return named, f"{rows} rows{dropped}{groups}"

    @property
    def begins(self) -> dict[str, Tensor]:
        """Where a search for sites begins by name: elsewhere their link may have no value, and beyond a pole others."""
        found = [p.b for p in self._sketch.predictors if p.b and p.b.prior is not None and p.b.start != 1.0]
        effects = [] if self._sketch.family.begins_at_zero else [e for p in self._sketch.predictors for e in p.effects]
        at_zero = {f"u_{e.label}": torch.zeros((), dtype=torch.float64) for e in effects}
        return at_zero | {b.name: torch.tensor(b.start, dtype=torch.float64) for b in found}

    @cached_property
    def __signature__(self) -> Signature:
        *given, response = (Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in self._sketch.arguments)
        return Signature([*given, response.replace(default=None)])

    def __repr__(self) -> str:
        return f"MixedModel({self.formula!r}, family={self.family!r})"

    @property
    def frame(self) -> Frame:
        """The rows of the fit, of the columns that the formulas name."""
        return self._designs[0].frame

    def seen(self, function: Callable[[Tensor, Any], Tensor]) -> "MixedModel":
        """The same model with something else in the response's place, without noise.

        :param function: of the linear predictor and the distribution of the response.
        """
        return replace(self, _sketch=replace(self._sketch, seen=function))

    def arguments(self, frame: Frame | None = None, groups: bool = True) -> Arguments:
        """The program's arguments for new rows, without the response: ``posterior.predict(frame)`` takes these.

        Groups that the fit has not seen get effects drawn from their distribution.  Where the frame has
        not the columns of the numbers of trials, each row is of one trial: its mean is the chance.

        :param frame: a ``pandas.DataFrame`` with the columns of the right-hand side; None for the rows of the fit.
        :param groups: False leaves their effects out; the frame needs no columns of groups then.
        :raises BadInput: for a missing value, a column that is not there, a level of a fixed effect that is new.
        """
        frame = self.frame if frame is None else frame
        parts = [replace(d.formula, response="", varying=d.formula.varying if groups else ()) for d in self._designs]
        words = set().union(*(part.words for part in parts))
        wanted = [c for c in self._designs[0].frame.columns if c in words]
        trials = self._designs[0].trials_in(frame)
        frame = columns_of(frame, wanted, wanted)
        gaps = [c for c in wanted if bool(frame[c].isna().any())]
        if gaps:
            raise BadInput(f"the new rows lack values of '{gaps[0]}'; expected none missing. Leave such rows out.")
        return (*_inputs(self._designs, self._sketch, frame, groups), *([] if trials is None else [trials]))


def mixed(
    formula: str,
    frame: Frame,
    *,
    family: Family = "gaussian",
    link: str | None = None,
    priors: Priors | str | None = None,
    weights: str | None = None,
    neighbours: Mapping[str, Sequence[tuple[str, str]]] | None = None,
) -> tuple[MixedModel, Arguments]:
    """A mixed model as an ordinary Pyro program, and its arguments: ``LaplaceEvidence(model).run(*data)``.

    The formula is that of lme4 and brms: ``(days | subject)`` are correlated effects, ``(days || subject)`` independent
    ones, ``(1 | a / b)`` nested groups, ``ar1(time | g)``, ``cs(x | g)``, ``diag`` and ``us`` what they are in glmmTMB,
    ``x * z`` interactions, ``offset(x)`` a term with coefficient one, ``.`` every other column.  Smooths are those of
    mgcv: ``s(x)``, a curve, ``s(x, k=20)`` of more functions, ``s(x, by=g)`` one a level, ``s(x, z)`` and
    ``t2(x, z)`` surfaces, ``s(day, bs="cc", knots=[0, 365])`` of a period, ``s(g, bs="mrf")`` over a graph; ``gp(x)``
    is a Gaussian process by sines (Riutort-Mayol et al. 2023).  Behind
    semicolons stand formulas of other parameters, groups in them too: ``"y ~ x; sigma ~ x"`` (its logarithm, as of
    every positive one), and of counts ``zi ~ x``, the log odds of zeros beside those that they have, or
    ``hurdle ~ x``, of every zero.  Without priors fixed effects and spreads are params, found by maximum (marginal)
    likelihood.

    :param frame: a ``pandas.DataFrame``; rows with a missing value are left out, and counted in ``model.dropped``.
    :param family: one of ``FAMILIES``, in any case, or R's name of it (``nbinom2``): gaussian, student, gamma, beta,
        bernoulli, binomial, beta binomial, poisson, negative binomial (1: its variance is ``mean (1 + phi)``),
        truncated poisson, truncated negative binomial (counts from 1), categorical, ordinal (a cumulative link and
        ``cutpoints``); of times until an event, ``surv(time, event)``, ``surv(start, stop, event)``, or a
        column where all were seen, exponential, weibull, lognormal, loglogistic (``eta`` is the log of a typical time),
        gompertz (the log of the hazard at 0), or cox, Cox's partial likelihood with Efron's
        treatment of ties, "cox breslow" with Breslow's (the log of a ratio of hazards, no intercept).  Any distribution
        is one with the name of the argument that the linear predictor is of: ``(dist.StudentT, "loc", {"df": 4.0})``;
        its other positive arguments are parameters.
    :param link: logit, probit, cloglog, log or identity of shares and chances, identity, log or inverse of means; None
        for the family's first.
    :param priors: of ``b`` (fixed effects), ``sd`` (spreads of groups, or ``sd_subject`` for one), ``L`` (their
        correlations, or ``rho``, that of ``ar1`` and ``cs``), ``ell`` (the length of a ``gp``), of the family's
        parameters (``sigma``, ``shape``, ``phi``, ``df``, ``growth``; ``cutpoints``, where it is of the first of them
        and of the logarithms of their differences), of ``b_sigma`` where that has a formula: what
        has one is a latent site.  ``{"b": "flat"}`` gives restricted maximum likelihood, ``"weak"`` priors in the
        data's units for all; ``model.source`` states them.
    :param weights: the column that says how often each row counts, in the log likelihood, as in glmmTMB and brms.
    :param neighbours: of ``s(g, bs="mrf")``: column -> pairs of values that are neighbours.
    :return: the program, and its arguments, response last.
    :raises BadInput: for a formula, a frame, a family, a link or a prior that cannot be used.

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
    formulas = parsed(formula, frame)
    named, chosen = chosen_family(family, link)
    zeros = ZEROS if chosen.response == "counts" else ()
    allowed = (*(p for p in chosen.parameters if p not in ("growth", CUTPOINTS)), *zeros)
    wrong = [n for n in formulas if n and n not in allowed]
    if wrong or set(ZEROS) <= set(formulas):
        several = ", not both of the last two" if zeros else ""
        raise BadInput(
            f"a formula for {' and '.join(wrong or ZEROS)} in a model of family {named!r}; expected one for "
            f"{', '.join(allowed) or 'the response alone'}{several}."
        )
    kept = complete_rows(formulas.values(), frame, [] if weights is None else [weights])
    kinds = [chosen.response if not name else "real" if name in ZEROS else POSITIVE for name in formulas]
    pairs = zip(formulas.values(), kinds, strict=True)
    designs = tuple(FrameDesign(f, kind, kept, neighbours or {}) for f, kind in pairs)
    response = designs[0].response()
    if weights is not None:
        if chosen.response == "order":
            raise BadInput(
                f"weights={weights!r} of family {named!r}, whose rows have no density of their own; expected none."
            )
        response = replace(response, given={**response.given, "weights": row_weights(kept[weights], weights)})
    sketch = _sketch(f"{formula}  ({named}", chosen, dict(zip(formulas, designs, strict=True)), response, priors)
    coords, dims = _names(sketch, designs)
    model = MixedModel(formula, named, coords, dims, len(frame) - len(kept), response.classes, designs, sketch)
    return model, (*_inputs(designs, sketch), *response.given.values(), response.values)


def _sketch(
    title: str,
    family: GLMFamily,
    designs: Mapping[str, FrameDesign],
    response: Response,
    priors: Priors | str | None,
) -> Sketch:
    stated = _chosen(priors, family, designs, response)
    classes = family.response == "classes"
    endings = tuple(f"_{c}" for c in suffixes(response.classes)) if classes else ("",)
    of_classes = f"; {', '.join(f'{i} is {c}' for i, c in enumerate(response.classes))}" if response.classes else ""
    columns, predictors = [], dict[str, list[Predictor]]()
    centre, unit = family.moments(response.values / response.given.get("trials", 1.0))
    ends = {name: f"_{name}" if name else "" for name in designs}
    taken = {*TAKEN, *family.parameters} | {f"{kind}{end}" for kind in ("b", "eta") for end in endings}
    taken |= {f"{kind}{end}" for kind in ("b", "eta", "X", "offset", "coefficient") for end in ends.values()}
    for name, design in designs.items():
        own, of_name = endings if not name else ("",), ends[name]
        start: tuple[Any, float] = (1.0, 1.0)
        if not name and not family.begins_at_zero:
            start = _at_the_mean(design, centre), unit
        offset = "" if design.offset() is None else f"offset{of_name}"
        columns.append(Columns(f"X{of_name}", tuple(_blocks(design, own, of_name, taken)), offset))
        predictors[name] = [
            _predictor(name or f"eta{end}", f"b{of_name}{end}", end, columns[-1], design, stated, start) for end in own
        ]
    sketch = Sketch(
        f"{title}, {family.link} link{of_classes})".replace('"', "'").replace("\\", "/"),
        family,
        identifier(designs[""].formula.response.partition("[")[0], taken),
        tuple(columns),
        tuple(predictors[""]),
        tuple(
            predictors[n][0] if n in predictors else _parameter(n, family, response, stated) for n in family.parameters
        ),
        next((predictors[name][0] for name in ZEROS if name in predictors), None),
        tuple(response.given),
    )
    allowed = {n for n in sketch.names.keys() | {general(n) for n in sketch.names} if n[0] != "u"}
    if unknown := [name for name in stated if name not in allowed]:
        raise BadInput(f"priors has an entry {unknown[0]!r}; expected one of {sorted(allowed)}.")
    return sketch


def _parameter(name: str, family: GLMFamily, response: Response, stated: Priors) -> Quantity:
    """A parameter of the family that is the same for all rows."""
    if name == CUTPOINTS:
        counts = torch.bincount(response.values, minlength=len(response.classes)).double()
        start = tuple(round(x, 3) for x in (counts.cumsum(0)[:-1] / counts.sum()).logit().tolist())
        between = tuple(f"{low}|{high}" for low, high in pairwise(response.classes))
        return _quantity(name, (len(between),), "ordered", between, stated, start)
    first = 1.0
    if name == "growth":  # a hazard, which overflows at late times
        first = 1.0 / float(response.values.max())
    elif name == "sigma" and not family.begins_at_zero:
        first = float(f"{float(response.values.std()):.4g}")
    return _quantity(name, (), "positive", (), stated, first)


def _at_the_mean(design: FrameDesign, centre: float) -> Any:
    """Coefficients of least squares, to four digits, by which all rows have the mean response; 1.0 if none."""
    X, offset = design.fixed(), design.offset()
    eta = centre - torch.zeros(len(X)) if offset is None else centre - offset
    found = torch.linalg.lstsq(X, eta.to(X).unsqueeze(-1), driver="gelsd").solution[:, 0]
    return tuple(float(f"{x:.4g}") for x in found.tolist()) if bool(found.isfinite().all()) else 1.0


def _predictor(
    name: str,
    own: str,
    ending: str,
    columns: Columns,
    design: FrameDesign,
    stated: Priors,
    start: tuple[Any, float],
) -> Predictor:
    """A linear predictor, with the name of its coefficients and the ending of what its groups bring.

    :param start: of the coefficients, and of spreads.
    """
    coefficients = design.coefficients
    b = _quantity(own, (len(coefficients),), "real", coefficients, stated, start[0]) if coefficients else None
    effects = []
    for block in columns.blocks:
        names, label, structure = block.coefficients, block.label + ending, block.structure
        shape = () if block.plain or structure.single else (len(names),)
        sd = _quantity(f"sd_{label}", shape, "positive", () if structure.single else names, stated, start[1])
        effects.append(Effects(block, label, sd, _of_structure(block, label, stated) if structure.parameter else None))
    return Predictor(name, columns, b, tuple(effects), exponential=design.kind == POSITIVE)


def _of_structure(block: Grouping, label: str, stated: Priors) -> Quantity:
    """The parameter of a block's structure: correlations, one of them, or the length of a Gaussian process."""
    structure, least = block.structure, block.structure.least
    if isinstance(least, Expression):
        least = least.value({"size": block.size, "width": block.width})
    if stated.get(structure.parameter) == WEAK:
        stated = {**stated, structure.parameter: structure.weak.format(least=least, ten=10.0 * least)}
    whole = structure.constraint == "corr_cholesky"
    shape, labels = ((block.size, block.size), block.coefficients) if whole else ((), ())
    return _quantity(f"{structure.parameter}_{label}", shape, structure.constraint, labels, stated, least)


def _quantity(
    name: str, shape: tuple[int, ...], constraint: str, labels: tuple[str, ...], priors: Priors, start: Any = 1.0
) -> Quantity:
    return Quantity(name, shape, constraint, labels, stated_prior(name, shape, priors), start)


def _chosen(
    priors: Priors | str | None, family: GLMFamily, designs: Mapping[str, FrameDesign], response: Response
) -> Priors:
    if priors is None:
        return {}
    if isinstance(priors, Mapping):
        flat = [n for n, text in priors.items() if text == FLAT and general(n) != "b"]
        if flat:
            raise BadInput(f"priors[{flat[0]!r}]='flat'; expected it for b only. Leave it out: its maximum is taken.")
        return priors
    if priors != WEAK:
        raise BadInput(f"priors={priors!r}; expected a dict such as {{'b': 'Normal(0, 2.5)'}}, 'weak' or None.")
    found = weak_priors(designs[""].fixed(), designs[""].coefficients, family, response.values)
    of_parameters = {f"b_{n}": weak_coefficients(d.fixed()) for n, d in designs.items() if n and d.coefficients}
    varying = [(d, v) for d in designs.values() for v in d.formula.varying]
    several = {v.structure for d, v in varying if len(d.effects(v)) > 1}
    widths = [width for d in designs.values() for _, _, width in d.smooth_blocks]
    structures = [STRUCTURES[name] for name in several] + [PROCESS for width in widths if width is not None]
    found |= {s.parameter: WEAK for s in structures if s.parameter}
    absent = {n for n in designs if n} | (set() if varying or widths else {"sd"})
    return {n: text for n, text in (found | of_parameters).items() if n not in absent}


def _blocks(design: FrameDesign, endings: Sequence[str], of_name: str, taken: set[str]) -> Iterator[Grouping]:
    """The groupings of a formula, then the blocks of its smooths; their names are added to those that are taken."""
    for varying in design.formula.varying:
        coefficients = design.effects(varying)
        if not coefficients:
            raise BadInput(f"{varying.text} has nothing that varies; expected terms such as (1 + x | group).")
        label = _label(f"{varying.group}{of_name}", coefficients[0], endings, taken)
        structure = STRUCTURES[varying.structure if len(coefficients) > 1 else "diag"]
        yield Grouping(varying.text, label, coefficients, structure)
    for text, columns, width in design.smooth_blocks:
        label = _label(f"{text}{of_name}", "", endings, taken)
        structure = STRUCTURES["diag"] if width is None else PROCESS
        yield Grouping(text, label, ("Intercept",), structure, len(columns), float(width or 1.0))


def _label(text: str, more: str, endings: Sequence[str], taken: set[str]) -> str:
    """A name for a block that none of its words shares with what is taken, where they are added."""
    label = identifier(text)
    if more and taken & _words(label, endings):
        label = identifier(f"{label}_{more}")
    while taken & _words(label, endings):
        label += "_"
    taken |= _words(label, endings)
    return label


def _words(label: str, endings: Sequence[str]) -> set[str]:
    """Every name that groups of that label bring into the program, and along its dimensions."""
    sites = {f"{site}_{label}{ending}" for site in ("u", "sd", "L", "rho", "ell") for ending in endings}
    plates = {f"{label}{ending}_{plate}" for ending in endings for plate in ("groups", "functions")}
    return sites | plates | {label, f"num_{label}", f"Z_{label}", f"{label}_effect"}


def _inputs(
    designs: Sequence[FrameDesign], sketch: Sketch, frame: Frame | None = None, groups: bool = True
) -> list[Any]:
    """The arguments up to the response, what is known of it apart."""
    found: list[Any] = []
    for design, columns in zip(designs, sketch.columns, strict=True):
        found.append(design.fixed(frame))
        for block, varying in zip(columns.blocks, design.formula.varying, strict=False):  # those of smooths follow
            found += design.index(varying, frame) if groups else (None, None)
            if not block.plain:
                found.append(design.columns(varying, frame) if groups else None)
        for smooth in design.formula.smooths:
            found += design.smooth(smooth).blocks(*design.smooth_at(smooth, frame))
        found += [design.offset(frame)] if columns.offset else []
    return found


def _names(sketch: Sketch, designs: Sequence[FrameDesign]) -> tuple[dict[str, Sequence[str]], dict[str, Sequence[str]]]:
    """Names along dimensions, and which site has which."""
    coords: dict[str, Sequence[str]] = {}
    for design, columns in zip(designs, sketch.columns, strict=True):
        coords[f"coefficient{columns.X[1:]}"] = design.coefficients
        names = [design.levels(varying) for varying in design.formula.varying] + [n for _, n, _ in design.smooth_blocks]
        for block, levels in zip(columns.blocks, names, strict=True):
            coords |= {block.label: levels, f"{block.label}_effect": block.coefficients}
    dims: dict[str, Sequence[str]] = {}
    for predictor in sketch.every_predictor:
        dims |= {predictor.b.name: [f"coefficient{predictor.columns.X[1:]}"]} if predictor.b else {}
        for effects in predictor.effects:
            along = [] if effects.block.plain else [f"{effects.block.label}_effect"]
            dims |= {q.name: len(q.shape) * along for q in effects.quantities}
            dims[f"u_{effects.label}"] = [effects.block.label, *along]
    for parameter in sketch.parameters:
        if isinstance(parameter, Quantity) and parameter.labels:
            coords["threshold"], dims[parameter.name] = parameter.labels, ["threshold"]
    return coords, {name: found for name, found in dims.items() if found}
