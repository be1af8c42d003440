"""Every engine on data that nobody should have passed: each case ends in a fit or in a message of the package's.

``make fuzz``, or ``python -m tests.fuzz --cases 10000 --seed 0 --only RVM``.  A case is an engine, a kind of inputs and
a kind of targets, drawn from the seed and its own number, so that one is run again by ``--first NUMBER --cases 1``.
Wrong are errors that are not the package's, fits that take more than :data:`LIMIT` seconds of processor time, and fits
without a message whose log evidence is nan.
"""

import argparse
import collections
import contextlib
import io
import math
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pyro
import torch
import xarray
from torch import Tensor

from pyro_evidence import REVM, RVM, VRVM, EvidenceEM, LaplaceEvidence, LaplacePosterior, OverlapEM, Start, Stop
from pyro_evidence.data import Groups, Parquet, Slices
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.formula import mixed
from pyro_evidence.models.gp import gp_classifier, gp_poisson, gp_regression
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture
from pyro_evidence.models.mlp import MLP
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression
from tests.cases.expect import OWN_ERRORS, TooSlow, within

LIMIT = 20.0
NUM = 12  # rows
SHORT = Stop(num_steps=3, throw=False, progress=False)
ONE = Start(restarts=1)
Kind = Callable[[Tensor], Any]  # what becomes of good data


def changed(x: Tensor, value: float) -> Tensor:
    """One number of the data is another."""
    x = x.clone()
    x.view(-1)[x.numel() // 2] = value
    return x


def read_only(x: Any) -> Any:
    """An array that may not be written to."""
    x.setflags(write=False)
    return x


class Spent:
    """An iterator that was gone through."""

    def __iter__(self) -> "Spent":
        return self

    def __next__(self) -> Any:
        raise StopIteration


KINDS: dict[str, Kind] = {
    "good": lambda x: x,
    "nan": lambda x: changed(x, torch.nan),
    "inf": lambda x: changed(x, torch.inf),
    "all nan": lambda x: x * torch.nan,
    "huge": lambda x: x * 1e200,
    "large": lambda x: x * 1e30,
    "one huge": lambda x: changed(x, 1e300),
    "tiny": lambda x: x * 1e-200,
    "small": lambda x: x * 1e-30,
    "subnormal": lambda x: x * 1e-310,
    "far away": lambda x: x + 1e12,
    "int": lambda x: (10.0 * x).long(),
    "int8": lambda x: (10.0 * x).to(torch.int8),
    "uint8": lambda x: (10.0 * x).abs().to(torch.uint8),
    "bool": lambda x: x > 0,
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float32": lambda x: x.float(),
    "complex": lambda x: x + 1j * x,
    "0-d": lambda x: x.reshape(-1)[0],
    "more axes": lambda x: x.unsqueeze(-1),
    "4-d": lambda x: x.reshape(-1, 1, 1, 1),
    "flat": lambda x: x.reshape(-1),
    "transposed": lambda x: x.mT if x.dim() > 1 else x.flip(0),
    "not contiguous": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "with a graph": lambda x: 2.0 * x.clone().requires_grad_(),
    "numpy": lambda x: x.numpy(),
    "numpy objects": lambda x: x.numpy().astype(object),
    "numpy words": lambda x: x.numpy().astype(str),
    "masked array": lambda x: np.ma.masked_array(x.numpy(), x.numpy() > 1),
    "big endian": lambda x: x.numpy().astype(">f8"),
    "uint16": lambda x: (10.0 * x).abs().to(torch.uint16),
    "uint64": lambda x: (10.0 * x).abs().to(torch.uint64),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "numpy uint32": lambda x: (10.0 * x).abs().numpy().astype(np.uint32),
    "numpy wraps": lambda x: x.abs().numpy().astype(np.uint64) + np.uint64(2**63 + 5),
    "numpy half": lambda x: x.numpy().astype(np.float16),
    "numpy long": lambda x: x.numpy().astype(np.longdouble),
    "numpy thirds": lambda x: x.numpy().astype(np.longdouble) / 3,
    "numpy complex": lambda x: x.numpy() + 1j,
    "numpy structures": lambda x: np.array([tuple(row.reshape(-1)) for row in x], [("a", "f8")] * 1),
    "numpy dates": lambda x: x.numpy().astype("M8[s]"),
    "numpy bytes": lambda x: x.numpy().astype("S"),
    "numpy void": lambda x: np.zeros(x.shape, "V8"),
    "numpy one number": lambda x: np.float64(3.0),
    "backwards": lambda x: x.numpy()[::-1].copy()[::-1],
    "read only": lambda x: read_only(x.numpy().copy()),
    "of Fortran": lambda x: np.asfortranarray(x.numpy()),
    "broadcast": lambda x: np.broadcast_to(x[:1].numpy(), x.shape),
    "matrix": lambda x: np.asmatrix(x.numpy()),
    "no mask": lambda x: np.ma.masked_array(x.numpy(), np.zeros(x.shape, bool)),
    "xarray": lambda x: xarray.DataArray(x.numpy()),
    "buffer": lambda x: memoryview(x.numpy()),
    "nullable": lambda x: (
        pd.DataFrame(x.numpy()).astype("Float64") if x.dim() > 1 else pd.Series(x.numpy(), dtype="Float64")
    ),
    "nothing": lambda x: pd.Series([pd.NA] * len(x)),
    "of Arrow": lambda x: pd.Series(x.reshape(-1)[: len(x)].numpy(), dtype="double[pyarrow]"),
    "sparse pandas": lambda x: pd.Series(pd.arrays.SparseArray(x.reshape(-1)[: len(x)].numpy())),
    "big endian pandas": lambda x: (
        pd.DataFrame(x.numpy().astype(">f8")) if x.dim() > 1 else pd.Series(x.numpy().astype(">f8"))
    ),
    "other index": lambda x: pd.Series(x.reshape(-1)[: len(x)].numpy(), index=[7] * len(x)),
    "one name twice": lambda x: pd.DataFrame(np.stack([x.reshape(-1)[: len(x)].numpy()] * 2, -1), columns=["x", "x"]),
    "spans of time": lambda x: pd.Series(pd.to_timedelta(range(len(x)), unit="D")),
    "complex pandas": lambda x: pd.Series(x.reshape(-1)[: len(x)].numpy() + 1j),
    "mixed types": lambda x: pd.Series([1, "1"] * (len(x) // 2)),
    "range": lambda x: range(len(x)),
    "set": lambda x: {1.0, 2.0},
    "nested": lambda x: torch.nested.nested_tensor([*x.reshape(len(x), -1)]),
    "conjugate": lambda x: torch.complex(x, x).conj().imag,
    "list": lambda x: x.tolist(),
    "tuple": lambda x: tuple(x.tolist()),
    "list of tensors": lambda x: list(x),
    "ragged list": lambda x: [[1.0], [1.0, 2.0]],
    "pandas": lambda x: pd.DataFrame(x.numpy()) if x.dim() > 1 else pd.Series(x.numpy()),
    "pandas with words": lambda x: pd.DataFrame({"a": ["x"] * len(x)}),
    "categories": lambda x: pd.Series(["a", "b"] * (len(x) // 2), dtype="category"),
    "dates": lambda x: pd.Series(pd.date_range("2020", periods=len(x))),
    "integers with gaps": lambda x: pd.Series([1, None] * (len(x) // 2), dtype="Int64"),
    "a row less": lambda x: x[:-1],
    "a row more": lambda x: torch.cat([x, x[:1]]),
    "no rows": lambda x: x[:0],
    "no columns": lambda x: x[..., :0] if x.dim() > 1 else x[:, None][:, :0],
    "one row": lambda x: x[:1],
    "two rows": lambda x: x[:2],
    "one column": lambda x: x[..., :1] if x.dim() > 1 else x[:, None],
    "constant": lambda x: torch.full_like(x, 3.0),
    "zeros": lambda x: torch.zeros_like(x),
    "constant column": lambda x: torch.cat([x[..., :1], torch.ones_like(x[..., :1])], -1),
    "column twice": lambda x: torch.cat([x, x], -1),
    "rows twice": lambda x: torch.cat([x[: len(x) // 2]] * 2),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.reshape(len(x), -1).to_sparse_csr(),
    "meta": lambda x: x.to("meta"),
    "quantised": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "parameter": lambda x: torch.nn.Parameter(x),
    "None": lambda x: None,
    "text": lambda x: "data.csv",
    "bytes": lambda x: b"data",
    "empty text": lambda x: "",
    "null byte": lambda x: "a\0b",
    "surrogate": lambda x: "\udcff",
    "long text": lambda x: "x" * 5000,
    "device": lambda x: "/dev/zero",
    "number": lambda x: 3.0,
    "iterator": lambda x: iter(x),
    "spent": lambda x: Spent(),
    "generator": lambda x: (row for row in x),
    "dict": lambda x: {"x": x},
    "class": lambda x: Tensor,
    "module": lambda x: torch.nn.Linear(2, 1),
    "negative": lambda x: -x.abs() - 1,
    "labels from 1": lambda x: (x > 0).double() + 1,
    "labels -1": lambda x: torch.where(x > 0, 1.0, -1.0).to(x),
    "many labels": lambda x: torch.arange(float(len(x))).reshape(-1, *[1] * (x.dim() - 1)).expand(x.shape),
    "one class": lambda x: torch.ones_like(x),
    "whole": lambda x: (x > 0).double(),
}

# Data that are what they are, in whatever they come: a fit to them ends where it ends for tensors.
ALIKE = {
    *("good", "not contiguous", "numpy", "big endian", "numpy long", "backwards", "read only", "of Fortran", "no mask"),
    *("pandas", "big endian pandas", "nullable", "requires grad", "parameter", "xarray", "list"),
}
Engine = Callable[[Any, Any], Any]


def in_chunks(engine: Any) -> Engine:
    """Rows in two chunks, by slices, or as whatever cannot be sliced comes."""

    def run(*arguments: Any) -> Any:
        given = [a for a in arguments if a is not None or len(arguments) == 2]
        return engine().run_chunks(Slices(*given, size=NUM // 2))

    return run


def frame(X: Any, t: Any) -> pd.DataFrame:
    """A table of whatever columns pandas can make of them."""
    columns = X if isinstance(X, dict | pd.DataFrame) else {"x": column(X)}
    return pd.DataFrame(dict(columns) | {"y": column(t), "g": ["a", "b", "c"] * (NUM // 3)})


def column(x: Any) -> Any:
    return x[..., 0] if isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] else x


def formula(text: str, family: str = "gaussian") -> Engine:
    def run(X: Any, t: Any) -> Any:
        try:
            data = frame(X, t)
        except Exception:  # pandas makes no table of it, and the package has seen nothing
            return None
        model, arguments = mixed(text, data, family=family)
        return LaplaceEvidence(model, stop=SHORT, start=ONE).run(*arguments)

    return run


def groups(X: Any, t: Any) -> Any:
    """Labels of groups are the targets."""
    return [chunk for chunk in Groups(t, X, size=4)] and None


def of_file(read: Callable[[Any], Any]) -> Engine:
    """What reads a file is given whatever comes as its path; no file of such a name is no error."""

    def run(X: Any, t: Any) -> Any:
        with contextlib.suppress(FileNotFoundError):
            read(X)

    return run


def estimator(name: str, *settings: Any, **more: Any) -> Engine:
    def run(X: Any, t: Any) -> Any:
        from pyro_evidence import sklearn

        made = getattr(sklearn, name)(*settings, **more).fit(X, t)
        made.predict(X)
        return made

    return run


def laplace(model: Any) -> Any:
    return lambda: LaplaceEvidence(model, stop=SHORT, start=ONE)


LINE, LOGIT = regression(Linear()), classifier(Linear())
MAKE: dict[str, Callable[[], Any]] = {
    "LaplaceEvidence line": laplace(LINE),
    "LaplaceEvidence logit": laplace(LOGIT),
    "RVM": lambda: RVM(regression(Polynomial(2)), noise="beta", stop=SHORT),
    "RVM logit": lambda: RVM(LOGIT, stop=SHORT),
    "VRVM": lambda: VRVM(LINE, stop=SHORT),
    "VRVM logit": lambda: VRVM(LOGIT, stop=SHORT),
    "REVM": lambda: REVM(LINE, stop=SHORT),
    "REVM logit": lambda: REVM(LOGIT, stop=SHORT),
    "OverlapEM": lambda: OverlapEM(prbf(2), stop=SHORT),
}
DENSITIES: dict[str, Callable[[], Any]] = {
    "EvidenceEM": lambda: EvidenceEM(gaussian_mixture(2), start=ONE, stop=SHORT),
    "EvidenceEM full": lambda: EvidenceEM(gaussian_mixture(2, noise=FullNoise()), start=ONE, stop=SHORT),
    "EvidenceEM planes": lambda: EvidenceEM(mppca(2, 1), start=ONE, stop=SHORT),
}
ENGINES: dict[str, Engine] = {
    **{name: lambda X, t, make=make: make().run(X, t) for name, make in MAKE.items()},
    **{name: lambda X, t, make=make: make().run(X) for name, make in DENSITIES.items()},
    **{f"{name} in chunks": in_chunks(make) for name, make in MAKE.items()},
    **{f"{name} in chunks": lambda X, t, make=make: in_chunks(make)(X) for name, make in DENSITIES.items()},
    **{
        f"LaplaceEvidence {name}": lambda X, t, model=model: laplace(model)().run(X, t)
        for name, model in {
            "process": gp_regression(RBF()),
            "process of labels": gp_classifier(RBF()),
            "process of counts": gp_poisson(RBF()),
            "network": MLP(2, 2),
            "polynomial": regression(Polynomial(2), beta=1.0),
            "three classes": classifier(Linear(), num_classes=3),
        }.items()
    },
    "chunks as they are": lambda X, t: laplace(LINE)().run_chunks(X),
    "chunks of what comes": lambda X, t: laplace(LOGIT)().run_chunks([(X, t), (X, t)]),
    "groups": groups,
    "posterior": of_file(lambda path: LaplacePosterior.load(path, LINE)),
    "checkpoint": of_file(lambda path: EvidenceEM(gaussian_mixture(2)).resume(path)),
    "Parquet": of_file(lambda path: Parquet(path, ["a"])),
    "formula": formula("y ~ x + (1 | g)"),
    "formula of counts": formula("y ~ x", "poisson"),
    "formula of labels": formula("y ~ x", "bernoulli"),
    "formula of groups": formula("x ~ 1 + (1 | y)"),
    "RVMClassifier": estimator("RVMClassifier"),
    "RVMRegressor": estimator("RVMRegressor"),
    "VRVMClassifier": estimator("VRVMClassifier"),
    "REVMClassifier": estimator("REVMClassifier"),
    "REVMRegressor": estimator("REVMRegressor"),
    "EvidenceMixture": estimator("EvidenceMixture", 2, n_init=1, random_state=0),
    "MPPCA": estimator("MPPCA", 2, 1, n_init=1, random_state=0),
    "ClassConditionalMixture": estimator("ClassConditionalMixture", 2, n_init=1, random_state=0),
    "PyroClassifier": estimator("PyroClassifier", LOGIT),
    "PyroRegressor": estimator("PyroRegressor", LINE),
}


def drawn(number: int, seed: int, engines: list[str]) -> tuple[str, str, str]:
    """Engine and kinds of case ``number``: each engine in turn, mostly one of both kinds good."""
    chosen = random.Random(f"{seed} {number}")
    kinds = [*KINDS]
    which = chosen.choice(["X", "X", "t", "both"])
    of_inputs = chosen.choice(kinds) if which != "t" else "good"
    return engines[number % len(engines)], of_inputs, chosen.choice(kinds) if which != "X" else "good"


def outcome(engine: str, of_inputs: str, of_targets: str) -> str:
    """``fit``, ``refused`` or ``no data``; or what is wrong, in a line."""
    X, t = good_data()
    pyro.clear_param_store()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x, y = KINDS[of_inputs](X), KINDS[of_targets](t)
    except Exception:  # there are no such data
        return "no data"
    shown = io.StringIO()
    try:
        with warnings.catch_warnings(), within(LIMIT), contextlib.redirect_stdout(shown):
            warnings.simplefilter("ignore")
            found = ENGINES[engine](x, y)
    except OWN_ERRORS as error:
        return "refused" if len(str(error)) > 20 else f"refused without a reason: {error}"
    except TooSlow as error:
        return f"slow: {error}"
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = next((f for f in reversed(frames) if "pyro_evidence/" in f.filename), frames[-1])
        checked = any("site-packages/sklearn/" in f.filename for f in frames)
        raised_here = (frames[-1].line or "").startswith("raise") and frames[-1] is where and len(str(error)) > 20
        if isinstance(error, ValueError | TypeError) and (checked or raised_here):
            return "refused"
        said = " ".join(str(error).split())[:120]
        return f"bare {type(error).__name__} at {where.filename.split('pyro_evidence/')[-1]}:{where.lineno}: {said}"
    evidence = evidence_of(found)
    if math.isnan(evidence):
        return "log evidence nan"
    if {of_inputs, of_targets} <= ALIKE and evidence != 0.0 and (of_inputs, of_targets) != ("good", "good"):
        expected = of_good_data(engine)
        if not math.isclose(evidence, expected, rel_tol=1e-7, abs_tol=1e-7):
            return f"log evidence {evidence}, of the same data as tensors {expected}"
    return "fit"


def evidence_of(found: Any) -> float:
    """The log evidence of a fit; 0.0 of what has none."""
    evidence = getattr(found, "log_evidence", getattr(found, "log_evidence_", None))
    return 0.0 if evidence is None or isinstance(evidence, property) else float(evidence)


@cache
def of_good_data(engine: str) -> float:
    """The log evidence that an engine finds for data as they should come."""
    pyro.clear_param_store()
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        return evidence_of(ENGINES[engine](*good_data()))


def good_data() -> tuple[Tensor, Tensor]:
    """Inputs of two columns, and labels that depend on the first."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(NUM, 2, generator=generator, dtype=torch.float64)
    return X, (X[:, 0] + torch.randn(NUM, generator=generator, dtype=torch.float64) > 0).double()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="engines whose name holds this")
    given = parser.parse_args()
    engines = [name for name in ENGINES if given.only in name]
    torch.set_default_dtype(torch.float64)
    counts: collections.Counter[str] = collections.Counter()
    for number in range(given.first, given.first + given.cases):
        case = drawn(number, given.seed, engines)
        found = outcome(*case)
        is_right = found in ("fit", "refused", "no data")
        counts[found if is_right else "wrong"] += 1
        if not is_right:
            print(f"{number}: {' | '.join(case)}: {found}", flush=True)  # noqa: T201
        if number % 500 == 499:
            print(f"up to {number}: {dict(counts)}", flush=True)  # noqa: T201
    sys.stdout.write(f"{dict(counts)}\n")
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
