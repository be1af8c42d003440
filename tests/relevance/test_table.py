"""What a relevance machine says of itself: axes that are kept, in the format of every posterior."""

from typing import Any

import pytest
import torch

from pyro_evidence import REVM, RVM
from pyro_evidence.models.basis import GaussianRBF
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.regression import regression


@pytest.mark.parametrize("engine", [RVM, REVM])
def test_axes_that_are_kept_are_listed_and_the_others_counted(engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    t = (X[:, 0] + torch.cos(40.0 * X[:, 0]) > 0.0).double()
    posterior = engine(classifier(GaussianRBF(X.clone(), scale=0.3))).run(X, t)
    table = posterior.table()
    kept = torch.nonzero(posterior.active).flatten().tolist()
    assert 0 < len(kept) < len(posterior.active)
    named = "w[{}]" if engine is RVM else "axis {}"
    assert list(table.rows) == [named.format(i) for i in kept]
    row = table.rows[named.format(kept[0])]
    assert row["alpha"] == float(posterior.alpha[kept[0]]) and row["gamma"] == float(posterior.gamma["alpha"][0])
    assert f"{len(posterior.active) - len(kept)} of {len(posterior.active)} axes are pruned" in table.notes
    posterior.summary()
    said = capsys.readouterr().out
    assert said.startswith(str(table)) and "<table>" in posterior._repr_html_()
    assert "log evidence = " in said and "importance sampling" in said and "gradient_norm" not in said


def test_deviations_are_those_of_draws() -> None:
    X = torch.linspace(-3.0, 3.0, 40).unsqueeze(-1)
    posterior = RVM(regression(GaussianRBF(X.clone(), scale=1.0), beta=25.0)).run(X, torch.sin(2.0 * X[:, 0]))
    draws = posterior.get_samples(20_000, seed=0)["w"][:, posterior.active]
    rows = list(posterior.table(prob=0.5).rows.values())
    assert [row["sd"] for row in rows] == pytest.approx(draws.std(0).tolist(), rel=0.03)
    assert [row["75%"] - row["value"] for row in rows] == pytest.approx([0.6745 * row["sd"] for row in rows], rel=1e-3)
