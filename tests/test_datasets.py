"""Loaders against files written here, scikit-learn, and the sizes and class counts of the real data."""

import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from pyro_evidence import datasets
from pyro_evidence.datasets import Dataset, csv, standardised, train_test_split
from pyro_evidence.errors import BadInput

assert_exact = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYRO_EVIDENCE_DATA", str(tmp_path))
    return tmp_path


def test_a_file_becomes_tensors_with_nan_where_a_value_is_missing(folder: Path) -> None:
    (folder / "small.csv").write_text('"a, b",c,label\n0.1,2,0\n,-3e2,1\n\n5,,1\n')
    data = csv("small")
    assert_exact(data.X, torch.tensor([[0.1, 2.0], [math.nan, -300.0], [5.0, math.nan]]))
    assert_exact(data.t, torch.tensor([0.0, 1.0, 1.0]))
    assert data.names == ("a, b", "c")
    assert data.source == "small.csv"


def test_the_result_is_double_whatever_the_default(folder: Path) -> None:
    (folder / "small.csv").write_text("a,label\n0.1,0\n")
    torch.set_default_dtype(torch.float32)
    X, t, *_ = csv("small")
    assert X.dtype == t.dtype == torch.float64
    assert X.item() == 0.1


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("0 1 1", torch.tensor([0.0, 1.0, 1.0])),
        ("1 1 1", torch.tensor([1.0, 1.0, 1.0])),
        ("1 7 3", torch.tensor([1, 7, 3])),
        ("1.5 0 1", torch.tensor([1.5, 0.0, 1.0])),
    ],
)
def test_labels_other_than_0_and_1_are_whole_numbers(folder: Path, labels: str, expected) -> None:
    (folder / "small.csv").write_text("a,label\n" + "".join(f"0,{label}\n" for label in labels.split()))
    assert_exact(csv("small").t, expected)


def test_without_a_label_there_is_no_target(folder: Path) -> None:
    (folder / "small.csv").write_text("velocity\n3\n4\n")
    data = csv("small")
    assert data.t is None
    assert_exact(data.X, torch.tensor([[3.0], [4.0]]))
    first, second = train_test_split(data, fraction=0.5, seed=0)
    assert first.t is None and second.t is None


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a,label\n1,0\nx,1\n", r"small.csv, row 2, column 'a' reads 'x'; expected a number"),
        ("a,label\n1,0,5\n", r"small.csv, row 1 has 3 fields; expected 2"),
        ("a,label\n1\n", r"row 1 has 1 fields; expected 2"),
        ("a,label\n", r"small.csv has 1 lines; expected a header and"),
        ("", r"small.csv has 0 lines"),
        ("a,label\n1,0\n2,\n", r"small.csv: row 2 has no label"),
    ],
)
def test_a_file_that_is_no_table_of_numbers_is_refused(folder: Path, text: str, match: str) -> None:
    (folder / "small.csv").write_text(text)
    with pytest.raises(BadInput, match=match):
        csv("small")


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_folder_the_letter_says_what_to_set(monkeypatch: pytest.MonkeyPatch, value) -> None:
    monkeypatch.delenv("PYRO_EVIDENCE_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("PYRO_EVIDENCE_DATA", value)
    with pytest.raises(FileNotFoundError, match=r"Set .* PYRO_EVIDENCE_DATA to the folder that holds pima\.csv"):
        datasets.pima()


def test_a_missing_file_names_those_that_are_there(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"pima\.csv is no file.*holds: no CSV file"):
        datasets.pima()
    for name in ("zoo.csv", "iris.csv", "notes.txt", "yeast.csv", "abalone.csv"):
        (folder / name).write_text("a\n1\n")
    with pytest.raises(FileNotFoundError, match=r"pima\.csv is no file.*holds: abalone, iris, yeast, zoo\."):
        datasets.pima()


@pytest.mark.parametrize(
    ("load", "shape", "num_positive"),
    [
        (datasets.ripley_train, (250, 2), 125),
        (datasets.ripley_test, (1000, 2), 500),
        (datasets.pima, (768, 8), 268),
        (partial(csv, "ionosphere"), (351, 34), 225),
        (partial(csv, "heart"), (270, 13), 120),
        (partial(csv, "hepatitis"), (155, 19), 123),
    ],
)
def test_real_data_have_their_published_sizes(data_dir: Path, load, shape, num_positive: int) -> None:
    data: Dataset = load()
    assert data.X.shape == shape
    assert data.X.dtype == data.t.dtype == torch.float64
    assert data.t.shape == shape[:1]
    assert data.t.sum() == num_positive
    assert len(data.names) == shape[1]


def test_zeros_that_mean_missing_are_kept(data_dir: Path) -> None:
    data = datasets.pima()
    assert not data.X.isnan().any()
    zeros = dict(zip(data.names, (data.X == 0).sum(0).tolist(), strict=True))
    assert (zeros["glucose"], zeros["blood_pressure"], zeros["bmi"]) == (5, 35, 11)  # as published


def test_galaxies_are_in_kilometres_per_second(data_dir: Path) -> None:
    data = datasets.galaxies()
    assert data.X.shape == (82, 1)
    assert data.t is None
    assert data.X[77] == 26690
    assert data.X.min() == 9172 and data.X.max() == 34279


def test_missing_values_and_several_classes_are_read(data_dir: Path) -> None:
    assert csv("hepatitis").X.isnan().sum() == 167
    assert csv("votes").X.isnan().sum() == 392
    t = csv("satimage_test").t
    assert t.dtype == torch.int64
    assert t.unique().tolist() == [1, 2, 3, 4, 5, 7]


def test_a_constant_column_is_named(data_dir: Path) -> None:
    with pytest.raises(BadInput, match=r"Columns \[1\] of X are constant"):
        standardised(csv("ionosphere"))


def test_breast_cancer_is_that_of_scikit_learn() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    data, (X, t) = datasets.breast_cancer(), sklearn_datasets.load_breast_cancer(return_X_y=True)
    assert_exact(data.X, torch.tensor(X))
    assert_exact(data.t, torch.tensor(t, dtype=torch.float64))
    assert data.X.shape == (569, 30) and data.t.sum() == 357
    assert data.names[0] == "mean radius"


def test_diabetes_is_that_of_scikit_learn() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    data, (X, t) = datasets.diabetes(), sklearn_datasets.load_diabetes(return_X_y=True)
    assert_exact(data.X, torch.tensor(X))
    assert_exact(data.t, torch.tensor(t))
    assert_exact(data.X.square().sum(0), torch.ones(10))
    assert data.t.dtype == torch.float64 and data.names[2] == "bmi"


def test_digits_are_those_of_scikit_learn() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    data, (X, t) = datasets.digits(), sklearn_datasets.load_digits(return_X_y=True)
    assert_exact(data.X, torch.tensor(X))
    assert data.t.dtype == torch.int64
    assert data.t.tolist() == t.tolist()
    assert len(data.names) == 64


def test_without_scikit_learn_the_letter_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'pyro-evidence\[sklearn\]'"):
        datasets.digits()


def small() -> Dataset:
    X = torch.arange(20.0).reshape(10, 2)
    return Dataset(X, 100.0 + torch.arange(10.0), ("a", "b"), "made here")


def test_standardised_inputs_have_population_variance_one() -> None:
    data = standardised(small())
    assert_exact(data.X.mean(0), torch.zeros(2))
    assert_exact(data.X.square().sum(0), torch.full((2,), 10.0))
    assert torch.equal(data.t, small().t)
    assert data[2:] == small()[2:]


def test_a_test_set_is_standardised_like_its_training_set() -> None:
    train, test = train_test_split(small(), fraction=0.7, seed=3)
    mean, scale = train.X.mean(0), train.X.var(0, correction=0).sqrt()
    assert_exact(standardised(test, like=train).X, (test.X - mean) / scale)


def test_a_split_shares_out_all_rows_and_keeps_pairs_together() -> None:
    train, test = train_test_split(small(), fraction=0.7, seed=3)
    assert (len(train.X), len(test.X)) == (7, 3)
    X, t = torch.cat([train.X, test.X]), torch.cat([train.t, test.t])
    assert_exact(t - 100.0, X[:, 0] / 2)
    assert_exact(t.sort().values, small().t)
    assert not torch.equal(t, small().t)  # in random order
    assert train.names == test.names == ("a", "b")


def test_a_split_depends_on_its_seed_alone() -> None:
    state = torch.random.get_rng_state()
    first = train_test_split(small(), fraction=0.5, seed=1)[0].t
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(17)
    assert torch.equal(train_test_split(small(), fraction=0.5, seed=1)[0].t, first)
    assert not torch.equal(train_test_split(small(), fraction=0.5, seed=2)[0].t, first)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.99, 1.0, -1.0, 2.0])
def test_a_split_with_an_empty_side_is_refused(fraction: float) -> None:
    with pytest.raises(BadInput, match=r"of 10 rows leaves .* expected at least one in each"):
        train_test_split(small(), fraction=fraction, seed=0)


def test_series_density_has_mass_one_and_is_the_law_of_the_next_value() -> None:
    """Quadrature for the mass; for the law, the distribution function at what came next is uniform."""
    y = (torch.arange(200_000) + 0.5) / 200_000
    for x in (0.05, 0.3, 0.5, 0.95):
        density = datasets.stochastic_series_log_density(torch.full_like(y, x), y).exp()
        assert float(density.mean()) == pytest.approx(1.0, abs=1e-3)
    series = datasets.stochastic_series(400, seed=3)
    grid = y[::100]
    pairs = datasets.stochastic_series_log_density(series.X.expand(-1, len(grid)), grid.expand(400, -1)).exp()
    level = (pairs * (grid <= series.t[:, None])).mean(-1).sort().values
    uniform = (torch.arange(400) + 0.5) / 400
    assert float((level - uniform).abs().max()) < 1.63 / 400**0.5 + 0.01  # Kolmogorov-Smirnov, 1 %, plus the grid


def test_series_comes_as_close_to_the_bayes_limit_as_it_should() -> None:
    """-1.182 nats per datum is the entropy of the conditional density; four standard errors."""
    series = datasets.stochastic_series(20_000, seed=0)
    log_density = datasets.stochastic_series_log_density(series.X[:, 0], series.t)
    assert bool(log_density.isfinite().all())
    x, y = series.X[:, 0], series.t
    a, kappa = y / (x * (1.0 - x)), torch.log1p(-y) / x.log()
    assert 3.0 < float(a[(kappa < 0.5) | (kappa > 1.25)].min()) < 3.01  # what cannot have come the other way
    assert 3.99 < float(a[(kappa < 0.5) | (kappa > 1.25)].max()) < 4.0
    assert 0.5 < float(kappa[(a < 3.0) | (a > 4.0)].min()) < 0.51
    assert 1.24 < float(kappa[(a < 3.0) | (a > 4.0)].max()) < 1.25
    assert abs(-float(log_density.mean()) + 1.182) < 4 * float(log_density.std()) / 20_000**0.5 + 5e-4


def test_series_is_a_path_from_its_seed_and_moves_no_generator() -> None:
    state = torch.get_rng_state()
    series, again, other = (datasets.stochastic_series(50, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert series.X.shape == (50, 1) and series.X.dtype == torch.float64
    assert torch.equal(series.X[1:, 0], series.t[:-1])
    assert torch.equal(series.t, again.t) and not torch.equal(series.t, other.t)
