"""What a relevance machine says of itself: axes that are kept, in the format of every posterior."""

import pytest
import torch

from pyro_evidence import RVM
from pyro_evidence.models.basis import GaussianRBF
from pyro_evidence.models.classifier import classifier


def test_axes_that_are_kept_are_listed_and_the_others_counted(capsys: pytest.CaptureFixture[str]) -> None:
    X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    t = (X[:, 0] + torch.cos(40.0 * X[:, 0]) > 0.0).double()
    posterior = RVM(classifier(GaussianRBF(X.clone(), scale=0.3))).run(X, t)
    table = posterior.table()
    kept = torch.nonzero(posterior.active).flatten().tolist()
    assert 0 < len(kept) < len(posterior.active)
    assert list(table.rows) == [f"axis {i}" for i in kept]
    assert table.rows[f"axis {kept[0]}"]["alpha"] == float(posterior.alpha[kept[0]])
    assert table.notes == [f"{len(posterior.active) - len(kept)} of {len(posterior.active)} axes are pruned"]
    posterior.summary()
    said = capsys.readouterr().out
    assert said.startswith(str(table)) and "log_evidence = " in said
    assert "<table>" in posterior._repr_html_()
