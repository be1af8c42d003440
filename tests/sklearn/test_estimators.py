"""Estimators keep scikit-learn's own rules, say what their engine says, and survive pipelines, frames and pickles."""

import pickle
import warnings
from inspect import signature
from typing import Any
from unittest import SkipTest

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import RVM, EvidenceEM, Stop
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import FullNoise, SphericalNoise, gaussian_mixture
from pyro_evidence.models.regression import regression as regression_of

pytest.importorskip("sklearn")
from scipy.stats import multivariate_normal
from sklearn.base import clone
from sklearn.datasets import make_blobs, make_moons
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.mixture import GaussianMixture
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import pyro_evidence.sklearn as estimators
from benchmarks import estimator_overhead
from pyro_evidence.sklearn.sparse import RVM_STOP, kernel_basis

NAMES_ITS_CHECKS = "on_fail" in signature(check_estimator).parameters  # from scikit-learn 1.6 on
OLD_SHARE = 0.7  # of today's checks that scikit-learn 1.4 had
KNOWN_NOISE = regression_of(Linear(), beta=1.0)  # some checks' rows are met exactly: a noise would go to nothing
OF_ITS_MODEL = {
    "check_classifier_not_supporting_multiclass": "how many classes there are, the model knows, and it says so itself"
}


class OfTwoClasses(estimators.PyroClassifier):
    """As its model has it."""

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def _more_tags(self) -> dict[str, bool]:
        """What scikit-learn before 1.6 asks."""
        return {"binary_only": True}


FAST = {
    "EvidenceMixture": (estimators.EvidenceMixture(3, n_init=1, random_state=0), 40),
    "REVMRegressor": (estimators.REVMRegressor(), 51),
}
SLOW = {
    "PRBFClassifier": (estimators.PRBFClassifier(4), 54),
    "REVMClassifier": (estimators.REVMClassifier(), 54),
    "PyroClassifier": (OfTwoClasses(classifier(Linear())), 61, OF_ITS_MODEL),
    "PyroRegressor": (estimators.PyroRegressor(KNOWN_NOISE), 58),
    "ClassConditionalMixture": (estimators.ClassConditionalMixture(2, random_state=0), 54),
    "MPPCA": (estimators.MPPCA(2, random_state=0), 46),
    "RVMClassifier": (estimators.RVMClassifier(), 60),
    "RVMRegressor": (estimators.RVMRegressor(), 58),
    "VRVMClassifier": (estimators.VRVMClassifier(), 55),
    "LaplaceGPClassifier": (estimators.LaplaceGPClassifier(), 54),
    "LaplaceGPRegressor": (estimators.LaplaceGPRegressor(), 51),
    "EvidenceMLPClassifier": (estimators.EvidenceMLPClassifier(3, random_state=0), 54),
    "EvidenceMLPRegressor": (estimators.EvidenceMLPRegressor(3, random_state=0), 51),
}


def keeps_the_rules(estimator: Any, least: int, declared: dict[str, str] | None = None) -> None:
    """No check fails, and as many have run as scikit-learn has for this kind: none was switched off by a tag.

    :param declared: checks that fail, and why.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if NAMES_ITS_CHECKS:
            results = check_estimator(estimator, on_fail=None, on_skip=None, expected_failed_checks=declared)
        else:
            results = [outcome(copy, check, declared or {}) for copy, check in check_estimator(estimator, True)]
    assert [(r["check_name"], r["exception"]) for r in results if r["status"] == "failed"] == []
    assert sum(r["status"] == "passed" for r in results) >= (least if NAMES_ITS_CHECKS else OLD_SHARE * least)


def outcome(estimator: Any, check: Any, declared: dict[str, str]) -> dict[str, Any]:
    """Of one check, as scikit-learn tells it from 1.6 on."""
    name = check.func.__name__
    try:
        check(estimator)
    except SkipTest:
        return {"check_name": name, "status": "skipped", "exception": None}
    except Exception as error:
        return {"check_name": name, "status": "xfail" if name in declared else "failed", "exception": error}
    return {"check_name": name, "status": "passed", "exception": None}


@pytest.mark.parametrize("name", FAST)
def test_rules_of_scikit_learn(name: str) -> None:
    keeps_the_rules(*FAST[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_rules_of_scikit_learn_where_they_take_longer(name: str) -> None:
    keeps_the_rules(*SLOW[name])


def test_a_mixture_is_the_engines_own() -> None:
    X, _ = make_blobs(200, centers=3, random_state=0)
    found = estimators.EvidenceMixture(6, noise=FullNoise(), random_state=0).fit(X)
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
    model = classifier(kernel_basis(torch.as_tensor(X)))
    posterior = RVM(model, stop=RVM_STOP).run(torch.as_tensor(X), torch.as_tensor(y))
    assert found.log_evidence_ == float(posterior.log_evidence)
    np.testing.assert_array_equal(found.predict_proba(X)[:, 1], posterior.predict(torch.as_tensor(X)).numpy())


@pytest.mark.parametrize("hidden", [pytest.param(3, marks=pytest.mark.slow), 10])
def test_a_network_predicts_what_it_has_learned(hidden: int) -> None:
    """Also where it has many more weights than the data determine, whose draws are wild."""
    X, y = make_moons(200, noise=0.15, random_state=0)
    X = StandardScaler().fit_transform(X)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a mode that ends: there are units too many
        found = estimators.EvidenceMLPClassifier(hidden, n_init=1, random_state=0).fit(X[::2], y[::2])
    assert found.score(X[1::2], y[1::2]) > 0.8
    assert found.predict_log_proba(X[1::2])[np.arange(100), y[1::2]].mean() > -0.45


def test_labels_that_inputs_do_not_explain_are_no_error() -> None:
    X, y = np.array([[3.0, 0], [0, 1], [0, 2], [1, 1], [1, 2], [2, 1]]), np.array([1, 1, 1, 2, 2, 2])
    found = estimators.REVMClassifier().fit(X, y)
    assert found.posterior_.num_active == 0
    np.testing.assert_allclose(found.predict_proba(X), 0.5)


def test_classes_far_apart_are_told_apart() -> None:
    X, y = make_blobs(20, centers=2, cluster_std=0.1, random_state=0)
    assert estimators.REVMClassifier().fit(X, y).score(X, y) == 1.0
    with pytest.warns(UserWarning, match="every axis was pruned"):
        assert estimators.REVMClassifier(ridge=1e-2).fit(X, y).score(X, y) == 0.5


@pytest.mark.parametrize("name", ["RVMClassifier", "REVMClassifier", "LaplaceGPClassifier"])
def test_probabilities_of_a_row_do_not_depend_on_the_others(name: str) -> None:
    X, y = make_blobs(45, centers=3, cluster_std=2.0, random_state=0)
    fitted = getattr(estimators, name)().fit(X, y)
    together, alone = fitted.predict_proba(X), np.vstack([fitted.predict_proba(row[None]) for row in X])
    np.testing.assert_allclose(together, alone, rtol=0.0, atol=1e-7)
    np.testing.assert_allclose(together.sum(-1), 1.0)


@pytest.mark.parametrize("name", ["EvidenceMixture", "PRBFClassifier", "PyroRegressor"])
def test_an_estimator_takes_little_beside_its_engine(name: str) -> None:
    """Five milliseconds, or a twentieth of the engine: of a fit, and of predictions."""
    X, labels, t = estimator_overhead.data()
    made = {
        "EvidenceMixture": estimators.EvidenceMixture(2, random_state=0),
        "PRBFClassifier": estimators.PRBFClassifier(2),
    }
    estimator = made.get(name, estimators.PyroRegressor(regression_of(Linear())))
    found = estimator_overhead.measured(estimator, X, labels if "Classifier" in name else t, calls=3)
    assert [call for call, seconds in found.items() if not estimator_overhead.is_fine(*seconds)] == []
    assert all(engine > 0.0 and more > 0.0 for engine, more in found.values())


def test_pipelines_searches_clones_and_pickles() -> None:
    X, y = make_moons(80, noise=0.2, random_state=0)
    words = np.array(["lower", "upper"])[y]
    pipeline = make_pipeline(StandardScaler(), estimators.PRBFClassifier())
    search = GridSearchCV(pipeline, {"prbfclassifier__n_kernels": [2, 6]}, cv=2).fit(X, words)
    assert search.best_score_ > 0.75 and set(search.predict(X)) == {"lower", "upper"}
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    np.testing.assert_array_equal(again.predict_proba(X), search.predict_proba(X))
    assert clone(pipeline).get_params()["prbfclassifier__n_kernels"] == 8


def test_frames_keep_their_names() -> None:
    pandas = pytest.importorskip("pandas")
    X, _ = make_blobs(60, n_features=3, random_state=0)
    frame = pandas.DataFrame(X, columns=["a", "b", "c"])
    found = estimators.MPPCA(2, 1, random_state=0).set_output(transform="pandas").fit(frame)
    assert list(found.feature_names_in_) == ["a", "b", "c"]
    assert found.transform(frame).shape == (60, 2 * found.posterior_.num_components)


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


MIXTURES = {
    "diag": estimators.EvidenceMixture(4, random_state=0),
    "full": estimators.EvidenceMixture(4, noise=FullNoise(), random_state=0),
    "spherical": estimators.EvidenceMixture(4, noise=SphericalNoise(), random_state=0),
    "planes": estimators.MPPCA(3, 1, random_state=0),
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_components_are_those_of_the_density(kind: str) -> None:
    X = np.concatenate([np.random.default_rng(0).normal(m, 0.5, (50, 3)) for m in (-3.0, 3.0)])
    found = clone(MIXTURES[kind]).fit(X)
    parts = zip(found.weights_, found.means_, found.covariances_, strict=True)
    density = sum(w * multivariate_normal(m, C).pdf(X) for w, m, C in parts)
    np.testing.assert_allclose(np.log(density), found.score_samples(X), rtol=1e-9)
    free = {"diag": 13, "full": 19, "spherical": 9}.get(kind)
    if free is not None:
        assert GaussianMixture(2, covariance_type=kind, random_state=0).fit(X)._n_parameters() == free
        assert found.aic(X) == pytest.approx(2.0 * free - 2.0 * found.score_samples(X).sum())
        assert found.bic(X) == pytest.approx(found.aic(X) + free * (np.log(100.0) - 2.0))
    else:
        latents = int(found.posterior_.num_latents[found.posterior_.active].sum())
        assert found.aic(X) == pytest.approx(2.0 * (1 + 2 * 4 + 3 * latents) - 2.0 * found.score_samples(X).sum())


def test_bumps_are_made_of_the_rows_of_the_fit() -> None:
    """What a search over widths must do: a fold knows nothing of the others' rows."""
    X, y = make_moons(60, noise=0.1, random_state=0)
    found = estimators.RVMClassifier(gamma=2.0, centers=7).fit(X[:40], y[:40])
    basis = kernel_basis(torch.as_tensor(X[:40]), 2.0, 7)
    own = basis(torch.as_tensor(X[40:]))
    assert own.shape == (20, 8) and found.posterior_.mode["w"].numel() == 8
    places = basis.centres
    squares = (torch.as_tensor(X[40:])[:, None] - places).square().sum(-1)
    torch.testing.assert_close(own[:, :7], (-2.0 * squares).exp())
    every = kernel_basis(torch.as_tensor(X))(torch.as_tensor(X))[:, :-1]
    np.testing.assert_allclose(every, rbf_kernel(X, gamma=1.0 / (2.0 * X.var())), rtol=1e-9)  # gamma="scale"
    search = GridSearchCV(estimators.RVMRegressor(), {"gamma": [0.1, 3.0], "centers": [5, None]}, cv=2).fit(X, y)
    assert search.best_params_["gamma"] in (0.1, 3.0)
    numbers = GridSearchCV(estimators.RVMRegressor(), {"gamma": np.arange(1, 3), "centers": np.arange(4, 6)}, cv=2)
    assert numbers.fit(X, y).best_estimator_.posterior_.mode["w"].numel() in (5, 6)  # NumPy's are numbers too


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gamma": "wide"}, "expected 'scale' or a positive number"),
        ({"gamma": -1.0}, "expected 'scale' or a positive number"),
        ({"centers": 0}, "expected a number from 1 to that of the rows"),
        ({"centers": np.zeros((3, 5))}, r"centers of shape \(3, 5\); expected \(C, 2\)"),
    ],
    ids=str,
)
def test_bumps_that_cannot_be_made_are_refused(settings: dict[str, Any], said: str) -> None:
    X, y = make_moons(20, random_state=0)
    with pytest.raises(ValueError, match=said):
        estimators.RVMClassifier(**settings).fit(X, y)
