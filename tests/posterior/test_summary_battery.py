"""What ``summary()`` says of posteriors that are known in closed form: silence where moments are right, else an alarm.

Right: all means within a tenth of a deviation and all deviations within a tenth; wrong: beyond three tenths.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_evidence import ImportancePosterior, LaplaceEvidence, LaplacePosterior, Stop
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.nested.joint_posterior import Proposal
from pyro_evidence.numerics import importance
from pyro_evidence.numerics.importance import checked
from pyro_evidence.posterior import diagnostics, laplace
from pyro_evidence.posterior.diagnostics import (
    Elements,
    Shifts,
    by_steps,
    by_weights,
    lines,
    moments,
    most_until,
)
from pyro_evidence.precision.dense import Diagonal
from tests.models_for_tests.posterior_models import class_data, fitted_logistic, logistic
from tests.models_for_tests.sampled_scales import SCHOOLS, schools_centred

QUIET = Stop(progress=False)
ALARMS = ("far from Gaussian", "is off by", "may be off by", "is not known")


def alone(make: Callable[[Tensor], Any], size: int) -> LaplacePosterior:
    """A posterior that is the prior: ``size`` independent numbers of a distribution."""

    def model(one: Tensor) -> None:
        with pyro.plate("numbers", size):
            x = pyro.sample("x", make(one))
        pyro.factor("nothing", 0.0 * x.sum())

    return LaplaceEvidence(model, marginalise=(), stop=QUIET).run(torch.ones(()))


def counted(y: float, size: int) -> tuple[LaplacePosterior, Any]:
    """Poisson counts under a Gamma prior of each rate: the posterior is a Gamma distribution."""

    def model(y: Tensor) -> None:
        with pyro.plate("numbers", len(y)):
            pyro.sample("y", dist.Poisson(pyro.sample("x", dist.Gamma(y.new_tensor(1.0), 1.0))), obs=y)

    return LaplaceEvidence(model, marginalise=(), stop=QUIET).run(torch.full((size,), y)), dist.Gamma(y + 1.0, 2.0)


def of_prior(make: Callable[[Tensor], Any], size: int) -> tuple[LaplacePosterior, Any]:
    return alone(make, size), make(torch.ones(()))


RIGHT = {
    "one normal": lambda: of_prior(lambda one: dist.Normal(3.0 * one, 2.0), 1),
    "many counts": lambda: counted(900.0, 1),
    "forty of many counts": lambda: counted(900.0, 40),
    "forty of single counts": lambda: counted(1.0, 40),
    "skewed": lambda: of_prior(lambda one: dist.Gumbel(one, 1.0), 2),
    "heavier tails": lambda: of_prior(lambda one: dist.StudentT(60.0 * one, 1.0, 2.0), 3),
    "three hundred of heavier tails": lambda: of_prior(lambda one: dist.StudentT(30.0 * one, 1.0, 2.0), 300),
}
EDGE = {  # right by the draws of the integral, and wrong by the mode alone
    "near an edge": lambda: of_prior(lambda one: dist.Beta(0.05 * one, 4.0), 1),
}
WRONG = EDGE | {
    "beyond an edge": lambda: of_prior(lambda one: dist.InverseGamma(2.5 * one, 1.0), 1),
    "far tails": lambda: of_prior(lambda one: dist.StudentT(2.2 * one, 1.0, 2.0), 1),
    "two hundred of heavy tails": lambda: of_prior(lambda one: dist.StudentT(4.0 * one, 1.0, 2.0), 200),
}


def distance(posterior: LaplacePosterior, truth: Any) -> float:
    """The largest of shifts of means, in exact deviations, and ratios of deviations beyond one."""
    x, sd = posterior.get_samples(20_000, seed=1)["x"].reshape(20_000, -1)[:, :3], truth.variance.sqrt()
    away, ratio = (x.mean(0) - truth.mean).abs() / sd, (x.std(0) / sd).log().abs().expm1()
    return float(torch.maximum(away, ratio).max())


def said_of(posterior: LaplacePosterior) -> str:
    """Below the table, by a check that has time enough whatever else the machine does: it ends when it knows."""
    return "\n".join(posterior._notes(time.process_time() + 30.0))


def alarms(said: str) -> list[str]:
    of_moments = [line for line in said.splitlines() if not line.startswith("the log evidence is off by")]
    return [alarm for alarm in ALARMS if alarm in "\n".join(of_moments)]


@pytest.mark.parametrize("name", RIGHT | EDGE)
def test_right_moments_raise_no_alarm(name: str) -> None:
    posterior, truth = (RIGHT | EDGE)[name]()
    assert distance(posterior, truth) < 0.1
    assert not alarms(said_of(posterior))


@pytest.mark.parametrize("name", WRONG)
def test_wrong_moments_raise_one(name: str) -> None:
    posterior, truth = WRONG[name]()
    posterior = posterior.at_mode(0) if isinstance(posterior, ImportancePosterior) else posterior
    assert distance(posterior, truth) > 0.3
    assert "is off by" in alarms(said_of(posterior))


def test_a_joint_k_hat_of_many_coordinates_is_no_alarm() -> None:
    posterior, _ = RIGHT["three hundred of heavier tails"]()
    found = posterior._check(time.process_time() + 30.0) | {"pareto_k": 0.9}
    said = "\n".join(lines(posterior._described(found)))
    assert "k-hat is above 0.7: importance sampling says little of the log evidence" in said and not alarms(said)


@pytest.mark.parametrize(
    ("gap", "error", "moments", "silent"),
    [(0.01, 0.01, [], True), (0.2, 0.01, [], False), (0.01, 0.05, [], False), (0.01, 0.01, ["in doubt"], False)],
    ids=["all agree", "another log evidence", "few weights count", "moments are not known"],
)
def test_a_tail_of_weights_that_change_nothing_is_no_alarm(
    gap: float, error: float, moments: list[str], silent: bool
) -> None:
    posterior, _ = RIGHT["three hundred of heavier tails"]()
    importance = {"log_evidence_importance": float(posterior.log_evidence) + gap, "log_evidence_importance_se": error}
    found = posterior._check(time.process_time()) | importance | {"pareto_k": 0.9, "moments": (False, moments)}
    said = "\n".join(lines(posterior._described(found)))
    assert ("k-hat is above 0.7" not in said) == silent and ("k-hat 0.9" in said)


@pytest.mark.parametrize(("pareto_k", "by_weights_alone"), [(0.8, True), (1.2, False)])
def test_weights_that_have_a_mean_count_where_steps_say_nothing(
    monkeypatch: pytest.MonkeyPatch, pareto_k: float, by_weights_alone: bool
) -> None:
    nothing, used, check = SimpleNamespace(is_settled=lambda: False), list[Any](), diagnostics.importance_check
    monkeypatch.setattr(diagnostics, "by_steps", lambda *_: nothing)
    monkeypatch.setattr(diagnostics, "importance_check", lambda *given: check(*given) | {"pareto_k": pareto_k})
    monkeypatch.setattr(diagnostics, "moments", lambda shifts, _: used.append(shifts))
    diagnostics.check_until(fitted_logistic(), time.process_time())
    assert (used[0] is not nothing) == by_weights_alone


def shifted(shift: Tensor, apart: float = 1.0) -> Shifts:
    """Shifts by a sample of 32 errors of a quarter of a deviation; those of elements go together but for a part.

    :param shift: of the means, ``(K,)``.
    """
    generator = torch.Generator().manual_seed(0)
    together, alone = (0.5 * torch.randn(32, size, generator=generator).double() for size in (1, len(shift)))
    noise = (1.0 - apart**2) ** 0.5 * together + apart * alone
    value, error = shift + noise.mean(0), noise.std(0) / 32**0.5
    names = tuple(("x", (i,)) for i in range(len(shift)))
    return Shifts(names, torch.stack([value, 0.0 * value]), torch.stack([error, 0.0 * error]), noise, "", "")


def test_the_largest_of_a_thousand_shifts_has_an_error() -> None:
    """Of independent draws some mean is always some standard errors off."""
    found = shifted(torch.zeros(2000).double())
    assert float(found.value[0].abs().max()) > 0.2
    assert not found.alarms.any()
    assert "is off by" not in moments_of(found)


def test_elements_of_a_site_tell_of_one_another() -> None:
    """Of each alone few draws tell nothing; a thousand that are right are known to be, unless their errors go together.

    Where some are wrong nothing is taken back: shifts that vary by .3 sd, and one in a thousand that is .8 off.
    """
    right, wide, one = torch.zeros(1000), 0.3 * torch.randn(1000, generator=torch.Generator().manual_seed(1)), 700
    found = shifted(right.double(), 1.0)
    assert found.reach * float(found.error[0].median()) > 0.3 and found.is_settled() and not moments_of(found)
    assert not shifted(right.double(), 0.1).is_settled()
    assert moments_of(shifted(wide.double(), 1.0))
    outlier = right.double().index_fill(0, torch.tensor(one), 0.8)
    found = shifted(outlier, 1.0)
    assert f"x({one},)" in moments_of(found) and bool(found.unknown()[0][one])


def test_steps_say_what_draws_of_another_normal_are_off_by() -> None:
    """Draws .4 deviations off and half as wide, of 300 normal numbers: exactly that, without any noise."""
    right = alone(lambda one: dist.Normal(3.0 * one, 2.0), 300)
    precision = Diagonal(4.0 * right.state.precision.variance.reciprocal())
    wrong = replace(right, state=replace(right.state, u=right.state.u - 0.8, precision=precision))
    vars(wrong)["_shifted"] = None  # which would move them back
    found = by_steps(wrong, wrong._white(64, torch.Generator().manual_seed(0)), 0.0)
    truth = torch.tensor([[0.8], [math.log(2.0)]]).double().expand(2, 300)
    assert found.value == pytest.approx(truth) and found.error == pytest.approx(0.0 * truth, abs=1e-9)


def moments_of(found: Shifts) -> str:
    return "".join(moments(found, lambda site, place: f"{site}{place}")[1])


def test_errors_of_weighted_moments_are_how_they_spread() -> None:
    """Oracle: the spread of the same numbers over other draws."""
    found: list[Shifts] = []
    for seed in range(200):
        x = torch.randn(1000, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        target, draws = dist.Normal(0.3, 0.9), {"x": x}
        log_weights = (target.log_prob(x) - dist.Normal(0.0, 1.0).log_prob(x)).sum(-1)
        found.append(by_weights(Elements.of(draws), draws, draws, checked(log_weights)))
    for row, truth in enumerate((0.3, math.log(0.9))):
        values = torch.cat([each.value[row] for each in found])
        errors = torch.cat([each.error[row] for each in found])
        assert float(values.mean()) == pytest.approx(truth, abs=0.01)
        assert 0.8 < float(errors.mean() / values.std()) < 1.6  # what smoothing takes off is left in


def test_without_time_the_summary_says_what_is_wrong() -> None:
    assert "is off by" in "\n".join(WRONG["two hundred of heavy tails"]()[0]._notes(time.process_time()))
    assert fitted_logistic()._check(time.process_time())["effective_sample_size"] <= 128.0


def test_weights_of_fewer_draws_than_are_enough_say_more_than_steps_that_do_not_settle(monkeypatch) -> None:
    """Responses of four subjects to four doses; of four times as many draws the weights are light, and nothing is off.

    Far out the slopes of such curves are of no normal density, and steps along them are as long as they like.
    """
    g = torch.Generator().manual_seed(5)
    draws = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((4, 1), (4, 1), (4, 4))]
    dose = torch.tensor([0.0, 10.0, 20.0, 80.0]).double()
    y = (2.0 + 0.3 * draws[0]) * dose / ((2.7 + 0.4 * draws[1]).exp() + dose) + 0.4 * draws[2]

    def model(y: Tensor) -> None:
        spread = pyro.sample("spread", dist.HalfNormal(y.new_tensor(1.0)))
        with pyro.plate("subjects", 4, dim=-2):
            most = pyro.sample("most", dist.Normal(y.new_tensor(2.0), 0.5))
            half = pyro.sample("half", dist.Normal(y.new_tensor(3.0), spread)).exp()
            with pyro.plate("doses", 4, dim=-1):
                pyro.sample("y", dist.Normal(most * dose / (half + dose), 0.4), obs=y)

    posterior = LaplaceEvidence(model, stop=QUIET).run(y)
    vars(posterior)["_num_checked"] = 2048
    found = posterior._check(math.inf)
    assert found["pareto_k"] < importance.threshold(2048) and not found["moments"][1]
    vars(posterior)["_num_checked"] = 512
    monkeypatch.setattr(importance, "threshold", lambda num: 0.5)
    found = posterior._check(math.inf)
    assert 0.5 < found["pareto_k"] < 0.7 and not found["moments"][1]


def test_a_summary_of_dear_draws_sees_few_and_each_once(monkeypatch) -> None:
    """Of draws that take a fiftieth of a second, as many as half of the time is for; the check begins with the same."""
    posterior = LaplaceEvidence(schools_centred, stop=QUIET).run(SCHOOLS)
    drawn, real, rows = Proposal.drawn, time.process_time, list[Tensor]()

    def dear(self: Proposal, white: Tensor) -> tuple[Tensor, Tensor]:
        rows.append(white)
        return drawn(self, white)

    vars(posterior)["_calibrated"] = posterior.proposal  # as of draws that are too dear for a thousand
    monkeypatch.setattr(type(posterior), "_follows", False)
    monkeypatch.setattr(Proposal, "drawn", dear)
    monkeypatch.setattr(time, "process_time", lambda: real() + 0.02 * sum(map(len, rows)))
    vars(posterior).pop("_latest", None)
    table = posterior._draws_until(time.process_time() + 2.0)
    num = len(next(iter(table.values())))
    assert 64 <= num <= 112
    posterior._check(time.process_time())
    assert len(torch.cat(rows).unique(dim=0)) == len(torch.cat(rows)) == num


def test_a_check_has_the_time_that_all_else_leaves(monkeypatch) -> None:
    """An error of the log evidence that takes a minute leaves none to the check of the moments."""
    posterior, late, real, found = fitted_logistic(), list[float](), time.process_time, diagnostics.check_until

    def dear(state: LaplaceState) -> bool:
        late.append(60.0)
        return False

    def checked(posterior: LaplacePosterior, until: float) -> dict[str, Any]:
        late.append(until - time.process_time())
        return found(posterior, until)

    monkeypatch.setattr(laplace, "is_in_blocks", dear)
    monkeypatch.setattr(diagnostics, "check_until", checked)
    monkeypatch.setattr(time, "process_time", lambda: real() + 60.0 * late.count(60.0))
    posterior.summary()
    assert late[0] == 60.0 and late[1] < 0.0


def test_a_posterior_keeps_how_long_its_fit_took(tmp_path) -> None:
    begun = time.process_time()
    posterior = LaplaceEvidence(logistic, stop=QUIET).run(*class_data())
    assert 0.0 < posterior.fit_seconds <= time.process_time() - begun
    posterior.save(tmp_path / "fit")
    assert LaplacePosterior.load(tmp_path / "fit", logistic).fit_seconds == posterior.fit_seconds


def test_the_table_is_had_without_the_check(capsys) -> None:
    fitted_logistic().summary(check=False)
    text = capsys.readouterr().out
    assert "w[0]" in text and "log evidence" not in text


def test_a_check_takes_more_draws_while_there_is_time() -> None:
    asked: list[int] = []

    def check(num: int) -> dict[str, Any]:
        asked.append(num)
        return {}

    most_until(check, 1000, time.process_time() + 30.0)
    assert asked == [100, 300, 900, 1000]
    most_until(check, 1000, time.process_time())
    assert asked[4:] == [100]
