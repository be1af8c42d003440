"""The table and the picture of benchmarks/demo.py, on a problem small enough for a test."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import pyro
import pytest
import torch

from benchmarks import demo
from benchmarks.demo import Fit, Problem
from pyro_evidence import LaplaceEvidence
from pyro_evidence.datasets import Dataset, train_test_split
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.regression import regression

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> Problem:
    for name, value in {"NUM_SAMPLES": 30, "NUM_WARMUP": 30, "NUM_SVI_STEPS": 200}.items():
        monkeypatch.setattr(demo, name, value)
    X = torch.randn(60, 2)
    t = torch.bernoulli(torch.sigmoid(2.0 * X[:, 0]))
    train, test = (Dataset(X[part], t[part], ("a", "b"), "") for part in (slice(40), slice(40, 60)))
    return Problem("small", classifier(Linear(), alpha_bias=0.01), train, test)


def test_every_engine_has_its_line_and_the_picture_has_units(problem: Problem) -> None:
    posterior = LaplaceEvidence(problem.model).run(problem.train.X, problem.train.t)
    fits = demo.fit_all(problem)
    lines = list(demo.table(problem, fits))
    assert [text[15:42].rstrip() for text in lines] == list(demo.ENGINES)
    assert not any("failed" in text for text in lines)
    evidences = [text[-31:-19].strip() for text in lines]
    assert evidences == [f"{float(posterior.log_evidence):.2f}", "-", "-", "-"]
    figure = demo.picture(problem, fits)
    assert all(axes.get_xlabel() for axes in figure.axes)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["a", "b", "bias"]
    assert math.isclose(figure.axes[2].lines[1].get_ydata()[-1], figure.axes[2].lines[1].get_ydata().max())
    plt.close(figure)


def test_svi_leaves_its_hyperparameters_in_its_model(problem: Problem) -> None:
    model = demo.by_svi(problem, {}).model
    alpha = pyro.param("alpha").detach().clone()
    pyro.clear_param_store()
    with pyro.poutine.trace() as tr:
        model(problem.train.X, problem.train.t)
    assert alpha != 1.0
    assert_exact(tr.trace.nodes["w"]["fn"].base_dist.scale[:2], alpha.rsqrt().expand(2))


def test_a_failure_is_told_in_its_line_and_the_rest_goes_on(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(problem: Problem, earlier: demo.Fits) -> Fit:
        raise ArithmeticError("no luck\ndetails")

    monkeypatch.setitem(demo.ENGINES, demo.OURS, broken)
    fits = demo.fit_all(problem)
    ours, joint, given, nuts = demo.table(problem, fits)
    assert ours.endswith("failed: ArithmeticError: no luck")
    assert "failed" not in joint
    assert given.endswith("needs the hyperparameters of LaplaceEvidence") and nuts.endswith("of LaplaceEvidence")
    assert demo.draw(problem, fits).startswith("No picture")


def test_densities_are_averaged_over_draws(problem: Problem) -> None:
    w = torch.tensor([[1.0, 0.0, 0.5], [-2.0, 1.0, 0.0]])
    log_prob, mean = demo.predict(Fit(classifier(Linear(), alpha=1.0, alpha_bias=1.0), w, 0.0), problem.test)
    p = torch.sigmoid(problem.test.X @ w[:, :2].T + w[:, 2])
    assert_exact(mean, p.mean(-1))
    assert_exact(log_prob, torch.where(problem.test.t == 1, mean, 1 - mean).log())


def test_error_is_a_share_of_labels_or_a_root_mean_square(problem: Problem) -> None:
    flipped = torch.where(torch.arange(20) < 3, 1 - problem.test.t, problem.test.t)
    assert demo.error(problem, flipped) == "15.0 %"
    numbers = replace(problem, train=problem.train._replace(t=torch.randn(40)), model=regression(Linear()))
    assert demo.error(numbers, problem.test.t + torch.tensor([1.0, -7.0]).repeat(10)) == "5.000"


def test_sd_error_is_relative_to_the_reference(problem: Problem) -> None:
    draws = torch.randn(100, 5)
    reference = Fit(problem.model, draws, 0.0)
    wider = Fit(problem.model, draws * torch.tensor([1.2, 1.2, 0.8, 1.0, 3.0]), 0.0)
    assert demo.sd_error(wider, reference) == "20 %"
    assert demo.sd_error(reference, reference) == demo.sd_error(wider, ValueError()) == "-"


def test_main_prints_the_table_and_writes_the_picture(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"NUM_SAMPLES": 10, "NUM_WARMUP": 5, "NUM_SVI_STEPS": 20}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "problems", lambda: [problem])
    monkeypatch.setattr(demo, "PICTURE", tmp_path / "demo.png")
    monkeypatch.delenv("PYRO_EVIDENCE_DATA", raising=False)
    demo.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split()[0] == "data" and all(text.startswith("small") for text in printed[1:5])
    assert printed[-2] == f"The picture is in {tmp_path / 'demo.png'}."
    assert "Pima and Ripley were left out" in printed[-1]
    height, width, _ = plt.imread(tmp_path / "demo.png").shape
    assert height > 500 and width > 1000
    plt.close("all")


def test_problems_depend_on_the_data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYRO_EVIDENCE_DATA", raising=False)
    found = {problem.name: problem for problem in demo.problems()}
    assert list(found) == ["breast cancer", "diabetes"]
    assert len(found["breast cancer"].train.X) == 398 and len(found["breast cancer"].test.X) == 171
    assert_exact(found["diabetes"].train.X.std(0, correction=0), torch.ones(10))
    assert [problem.is_classification for problem in found.values()] == [True, False]


def test_test_rows_are_standardised_like_the_training_rows() -> None:
    data = Dataset(3.0 + 2.0 * torch.randn(30, 2), torch.randn(30), ("a", "b"), "")
    train, test = train_test_split(data, fraction=0.7, seed=0)
    problem = demo.linear("small", data, regression(Linear()))
    assert_exact(problem.test.X, (test.X - train.X.mean(0)) / train.X.std(0, correction=0))
    assert_exact(problem.test.t, test.t)


def test_problems_from_files(data_dir: Path) -> None:
    *_, pima, ripley = demo.problems()
    assert (pima.name, len(pima.train.X)) == ("Pima", 538)
    assert (ripley.name, len(ripley.train.X), len(ripley.test.X)) == ("Ripley", 250, 1000)
