"""The text of a mixed model as a Pyro program, such as its reader would have written it."""

import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pyro_evidence.models.formula.families import FAMILIES
from pyro_evidence.models.formula.priors import FLAT, Priors, general, prior_text

HEAD = """import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints
"""
TAKEN = {"pyro", "dist", "torch", "constraints", "model", "X", "b", "eta", "sigma", "shape", "trials", "offset", "rows"}


@dataclass(frozen=True)
class Block:
    """The effects of one grouping, as the program names them.

    :ivar text: as the formula has it, ``(days | subject)``.
    :ivar label: the grouping as an identifier; effects are ``u_label``, their spreads ``sd_label``.
    :ivar coefficients: names of the effects of a group.
    :ivar correlated: whether those of one group are correlated.
    """

    text: str
    label: str
    coefficients: tuple[str, ...]
    correlated: bool

    @property
    def plain(self) -> bool:
        """Whether the one effect is an intercept."""
        return self.coefficients == ("Intercept",)

    @property
    def arguments(self) -> list[str]:
        """What the program is given of it."""
        return [self.label, f"num_{self.label}", *([] if self.plain else [f"Z_{self.label}"])]


@dataclass(frozen=True)
class Sketch:
    """All that the program's text is made of.

    :ivar title: its first line.
    :ivar response: the name of the observed site.
    :ivar coefficients: names of the fixed effects.
    :ivar offset: whether a column with coefficient one is added.
    :ivar classes: those with a predictor of their own; none but for categories.
    """

    title: str
    family: str
    response: str
    coefficients: tuple[str, ...]
    blocks: tuple[Block, ...]
    offset: bool
    classes: tuple[str, ...]
    priors: Priors

    @property
    def arguments(self) -> list[str]:
        """Of the program, the response last."""
        found = ["X", *(name for block in self.blocks for name in block.arguments)]
        found += ["offset"] * self.offset + ["trials"] * (self.family == "binomial")
        return [*found, self.response]


def identifier(text: str, taken: set[str]) -> str:
    """A name for a column that is a word of Python and not taken."""
    name = suffix(text) or "y"
    name = f"_{name}" if name[0].isdigit() else name
    while name in taken | TAKEN or keyword.iskeyword(name):
        name += "_"
    return name


def suffix(text: str) -> str:
    """What may stand at the end of an identifier."""
    return re.sub(r"\W+", "_", text).strip("_")


def program(sketch: Sketch) -> str:
    """The whole program."""
    *given, response = sketch.arguments
    lines = [f'"""{sketch.title}"""', *_predictor(sketch), *_likelihood(sketch)]
    body = "\n".join(f"    {line}" for line in lines)
    return f"{HEAD}\n\ndef model({', '.join(given)}, {response}=None):\n{body}\n"


def spread_names(sketch: Sketch) -> dict[str, tuple[str, ...]]:
    """Names of every param or site of the program but the response, and what its elements are called."""
    found: dict[str, tuple[str, ...]] = {}
    for suffix in [f"_{c}" for c in sketch.classes] or [""]:
        if sketch.coefficients:
            found[f"b{suffix}"] = sketch.coefficients
        for block in (replace(b, label=b.label + suffix) for b in sketch.blocks):
            found[f"sd_{block.label}"] = block.coefficients
            if block.correlated:
                found[f"L_{block.label}"] = block.coefficients
            found[f"u_{block.label}"] = block.coefficients
    spread = FAMILIES[sketch.family].spread
    return found | ({spread: ()} if spread else {})


def _predictor(sketch: Sketch) -> Iterator[str]:
    if not sketch.classes:
        yield from _one_predictor(sketch, "", "eta")
        return
    names = [f"eta_{c}" for c in sketch.classes]
    for name, label in zip(names, sketch.classes, strict=True):
        yield from _one_predictor(sketch, f"_{label}", name)
    yield f"eta = torch.stack([X.new_zeros(len(X)), {', '.join(names)}], -1)  # the first class is the baseline"


def _one_predictor(sketch: Sketch, suffix: str, eta: str) -> Iterator[str]:
    size = len(sketch.coefficients)
    if size:
        yield _value(f"b{suffix}", f"X.new_zeros({size})", "", sketch.priors, (size,)) + _comment(sketch.coefficients)
    start = f"X @ b{suffix}" if size else "X.new_zeros(len(X))"
    yield f"{eta} = {start}{' + offset' if sketch.offset else ''}"
    for block in sketch.blocks:
        yield from _effects(block, suffix, eta, sketch.priors)


def _effects(block: Block, suffix: str, eta: str, priors: Priors) -> Iterator[str]:
    label, size = block.label + suffix, len(block.coefficients)
    shape = () if block.plain else (size,)
    yield f"# {block.text}"
    start = "X.new_ones(())" if block.plain else f"X.new_ones({size})"
    yield _value(f"sd_{label}", start, "positive", priors, shape) + _comment(() if block.plain else block.coefficients)
    if block.correlated:
        yield _value(f"L_{label}", f"torch.eye({size}).to(X)", "corr_cholesky", priors, (size, size))
        yield f"scale = sd_{label}.unsqueeze(-1) * L_{label}"
    yield f'with pyro.plate("{label}_groups", num_{block.label}):'
    yield f'    u = pyro.sample("u_{label}", {_distribution(block, label)})'
    yield f"{eta} = {eta} + {f'u[{block.label}]' if block.plain else f'(Z_{block.label} * u[{block.label}]).sum(-1)'}"


def _distribution(block: Block, label: str) -> str:
    size = len(block.coefficients)
    if block.plain:
        return f"dist.Normal(0.0, sd_{label})"
    if not block.correlated:
        return f"dist.Normal(X.new_zeros({size}), sd_{label}).to_event(1)"
    return f"dist.MultivariateNormal(X.new_zeros({size}), scale_tril=scale)"


def _likelihood(sketch: Sketch) -> Iterator[str]:
    family = FAMILIES[sketch.family]
    if family.spread:
        yield _value(family.spread, "X.new_ones(())", "positive", sketch.priors, ())
    yield 'with pyro.plate("rows", len(X)):'
    yield f'    pyro.sample("{sketch.response}", {family.likelihood}, obs={sketch.response})'


def _value(name: str, start: str, constraint: str, priors: Priors, shape: Sequence[int]) -> str:
    """A line that states a param, or a site where it has a prior."""
    prior = priors.get(name, priors.get(general(name)))
    if prior is None:
        limit = f", constraint=constraints.{constraint}" if constraint else ""
        return f'{name} = pyro.param("{name}", {start}{limit})'
    text = prior_text(name, prior, shape[0] if shape else 1)
    if shape and prior != FLAT and not text.startswith("dist.LKJCholesky"):
        text = f"{text}.expand([{shape[0]}]).to_event(1)"
    return f'{name} = pyro.sample("{name}", {text})'


def _comment(names: tuple[str, ...]) -> str:
    text = ", ".join(names)
    return f"  # {text}" if 0 < len(text) <= 60 else ""
