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
# # 13. A scale: maximised, in the Gaussian, integrated, sampled
# How much do groups differ? That number, a scale, and the effects that it scales have a joint density without a useful
# mode. Four ways to deal with it, on two hierarchies: eight schools, where the data hardly say anything about the
# scale, and forty counties with radon in their houses, where they say a good deal.

# %%
import time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC
from torch import Tensor

from pyro_evidence import LaplaceEvidence, LaplaceNUTS, Stop
from pyro_evidence.plots import fitted
from pyro_evidence.plots import posterior as plots_posterior

torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)
quiet = Stop(progress=False)

# %% [markdown]
# ## Eight schools
# Effects of coaching in eight schools, with the standard errors of each (Rubin, 1981), in the centred form in which one
# would first write it down.

# %%
effect = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(effect: Tensor) -> None:
    mu, tau = pyro.sample("mu", dist.Normal(0.0, 5.0)), pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(effect)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, error), obs=effect)


# %% [markdown]
# **Maximised**: `maximise=["tau"]` sets the scale where evidence times prior is highest. That is at zero, or nearly:
# the schools are all alike, and nothing tells how sure that is.

# %%
maximised = LaplaceEvidence(schools, maximise=["tau"], stop=quiet).run(effect)
print("tau:", maximised.hyperparameters["tau"].item())
print("sd of the first school:", maximised.get_samples(2000, seed=0)["theta"][:, 0].std().item())

# %% [markdown]
# **In the Gaussian**: `marginalise=()` treats the scale as one coordinate of Laplace's approximation. The joint
# density of `tau` and the effects rises without bound as both go to their ends, so that there is no mode, and the
# engine says so.

# %%
try:
    LaplaceEvidence(schools, marginalise=(), stop=quiet).run(effect)
except ArithmeticError as refused:
    print(f"{type(refused).__name__}: {str(refused)[:200]}...")

# %% [markdown]
# **Integrated**: the default. The engine finds that `tau` sets the spread of other sites, and integrates it numerically
# around Laplace's approximation of the rest, here at a handful of values.

# %%
start = time.process_time()
integrated = LaplaceEvidence(schools, stop=quiet).run(effect)
print(f"{time.process_time() - start:.1f} s;", integrated.integral.method, "over", integrated.marginalised_sites)
tau = integrated.marginal("tau")
figure, ax = plt.subplots(figsize=(5, 3))
plots_posterior.marginal(ax, integrated, site="tau")
print(f"tau: mean {tau.mean.item():.2f}, sd {tau.sd.item():.2f}; log evidence {integrated.log_evidence.item():.3f}")

# %% [markdown]
# **Sampled**: NUTS in the coordinates of that posterior. Whitened by the precision at the current `tau`, the funnel of
# the centred form is gone; fifty steps of warm-up set the step size, and nothing else is adapted.

# %%
start = time.process_time()
mcmc = MCMC(LaplaceNUTS(integrated), num_samples=500, warmup_steps=50, disable_progbar=True)
mcmc.run()
sampled = mcmc.get_samples()
seconds = time.process_time() - start
worth, diverged = mcmc.diagnostics()["tau"]["n_eff"].item(), len(mcmc.diagnostics()["divergences"]["chain 0"])
print(f"{seconds:.1f} s: 500 draws worth {worth:.0f} of tau, {diverged} divergences")
print(f"tau: mean {sampled['tau'].mean().item():.2f}")
assert abs(sampled["tau"].log().mean() - integrated.integral.moments[0].item()) < 0.4

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
axes[0].hist(sampled["tau"], bins=40, range=(0, 25), density=True, alpha=0.4, label="sampled")
axes[0].plot(tau.values, tau.density, label="integrated")
axes[0].axvline(maximised.hyperparameters["tau"].item(), color="k", linestyle=":", label="maximised")
axes[0].set(xlim=(0, 25), xlabel="tau", ylabel="density", title="how much schools differ")
theta = integrated.marginal("theta")
axes[1].hist(sampled["theta"][:, 0], bins=40, density=True, alpha=0.4)
axes[1].plot(theta.values[:, 0], theta.density[:, 0])
axes[1].hist(maximised.get_samples(4000, seed=0)["theta"][:, 0], bins=60, density=True, histtype="step", color="k")
axes[1].set(
    xlabel="effect in the first school", ylabel="density", title="what that means for one school", xlim=(-25, 45)
)
_ = axes[0].legend()

# %% [markdown]
# The maximised fit is not only narrow in `tau`, of which it has one value: it is narrow in every school.
#
# ## Radon
# Forty counties with two to twenty houses each; the log of the radon in a house depends on its floor, and its county.
# Levels of counties spread by `tau`, houses within a county by `sigma`. The data are simulated.

# %%
counties = 40
size = 2 + torch.randint(0, 19, (counties,))
county = torch.arange(counties).repeat_interleave(size)
floor = torch.bernoulli(torch.full((len(county),), 0.2))
level = 1.4 + 0.35 * torch.randn(counties)
radon = level[county] - 0.7 * floor + 0.75 * torch.randn(len(county))
print(f"{len(radon)} houses")


def houses(county: Tensor, floor: Tensor, radon: Tensor) -> None:
    mean, slope = pyro.sample("mean", dist.Normal(0.0, 5.0)), pyro.sample("slope", dist.Normal(0.0, 2.0))
    tau, sigma = pyro.sample("tau", dist.HalfNormal(1.0)), pyro.sample("sigma", dist.HalfNormal(2.0))
    with pyro.plate("counties", counties):
        a = pyro.sample("a", dist.Normal(mean, tau))
    with pyro.plate("houses", len(radon)):
        pyro.sample("y", dist.Normal(a[county] + slope * floor, sigma), obs=radon)


data = (county, floor, radon)
integrated = LaplaceEvidence(houses, stop=quiet).run(*data)
maximised = LaplaceEvidence(houses, maximise=["tau", "sigma"], stop=quiet).run(*data)
start = time.process_time()
mcmc = MCMC(LaplaceNUTS(integrated), num_samples=300, warmup_steps=50, disable_progbar=True)
mcmc.run()
sampled = mcmc.get_samples()
print(f"NUTS: {time.process_time() - start:.1f} s")

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.2))
for ax, name, truth in zip(axes, ("tau", "sigma"), (0.35, 0.75), strict=True):
    found = integrated.marginal(name)
    ax.hist(sampled[name], bins=30, density=True, alpha=0.4, label="sampled")
    ax.plot(found.values, found.density, label="integrated")
    ax.axvline(maximised.hyperparameters[name].item(), color="k", linestyle=":", label="maximised")
    ax.axvline(truth, color="tab:green", label="truth")
    ax.set(xlabel=name, ylabel="density", xlim=found.quantiles([0.001, 0.999]).tolist())
    assert abs(sampled[name].mean() - found.mean) < 0.35 * found.sd
_ = axes[0].legend()

# %% [markdown]
# With forty counties the maximised scales sit where the density is; one best value is not far from an integral. That
# is when maximising is good enough: many groups, each with data. It is also cheaper, and the only way for hundreds of
# scales.
#
# ## Which counties stand out?
# All of them in order, each with the interval that the others have helped to make; counties with few houses are wide
# and close to the middle.

# %%
figure, ax = plt.subplots(figsize=(6, 8))
_ = fitted.caterpillar(ax, integrated, site="a")

# %% [markdown]
# ## What would each county have looked like to a fit without it?
# One fit answers that too: leave-one-group-out, by importance sampling from Laplace's approximation without the
# county, a k-hat for each.

# %%
left_out = integrated.loo(by=county)
print(left_out)
figure, ax = plt.subplots(figsize=(6, 3.2))
points = ax.scatter(size, left_out.elpd / size, c=left_out.pareto_k, cmap="viridis")
figure.colorbar(points, label="k-hat")
ax.set(xlabel="houses in the county", ylabel="nats per house", title="each county, predicted from the others")
print("to be fitted anew without them:", left_out.doubtful.tolist())
assert (left_out.pareto_k > 0.7).sum() <= 2

# %% [markdown]
# ## Which when
# - few scales, any amount of data: **integrated**, the default;
# - many scales, or so much data that they are known: **maximised**, `maximise=[...]` or a param;
# - scales that `posterior.summary()` complains of (k-hat above 0.7, nodes that do not settle): **sampled**, and
#   `LaplaceNUTS` makes that cheap;
# - in the Gaussian, `marginalise=()`: for scales that the data pin down, and to see what was done before.
