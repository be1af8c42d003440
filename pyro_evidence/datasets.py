"""Real data sets as float64 tensors.

Those from files are read from the folder that the environment variable ``PYRO_EVIDENCE_DATA`` names: CSV with
a header, the last column ``label``, an empty field where a value is missing.  Those from scikit-learn need
the extra ``sklearn``.
"""

import os
from csv import reader
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.lazy_import import import_extra
from pyro_evidence.models.basis import mean_and_scale


class Dataset(NamedTuple):
    """Inputs, targets and where they come from.

    :ivar X: inputs, float64, shape ``(N, D)``; nan where a value is missing.
    :ivar t: targets, shape ``(N,)``: float64 for numbers and for labels 0 and 1, int64 for other labels; None
        when the data have no target.
    :ivar names: of the ``D`` inputs.
    :ivar source: who collected the data.
    """

    X: Tensor
    t: Tensor | None
    names: tuple[str, ...]
    source: str


def ripley_train() -> Dataset:
    """Ripley's synthetic two-class problem, 250 rows of 2 inputs; the best possible error is about 8 %."""
    return _from_file("ripley_train", "Ripley (1994, 1996), synthetic two-class problem, training set")


def ripley_test() -> Dataset:
    """The 1000 test rows that belong to :func:`ripley_train`."""
    return _from_file("ripley_test", "Ripley (1994, 1996), synthetic two-class problem, test set")


def pima() -> Dataset:
    """Diabetes among Pima women, 768 rows of 8 inputs, 268 of them positive.

    A zero in glucose, blood_pressure, skin_thickness, insulin or bmi means *missing*; it is kept as it is.
    """
    return _from_file("pima", "UCI, Pima Indians Diabetes")


def galaxies() -> Dataset:
    """Velocities of 82 galaxies in km/s, without a target; the 78th is 26690, as most copies have it."""
    return _from_file("galaxies", "Roeder (1990), galaxies of the Corona Borealis region")


WARM_UP = 200  # steps of the stochastic series that are left out


def stochastic_series(num_data: int, *, seed: int) -> Dataset:
    r"""A noisy time series whose next value has two ways to go; inputs ``y_t``, targets ``y_{t+1}``, in (0, 1).

    .. math:: y_{t+1} = a_t\, y_t (1 - y_t) \text{ with probability } 2/3, \quad 1 - y_t^{\kappa_t} \text{ otherwise}

    with :math:`a_t` uniform in [3, 4] and :math:`\kappa_t` in [0.5, 1.25].  Husmeier (2000), eq. 4.3.  The first 200
    steps are left out; the random state of torch is left alone.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(WARM_UP + num_data + 1, 3, generator=generator, dtype=torch.float64).tolist()
    path = [noise[0][0]]
    for a, kappa, xi in noise[1:]:
        y = path[-1]
        path.append((3.0 + a) * y * (1.0 - y) if xi > 1.0 / 3.0 else 1.0 - y ** (0.5 + 0.75 * kappa))
    y = torch.tensor(path[WARM_UP:], dtype=torch.float64)
    return Dataset(y[:-1, None], y[1:], ("y_t",), "Husmeier and Taylor (1997), stochastic time series")


def stochastic_series_log_density(x: Tensor, y: Tensor) -> Tensor:
    """``log p(y_{t+1} = y | y_t = x)`` of :func:`stochastic_series`, exact, nats, shape that of ``x`` and ``y``.

    -inf where the series cannot go.  No model can have a mean of ``-log p`` below that of this density, about -1.182.
    """
    height = x * (1.0 - x)
    first = ((3.0 * height <= y) & (y <= 4.0 * height)).to(y) / height
    kappa = torch.log1p(-y) / x.log()
    second = ((0.5 <= kappa) & (kappa <= 1.25)).to(y) / (0.75 * (1.0 - y) * -x.log())
    return ((2.0 * first + second) / 3.0).log()


def csv(name: str) -> Dataset:
    """The file ``name``.csv of the data folder, rows in the order of the file.

    Labels keep their values: float64 when they are 0 and 1 or are not whole numbers, int64 otherwise.  Those
    that are not 0 to C - 1 become so by ``t.unique(return_inverse=True)[1]``.

    :raises FileNotFoundError: when ``PYRO_EVIDENCE_DATA`` is not set, or its folder holds no such file.
    :raises BadInput: when the file is not a table of numbers.
    """
    return _from_file(name, f"{name}.csv")


def breast_cancer() -> Dataset:
    """Breast masses, 569 rows of 30 inputs in their own units; 1 is benign (357 of them)."""
    return _from_sklearn("load_breast_cancer", torch.float64, "UCI, Breast Cancer Wisconsin (Diagnostic)")


def diabetes() -> Dataset:
    """Progress of diabetes in a year, 442 rows of 10 inputs; each column has mean 0 and sum of squares 1."""
    return _from_sklearn("load_diabetes", torch.float64, "Efron, Hastie, Johnstone and Tibshirani (2004)")


def digits() -> Dataset:
    """Handwritten digits, 1797 rows of 64 grey values from 0 to 16; ten classes; some columns are 0."""
    return _from_sklearn("load_digits", torch.int64, "UCI, Optical Recognition of Handwritten Digits")


def standardised(dataset: Dataset, *, like: Dataset | None = None) -> Dataset:
    """The data set with inputs shifted and scaled to mean 0 and *population* standard deviation 1.

    :param like: whose means and standard deviations to use, for a test set those of its training set; None
        for the data set's own.
    :raises BadInput: on missing values and on constant columns, by their numbers.
    """
    mean, scale = mean_and_scale((dataset if like is None else like).X)
    return dataset._replace(X=(dataset.X - mean) / scale)


def train_test_split(dataset: Dataset, *, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Two data sets without common rows, in random order; leaves the random state of torch alone.

    :param fraction: of the rows that go to the first (training) set, rounded to whole rows.
    :raises BadInput: when either set would be empty.
    """
    num_data = len(dataset.X)
    num_train = round(fraction * num_data)
    if not 0 < num_train < num_data:
        raise BadInput(
            f"fraction={fraction:g} of {num_data} rows leaves {num_train} for training and "
            f"{num_data - num_train} for testing; expected at least one in each. Choose another fraction."
        )
    order = torch.randperm(num_data, generator=torch.Generator().manual_seed(seed))
    return _rows(dataset, order[:num_train]), _rows(dataset, order[num_train:])


def _rows(dataset: Dataset, rows: Tensor) -> Dataset:
    return dataset._replace(X=dataset.X[rows], t=None if dataset.t is None else dataset.t[rows])


def _from_file(name: str, source: str) -> Dataset:
    header, table = _read(name)
    if header[-1] != "label":
        return Dataset(table, None, header, source)
    label = table[:, -1]
    if missing := (label.isnan().nonzero().flatten() + 1).tolist():
        raise BadInput(
            f"{name}.csv: row {missing[0]} has no label ({len(missing)} in all); expected one in each. Take "
            "these rows out of the file."
        )
    two_classes = bool(((label == 0) | (label == 1)).all())
    if not two_classes and torch.equal(label, label.round()):
        label = label.long()
    return Dataset(table[:, :-1], label, header[:-1], source)


def _read(name: str) -> tuple[tuple[str, ...], Tensor]:
    """Header and numbers, float64, shape ``(N, number of columns)``."""
    folder = os.environ.get("PYRO_EVIDENCE_DATA")
    if not folder:
        raise FileNotFoundError(
            f"No data folder is known. Set the environment variable PYRO_EVIDENCE_DATA to the folder that "
            f"holds {name}.csv (a header, comma-separated numbers, last column 'label')."
        )
    path = Path(folder) / f"{name}.csv"
    if not path.is_file():
        there = ", ".join(sorted(file.stem for file in Path(folder).glob("*.csv"))) or "no CSV file"
        raise FileNotFoundError(
            f"{path} is no file. PYRO_EVIDENCE_DATA={folder} holds: {there}. Put it there, or name another folder."
        )
    with path.open(newline="") as file:
        rows = [row for row in reader(file) if row]
    if len(rows) < 2:
        raise BadInput(f"{path} has {len(rows)} lines; expected a header and at least one row of numbers.")
    header, table = tuple(rows[0]), []
    for place, row in enumerate(rows[1:], start=1):
        if len(row) != len(header):
            raise BadInput(f"{path}, row {place} has {len(row)} fields; expected {len(header)}, as in the header.")
        numbers = []
        for column, field in zip(header, row, strict=True):
            try:
                numbers.append(float(field) if field.strip() else float("nan"))
            except ValueError:
                where = f"{path}, row {place}, column {column!r}"
                raise BadInput(f"{where} reads {field!r}; expected a number, or nothing if it is missing.") from None
        table.append(numbers)
    return header, torch.tensor(table, dtype=torch.float64)


def _from_sklearn(loader: str, dtype: torch.dtype, source: str) -> Dataset:
    missing = "This data set comes with scikit-learn, which is missing: pip install 'pyro-evidence[sklearn]'."
    bunch = getattr(import_extra("sklearn.datasets", missing), loader)()
    X = torch.as_tensor(bunch.data, dtype=torch.float64)
    names = tuple(str(name) for name in bunch.feature_names)
    return Dataset(X, torch.as_tensor(bunch.target, dtype=dtype), names, source)
