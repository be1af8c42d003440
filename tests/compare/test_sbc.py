"""Calibration of conjugate models, and the power to see a posterior that is not."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, LaplaceEvidence, sbc
from pyro_evidence.compare.sbc import chi_square, rank
from tests.models_for_tests.exact_models import location, straight, straight_data


def laplace(model: Any) -> LaplaceEvidence:
    return LaplaceEvidence(model, maximise=())


class Inflated:
    """Laplace with its standard deviation multiplied on purpose."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, *args: Any) -> SimpleNamespace:
        posterior = laplace(self.model).run(*args)

        def get_samples(num: int) -> dict[str, Tensor]:
            return {n: posterior.mode[n] + 1.6 * (v - posterior.mode[n]) for n, v in posterior.get_samples(num).items()}

        return SimpleNamespace(get_samples=get_samples)


@pytest.mark.slow
def test_exact_posteriors_are_calibrated() -> None:
    X, y = straight_data()
    found = sbc(straight, laplace, X, y, num_simulations=500)
    assert found.ranks.shape == (500, 3)
    assert found.p_value > 0.01
    assert found.names == ("w[0]", "w[1]", "w[2]")


def test_inflated_standard_deviation_is_seen() -> None:
    wide = sbc(location, Inflated, torch.zeros(12), num_simulations=80)
    assert wide.p_value < 1e-3
    counts = wide.histogram("mean")
    assert counts[4:6].sum() > 1.3 * (counts[0] + counts[9])  # too wide: the truth is too often in the middle


def test_rank_and_chi_square_by_hand() -> None:
    assert rank(torch.tensor([0.5]), torch.tensor([[0.1], [0.6], [0.2]])).tolist() == [2]
    ranks = torch.tensor([[0], [1], [2], [3], [3], [3]])
    statistic, p = chi_square(ranks, 3, 2)  # bins of 2 and 4 against 3 and 3
    assert float(statistic) == pytest.approx(2.0 / 3.0)
    assert float(p) == pytest.approx(0.4142161782, abs=1e-9)  # erfc(sqrt(1/3))


def test_same_seed_same_ranks_and_nothing_global_moves() -> None:
    before = torch.random.get_rng_state()
    first, second = (sbc(location, laplace, torch.zeros(3), num_simulations=50) for _ in range(2))
    assert torch.equal(first.ranks, second.ranks)
    assert torch.equal(before, torch.random.get_rng_state())
    assert "together: p =" in str(first)
    assert dataclasses.is_dataclass(first)


def test_letters() -> None:
    with pytest.raises(BadInput, match="multiple of num_bins"):
        sbc(location, laplace, torch.zeros(3), num_samples=100)
    with pytest.raises(BadInput, match="engine is a LaplaceEvidence; expected a function of a model"):
        sbc(location, laplace(location), torch.zeros(3))  # type: ignore[arg-type]
    failing = SimpleNamespace(run=lambda *_: SimpleNamespace(get_samples=lambda n: {"mean": torch.zeros(n - 1)}))
    with pytest.raises(
        BadInput,
        match=r"50 of 50 runs failed; expected at most a tenth\. The first said: data set 0: get_samples\(99\) gave",
    ):
        sbc(location, lambda _: failing, torch.zeros(3), num_simulations=50)
