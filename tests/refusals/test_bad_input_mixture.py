"""What data and settings can do wrong to a mixture: a finite answer, or an error message that says what to do."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, EvidenceEM, NotConverged, Start, Stop, class_conditional
from pyro_evidence.fitting.iterate import Status
from pyro_evidence.mixture import GreedyDeletion, RandomWeights, Unregularised, WeightDecay
from pyro_evidence.mixture.expectation import Mixture
from pyro_evidence.mixture.fit import MixtureRestarts
from pyro_evidence.mixture.posterior import MixturePosterior
from pyro_evidence.mixture.updates import BoundedInflation, EStep
from pyro_evidence.models.basis import RandomVectorFunctionalLink
from pyro_evidence.models.mixture import DiagonalNoise, FullNoise, SharedNoise, gaussian_mixture, linear_mixture

NOISE = [DiagonalNoise(), SharedNoise(), FullNoise()]


def two_blobs(num_data: int = 60) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    Y = torch.randn(num_data, 2, generator=generator)
    Y[num_data // 2 :] = 0.5 * Y[num_data // 2 :] + torch.tensor([6.0, 3.0])
    return Y


POOR = {
    "two points": torch.tensor([[1.0, 2.0], [3.0, 1.0]]),
    "constant column": torch.cat([torch.linspace(0, 1, 9)[:, None], torch.ones(9, 1)], -1),
    "far outlier": torch.cat([two_blobs(), torch.tensor([[1e9, 0.0]])]),
    "fewer points than components": torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 1.0]]),
    "ties": torch.cat([two_blobs(30), torch.zeros(10, 2)]),
    "collinear": torch.linspace(-1, 1, 30)[:, None] * torch.tensor([[1.0, 2.0]]),
}


@pytest.mark.filterwarnings("ignore:.*are one constant each")
@pytest.mark.parametrize("Y", POOR.values(), ids=POOR)
@pytest.mark.parametrize("noise", NOISE, ids=lambda n: type(n).__name__)
def test_poor_data_give_a_finite_answer(Y: Tensor, noise: FullNoise) -> None:
    stop = Stop(tolerance=0.0, num_steps=60, throw=False)
    found = EvidenceEM(gaussian_mixture(4, noise=noise), stop=stop).run(Y)
    assert isinstance(found, MixturePosterior)
    assert math.isfinite(float(found.log_evidence)) and found.num_components >= 1
    assert bool(found.log_prob(Y).isfinite().all())


@pytest.mark.parametrize("num", [1, 5])
@pytest.mark.parametrize("noise", NOISE, ids=lambda n: type(n).__name__)
def test_points_that_are_all_the_same_are_refused(num: int, noise: FullNoise) -> None:
    with pytest.raises(BadInput, match="all rows are the same"):
        EvidenceEM(gaussian_mixture(4, noise=noise)).run(torch.tensor([[1.0, 2.0]] * num))


def test_a_basis_with_more_functions_than_points() -> None:
    generator = torch.Generator().manual_seed(0)
    weights, biases = torch.randn(1, 30, generator=generator), torch.randn(30, generator=generator)
    X = torch.linspace(-1.0, 1.0, 8)[:, None]
    model = linear_mixture(2, RandomVectorFunctionalLink(weights, biases))
    found = EvidenceEM(model, stop=Stop(tolerance=0.0, num_steps=20, throw=False)).run(X, X.sin())
    assert isinstance(found, MixturePosterior)
    assert math.isfinite(float(found.log_evidence))
    assert 0.0 < float(found.gamma["alpha"].sum()) <= 8.0  # no more than there are data


def test_a_response_far_away_is_a_low_density_not_a_nan() -> None:
    found = EvidenceEM(gaussian_mixture(3)).run(two_blobs())
    assert isinstance(found, MixturePosterior)
    away = torch.tensor([[1e6, -1e6]])
    assert -math.inf < float(found.log_prob(away)) < -1e9
    assert float(found.responsibilities(away).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("weight", [torch.zeros(60), -torch.ones(60), torch.full((60,), math.nan), torch.ones(3)])
def test_weights_that_mean_nothing_are_refused(weight: Tensor) -> None:
    with pytest.raises(BadInput, match="weight"):
        EvidenceEM(gaussian_mixture(2)).run(two_blobs(), weight)


def test_a_datum_of_weight_zero_is_no_datum() -> None:
    Y = torch.cat([two_blobs(), torch.tensor([[40.0, 40.0]])])
    weight = torch.ones(61)
    weight[60] = 0.0
    found = EvidenceEM(gaussian_mixture(3, units=units)).run(Y, weight)
    without = EvidenceEM(gaussian_mixture(3, units=units)).run(two_blobs())
    torch.testing.assert_close(found.log_evidence, without.log_evidence, rtol=1e-6, atol=1e-6)


def units(Y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor([3.0, 1.5]), torch.tensor([3.0, 2.0])


@pytest.mark.parametrize("labels", [torch.tensor([0] * 59 + [1]), torch.zeros(59).long()])
def test_classes_that_cannot_be_fitted_are_refused(labels: Tensor) -> None:
    with pytest.raises(BadInput, match=r"label|class"):
        class_conditional(EvidenceEM(gaussian_mixture(2)), two_blobs(), labels)


@pytest.mark.parametrize("labels", [torch.zeros(0), torch.tensor([0.0] * 30 + [torch.nan] * 30)])
def test_classes_that_are_none_are_refused(labels: Tensor) -> None:
    with pytest.raises(BadInput, match="expected data, and a label for each"):
        class_conditional(EvidenceEM(gaussian_mixture(2)), two_blobs()[: len(labels)], labels)


@pytest.mark.parametrize("shape", [(0, 2), (5, 0)])
def test_no_data_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match="at least one row and one column"):
        EvidenceEM(gaussian_mixture(2)).run(torch.zeros(shape))


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        (lambda: Start(restarts=0), "restarts=0"),
        (lambda: RandomWeights(warm_up=-1), "warm_up=-1; expected a whole number of at least 0"),
        (lambda: RandomWeights(width=0.0), "width"),
        (lambda: RandomWeights(alpha=math.inf), "alpha"),
        (lambda: BoundedInflation(rho=-1.0), "rho=-1.0"),
        (lambda: BoundedInflation(num_other_outputs=math.nan), "math.inf for all"),
        (lambda: Unregularised(rho=-1.0), "rho"),
        (lambda: Unregularised(cutoff=-1.0), "cutoff"),
        (lambda: WeightDecay(0.0), r"Unregularised\(\)"),
        (lambda: WeightDecay(1.0, rho=math.nan), "rho=nan"),
        (lambda: GreedyDeletion(num_steps=0), "num_steps=0"),
    ],
)
def test_settings_that_mean_nothing_are_refused_where_they_are_made(setting: Callable[[], object], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        setting()


def test_unseen_data_of_another_kind_are_refused() -> None:
    with pytest.raises(BadInput, match="3 responses and 1 basis functions, the fitted ones 2 responses"):
        EvidenceEM(gaussian_mixture(2)).track_validation(torch.randn(5, 3)).run(two_blobs())


@dataclass(frozen=True)
class Breaking:
    """Spoils something of the rows given in one round."""

    rows: tuple[int, ...]
    spoil: Callable[[Mixture, Tensor], Mixture]

    def __call__(self, at: EStep) -> Mixture:
        """One round."""
        row = torch.zeros(len(at.mixture.w), dtype=torch.bool)
        row[list(self.rows)] = True
        return self.spoil(BoundedInflation()(at), row)


def no_weights(mixture: Mixture, row: Tensor) -> Mixture:
    return replace(mixture, w=torch.where(row[:, None, None, None], math.nan, mixture.w))


def no_noise(mixture: Mixture, row: Tensor) -> Mixture:
    return replace(mixture, noise=torch.where(row[:, None, None], math.inf, mixture.noise))


@pytest.mark.parametrize(("spoil", "word"), [(no_weights, "weights"), (no_noise, "noise precisions")])
def test_when_every_restart_fails_every_one_says_why(spoil: Callable[[Mixture, Tensor], Mixture], word: str) -> None:
    engine = EvidenceEM(
        gaussian_mixture(3), update=Breaking((0, 1), spoil), start=Start(restarts=2), initial=RandomWeights(warm_up=0)
    )
    with pytest.raises(NotConverged) as error:
        engine.run(two_blobs())
    for row in (0, 1):
        assert f"restart {row}: round 1: {word} of component" in str(error.value)


def test_a_restart_that_fails_costs_only_itself() -> None:
    update, start, initial = Breaking((1,), no_weights), Start(restarts=3), RandomWeights(warm_up=0)
    engine = EvidenceEM(gaussian_mixture(3), update=update, start=start, initial=initial, deletion=None)
    found = engine.run(two_blobs())
    assert found.restarts.isnan().tolist() == [False, True, False]
    assert len(found.failures) == 1 and found.failures[0].startswith("restart 1: round 1: weights")
    assert math.isfinite(float(found.log_evidence))


def test_collapse_of_every_kernel_in_the_first_rounds_is_no_crash() -> None:
    """Plain EM with full covariances on points that coincide: singular matrices in every restart."""
    engine = EvidenceEM(
        gaussian_mixture(3, noise=FullNoise()),
        update=Unregularised(),
        deletion=None,
        stop=Stop(tolerance=0.0, num_steps=20, throw=False),
    )
    try:
        found = engine.run(torch.tensor([[0.0, 0.0]] * 4 + [[1.0, 1.0]] * 4))
    except (NotConverged, ArithmeticError) as error:
        assert "restart 0" in str(error) or "positive" in str(error)
    else:
        assert math.isfinite(float(found.log_evidence))


@dataclass
class Impatient:
    """Ctrl-C in one of the rounds."""

    after: int
    calls: int = 0

    def __call__(self, at: EStep) -> Mixture:
        """One round."""
        self.calls += 1
        if self.calls > self.after:
            raise KeyboardInterrupt
        return BoundedInflation()(at)


@pytest.mark.parametrize("after", [1, 7])
def test_an_interruption_keeps_the_last_good_state(after: int) -> None:
    engine = EvidenceEM(gaussian_mixture(3), update=Impatient(after), initial=RandomWeights(warm_up=2))
    with pytest.warns(UserWarning, match="interrupted"):
        found = engine.run(two_blobs())
    assert found.status == Status.INTERRUPTED.value
    assert len(found.log_evidences) == after + 1
    assert math.isfinite(float(found.log_evidence))


@dataclass(frozen=True)
class Interrupted(GreedyDeletion):
    """Ctrl-C while components are left out."""

    def __call__(self, batch: MixtureRestarts) -> MixtureRestarts:
        """Nothing comes of it."""
        raise KeyboardInterrupt


def test_an_interrupted_deletion_keeps_what_was_there() -> None:
    with pytest.warns(UserWarning, match="deletion: interrupted"):
        found = EvidenceEM(gaussian_mixture(3), deletion=Interrupted()).run(two_blobs())
    assert found.status == Status.INTERRUPTED.value and math.isfinite(float(found.log_evidence))


def test_running_out_of_rounds_is_said_aloud() -> None:
    few = Stop(tolerance=1e-12, gradient_tolerance=1e-12, num_steps=2, throw=False)
    with pytest.warns(UserWarning, match="ran out of steps"):
        EvidenceEM(gaussian_mixture(3), deletion=None, stop=few).run(two_blobs())
    with pytest.raises(NotConverged, match="ran out of steps") as error:
        EvidenceEM(gaussian_mixture(3), deletion=None, stop=replace(few, throw=True)).run(two_blobs())
    assert isinstance(error.value.posterior, MixturePosterior)


def test_a_tolerance_of_zero_asks_for_just_so_many_rounds() -> None:
    found = EvidenceEM(gaussian_mixture(3), deletion=None, stop=Stop(tolerance=0.0, num_steps=3, throw=False)).run(
        two_blobs()
    )
    assert len(found.log_evidences) == 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_values_are_refused_with_their_number(value: float) -> None:
    Y = two_blobs()
    Y[3, 1] = value
    with pytest.raises(BadInput, match=r"1 nan|1 values that are inf"):
        EvidenceEM(gaussian_mixture(3)).run(Y)
