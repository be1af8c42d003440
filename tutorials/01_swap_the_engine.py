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
# # Tutorial 01: swap the engine
#
# You have a Pyro model, and a script that fits it by SVI, by `AutoLaplaceApproximation` or by NUTS. This tutorial
# changes the engine in each of the three and leaves the model alone. What comes back is the posterior that NUTS
# finds, in a fraction of the time, together with two things that the script did not have before: hyperparameters
# that were learned, and a log evidence that compares models.
#
# | you had | you write |
# |---|---|
# | `svi = SVI(model, guide, optim, loss)` | `engine = LaplaceEvidence(model)` |
# | `svi.step(X, t)`, a thousand times | `engine.step(X, t)`, a dozen times, or `engine.run(X, t)` once |
# | `pyro.param("alpha")` | `posterior.hyperparameters["alpha"]`, or as before after `posterior.update_param_store()` |
# | `guide = AutoLaplaceApproximation(model)`, SVI steps | `posterior = LaplaceEvidence(model).run(X, t)` |
# | `guide.laplace_approximation(X, t)` | `posterior.guide` |
# | `MCMC(NUTS(model), num_samples=1000)` | `MCMC(LaplaceKernel(model), num_samples=1000, warmup_steps=0)` |
# | `mcmc.get_samples()` | the same, or `posterior.get_samples(1000)`: same names, same shapes |

# %%
from time import process_time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoLaplaceApproximation
from pyro.optim import Adam
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, LaplaceKernel
from pyro_evidence.datasets import breast_cancer, standardised, train_test_split
from pyro_evidence.plots import fitted
from pyro_evidence.plots import posterior as plots_posterior

torch.set_default_dtype(torch.float64)  # log determinants need double precision
pyro.set_rng_seed(0)

# %% [markdown]
# ## The model stays
#
# Is a breast mass benign? Ten measurements of the cell nuclei, each an average over one image, enter a logistic
# regression. The weights have a common prior precision `alpha`, which is declared with `pyro.param` because we do
# not know it.

# %%
train, test = train_test_split(breast_cancer(), fraction=0.7, seed=0)
X, X_test = (standardised(part, like=train).X[:, :10] for part in (train, test))
t, t_test = train.t, test.t


def model(X, t=None):
    alpha = pyro.param("alpha", torch.tensor(1.0), constraint=constraints.positive)
    bias = pyro.sample("bias", dist.Normal(0.0, 10.0))
    w = pyro.sample("w", dist.Normal(0.0, alpha**-0.5).expand([X.shape[-1]]).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w + bias), obs=t)


# %% [markdown]
# ## 1. An SVI script, with AutoLaplaceApproximation
#
# This is the script as it was. `alpha` is a parameter of the model, so every step moves it together with the point
# estimate of the weights.

# %%
start = process_time()
guide = AutoLaplaceApproximation(model)
svi = SVI(model, guide, Adam({"lr": 0.02}), Trace_ELBO())
for _ in range(1000):
    loss = svi.step(X, t)
laplace_guide = guide.laplace_approximation(X, t)
svi_seconds = process_time() - start
svi_alpha = pyro.param("alpha").item()
svi_samples = {"w": torch.stack([laplace_guide(X)["w"].detach() for _ in range(1000)])}
print(f"SVI: alpha {svi_alpha:.2f} after {svi_seconds:.1f} s")

# %% [markdown]
# The new engine takes the place of `SVI` and of the guide. A step is one update of the hyperparameters; the mode of
# the weights is found anew inside it, so a dozen steps are plenty. The loss is minus the log evidence, in nats.
# `update_param_store` puts the result where the rest of an SVI script expects it.

# %%
pyro.clear_param_store()
start = process_time()
engine = LaplaceEvidence(model)
for _ in range(12):
    loss = engine.step(X, t)
posterior = engine.posterior
posterior.update_param_store()
our_seconds = process_time() - start
our_alpha = pyro.param("alpha").item()
print(f"LaplaceEvidence: alpha {our_alpha:.2f} after {our_seconds:.1f} s, log evidence {-loss:.2f} nats")

# %% [markdown]
# The two values of `alpha` differ, and not by accident. SVI with a point estimate looks for the joint mode of `alpha`
# and the weights, where the weights count as if they were known exactly. Small weights and a large precision
# then confirm each other. The evidence integrates over the weights before it asks for `alpha`, and pays for every
# weight that the data do not determine.
#
# A loop is not needed. `run` goes on until the evidence has its maximum, and complains if it does not get there.

# %%
posterior = LaplaceEvidence(model).run(X, t)
posterior.summary()

# %% [markdown]
# What has it found? On the left the log evidence after each of the twelve steps. On the right the probability of a
# benign mass as one measurement moves and the other nine stay what they are in each test case: the line is the mean
# of the cases, and nine tenths of them lie in the band.

# %%
number = train.names.index("mean concave points")
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
plots_posterior.evidence_path(left, engine.posterior)
fitted.partial_dependence(right, posterior, X_test, column=number, quantile=0.05)
_ = right.set(xlabel=f"{train.names[number]}, standardised", ylabel="probability of a benign mass")

# %% [markdown]
# Predictions need no change, because the posterior has a guide. `posterior.model` is the model with the learned
# `alpha` in it.

# %%
predictive = Predictive(posterior.model, guide=posterior.guide, num_samples=300)
probability = predictive(X_test)["t"].mean(0)
accuracy = ((probability > 0.5) == t_test).double().mean().item()
print(f"{100 * accuracy:.1f} % of {len(t_test)} test cases are classified correctly")

# %% [markdown]
# ## 2. A NUTS script
#
# NUTS does not know what to do with a `pyro.param`; it takes the value that it finds. So we hand it `posterior.model`
# and let both engines look at the same density. First the script as it was, then with the other kernel.

# %%
start = process_time()
nuts = MCMC(NUTS(posterior.model), num_samples=150, warmup_steps=100, disable_progbar=True)
nuts.run(X, t)
nuts_seconds = process_time() - start

start = process_time()
mcmc = MCMC(LaplaceKernel(model), num_samples=1000, warmup_steps=0, disable_progbar=True)
mcmc.run(X, t)
kernel_seconds = process_time() - start
print(f"NUTS {nuts_seconds:.1f} s, LaplaceKernel {kernel_seconds:.1f} s including the fit of alpha")

# %% [markdown]
# Whatever came after `run` still works: `get_samples`, `summary`, `diagnostics`.

# %%
nuts_samples, samples = nuts.get_samples(), mcmc.get_samples()
assert {name: value.shape[1:] for name, value in samples.items()} == {
    name: value.shape[1:] for name, value in nuts_samples.items()
}

figure, axes = plt.subplots(figsize=(7, 6))
plots_posterior.marginals(axes, {"LaplaceKernel": samples, "NUTS": nuts_samples, "SVI": svi_samples}, site="w")
axes.set_yticks(range(10), train.names[:10])
axes.set_xlabel("log odds per standard deviation of the input, median and 90 % interval")
_ = axes.legend(loc="lower left")

# %% [markdown]
# Ours and those of NUTS are the same intervals up to the noise of 150 draws, and up to a little skewness that a
# Gaussian cannot have. Those of SVI are too narrow and too close to zero, because its `alpha` is too large.
#
# How good is the Gaussian? `diagnostics` draws from it, corrects the log evidence by importance sampling, and reports
# k-hat, which says how heavy the tail of the importance ratios is. Up to 0.7 the correction can be trusted.

# %%
found = posterior.diagnostics()
print(f"Laplace             {found['log_evidence']:.3f} nats")
print(f"importance sampling {found['log_evidence_importance']:.3f} +- {found['log_evidence_importance_se']:.3f} nats")
print(f"k-hat               {found['pareto_k']:.2f}")

# %% [markdown]
# ## 3. What the old scripts could not tell
#
# Should every input have a precision of its own? The second model says so, and the evidence answers. No test set and
# no cross-validation is involved.


# %%
def model_with_relevance(X, t=None):
    alpha = pyro.param("alpha_per_input", torch.ones(X.shape[-1]), constraint=constraints.positive)
    bias = pyro.sample("bias", dist.Normal(0.0, 10.0))
    w = pyro.sample("w", dist.Normal(0.0, alpha**-0.5).to_event(1))
    with pyro.plate("data", len(X)):
        return pyro.sample("t", dist.Bernoulli(logits=X @ w + bias), obs=t)


relevance = LaplaceEvidence(model_with_relevance).run(X, t)
gain = float(relevance.log_evidence - posterior.log_evidence)
print(f"one precision {float(posterior.log_evidence):.2f} nats, one each {float(relevance.log_evidence):.2f} nats")
print(f"mean log likelihood of the test cases: {float(posterior.log_prob(X_test, t_test).mean()):.4f}", end=" and ")
print(f"{float(relevance.log_prob(X_test, t_test).mean()):.4f}")

# %% [markdown]
# The data prefer the second model, and the test cases, which neither fit has seen, agree. Half of the inputs are
# switched off: their precision is infinite. Radius, perimeter and area measure nearly the same thing, and one of
# them is enough.

# %%
figure, axes = plt.subplots(figsize=(7, 4))
plots_posterior.well_determined(axes, relevance)
axes.set_yticks(range(10), train.names[:10])
_ = axes.set_title(f"{float(relevance.gamma['alpha_per_input'].sum()):.1f} well-determined weights of 10")

# %% [markdown]
# ## The claim in numbers

# %%
sd_ratio = samples["w"].std(0) / nuts_samples["w"].std(0)
svi_ratio = svi_samples["w"].std(0) / nuts_samples["w"].std(0)
assert (sd_ratio - 1).abs().median() < 0.1  # the posterior of NUTS ...
assert our_seconds < nuts_seconds  # ... in less time
assert svi_alpha > 1.5 * our_alpha and svi_ratio.median() < 0.9  # the joint mode is too sure of itself
assert abs(-loss - float(posterior.log_evidence)) < 1e-3  # steps and run arrive at the same place
assert abs(found["log_evidence"] - found["log_evidence_importance"]) < 0.5  # the Gaussian is good enough
assert gain > 2.0 and 4 <= relevance.pruned["w"].sum() <= 6  # the evidence compares models
assert accuracy > 0.9
