"""How fast a release is: every figure beside its peer in one run, kept as JSON, and the table against the one before.

    OMP_NUM_THREADS=1 python benchmarks/releases.py [CASE ...] [--peers FOLDER] [--write] [--plot]

Each case runs in a process of its own, one thread, double precision, ours and the peer's jobs in turn; figures are the
least processor seconds.  ``--write`` keeps them in ``benchmarks/results/VERSION.json``, with the machine and versions;
without it the table is only printed.  A row is marked where it became slower by more than a tenth: by its ratio to the
peer, or, where it has none, by its seconds in units of a fixed job that is timed beside it.  ``--plot`` draws those
numbers over all releases.  ``--peers`` is a folder with packages that are not installed here (fastrvm); rows of
Ripley's data want PYRO_EVIDENCE_DATA.
"""

import argparse
import compileall
import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import pyro_evidence

RESULTS = Path(__file__).parent / "results"
SLOWER = 1.1
Jobs = dict[str, Callable[[], Any]]  # "ours", perhaps "peer"; or "seconds", which measures itself, and "peer seconds"
Row = dict[str, Any]


def unit() -> None:
    """Half a second or so of what fits are made of: small factorisations and derivatives."""
    A = torch.eye(60, dtype=torch.float64) * 60.0 + 1.0
    for _ in range(400):
        x = torch.ones(60, dtype=torch.float64, requires_grad=True)
        L = torch.linalg.cholesky(A + x.diag())
        torch.autograd.grad(L.diagonal().log().sum() + torch.cholesky_solve(x[:, None], L).sum(), x)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plane(N: int) -> tuple[torch.Tensor, torch.Tensor]:
    X = normal(N, 2)
    return X, (2.0 * X[:, 0]).sin() + X[:, 1] + 0.3 * normal(N, seed=1)


def gp_regression(N: int) -> Jobs:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF as TheirRBF
    from sklearn.gaussian_process.kernels import ConstantKernel, WhiteKernel

    from pyro_evidence import LaplaceEvidence
    from pyro_evidence.models.gp import gp_regression
    from pyro_evidence.models.kernels import RBF

    X, t = plane(N)
    kernel = ConstantKernel(1.0) * TheirRBF(1.0) + WhiteKernel(1.0)
    return {
        "ours": lambda: LaplaceEvidence(gp_regression(RBF())).run(X, t),
        "peer": lambda: GaussianProcessRegressor(kernel).fit(X.numpy(), t.numpy()),
    }


def gp_classification(N: int) -> Jobs:
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF as TheirRBF
    from sklearn.gaussian_process.kernels import ConstantKernel

    from pyro_evidence import LaplaceEvidence
    from pyro_evidence.models.gp import gp_classifier
    from pyro_evidence.models.kernels import RBF

    X, t = plane(N)
    y = (t > 0).double()
    return {
        "ours": lambda: LaplaceEvidence(gp_classifier(RBF())).run(X, y),
        "peer": lambda: GaussianProcessClassifier(ConstantKernel(1.0) * TheirRBF(1.0)).fit(X.numpy(), y.numpy()),
    }


def rvm() -> Jobs:
    """On Ripley's training data, a kernel on each datum and a bias."""
    from revm_speed import kernel, model

    from pyro_evidence import RVM
    from pyro_evidence.datasets import ripley_train

    train = ripley_train()
    X, t = train.X.double(), train.t.double()
    Phi = kernel(X, X)
    jobs: Jobs = {"ours": lambda: RVM(model).run(Phi, t)}
    try:
        peer = importlib.import_module("fastrvm").RVC
    except ImportError:
        return jobs
    data = X.numpy(), t.numpy().astype(int)
    return jobs | {"peer": lambda: peer(kernel="rbf", gamma=4.0).fit(*data)}


def network() -> Jobs:
    """Four starts of five hidden units on the first Friedman function; the peer is chosen by cross-validation."""
    from sklearn.datasets import make_friedman1
    from sklearn.model_selection import GridSearchCV
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from pyro_evidence import LaplaceEvidence, Start, Stop, gauss_newton
    from pyro_evidence.models.mlp import MLP

    X, t = make_friedman1(300, noise=1.0, random_state=0)
    A, b = (torch.as_tensor((v - v.mean(0)) / v.std(0)) for v in (X, t))
    quiet = Stop(progress=False, throw=False)
    engine = LaplaceEvidence(MLP(A.shape[1], 5), curvature=gauss_newton, start=Start(restarts=4), stop=quiet)
    grid = {"mlpregressor__alpha": [1e-4, 1e-2, 1.0], "mlpregressor__hidden_layer_sizes": [(5,), (20,)]}
    theirs = make_pipeline(StandardScaler(), MLPRegressor(solver="lbfgs", max_iter=2000, random_state=0))
    return {
        "ours": lambda: engine.run(A, b),
        "peer": lambda: GridSearchCV(theirs, grid, cv=5).fit(A.numpy(), b.numpy()),
    }


def outer_iteration() -> Jobs:
    """The longest of five steps of type II on an 8-50-1 network beside laplace-torch's training with 200 epochs."""
    from mlp_speed import data, ours, theirs

    X, t = data(768, 8)
    jobs: Jobs = {"seconds": lambda: max(ours(X, t, 50)["seconds"][1:])}
    try:
        importlib.import_module("laplace")
    except ImportError:
        return jobs
    return jobs | {"peer": lambda: theirs(X, t, 50, 200)}


def network_beside_nuts() -> Jobs:
    """A 1-50-1 network; the peer is NUTS, 500 + 500, its potential compiled, its trees at most seven deep."""
    from mlp_speed import against_nuts

    found: dict[str, Any] = {}

    def both() -> float:
        found.update(against_nuts(500, 7))
        return found["seconds"]

    return {"seconds": both, "peer seconds": lambda: found["nuts"]}


def hidden_markov() -> Callable[[], Any]:
    """The first hidden Markov model of Pyro's examples: five sequences of ten steps, two states, four tones."""
    import pyro
    import pyro.distributions as dist

    from pyro_evidence import LaplaceEvidence

    def model(sequences: torch.Tensor) -> None:
        probs_x = pyro.sample("probs_x", dist.Dirichlet(0.9 * torch.eye(2) + 0.1).to_event(1))
        probs_y = pyro.sample("probs_y", dist.Beta(0.1, 0.9).expand([2, 4]).to_event(2))
        tones = pyro.plate("tones", 4, dim=-1)
        for i in pyro.plate("sequences", len(sequences)):
            x: Any = 0
            for t in pyro.markov(range(10)):
                x = pyro.sample(f"x_{i}_{t}", dist.Categorical(probs_x[x]), infer={"enumerate": "parallel"})
                with tones:
                    pyro.sample(f"y_{i}_{t}", dist.Bernoulli(probs_y[x.squeeze(-1)]), obs=sequences[i, t])

    torch.set_default_dtype(torch.float32)
    states = (normal(5, 10) + normal(5, 1, seed=1) > 0).float()
    tones = (normal(5, 10, 4, seed=2) > (1.0 - 2.0 * states[..., None]) * torch.tensor([1.0, 1.0, -1.0, 0.5])).float()
    return lambda: LaplaceEvidence(model).run(tones)


def captures() -> Callable[[], Any]:
    """Capture and recapture, the first model of Pyro's example: 294 animals, 7 years; float32."""
    import pyro
    import pyro.distributions as dist
    from pyro import poutine

    from pyro_evidence import LaplaceEvidence

    def model(history: torch.Tensor) -> None:
        phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
        rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
        with pyro.plate("animals", len(history), dim=-1):
            z, first = torch.ones(len(history)), torch.zeros(len(history)).bool()
            for t in pyro.markov(range(history.shape[1])):
                with poutine.mask(mask=first):
                    alive = first.float() * phi * z + (1 - first.float())
                    z = pyro.sample(f"z_{t}", dist.Bernoulli(alive), infer={"enumerate": "parallel"})
                    pyro.sample(f"y_{t}", dist.Bernoulli(rho * z), obs=history[:, t])
                first |= history[:, t].bool()

    torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(0)
    lives = torch.bernoulli(torch.full((294, 7), 0.6), generator=generator).cumprod(-1)
    seen = torch.bernoulli(torch.full((294, 6), 0.9), generator=generator)
    history = torch.cat([torch.ones(294, 1), lives[:, :-1] * seen], 1)
    return lambda: LaplaceEvidence(model).run(history)


def looking_at(fit: Callable[[], Any]) -> Jobs:
    """``diagnostics()`` beside the fit itself."""
    posterior = fit()
    return {"ours": posterior.diagnostics, "peer": fit}


def comparison() -> Jobs:
    """``compare`` with Laplace, REVM, SVI and NUTS on Pima beside that NUTS alone."""
    from compare_speed import comparison as compared
    from compare_speed import nuts_alone, pima_data

    _, (X, t) = pima_data()
    return {"ours": lambda: compared(X, t), "peer": lambda: nuts_alone(X, t)}


def ripley_class() -> Jobs:
    """The default mixture on the first class of Ripley's data."""
    from pyro_evidence import EvidenceEM
    from pyro_evidence.datasets import ripley_train
    from pyro_evidence.models.mixture import gaussian_mixture

    train = ripley_train()
    Y = train.X[train.t == 1].double()
    return {"ours": lambda: EvidenceEM(gaussian_mixture(10)).run(Y)}


def linear(shared: bool) -> Jobs:
    """A hundred thousand rows, fifty columns; a precision each, or one for all."""
    from pyro_evidence import LaplaceEvidence
    from pyro_evidence.models.basis import Linear
    from pyro_evidence.models.regression import Learned, regression

    X = normal(100_000, 50)
    t = X[:, :10].sum(-1) + normal(100_000, seed=1)
    model = regression(Linear(), alpha=Learned(1.0 if shared else torch.ones(50, dtype=torch.float64)))
    return {"ours": lambda: LaplaceEvidence(model).run(X, t)}


def logistic() -> Jobs:
    """A hundred rows, three columns, one precision: what a fit costs that has nothing to compute."""
    from pyro_evidence import LaplaceEvidence
    from pyro_evidence.models.basis import Linear
    from pyro_evidence.models.classifier import classifier

    X = normal(100, 3)
    y = (X[:, 0] + normal(100, seed=1) > 0).double()
    return {"ours": lambda: LaplaceEvidence(classifier(Linear(), alpha_bias=None)).run(X, y)}


def importing() -> Jobs:
    """``from pyro_evidence import LaplaceEvidence`` beyond what Pyro's import costs."""

    def took(words: str) -> float:
        code = f"import time, pyro.infer; a = time.process_time(); {words}; print(time.process_time() - a)"
        return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    return {"seconds": lambda: min(took("from pyro_evidence import LaplaceEvidence") for _ in range(3))}


# Case -> its jobs, the target as a ratio to the peer (or in seconds, where there is none), runs.
CASES: dict[str, tuple[Callable[[], Jobs], float, int]] = {
    "GP regression, N = 300": (lambda: gp_regression(300), 1.0, 3),
    "GP regression, N = 2000": (lambda: gp_regression(2000), 0.7, 1),
    "GP classification, N = 100": (lambda: gp_classification(100), 1.0, 5),
    "GP classification, N = 200": (lambda: gp_classification(200), 1.0, 5),
    "GP classification, N = 500": (lambda: gp_classification(500), 1.0, 3),
    "GP classification, N = 1000": (lambda: gp_classification(1000), 1.0, 1),
    "RVM, Ripley, against fastrvm": (rvm, 2.0, 3),
    "MLP, Friedman 1, four starts (s; peer: MLPRegressor by cross-validation)": (network, 2.0, 1),
    "MLP 8-50-1, longest iteration of the hyperparameters, against laplace-torch's training": (outer_iteration, 0.2, 1),
    "MLP 1-50-1, against NUTS 500 + 500, compiled": (network_beside_nuts, 0.02, 1),
    "Ripley, class 1, EvidenceEM as it stands (s)": (ripley_class, 0.12, 5),
    "50 precisions, N = 100,000 (s)": (lambda: linear(False), 2.5, 1),
    "1 precision for 50 weights, N = 100,000 (s)": (lambda: linear(True), 2.5, 1),
    "logistic regression, N = 100, D = 3 (s)": (logistic, 0.015, 7),
    "its diagnostics, against the fit": (lambda: looking_at(logistic()["ours"]), 1.0, 5),
    "hidden Markov model of Pyro's examples (s)": (lambda: {"ours": hidden_markov()}, 1.5, 1),
    "its diagnostics, against that fit": (lambda: looking_at(hidden_markov()), 1.0, 1),
    "capture and recapture of Pyro's examples (s)": (lambda: {"ours": captures()}, 0.7, 3),
    "compare, against its NUTS": (comparison, 1.05, 1),
    "import beyond Pyro's (s)": (importing, 0.25, 1),
}


def measured(case: str) -> Row:
    """Least seconds of each job, in turn."""
    from timing import seconds

    make, target, num = CASES[case]
    jobs = make()
    if "seconds" in jobs:
        row = {"ours": jobs["seconds"](), "target": target, "unit": min(seconds(unit) for _ in range(3))}
        peers = {"peer": seconds(jobs["peer"])} if "peer" in jobs else {}
        return row | peers | ({"peer": jobs["peer seconds"]()} if "peer seconds" in jobs else {})
    if num > 1:
        for job in jobs.values():
            job()
    elif "ours" in jobs:
        logistic()["ours"]()  # torch loads parts of itself at the first derivative
    found: Row = {"target": target}
    for _ in range(num):
        for name, job in (jobs | {"unit": unit}).items():
            found[name] = min(found.get(name, float("inf")), seconds(job))
    return found


def in_seconds(case: str) -> bool:
    """Whether a case's target is in seconds, not a ratio to its peer."""
    return "(s" in case


def relative(case: str, row: Mapping[str, Any]) -> float:
    """What can be compared between machines: ours over the peer, or over the fixed job."""
    return row["ours"] / row["peer" if "peer" in row and not in_seconds(case) else "unit"]


def line(case: str, row: Mapping[str, Any], before: Mapping[str, Any] | None) -> str:
    """One row of the table, marked where it became slower."""
    against = row["ours"] if in_seconds(case) else row["ours"] / row["peer"] if "peer" in row else float("nan")
    cells = [case, f"{row['ours']:.3g}", f"{row['peer']:.3g}" if "peer" in row else "", f"{against:.3g}"]
    change = relative(case, row) / relative(case, before) if before is not None else float("nan")
    mark = "SLOWER" if change > SLOWER else ""
    stop_reason = "met" if against <= row["target"] else "missed" if against == against else "no peer"
    return " | ".join(["", *cells, f"{row['target']:g}", stop_reason, f"{change:.2f}", mark, ""]).strip()


def table(rows: Mapping[str, Row], before: Mapping[str, Row]) -> str:
    """All rows against those of the last release."""
    head = ["case", "ours s", "peer s", "ours / peer, or s", "target", "", "against the last release", ""]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join(lines + [line(case, row, before.get(case)) for case, row in rows.items()])


def releases() -> dict[str, dict[str, Any]]:
    """Every release's figures, the oldest first."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("[0-9]*.json")}
    return dict(sorted(found.items(), key=lambda item: tuple(int(n) for n in item[0].split(".") if n.isdigit())))


def machine() -> dict[str, str]:
    """What the figures were taken on, and with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((text.split(":")[1].strip() for text in lines if text.startswith("model name")), platform.processor())
    names = ("torch", "pyro-ppl", "numpy", "scikit-learn", "scipy")
    return {"processor": model, "cores": str(os.cpu_count()), "python": platform.python_version()} | {
        name: version(name) for name in names
    }


def plot(path: Path) -> None:
    """What can be compared between machines, over the releases, beside the first of them."""
    import matplotlib.pyplot as plt

    found, (fig, ax) = releases(), plt.subplots(figsize=(9.0, 5.0), layout="constrained")
    for case in CASES:
        points = [(name, relative(case, r["rows"][case])) for name, r in found.items() if case in r["rows"]]
        if points:
            ax.plot([name for name, _ in points], [p / points[0][1] for _, p in points], "o-", label=case)
    ax.set(ylabel="seconds, relative, over those of the first release", yscale="log", xlabel="release")
    ax.axhline(SLOWER, color="grey", linewidth=0.5)
    ax.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    fig.savefig(path, dpi=120)


def run(case: str, peers: str | None) -> Row:
    """A case in a process of its own."""
    command = [sys.executable, __file__, "--case", case, *(["--peers", peers] if peers else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{case}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def names(part: str, case: str) -> bool:
    """Whether what was asked for is a case: its name, or a part of its name that is not another's whole name."""
    return part == case if part in CASES else part in case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="names of cases, or parts of them; default all")
    parser.add_argument("--peers")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        sys.path += [asked.peers] if asked.peers else []
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        print(json.dumps(measured(asked.case)))
        return
    compileall.compile_dir(Path(pyro_evidence.__file__).parent, quiet=1)  # as pip does where it installs
    now, known = version("pyro-evidence"), releases()
    last = next((r for name, r in reversed(known.items()) if name != now), known.get(now, {"rows": {}}))
    chosen = [case for case in CASES if not asked.cases or any(names(part, case) for part in asked.cases)]
    rows = {case: row for case in chosen if (row := run(case, asked.peers))}
    print(table(rows, last["rows"]))
    if asked.write:
        kept = {"machine": machine(), "rows": {**known.get(now, {"rows": {}})["rows"], **rows}}
        (RESULTS / f"{now}.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if asked.plot:
        plot(RESULTS / "releases.png")


if __name__ == "__main__":
    main()
