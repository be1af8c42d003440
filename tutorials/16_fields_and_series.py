# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 16. Fields and series: rain, and a year of road deaths ahead
# A smooth curve over time is a Gaussian field: neighbouring values are alike, and how much so is one number, its scale.
# Two classic series: on which days of the year it rains in Tokyo, and how many drivers were killed or injured on
# British roads, which we forecast by twelve months.

# %%
import csv
import os
from pathlib import Path

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplaceNUTS, Stop
from pyro_evidence.compare import prequential
from pyro_evidence.models.gmrf import RandomWalk, Seasonal
from pyro_evidence.plots import comparison as plots_comparison

torch.set_default_dtype(torch.float64)
quiet = Stop(progress=False)


def columns(name: str) -> dict[str, Tensor]:
    """The columns of one of the data files; what is missing is left out."""
    if "PYRO_EVIDENCE_DATA" not in os.environ:
        raise FileNotFoundError("the series are read from the folder that PYRO_EVIDENCE_DATA names")
    with (Path(os.environ["PYRO_EVIDENCE_DATA"]) / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {c: torch.tensor([float(row[c]) for row in rows if row[c] not in ("", "NA")]) for c in rows[0]}


# %% [markdown]
# ## Rain
# For each day of the year, in how many of two years it rained. The logits are a random walk of second order that
# closes on itself, since December goes over into January. Its scale has a prior, and is integrated with the rest.

# %%
rain = columns("tokyo")


def rainfall(n: Tensor, y: Tensor) -> None:
    scale = pyro.sample("scale", dist.HalfNormal(0.1))
    curve = pyro.sample("curve", RandomWalk(scale, len(n), order=2, level=10.0, cyclic=True))
    with pyro.plate("days", len(n)):
        pyro.sample("y", dist.Binomial(n, logits=curve), obs=y)


rainy = LaplaceEvidence(rainfall, stop=quiet).run(rain["n"], rain["y"])
print(rainy.structure)
print("log evidence", float(rainy.log_evidence), "scale", rainy.marginal("scale").mean.item())

# %% [markdown]
# Beside it NUTS on the same density, in the coordinates of this posterior: in its own the walk and its scale are a
# funnel. The scale wanders slowly through so few draws; the curve is the same.

# %%
pyro.set_rng_seed(0)
mcmc = MCMC(LaplaceNUTS(rainy), num_samples=300, warmup_steps=100, disable_progbar=True)
mcmc.run(rain["n"], rain["y"])
chain = mcmc.get_samples()["curve"]
off = ((chain.mean(0) - rainy.get_samples(2000)["curve"].mean(0)) / chain.std(0)).abs()
print(f"means of the curve differ by {off.mean():.2f} standard deviations, and at most {off.max():.2f}")

# %%
low, middle, high = rainy.quantiles([0.05, 0.5, 0.95])["curve"].sigmoid()
figure, axes = plt.subplots(figsize=(7.0, 3.5))
axes.plot(rain["y"] / rain["n"], ".", color="tab:gray", label="share of days with rain")
axes.fill_between(range(366), low, high, alpha=0.3, label="90 % interval")
axes.plot(middle, label="median")
axes.plot(chain.sigmoid().median(0).values, "k:", label="NUTS")
axes.set(xlabel="day of the year", ylabel="probability of rain", ylim=(0.0, 1.25))
axes.legend(loc="upper center", ncol=4, fontsize="small")
figure.tight_layout()

# %% [markdown]
# ## Road deaths
# The logarithm of a monthly count: a slowly turning trend, a season that sums to nearly nothing over twelve months, and
# the effect of a law, by which belts became compulsory. Scales are given here; with priors they would be integrated.

# %%
deaths = columns("drivers")
belt, y = deaths["belt"], deaths["y"].log() - 7.4
num, ahead = len(y), 12


def drivers(belt: Tensor, y: Tensor | None = None, season: bool = True) -> None:
    size = len(belt)
    law = pyro.sample("law", dist.Normal(0.0, 1.0))
    mean = pyro.sample("trend", RandomWalk(0.02, size, 2, level=0.1)) + law * belt
    if season:
        mean = mean + pyro.sample("season", Seasonal(0.01, size, 12, level=0.1))
    with pyro.plate("months", size):
        pyro.sample("y", dist.Normal(mean, 0.07), obs=y)


posterior = LaplaceEvidence(drivers, marginalise=(), stop=quiet).run(belt[:num], y)
change = posterior.mode["law"].exp().item() - 1.0
print(f"log evidence {float(posterior.log_evidence):.2f}; the law changed the number by {100.0 * change:.0f} %")

# %% [markdown]
# `forecast` takes the arguments of all months, the new ones too, targets left out. Trend and season go on by their
# conditional law; where all is normal, as here, means and standard deviations are exact.

# %%
mean, sd = posterior.forecast(ahead, belt[: num + ahead], return_std=True)
months = torch.arange(num, num + ahead)
figure, axes = plt.subplots(figsize=(7.0, 3.5))
axes.plot(range(num - 48, num), (y[-48:] + 7.4).exp(), color="tab:gray", label="seen")
axes.plot(months, (mean + 7.4).exp(), label="forecast")
ends = [(mean + side * 1.645 * sd + 7.4).exp() for side in (-1.0, 1.0)]
axes.fill_between(months, *ends, alpha=0.3, label="90 % interval")
axes.set(xlabel="month", ylabel="drivers killed or injured")
axes.legend(loc="upper right")
figure.tight_layout()

# %% [markdown]
# ## Which model forecasts better, and when
# The log evidence is a sum of forecasts: of each year given all before it. Cumulated differences show when one
# model is better than another, here with the season against without.


# %%
def without_season(belt: Tensor, y: Tensor | None = None) -> None:
    drivers(belt, y, season=False)


scores = [
    prequential(LaplaceEvidence(model, marginalise=(), stop=quiet), (belt[:num], y), first=120, step=12)
    for model in (drivers, without_season)
]
figure, axes = plt.subplots(figsize=(7.0, 3.0))
plots_comparison.prequential_difference(axes, *scores)
figure.tight_layout()

# %% [markdown]
# ## The claim in numbers

# %%
assert 0.0 < rainy.marginal("scale").mean < 0.2
assert float((high - low).max()) < 0.6  # the curve is known to a few tenths
assert float(off.mean()) < 0.3  # and NUTS has the same
assert -0.35 < change < -0.05  # fewer deaths since the law
assert float(sd[-1]) > float(sd[0])  # farther ahead is less known
whole = scores[0].log_evidences[0] + scores[0].log_scores.sum()
assert abs(float(whole - posterior.log_evidence)) < 1e-6  # a sum of forecasts
assert float((scores[0].log_scores - scores[1].log_scores).sum()) > 10.0  # months differ
