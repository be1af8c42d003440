"""EvidenceEM beside 1000 SVI steps on the same Pyro mixtures: CPU seconds and test error; one thread, float64.

    PYRO_EVIDENCE_DATA=folder OMP_NUM_THREADS=1 python benchmarks/mixture_svi.py    # Markdown on stdout

SVI is as in Pyro's tutorial on mixtures: ``TraceEnum_ELBO``, Adam, started at a draw from the prior; ``AutoDelta`` and
``AutoNormal``.  Of three learning rates the one with the lowest loss in the last hundred steps counts, and only its own
time.  The NLL is that of the test data, nats per datum, at the weights' point estimate.  ``first better round`` is one
start of EvidenceEM, recognition of the model included, up to the first round whose test NLL is below that of SVI;
nobody knows this round beforehand, so two runs to the end stand beside it.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_sample
from pyro.optim import Adam
from timing import least
from torch import Tensor

from pyro_evidence import EvidenceEM, Start, datasets
from pyro_evidence.compare import learning_curve
from pyro_evidence.fitting.em import advance, warmed
from pyro_evidence.infer import evidence_em
from pyro_evidence.mixture.density import MixtureDensity
from pyro_evidence.mixture.fit import begin
from pyro_evidence.models.basis import RandomVectorFunctionalLink
from pyro_evidence.models.mixture import GaussianMixture, LinearMixture, gaussian_mixture, linear_mixture
from pyro_evidence.program.log_joint import LogJoint

NUM_STEPS = 1000
ONE = Start(restarts=1)


@dataclass(frozen=True)
class Case:
    name: str
    model: GaussianMixture | LinearMixture
    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]


def cases() -> list[Case]:
    train, test = datasets.ripley_train(), datasets.ripley_test()
    classes = (train.X[train.t == 0],), (test.X[test.t == 0],)
    phoneme = datasets.csv("phoneme")
    nasal = phoneme.X[phoneme.t == 0]
    nasal = nasal[torch.randperm(len(nasal), generator=torch.Generator().manual_seed(0))]
    series = datasets.stochastic_series(1200, seed=0)
    parts = [(series.X[part], series.t[part, None]) for part in (slice(200), slice(200, None))]
    generator = torch.Generator().manual_seed(0)
    basis = RandomVectorFunctionalLink(
        math.e * torch.randn(1, 10, generator=generator), math.e * torch.randn(10, generator=generator)
    )
    return [
        Case("Ripley, class 1, K = 10", gaussian_mixture(10), *classes),
        Case("phoneme, nasal, N = 1000, K = 20", gaussian_mixture(20), (nasal[:1000],), (nasal[1000:],)),
        Case("time series, K = 10, 12 functions", linear_mixture(10, basis), *parts),
    ]


def svi(case: Case, guide_of: Callable[..., object], lr: float) -> tuple[float, float, float]:
    """Loss at the end, test error (nats per datum) and CPU seconds."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    begin = time.process_time()
    guide = guide_of(poutine.block(case.model, hide=["z"]), init_loc_fn=init_to_sample)
    engine = SVI(case.model, guide, Adam({"lr": lr}), TraceEnum_ELBO(max_plate_nesting=1))
    losses = [engine.step(*case.train) for _ in range(NUM_STEPS)]
    seconds = time.process_time() - begin
    with torch.no_grad():
        return sum(losses[-100:]), test_error(case, guide.median()["w"]), seconds


def test_error(case: Case, w: Tensor) -> float:
    """At weights ``w`` and the hyperparameters of the param store."""
    mixing, beta = pyro.param("mixing"), pyro.param("beta")
    loc = w.unsqueeze(0) if w.dim() == 2 else torch.einsum("kmb,nb->nkm", w, case.model.basis(case.test[0]))
    density = MixtureDensity(mixing.log().unsqueeze(0), loc, beta.rsqrt().diag_embed().unsqueeze(0))
    return -float(density.log_prob(case.test[-1]).mean())


def rounds(case: Case, num: int) -> Callable[[], object]:
    """Recognition, one start, and ``num`` rounds; what a user has after ``num`` calls of ``step``."""

    def run() -> object:
        engine = EvidenceEM(case.model, start=ONE)
        task = begin(LogJoint(case.model, case.train), engine)
        batch = warmed(task.batch, min(num, engine.initial.warm_up))
        for _ in range(num - engine.initial.warm_up):
            batch = advance(batch)
        return batch.objective

    return run


def rows(case: Case) -> Iterator[list[str]]:
    pyro.clear_param_store()  # or the start would be the last case's end
    settings: list[dict[str, Any]] = [{"start": ONE, "deletion": None}, {}]
    ours = [whole(case, s) for s in settings]
    curve = learning_curve(EvidenceEM(case.model, start=ONE), case.train, case.test, num_steps=60).test_nll[:, 0]
    for guide_of in (AutoDelta, AutoNormal):
        runs = [svi(case, guide_of, lr) for lr in (0.01, 0.03, 0.1)]
        _, error, seconds = min(run for run in runs if math.isfinite(run[0]))
        better = (curve < error).nonzero().flatten().tolist()
        cells = [case.name, guide_of.__name__, f"{error:.3f}", f"{seconds:.2f}"]
        if better:
            first = least(rounds(case, better[0]), 7)
            cells += [f"{better[0]}: {curve[better[0]]:.3f}", f"{1e3 * first:.0f}", f"{seconds / first:.0f}"]
        else:
            cells += ["never", "", ""]
        for nll, took in ours:
            cells += [f"{nll:.3f}", f"{1e3 * took:.0f}", f"{seconds / took:.0f}"]
        yield cells


def whole(case: Case, settings: dict[str, Any]) -> tuple[float, float]:
    """Test error and CPU seconds of a run to the end."""
    stop = replace(evidence_em.STOP, progress=False)
    engine = EvidenceEM(case.model, stop=stop, **settings)
    nll = -float(engine.run(*case.train).log_prob(*case.test).mean())
    return nll, least(lambda: engine.run(*case.train), 3)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    head = ["data", "guide", "SVI: NLL", "s", "first better round: NLL", "ms", "times faster"]
    for what in ("one start, no deletion", "default"):
        head += [f"{what}: NLL", "ms", "times faster"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for case in cases():
        for cells in rows(case):
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
