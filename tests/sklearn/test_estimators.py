"""Estimators keep scikit-learn's own rules, say what their engine says, and survive pipelines, frames and pickles."""

import pickle
import warnings
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import RVM, EvidenceEM, Stop
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.datasets import make_blobs, make_moons
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import pyro_evidence.sklearn as estimators
from pyro_evidence.sklearn.sparse import RVM_STOP, kernel_basis

FAST = {
    "EvidenceMixture": (estimators.EvidenceMixture(3), 40),
    "PRBFClassifier": (estimators.PRBFClassifier(4), 54),
    "REVMClassifier": (estimators.REVMClassifier(), 54),
    "REVMRegressor": (estimators.REVMRegressor(), 51),
}
SLOW = {
    "ClassConditionalMixture": (estimators.ClassConditionalMixture(2), 54),
    "MPPCA": (estimators.MPPCA(2, 1), 46),
    "RVMClassifier": (estimators.RVMClassifier(), 54),
    "RVMRegressor": (estimators.RVMRegressor(), 51),
    "VRVMClassifier": (estimators.VRVMClassifier(), 54),
    "LaplaceGPClassifier": (estimators.LaplaceGPClassifier(), 54),
    "LaplaceGPRegressor": (estimators.LaplaceGPRegressor(), 51),
    "EvidenceMLPClassifier": (estimators.EvidenceMLPClassifier(3), 54),
    "EvidenceMLPRegressor": (estimators.EvidenceMLPRegressor(3), 51),
}


def keeps_the_rules(estimator: Any, least: int) -> None:
    """No check fails, and as many have run as scikit-learn has for this kind: none was switched off by a tag."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(estimator, on_fail=None, on_skip=None)
    assert [(r["check_name"], r["exception"]) for r in results if r["status"] == "failed"] == []
    assert sum(r["status"] == "passed" for r in results) >= least


@pytest.mark.parametrize("name", FAST)
def test_rules_of_scikit_learn(name: str) -> None:
    keeps_the_rules(*FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_rules_of_scikit_learn_where_they_take_longer(name: str) -> None:
    keeps_the_rules(*SLOW[name])


def test_a_mixture_is_the_engines_own() -> None:
    X, _ = make_blobs(200, centers=3, random_state=0)
    found = estimators.EvidenceMixture(6, noise=FullNoise()).fit(X)
    engine = EvidenceEM(gaussian_mixture(6, noise=FullNoise()), stop=Stop(throw=False, progress=False))
    posterior = engine.run(torch.as_tensor(X))
    assert found.log_evidence_ == float(posterior.log_evidence) and found.n_components_ == posterior.num_components
    np.testing.assert_array_equal(found.score_samples(X), posterior.log_prob().numpy())
    assert found.predict_proba(X).shape == (200, found.n_components_)
    assert found.sample(5).shape == (5, 2)


WEIGHING = {
    "RVMRegressor": estimators.RVMRegressor(),
    "RVMClassifier": estimators.RVMClassifier(),
    "PyroClassifier": estimators.PyroClassifier(classifier(Linear())),
}


@pytest.mark.parametrize("name", WEIGHING)
def test_weights_are_repeated_rows(name: str) -> None:
    X, labels = make_blobs(40, centers=2, cluster_std=2.0, random_state=0)
    y = labels if "Classifier" in name else X @ np.array([1.0, -1.0]) + np.sin(X[:, 0])
    weight = np.arange(40) % 3  # 0 too
    once = clone(WEIGHING[name]).fit(X, y, sample_weight=weight)
    again = clone(WEIGHING[name]).fit(np.repeat(X, weight, axis=0), np.repeat(y, weight))
    assert once.log_evidence_ == pytest.approx(again.log_evidence_, rel=1e-6)
    np.testing.assert_allclose(once.predict(X), again.predict(X), rtol=1e-5)


@pytest.mark.parametrize("weight", [-np.ones(40), np.zeros(40)])
def test_weights_that_cannot_be_meant_are_refused(weight: Any) -> None:
    X, y = make_blobs(40, centers=2, random_state=0)
    with pytest.raises(ValueError, match=r"(?i)sample.weight"):
        estimators.RVMClassifier().fit(X, y, sample_weight=weight)


def test_a_classifier_is_the_engines_own() -> None:
    X, y = make_moons(80, noise=0.2, random_state=0)
    found = estimators.RVMClassifier().fit(X, y)
    model = classifier(kernel_basis(torch.as_tensor(X), None))
    posterior = RVM(model, stop=RVM_STOP).run(torch.as_tensor(X), torch.as_tensor(y))
    assert found.log_evidence_ == float(posterior.log_evidence)
    np.testing.assert_array_equal(found.predict_proba(X)[:, 1], posterior.predict(torch.as_tensor(X)).numpy())


def test_pipelines_searches_clones_and_pickles() -> None:
    X, y = make_moons(80, noise=0.2, random_state=0)
    words = np.array(["lower", "upper"])[y]
    pipeline = make_pipeline(StandardScaler(), estimators.PRBFClassifier())
    search = GridSearchCV(pipeline, {"prbfclassifier__n_kernels": [2, 6]}, cv=2, n_jobs=2).fit(X, words)
    assert search.best_score_ > 0.75 and set(search.predict(X)) == {"lower", "upper"}
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict_proba(X), search.predict_proba(X))
    assert clone(pipeline).get_params()["prbfclassifier__n_kernels"] == 8


def test_frames_keep_their_names() -> None:
    pandas = pytest.importorskip("pandas")
    X, _ = make_blobs(60, n_features=3, random_state=0)
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    found = estimators.MPPCA(2, 1).set_output(transform="pandas").fit(frame)
    assert list(found.feature_names_in_) == ["a", "b", "c"]
    assert found.transform(frame).shape == (60, 4)


def regression(X: Tensor, t: Tensor | None = None) -> Tensor:
    w = pyro.sample("w", dist.Normal(torch.zeros(X.shape[1]), 10.0).to_event(1))
    with pyro.plate("rows", len(X)):
        return pyro.sample("t", dist.Normal(X @ w, 0.5), obs=t)


def test_any_model_is_an_estimator() -> None:
    X = np.random.default_rng(0).normal(size=(50, 2))
    y = X @ np.array([1.0, -1.0])
    mean, std = estimators.PyroRegressor(regression).fit(X, y).predict(X, return_std=True)
    assert np.abs(mean - y).max() < 0.2 and np.allclose(std, 0.5, atol=0.1)


def test_labels_of_one_class_are_refused() -> None:
    with pytest.raises(ValueError, match="one class only, 1; a classifier needs at least two"):
        estimators.RVMClassifier().fit(np.eye(3), np.ones(3, dtype=int))


def test_a_machine_for_two_classes_says_so() -> None:
    X, y = make_blobs(30, centers=3, random_state=0)
    with pytest.raises(
        ValueError, match=r"Only binary classification is supported\. The type of the target is multiclass"
    ):
        estimators.VRVMClassifier().fit(X, y)
