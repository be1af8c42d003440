"""The loop and its stopping rule, on a state that is a number."""

import inspect
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace

import pytest

from pyro_evidence import RVM, VRVM, EvidenceEM, LaplaceEvidence, OverlapEM
from pyro_evidence.data.ranks import COMMUNICATOR, Communicator
from pyro_evidence.errors import NotConverged
from pyro_evidence.fitting.iterate import Status, Stop, bar_of, iterate, require_convergence


@dataclass(frozen=True)
class Number:
    """Climbs ``-x^2``."""

    x: float
    stop_reason: Status | None = None

    @property
    def objective(self) -> float:
        return -self.x * self.x

    @property
    def gradient_norm(self) -> float:
        return abs(2.0 * self.x)


def halve(state: Number) -> Number:
    return replace(state, x=0.5 * state.x)


def test_converges_only_when_both_change_and_gradient_are_small() -> None:
    fit = iterate(halve, Number(1.0), Stop(tolerance=1e-4, gradient_tolerance=1e-6, progress=False), "test")
    assert fit.status is Status.CONVERGED
    assert fit.state.gradient_norm <= 1e-6 < 2.0 * fit.state.gradient_norm
    assert fit.objectives[0] == -1.0 and fit.objectives[-1] == fit.state.objective
    assert len(fit.objectives) == 22  # 2 / 2^21 is the first below 1e-6


def test_a_state_without_a_gradient_has_nothing_to_do() -> None:
    fit = iterate(halve, Number(0.0), Stop(progress=False), "test")
    assert fit.status is Status.CONVERGED and fit.objectives == (0.0,)


def test_step_limit_is_not_called_convergence() -> None:
    fit = iterate(halve, Number(1.0), Stop(num_steps=3, progress=False), "test")
    assert fit.status is Status.STEP_LIMIT and len(fit.objectives) == 4 and fit.state.x == 0.125


def test_a_verdict_of_the_state_ends_the_loop() -> None:
    def give_up(state: Number) -> Number:
        return replace(state, x=0.9 * state.x, stop_reason=Status.STUCK)

    assert iterate(give_up, Number(1.0), Stop(progress=False), "test").status is Status.STUCK


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, Status.INTERRUPTED), (ArithmeticError, Status.FAILED)]
)
def test_the_last_good_state_survives(error: type[BaseException], status: Status) -> None:
    def breaks(state: Number) -> Number:
        if state.x < 0.2:
            raise error("the reason")
        return halve(state)

    with pytest.warns(UserWarning, match=r"test, step 4: .*last good state.*the reason"):
        fit = iterate(breaks, Number(1.0), Stop(progress=False), "test")
    assert fit.status is status and fit.state.x == 0.125 and len(fit.objectives) == 4


def test_other_errors_are_not_swallowed() -> None:
    def bug(state: Number) -> Number:
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        iterate(bug, Number(1.0), Stop(progress=False), "test")


def test_no_bar_for_what_takes_less_than_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    iterate(halve, Number(1.0), Stop(), "test")
    assert capsys.readouterr().err.strip() == ""


def test_an_early_end_is_an_error_with_the_posterior_or_a_warning() -> None:
    with pytest.raises(NotConverged, match=r"X: ran out of steps: .* at 3\. The posterior so far is in") as caught:
        require_convergence("X", Status.STEP_LIMIT, "posterior", Stop(), " at 3")
    assert caught.value.posterior == "posterior"
    with pytest.warns(UserWarning, match=r"X: ran out of steps: raise num_steps or loosen tolerance at 3"):
        require_convergence("X", Status.STEP_LIMIT, "posterior", Stop(throw=False), " at 3")


@pytest.mark.parametrize("status", [Status.CONVERGED, Status.INTERRUPTED])
def test_a_proper_end_is_no_complaint(status: Status) -> None:
    require_convergence("X", status, None, Stop())


def test_a_failed_step_is_not_warned_of_twice() -> None:
    with pytest.raises(NotConverged, match="a step failed"):
        require_convergence("X", Status.FAILED, None, Stop())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_convergence("X", Status.FAILED, None, Stop(throw=False))


def test_steps_that_were_counted_end_without_a_complaint_and_failed_ones_do_not() -> None:
    counted = Stop(tolerance=0.0, num_steps=4)
    require_convergence("X", Status.STEP_LIMIT, None, counted)
    with pytest.raises(NotConverged, match="a step failed"):
        require_convergence("X", Status.FAILED, None, counted)


def test_every_engine_throws_by_default() -> None:
    """One rule: the settings of no engine are quiet unless a user makes them so."""
    engines = [LaplaceEvidence, EvidenceEM, OverlapEM, RVM, VRVM]
    stops = [inspect.signature(engine).parameters["stop"].default for engine in engines]
    assert all(stop.throw and not stop.counted for stop in stops)


def test_bars_obey_tqdms_own_variable() -> None:
    """In a process of its own, for tqdm looks at the variable when it is imported; tests/test_output.py has none."""
    program = (
        "from pyro_evidence.fitting.iterate import bar_of; "
        "print(*(not bar_of('fit', progress).disable for progress in (True, False)))"
    )
    env = os.environ | {"TQDM_DISABLE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"


def test_a_bar_tells_the_time_left_only_of_counted_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyro_evidence.fitting.iterate.tqdm", lambda **settings: settings)
    assert "remaining" not in bar_of("fit", True)["bar_format"] and bar_of("fit", True)["total"] is None
    assert "bar_format" not in bar_of("fit", True, total=9)


def test_of_several_processes_the_first_alone_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    said: list[bool] = []
    monkeypatch.setattr("pyro_evidence.fitting.iterate.tqdm", lambda disable=False, **_: said.append(disable))
    for is_first in (True, False):
        token = COMMUNICATOR.set(Communicator(is_first=is_first))
        bar_of("fit", True)
        COMMUNICATOR.reset(token)
    assert said == [False, True]
