"""Ten tasks of someone who has read the docs alone, each a script of under ten lines, and what must come out."""

from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor

from pyro_evidence import EvidenceEM, LaplaceEvidence, LaplacePosterior, Stop, compare_evidence, to_inference_data
from pyro_evidence.models.gmrf import RandomWalk
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF, Periodic
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture

pytest.importorskip("formulae")
import pandas

from pyro_evidence.models.formula import mixed

QUIET = Stop(progress=False)


def test_logistic_regression_of_a_frame(data_dir: Path) -> None:
    frame = pandas.read_csv(data_dir / "pima.csv").query("glucose > 0 and bmi > 0")
    model, data = mixed("label ~ glucose + bmi + age", frame, family="bernoulli", priors="weak")
    posterior = LaplaceEvidence(model, stop=QUIET).run(*data)
    assert posterior.fixed().rows["b[glucose]"]["5%"] > 0.0
    assert ((posterior.predict(frame) > 0.5).numpy() == (frame.label == 1)).mean() > 0.75


def test_an_interval_for_a_new_subject(data_dir: Path) -> None:
    model, data = mixed("Reaction ~ Days + (Days | Subject)", pandas.read_csv(data_dir / "sleepstudy.csv"))
    posterior = LaplaceEvidence(model, stop=QUIET).run(*data)
    new = pandas.DataFrame({"Days": [9.0], "Subject": ["new"]})
    low, high = posterior.predict(new, quantiles=[0.05, 0.95])
    mean = float(posterior.predict(new))
    assert mean == pytest.approx(251.405 + 9.0 * 10.467, abs=0.05)
    assert float(high - low) == pytest.approx(2.0 * 1.645 * 63.1, rel=0.06)  # of sd, 9 days, correlation and noise


def test_a_curve_with_its_band_and_what_a_group_does_to_it() -> None:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"dose": rng.uniform(0.0, 1.0, 200), "drug": rng.choice(["no", "yes"], 200)})
    frame["y"] = np.sin(5.0 * frame.dose) + 0.8 * (frame.drug == "yes") + 0.2 * rng.normal(size=200)
    model, data = mixed("y ~ drug + s(dose)", frame, priors={"b": "flat"})
    posterior = LaplaceEvidence(model, stop=QUIET).run(*data)
    new = pandas.DataFrame({"dose": [0.1, 0.5, 0.9], "drug": "no"})
    curve, sd = posterior.predict(new, kind="link", return_std=True)
    assert bool(((curve - torch.tensor(np.sin(5.0 * new.dose.to_numpy()))).abs() < 3.0 * sd).all())
    effect = posterior.comparisons("drug").rows["drug[yes] - drug[no]"]
    assert abs(effect["value"] - 0.8) < 3.0 * effect["sd"] < 0.15


def test_how_many_clusters() -> None:
    centres = 8.0 * torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    Y = centres[torch.arange(2000) % 5] + torch.randn(2000, 3, generator=torch.Generator().manual_seed(1))
    assert EvidenceEM(gaussian_mixture(10, noise=FullNoise()), stop=QUIET).run(Y).num_components == 5


def test_relevance_vectors_in_a_search() -> None:
    pytest.importorskip("sklearn")
    from sklearn.datasets import make_moons
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from pyro_evidence.sklearn import RVMClassifier

    X, y = make_moons(120, noise=0.2, random_state=0)
    pipe = make_pipeline(StandardScaler(), RVMClassifier())
    search = GridSearchCV(pipe, {"rvmclassifier__gamma": [0.01, 2.0]}, cv=3).fit(X, y)
    assert search.best_params_["rvmclassifier__gamma"] == 2.0 and search.best_score_ > 0.9


def test_counts_with_an_offset_and_too_many_zeros() -> None:
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"x": rng.normal(size=800), "g": rng.integers(0, 20, 800), "time": rng.uniform(1, 3, 800)})
    rate = frame.time * np.exp(0.5 * frame.x + 0.4 * rng.normal(size=20)[frame.g])
    frame["k"] = rng.poisson(rate) * (rng.random(800) > 0.25)
    fits = {}
    for zeros in ("", "; zi ~ 1"):
        model, data = mixed(f"k ~ x + offset(log(time)) + (1 | g){zeros}", frame, family="poisson", priors="weak")
        fits[zeros] = LaplaceEvidence(model, stop=QUIET).run(*data)
    assert float(fits["; zi ~ 1"].log_evidence - fits[""].log_evidence) > 20.0
    assert fits["; zi ~ 1"].mode["b"][1].item() == pytest.approx(0.5, abs=0.12)
    assert fits["; zi ~ 1"].mode["b_zi"].sigmoid().item() == pytest.approx(0.25, abs=0.06)


def test_three_models_compared(data_dir: Path) -> None:
    frame, fits = pandas.read_csv(data_dir / "sleepstudy.csv"), {}
    for name, groups in {"none": "", "intercepts": " + (1 | Subject)", "slopes": " + (0 + Days | Subject)"}.items():
        model, data = mixed(f"Reaction ~ Days{groups}", frame, priors="weak")
        fits[name] = LaplaceEvidence(model, stop=QUIET).run(*data)
    comparison = compare_evidence(**fits)
    assert [row.name for row in comparison.rows] == ["slopes", "intercepts", "none"]
    assert comparison.plot() is not None


def eight_schools(sigma: Tensor, y: Tensor | None = None) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(sigma)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, sigma), obs=y)


@pytest.mark.slow
def test_eight_schools_beside_nuts_in_arviz() -> None:
    arviz = pytest.importorskip("arviz")
    y = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sigma = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
    posterior = LaplaceEvidence(eight_schools, stop=QUIET).run(sigma, y)
    chains = MCMC(NUTS(eight_schools), num_samples=200, warmup_steps=200, disable_progbar=True)
    chains.run(sigma, y)
    laplace = arviz.summary(to_inference_data(posterior), var_names=["mu"])
    assert float(laplace["mean"].iloc[0]) == pytest.approx(float(chains.get_samples()["mu"].mean()), abs=1.2)


def test_a_kernel_is_chosen() -> None:
    x = torch.rand(60, generator=torch.Generator().manual_seed(0)).sort().values * 10.0
    t = (2.0 * x).sin() + 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(1))
    kernels: dict[str, Any] = {"smooth": RBF(), "periodic": Periodic()}
    fits = {n: LaplaceEvidence(gp_regression(k), stop=QUIET).run(x.unsqueeze(-1), t) for n, k in kernels.items()}
    assert compare_evidence(**fits).rows[0].name == "periodic"
    assert float(fits["periodic"].predict(torch.tensor([[3.3]]))) == pytest.approx(np.sin(6.6), abs=0.15)


def test_a_fit_is_kept_in_a_file(tmp_path: Path, data_dir: Path) -> None:
    frame = pandas.read_csv(data_dir / "sleepstudy.csv")
    model, data = mixed("Reaction ~ Days + (1 | Subject)", frame)
    posterior = LaplaceEvidence(model, stop=QUIET).run(*data)
    posterior.save(tmp_path / "fit")
    again = LaplacePosterior.load(tmp_path / "fit", mixed("Reaction ~ Days + (1 | Subject)", frame)[0])
    assert torch.equal(again.predict(frame.head(3)), posterior.predict(frame.head(3)))


def local_level(y: Tensor) -> None:
    noise, step = pyro.sample("noise", dist.HalfNormal(1.0)), pyro.sample("step", dist.HalfNormal(1.0))
    level = pyro.sample("level", RandomWalk(step, len(y), level=10.0))
    seen = ~y.isnan()
    with pyro.plate("seen", int(seen.sum())):
        pyro.sample("y", dist.Normal(level[seen], noise), obs=y[seen])


def test_a_series_with_a_gap() -> None:
    steps, noise = (torch.randn(120, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    level = 0.3 * steps.cumsum(0)
    y = level + 0.5 * noise
    y[50:70] = torch.nan
    posterior = LaplaceEvidence(local_level, stop=QUIET).run(y)
    low, high = posterior.quantiles([0.025, 0.975])["level"]
    width = high - low
    assert float(width[60]) > 1.3 * float(width[30])
    assert float(((low < level) & (level < high)).double().mean()) > 0.85
