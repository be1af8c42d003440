"""What scikit-learn's estimators take beside their engines: one table.

    python benchmarks/estimator_overhead.py

Of one call the processor's time within the engine is taken, and all of it; the difference is the estimator's.  Least of
seven calls, one thread.  An estimator may take 5 % of its engine, or 5 ms.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from time import process_time
from typing import Any
from unittest import mock

import numpy as np
import torch

import pyro_evidence.sklearn as estimators
from pyro_evidence import REVM, RVM, VRVM, EvidenceEM, LaplaceEvidence, OverlapEM
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.regression import regression

ENGINES = (EvidenceEM, LaplaceEvidence, RVM, REVM, VRVM, OverlapEM)
ANSWERS = ("predict", "predict_proba", "log_proba", "log_prob", "responsibilities")
SHARE, SECONDS, CALLS = 0.05, 5e-3, 7
CLASSIFIERS = {
    "ClassConditionalMixture": estimators.ClassConditionalMixture(3),
    "PRBFClassifier": estimators.PRBFClassifier(4),
    "RVMClassifier": estimators.RVMClassifier(),
    "VRVMClassifier": estimators.VRVMClassifier(),
    "REVMClassifier": estimators.REVMClassifier(),
    "LaplaceGPClassifier": estimators.LaplaceGPClassifier(),
    "EvidenceMLPClassifier": estimators.EvidenceMLPClassifier(3, n_init=1),
    "PyroClassifier": estimators.PyroClassifier(classifier(Linear())),
}
REGRESSORS = {
    "RVMRegressor": estimators.RVMRegressor(),
    "REVMRegressor": estimators.REVMRegressor(),
    "LaplaceGPRegressor": estimators.LaplaceGPRegressor(),
    "EvidenceMLPRegressor": estimators.EvidenceMLPRegressor(3, n_init=1),
    "PyroRegressor": estimators.PyroRegressor(regression(Linear())),
}
DENSITIES = {
    "EvidenceMixture": estimators.EvidenceMixture(4),
    "MPPCA": estimators.MPPCA(2, 1),
}


class Clock:
    """Seconds of the processor within the outermost of the calls that it watches."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            start = process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                self.seconds += 0.0 if self.depth else process_time() - start

        return inside


@contextmanager
def track_validation(places: list[tuple[type[Any], str]]) -> Iterator[Clock]:
    clock = Clock()
    patches = [mock.patch.object(owner, name, clock.watched(getattr(owner, name))) for owner, name in places]
    for patch in patches:
        patch.start()
    try:
        yield clock
    finally:
        for patch in patches:
            patch.stop()


def beside(job: Callable[[], Any], places: list[tuple[type[Any], str]], calls: int = CALLS) -> tuple[float, float]:
    """Seconds within the engine and beside it, of the call that took least beside."""
    job()
    found = []
    for _ in range(calls):
        with track_validation(places) as clock:
            start = process_time()
            job()
            found.append((process_time() - start - clock.seconds, clock.seconds))
    least, engine = min(found)
    return engine, least


def measured(estimator: Any, X: Any, y: Any, calls: int = CALLS) -> dict[str, tuple[float, float]]:
    """Of a fit and of predictions for the same rows."""
    fit = beside(lambda: estimator.fit(X, y), [(engine, "run") for engine in ENGINES], calls)
    kind = type(estimator.posterior_)
    answers = [(kind, name) for name in ANSWERS if hasattr(kind, name)]
    return {"fit": fit, "predict": beside(lambda: estimator.predict(X), answers, calls)}


def data() -> tuple[Any, Any, Any]:
    """Rows, two classes and targets, none of them met exactly."""
    generator = np.random.default_rng(0)
    X = np.concatenate([generator.normal(m, 1.0, (60, 3)) for m in (-1.0, 1.0)])
    return X, (X[:, 0] + generator.normal(0.0, 1.0, 120) > 0.0).astype(int), X[:, 0] + generator.normal(0.0, 0.3, 120)


def is_fine(engine: float, more: float) -> bool:
    return more <= max(SECONDS, SHARE * engine)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a fit that ran out of steps
    X, labels, t = data()
    print("| estimator | call | engine, ms | beside it, ms | share | |\n|---|---|---|---|---|---|")
    for group, y in ((CLASSIFIERS, labels), (REGRESSORS, t), (DENSITIES, None)):
        for name, estimator in group.items():
            for call, (engine, more) in measured(estimator, X, y).items():
                stop_reason = "" if is_fine(engine, more) else "more than 5 % and 5 ms"
                print(
                    f"| {name} | {call} | {1e3 * engine:.1f} | {1e3 * more:.2f} | {more / engine:.1%} | {stop_reason} |"
                )


if __name__ == "__main__":
    main()
