"""Files of every kind that the package writes, each with one entry changed and the digest made anew.

``python -m tests.cases.changed_files [part of a name]`` tries all changes and counts how the readings end.
"""

import collections
import contextlib
import math
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import (
    REVM,
    RVM,
    VRVM,
    EvidenceEM,
    LaplaceEvidence,
    LaplacePosterior,
    OverlapEM,
    Stop,
    diagonal,
    files,
)
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression
from pyro_evidence.relevance import GaussianPrior, L1Prior
from tests.cases.expect import OWN_ERRORS, TooSlow, within
from tests.fitting.test_checkpoint import FITS, killed_at, run
from tests.models_for_tests.grouped_models import groups, intercepts
from tests.models_for_tests.posterior_models import linear, precision_prior, regression_data
from tests.models_for_tests.sampled_scales import SCHOOLS, schools_centred

QUIET = Stop(progress=False, throw=False)
ALLOWED = 20.0  # seconds of one reading
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 2, generator=GENERATOR, dtype=torch.float64)
T = X @ torch.tensor([1.0, -0.5], dtype=torch.float64)
T = T + 0.3 * torch.randn(40, generator=GENERATOR, dtype=torch.float64)
LABELS = (T > 0).double()
HEAPS = torch.cat([X, X + 5.0])


@dataclass(frozen=True)
class Kind:
    """One kind of posterior: how it is fitted, to what data, and over which model it is read."""

    engine: Callable[[], Any]
    model: Any
    data: tuple[Any, ...]

    def load(self, path: Path) -> Any:
        """The posterior in a file, as the class reads it that has written it."""
        return type(self.posterior).load(path, self.model)

    @property
    def posterior(self) -> Any:
        """Fitted once."""
        return _fitted(self)


@cache
def _fitted(kind: Kind) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind.engine().run(*kind.data)


def kind_of(engine: Callable[..., Any], model: Any, data: tuple[Any, ...], **settings: Any) -> Kind:
    return Kind(lambda: engine(model, stop=QUIET, **settings), model, data)


POSTERIORS = {
    "logistic": kind_of(LaplaceEvidence, classifier(Linear()), (X, LABELS)),
    "held, diagonal": kind_of(LaplaceEvidence, linear, regression_data(), maximise=(), curvature=diagonal),
    "site maximised": kind_of(LaplaceEvidence, precision_prior, regression_data(), maximise=["alpha"]),
    "process": kind_of(LaplaceEvidence, gp_regression(RBF()), (X[:12], T[:12])),
    "blocks": kind_of(LaplaceEvidence, intercepts, groups(8, 4), nodes=5),
    "nested": kind_of(LaplaceEvidence, schools_centred, (SCHOOLS,)),
    "mixture": kind_of(EvidenceEM, gaussian_mixture(3), (HEAPS,)),
    "planes": kind_of(EvidenceEM, mppca(1, 2), (torch.cat([X, X + X.flip(-1)], -1),)),
    "kernels of classes": kind_of(OverlapEM, prbf(3, 2), (X, LABELS.long())),
    "RVM": kind_of(RVM, classifier(Polynomial(2)), (X, LABELS)),
    "VRVM": kind_of(VRVM, regression(Polynomial(2)), (X, T)),
    "REVM": kind_of(REVM, classifier(Polynomial(2)), (X, LABELS)),
    "REVM, groups": kind_of(REVM, regression(Polynomial(2)), (X, T), prior=GaussianPrior(2)),
    "REVM, Laplace": kind_of(REVM, regression(Polynomial(2)), (X, T), prior=L1Prior()),
}


# --- one entry changed ---


def thawed(content: Any) -> Any:
    """The same with plain dicts and lists, which can be changed in place; tuples become lists."""
    if isinstance(content, dict):
        return {key: thawed(value) for key, value in content.items()}
    is_list = isinstance(content, list | tuple) and not isinstance(content, torch.Size)
    return [thawed(value) for value in content] if is_list else content


def places(content: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys that lead to everything inside of what a file holds."""
    pairs = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in pairs:
        yield (*place, key)
        yield from places(value, (*place, key))


def others(value: Any) -> Iterator[tuple[str, Any]]:
    """What might stand in an entry's place, with what was done."""
    for other in (None, "a", "", -3, 10**9, 10**18, 0.25, math.nan, math.inf, True, [], {}, [[]], torch.zeros(2, 3)):
        yield f"= {other!r}".replace("\n", ""), other
    if isinstance(value, Tensor):
        yield from tensors(value)
    elif isinstance(value, bool):
        yield "negated", not value
    elif isinstance(value, int | float):
        yield from ((name, change) for name, change in (("+ 1", value + 1), ("- 1", value - 1), ("minus", -value)))
    elif isinstance(value, str):
        yield from (("longer", value + "a"), ("listed", [value]))
    elif isinstance(value, list):
        yield from (("longer", [*value, *value[:1]]), ("shorter", value[:-1]), ("reversed", value[::-1]))
    elif isinstance(value, dict):
        yield "one more", value | {"unheard of": 1}


def tensors(value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors beside one: other dtypes, shapes, elements."""
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex128):
        if value.dtype != dtype:
            yield f"as {dtype}", value.to(dtype)
    yield from (("unsqueezed", value.unsqueeze(0)), ("flat", value.reshape(-1)), ("empty", value.reshape(-1)[:0]))
    if value.dim():
        yield from (("a row less", value[:-1]), ("twice", torch.cat([value, value])), ("turned", value.flip(0)))
    if value.numel() and value.is_floating_point():
        for number in (math.nan, math.inf, -math.inf, -1e300, 0.0):
            changed = value.clone()
            changed.view(-1)[-1] = number
            yield f"last = {number}", changed
        yield from (("minus", -value), ("larger", 1.1 * value), ("+ 0.1", value + 0.1))
    elif value.numel():
        yield "another", ~value if value.dtype == torch.bool else value + 1


def changes(content: Any) -> Iterator[tuple[str, Any]]:
    """A file's content with one entry changed, and which; also with one missing."""
    content = thawed(content)
    for place in list(places(content)):
        name = "".join(f"[{key!r}]" for key in place)
        changed = _copied(content)
        parent = _at(changed, place[:-1])
        del parent[place[-1]]
        yield f"{name} missing", changed
        for what, other in others(_at(content, place)):
            changed = _copied(content)
            _at(changed, place[:-1])[place[-1]] = other
            yield f"{name} {what}", changed


def _copied(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _copied(value) for key, value in content.items()}
    return [_copied(value) for value in content] if isinstance(content, list) else content


def _at(content: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        content = content[key]
    return content


def chosen(content: Any, number: int, seed: int = 0) -> list[tuple[str, Any]]:
    """Some of the changes."""
    everything = list(changes(content))
    return random.Random(seed).sample(everything, min(number, len(everything)))


# --- how a reading ends ---


def numbers(posterior: Any) -> list[Any]:
    """What a reader asks a posterior for, as numbers that do not depend on how it got there."""
    if hasattr(posterior, "network"):  # a file without data, whose numbers follow from nothing else in it
        return [posterior.mixing.sum(-1), posterior.class_prior.sum(), posterior.covariance.isfinite()]
    hypers = {name: value for name, value in posterior.hyperparameters.items() if name != "ridge"}  # is believed
    found = [posterior.mode, hypers, posterior.get_samples(5, seed=0)]
    with contextlib.suppress(*OWN_ERRORS):  # some mixtures of planes have no evidence
        found.append(posterior.log_evidence)
    return found


def used(posterior: Any) -> None:
    """Other members that look at what was read."""
    repr(posterior)
    posterior.diagnostics(*([100] if isinstance(posterior, LaplacePosterior) else []))


def same(found: Any, expected: Any) -> bool:
    try:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    except AssertionError:
        return False
    return True


def ending(read: Callable[[], Any], path: Path, expected: Any) -> str:
    """Of one reading: "refused", "right", or what is wrong with it.

    A warning that an entry is believed counts as a refusal.
    """
    try:
        with within(ALLOWED), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = read()
    except TooSlow:
        return "HANG"
    except OWN_ERRORS as error:
        return "refused" if str(path) in str(error) else f"NAMELESS {type(error).__name__}: {_line(error)}"
    except Exception as error:
        return f"BARE {type(error).__name__}: {_line(error)}"
    try:
        with within(ALLOWED), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right = same(numbers(found), expected)
            used(found)
    except TooSlow:
        return "HANG later"
    except Exception as error:
        return f"LATE {type(error).__name__}: {_line(error)}"
    unchecked = any("is computed anew" in str(each.message) for each in said)
    return "right" if right else "refused" if unchecked else "WRONG"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:150]


def ending_of(name: str, folder: Path, change: Callable[[Any], Any]) -> str:
    """How the reading of one kind of posterior ends, of which a function has changed the content."""
    kind, path = POSTERIORS[name], folder / "posterior"
    kind.posterior.save(path)
    expected, content = numbers(kind.load(path)), thawed(files.read(path))
    change(content)
    files.write(content, path)
    return ending(lambda: kind.load(path), path, expected)


def checkpoint_ending_of(name: str, folder: Path, change: Callable[[Any], Any]) -> str:
    """How a fit ends that goes on from a checkpoint of which a function has changed the fields of the last state."""
    make, args = FITS[name]
    path = folder / "checkpoint"
    expected = numbers(run(make(), *args()))
    killed_at(make(), args(), path, 4)
    content = thawed(files.read(path))
    state = content["loops"][-1]["progress"]["tuple"][0][1]["inside"]
    fields = dict(state)
    change(fields)
    state[:] = [[field, value] for field, value in fields.items()]
    files.write(content, path)
    return ending(lambda: run(make().resume(path), *args()), path, expected)


def posterior_endings(name: str, folder: Path, number: int | None = None) -> Iterator[tuple[str, str]]:
    """Each change of one kind of posterior, and how its reading ends."""
    kind, path = POSTERIORS[name], folder / "posterior"
    kind.posterior.save(path)
    expected, content = numbers(kind.load(path)), files.read(path)
    for what, changed in changes(content) if number is None else chosen(content, number):
        with contextlib.suppress(*OWN_ERRORS):
            files.write(changed, path)
        yield what, ending(lambda: kind.load(path), path, expected)


def checkpoint_endings(name: str, folder: Path, number: int | None = None) -> Iterator[tuple[str, str]]:
    """Each change of a checkpoint of one engine, and how the fit ends that goes on from it."""
    make, args = FITS[name]
    path = folder / "checkpoint"
    expected = numbers(run(make(), *args()))
    if not killed_at(make(), args(), path, 4):
        killed_at(make(), args(), path, 2)
    content = files.read(path)
    for what, changed in changes(content) if number is None else chosen(content, number):
        with contextlib.suppress(*OWN_ERRORS):
            files.write(changed, path)
        yield what, ending(lambda: run(make().resume(path), *args()), path, expected)


def main(part: str, number: int | None) -> None:
    """Print what is wrong, and how often each kind of ending was met."""
    folder = Path(tempfile.mkdtemp())
    total: collections.Counter[str] = collections.Counter()
    for of, endings in ((POSTERIORS, posterior_endings), (FITS, checkpoint_endings)):
        for name in of:
            if part not in f"{endings.__name__} {name}":
                continue
            count: collections.Counter[str] = collections.Counter()
            for what, found in endings(name, folder, number):
                count[found.split()[0]] += 1
                if found not in ("refused", "right"):
                    print(f"{name}: {what}: {found}", flush=True)  # noqa: T201
            print(f"== {endings.__name__} {name}: {dict(count)}", flush=True)  # noqa: T201
            total += count
    print(dict(total))  # noqa: T201


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    main(sys.argv[1] if len(sys.argv) > 1 else "", int(sys.argv[2]) if len(sys.argv) > 2 else None)
