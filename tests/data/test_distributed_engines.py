"""Rows of several processes: every engine that adds up passes, ranks that are killed, and ranks that disagree."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_evidence import REVM, RVM, VRVM, EvidenceEM, LaplaceEvidence, OverlapEM, Start, Stop
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import Learned, regression
from pyro_evidence.prbf.posterior import PRBFPosterior
from tests.data.test_distributed import run_ranks

SCRIPT = """
import signal, threading
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
from datetime import timedelta
import torch.distributed as dist
from pyro_evidence import BadInput, EvidenceEM, Stop
from pyro_evidence.data.distributed import shards
from tests.data.test_distributed_engines import FITS, data, height, weights
cut, names, what = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
with shards(timeout=timedelta(seconds=3 if what == "killed" else 60)) as ranks:
    X, t = (x.split(cut)[ranks.rank].clone() for x in data())
    if what == "nan" and ranks.rank == 1:
        X[3, 2] = torch.nan
    if what == "columns" and ranks.rank == 1:
        X = X[:, :2]
    if what == "dtype" and ranks.rank == 1:
        X = X.float()
    try:
        if what == "killed":
            if ranks.rank == 1:
                threading.Timer(0.3, signal.raise_signal, [signal.SIGKILL]).start()
            while True:
                FITS[names[0]]().run(X, t)
        found = [FITS[name]().run(X, t) for name in names]
        print(json.dumps([[height(f), weights(f)] for f in found]))
    except (BadInput, RuntimeError) as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""

QUIET = Stop(progress=False)


class Grouped:
    """An engine that is told which sites are the groups'."""

    def __init__(self, engine: LaplaceEvidence) -> None:
        self.engine = engine

    def run(self, X: torch.Tensor, t: torch.Tensor) -> Any:
        return self.engine.run_chunks([(X, t)], local=["a"])


class Inputs:
    """An engine that is given the inputs alone."""

    def __init__(self, engine: EvidenceEM) -> None:
        self.engine = engine

    def run(self, X: torch.Tensor, t: torch.Tensor) -> Any:
        return self.engine.run(X)


def by_row(X: torch.Tensor, y: torch.Tensor) -> None:
    """A group for each row, so that every share has whole groups."""
    s = pyro.param("s", torch.tensor(0.7), constraint=constraints.positive)
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", len(X)):
        a = pyro.sample("a", dist.Normal(X @ w, s))
        pyro.sample("y", dist.Poisson(a.exp()), obs=(3.0 * y + X[:, 2].abs()).round())


FITS: dict[str, Any] = {
    "groups": lambda: Grouped(LaplaceEvidence(by_row, stop=QUIET)),
    "LaplaceEvidence": lambda: LaplaceEvidence(classifier(Linear(), alpha=Learned(torch.tensor(1.0))), stop=QUIET),
    "RVM": lambda: RVM(classifier(Polynomial(2)), stop=QUIET),
    "RVM, noise": lambda: RVM(regression(Linear(), beta=Learned(torch.tensor(1.0))), noise="beta", stop=QUIET),
    "VRVM": lambda: VRVM(
        classifier(Polynomial(1)), stop=replace(QUIET, tolerance=1e-6, gradient_tolerance=1e-3, num_steps=2000)
    ),
    "REVM": lambda: REVM(classifier(Linear())),
    "planes": lambda: Inputs(
        EvidenceEM(mppca(2, 1), start=Start(restarts=2), stop=replace(QUIET, throw=False, num_steps=30))
    ),
    "OverlapEM": lambda: OverlapEM(prbf(3), stop=replace(QUIET, tolerance=0.0, num_steps=30)),
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(120, 3, generator=generator, dtype=torch.float64)
    t = X[:, 0] - 0.5 * X[:, 1] + 0.6 * torch.randn(120, generator=generator, dtype=torch.float64)
    return X, (t > 0).double()


def height(found: Any) -> float:
    """The log evidence, or what is maximised where there is none."""
    return found.objectives[-1] if isinstance(found, PRBFPosterior) else float(found.log_evidence)


def weights(found: Any) -> list[float]:
    """At the mode; a column of loadings may be mirrored."""
    if isinstance(found, PRBFPosterior):
        return found.loc.flatten().tolist()
    return [v.abs().flatten().tolist() for n, v in found.mode.items() if n in ("w", "W")][0]  # noqa: RUF015


def said(path: Path, cut: list[int], names: list[str], what: str = "") -> list[Any]:
    """What each rank says; nothing that was killed does."""
    found = run_ranks(path, SCRIPT, len(cut), json.dumps(cut), json.dumps(names), what)
    return [json.loads(text) if text else None for text in found]


TOLD_BY_SUMS = ["groups", "LaplaceEvidence"]  # what each family adds up, once; EM by test_distributed.py


@pytest.mark.parametrize(
    ("cut", "names"),
    [
        ([0, 120], TOLD_BY_SUMS),
        pytest.param([20, 0, 100], list(FITS), marks=pytest.mark.slow),
        pytest.param([30] * 4, list(FITS), marks=pytest.mark.slow),
    ],
    ids=["two, some engines", "three", "four"],
)
def test_shares_change_nothing(cut: list[int], names: list[str], tmp_path: Path) -> None:
    """Two and three ranks of which one has nothing, and four, against one process; alike on every rank."""
    found = said(tmp_path, cut, names)
    assert all(x == found[0] for x in found)
    for name, (evidence, w) in zip(names, found[0], strict=True):
        alone = FITS[name]().run(*data())
        assert evidence == pytest.approx(height(alone), rel=1e-11), name
        assert w == pytest.approx(weights(alone), rel=1e-6, abs=1e-8), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nan", r"rank 1: BadInput: .*argument 0: .*1 nan \(first at \[3, 2\]\)"),
        ("columns", r"ranks have different models, columns or dtypes: rank 0 .*\(\., 3\).*; rank 1 .*\(\., 2\)"),
        ("dtype", r"rank 0 .*float64.*; rank 1 .*float32"),
    ],
)
def test_every_rank_hears_what_is_wrong_on_one(tmp_path: Path, what: str, message: str) -> None:

    found = said(tmp_path, [60, 60], ["LaplaceEvidence"], what)
    assert all(re.search(message, text) for text in found), found


def test_the_others_hear_that_a_rank_was_killed(tmp_path: Path) -> None:
    first, second = said(tmp_path, [60, 60], ["LaplaceEvidence"], "killed")
    assert "RuntimeError: rank 1 has left the fit" in first and second is None
