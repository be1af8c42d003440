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
# # Tutorial 09: a Bayesian workflow
#
# How many customers come on a day of a given temperature? We start from nothing: look at what a prior believes, fit
# three models, ask the evidence which one the data prefer and whether the evidence can be believed, check the winner
# by NUTS, leave every datum out in turn, and see whether new data of the winner look like the old ones.
#
# The counts are made up, so that we know the answer: the curve is bent, and the days differ by more than chance allows.

# %%
import warnings

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Predictive

from pyro_evidence import LaplaceEvidence, Stop, bridge_sampling, compare, compare_evidence, sbc, to_inference_data
from pyro_evidence.compare import NUTSRun, arviz_groups
from pyro_evidence.plots import comparison as plots_comparison
from pyro_evidence.plots import fitted

torch.set_default_dtype(torch.float64)  # log determinants need double precision
pyro.set_rng_seed(0)
quiet = Stop(progress=False)

num_days = 90
temperature = torch.linspace(-2.0, 2.0, num_days)  # standardised
true_rate = torch.exp(3.0 + 0.4 * temperature - 0.35 * temperature**2)
customers = dist.GammaPoisson(5.0, 5.0 / true_rate).sample()
old, new = torch.arange(num_days) % 3 != 0, torch.arange(num_days) % 3 == 0  # every third day is kept aside

# %% [markdown]
# ## Three models
#
# A straight line for the log rate, a parabola, and a parabola whose days vary by more than Poisson's law: `excess` is
# the variance of a day's own factor. All are ordinary Pyro models.


# %%
def straight(x, count=None, spread=1.0):
    a = pyro.sample("a", dist.Normal(3.0, spread))
    b = pyro.sample("b", dist.Normal(0.0, spread))
    with pyro.plate("days", len(x)):
        return pyro.sample("count", dist.Poisson((a + b * x).exp()), obs=count)


def curved(x, count=None):
    a = pyro.sample("a", dist.Normal(3.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    with pyro.plate("days", len(x)):
        return pyro.sample("count", dist.Poisson((a + b * x + c * x**2).exp()), obs=count)


def varied(x, count=None):
    a = pyro.sample("a", dist.Normal(3.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    excess = pyro.sample("excess", dist.LogNormal(-1.5, 1.0))
    with pyro.plate("days", len(x)):
        rate = (a + b * x + c * x**2).exp()
        return pyro.sample("count", dist.GammaPoisson(1.0 / excess, 1.0 / (excess * rate)), obs=count)


# %% [markdown]
# ## 1. Prior predictive check
#
# Does the prior know what a shop is? A spread of 10 on the scale of *log* rates looks vague and harmless. It is not
# harmless: on one day in twelve the shop would have more customers than there are people on Earth. A spread of 1
# allows anything between an empty shop and a full stadium, and that is vague enough.

# %%
with torch.no_grad():
    vague = Predictive(lambda x: straight(x, spread=10.0), num_samples=300)(temperature)["count"]
    sane = Predictive(straight, num_samples=300)(temperature)["count"]
figure, axes = plt.subplots(figsize=(6, 3))
sizes = {"spread 10": (vague + 0.5).double().log10(), "spread 1": (sane + 0.5).double().log10()}
drawn = [draws.flatten().tolist() for draws in sizes.values()]
axes.hist(drawn, bins=60, histtype="stepfilled", alpha=0.6, label=list(sizes))
axes.axvline(float(customers.max().log10()), color="black")
axes.set(xlabel="log10 of the customers that the prior expects; line: the most we saw", ylabel="draws")
_ = axes.legend()

# %% [markdown]
# Can the engine fit what this prior says? Simulation-based calibration draws a truth from the prior and data from the
# truth, fits the data, and asks where the truth lies among draws of the posterior. All ranks should come up equally
# often; the grey band holds 99 % of the bars if they do. A valley would be a posterior that is too narrow.

# %%
calibrated = sbc(
    curved, lambda m: LaplaceEvidence(m, stop=quiet), temperature[old], customers[old], num_simulations=100
)
figure, axes = plt.subplots(figsize=(6, 3))
_ = plots_comparison.rank_histogram(axes, calibrated)
print(calibrated)

# %% [markdown]
# Nearly. Drawn is the quantity with the smallest p-value, and its lowest bar is too high: in a shop with hardly a
# customer the log rate has a long lower tail, and a Gaussian has none. Ours will have customers.
#
# ## 2. The evidence, with a report on itself
#
# One line per model. `compare_evidence` does not take Laplace's word for it: it draws from each approximation, weighs
# the draws by the exact density, and refuses when the weights have too long a tail (k-hat).

# %%
data = temperature[old], customers[old]
posteriors = {model.__name__: LaplaceEvidence(model).run(*data) for model in (straight, curved, varied)}
stop_reason = compare_evidence(**posteriors)
print(stop_reason)

# %% [markdown]
# The parabola beats the line by far, and the varied parabola beats both: one parameter more, and dozens of nats. No
# hyperparameter was maximised, so nothing is owed for that. The columns `log evidence` and `Laplace` differ by little;
# the standard errors are far below the differences. This is what the report on the winner says in full:

# %%
winner = posteriors["varied"]
winner.summary()

# %% [markdown]
# ## 3. NUTS on the winner
#
# Only the engine line changes: the same model, the same data. `compare` runs the engines, measures how far apart they
# are, and predicts the days that were kept aside. Every distance has its Monte-Carlo error beside it.

# %%
comparison = compare(
    varied,
    *data,
    engines={
        "parabola alone": LaplaceEvidence(curved),
        "laplace": LaplaceEvidence(varied),
        "nuts": NUTSRun(num_samples=400, warmup_steps=200),
    },
    held_out=(temperature[new], customers[new]),
)
comparison

# %% [markdown]
# Laplace and NUTS differ by a third of a standard deviation, in the skewed `excess`, and predict equally well. The
# parabola without the extra variance is far too sure of its weights, less than half as wide, and its predictions of
# new days are worse by more than their paired error.

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2))
plots_comparison.overlaid(left, comparison, "c")
plots_comparison.worst_pair(middle, comparison, "laplace")
plots_comparison.calibration(right, comparison)
figure.tight_layout()

# %% [markdown]
# The chains give the evidence once more, by a route that has nothing of Laplace in it:

# %%
chains = comparison.runs["nuts"].fit
bridge = bridge_sampling(winner, chains.get_samples(group_by_chain=True))
print(bridge)
print(f"Laplace {float(winner.log_evidence):.3f}")

# %% [markdown]
# ## 4. Leaving one out
#
# The evidence asks how well a model predicts from its prior on; leave-one-out asks how well it predicts one day, given
# all others. They need not agree; here they do. ArviZ computes it from the pointwise log likelihood, which
# `to_inference_data` has for posteriors and for chains.

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # ArviZ announces its next version
    import arviz

    loo = {name: arviz.loo(to_inference_data(p, num_samples=2000)) for name, p in posteriors.items()}
    by_nuts = arviz.loo(to_inference_data(chains, *data))
for name, found in loo.items():
    print(f"{name:10s} elpd {found.elpd_loo:8.1f} +- {found.se:4.1f}   largest k-hat {float(found.pareto_k.max()):.2f}")
print(f"{'by NUTS':10s} elpd {by_nuts.elpd_loo:8.1f} +- {by_nuts.se:4.1f}")

# %% [markdown]
# ## 5. Posterior predictive check
#
# Would the winner have produced such data? First the counts as they are: fifty sets of new ones from each model, for
# the days that we had, beside those that came.

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True)
for ax, name in zip(axes, ("curved", "varied"), strict=True):
    fitted.predictive_check(ax, posteriors[name])
    ax.set_title(name)

# %% [markdown]
# A histogram does not know which day was warm. So look at how much counts scatter around the fitted curve: the
# parabola alone cannot scatter as much as the customers did.


# %%
def scatter(counts, rate):
    return ((counts - rate) ** 2 / rate).mean(-1)


shares, scattered = {}, {}
figure, axes = plt.subplots(figsize=(6, 3))
for name in ("curved", "varied"):
    drawn = arviz_groups(posteriors[name], num_samples=1000)["posterior_predictive"]["count"].reshape(1000, -1)
    replicates = torch.as_tensor(drawn)
    rate = replicates.mean(0)
    shares[name] = float((scatter(replicates, rate) >= scatter(customers[old], rate)).double().mean())
    scattered[name] = scatter(replicates, rate).tolist()
axes.hist(list(scattered.values()), bins=60, histtype="stepfilled", alpha=0.6, label=list(scattered))
axes.axvline(float(scatter(customers[old], rate)), color="black", label="the customers")
axes.set(xlabel="mean squared deviation from the curve, in Poisson variances", ylabel="sets of new data")
axes.legend()
print(shares)

# %% [markdown]
# ## The claim in numbers

# %%
assert float((vague > 1e6).double().mean()) > 0.2 and float((sane > 1e6).double().mean()) < 0.01
assert float(calibrated.p_values.min()) > 1e-3
assert stop_reason.rows[0].name == "varied" and stop_reason.probabilities["varied"] > 0.999
assert not any(row.doubts for row in stop_reason.rows)
assert abs(bridge.log_evidence - float(winner.log_evidence)) < 0.1
assert comparison.rows["laplace"]["mean"] < 0.5 and comparison.rows["parabola alone"]["sd"] < 0.8
assert comparison.rows["parabola alone"]["held_out"] < -comparison.rows["parabola alone"]["held_out_se"]
assert loo["varied"].elpd_loo > loo["curved"].elpd_loo > loo["straight"].elpd_loo
assert abs(loo["varied"].elpd_loo - by_nuts.elpd_loo) < 1.0
assert shares["curved"] < 0.01 and 0.05 < shares["varied"] < 0.95
