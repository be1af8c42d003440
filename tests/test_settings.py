"""Settings that cannot be meant are refused when an engine is made, by name."""

from collections.abc import Callable
from typing import Any

import pytest

from pyro_evidence import REVM, RVM, VRVM, BadInput, EvidenceEM, LaplaceEvidence, OverlapEM, Start, Stop, diagonal
from pyro_evidence.laplace.approximation import laplace_problem
from pyro_evidence.laplace.restarts import automatic
from pyro_evidence.mixture import BoundedInflation
from pyro_evidence.models.prbf import prbf
from pyro_evidence.prbf import KMeans
from pyro_evidence.program import LogJoint
from pyro_evidence.relevance import GaussianPrior, score_centre
from tests.models_for_tests import engine_models
from tests.models_for_tests.engine_models import linear

ENGINES: dict[str, Callable[..., Any]] = {
    "laplace": LaplaceEvidence,
    "rvm": RVM,
    "vrvm": VRVM,
    "revm": REVM,
    "em": EvidenceEM,
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_model_that_cannot_be_called_is_refused(engine) -> None:
    with pytest.raises(BadInput, match="model is a int; expected a callable Pyro model"):
        engine(3)


@pytest.mark.parametrize("engine", [LaplaceEvidence, RVM, VRVM, EvidenceEM])
@pytest.mark.parametrize("stop", [50, Stop, None, 1e-6])
def test_a_stop_that_is_none_is_refused(engine, stop) -> None:
    with pytest.raises(BadInput, match=r"stop=.*; expected a Stop, such as stop=Stop\(\)"):
        engine(linear, stop=stop)


@pytest.mark.parametrize("restarts", [0, -1, 2.5, True, "8"])
def test_restarts_that_are_no_number_of_starts_are_refused(restarts) -> None:
    with pytest.raises(BadInput, match=r"restarts=.*at least 1"):
        LaplaceEvidence(linear, start=Start(restarts=restarts))


def test_a_name_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(BadInput, match="curvature='diagonal'; expected a function"):
        LaplaceEvidence(linear, curvature="diagonal")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"centre='score'; expected a function .*, such as score_centre"):
        REVM(linear, centre="score")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="update='literal'; expected a function"):
        OverlapEM(prbf(2, 2), update="literal")  # type: ignore[arg-type]


def test_a_class_in_place_of_an_object_is_refused() -> None:
    with pytest.raises(BadInput, match=r"prior=GaussianPrior is a class; .*GaussianPrior\(...\)"):
        REVM(linear, prior=GaussianPrior)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="initial=KMeans is a class"):
        OverlapEM(prbf(2, 2), initial=KMeans)  # type: ignore[arg-type]


def test_what_can_be_meant_is_kept() -> None:
    stop = Stop(num_steps=3)
    engine = LaplaceEvidence(linear, curvature=diagonal, stop=stop, start=Start(restarts=2))
    assert engine.curvature is diagonal and engine.stop is stop and engine.start == Start(restarts=2)
    assert REVM(linear, centre=score_centre).settings.centre is score_centre


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"update": BoundedInflation}, "update=BoundedInflation is a class"),
        ({"update": "literal"}, "update='literal'; expected a function"),
        ({"start": 5}, "start=5; expected a Start"),
        ({"deletion": True}, "deletion=True has no __call__ and no split; expected an object such as GreedyDeletion"),
        ({"curvature": "full"}, "curvature='full'; expected a function"),
    ],
)
def test_settings_of_mixtures_that_cannot_be_meant_are_refused(setting, message) -> None:
    with pytest.raises(BadInput, match=message):
        EvidenceEM(linear, **setting)


def test_settings_that_are_none_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'restarts'"):
        LaplaceEvidence(linear, restarts=3)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match="restarts=0; expected a whole number of at least 1"):
        Start(restarts=0)


@pytest.mark.parametrize(
    ("model", "data", "number"),
    [
        (engine_models.linear, engine_models.targets, 1),
        (engine_models.logistic_ard, engine_models.classes, 1),
        (engine_models.logistic_noncentred, engine_models.classes, 4),
        (engine_models.network, engine_models.curve, 4),
        (engine_models.mixture, lambda: (engine_models.two_clusters(),), 4),
    ],
)
def test_several_starts_where_there_may_be_several_modes(model, data, number: int) -> None:
    assert automatic(laplace_problem(LogJoint(model, data()))) == number
