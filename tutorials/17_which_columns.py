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
# # 17. Which columns, and a prediction that need not choose
# Twelve candidate covariates, of which some matter, and some are shadows of those that do. Instead of one model we
# weigh all 4,096: a structure site says which columns are in, and the engine sums over it. What comes out is the
# probability of each column, and predictions averaged over every model. The winner is checked by NUTS.

# %%
import time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS

from pyro_evidence import LaplaceEvidence

torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(5)

effects = torch.tensor([1.2, -0.9, 0.5])
causes = torch.randn(400, 3, generator=generator)
shadows = 0.8 * causes + 0.6 * torch.randn(400, 3, generator=generator)
X = torch.cat([causes, shadows, torch.randn(400, 6, generator=generator)], 1)
y = torch.bernoulli(torch.sigmoid(0.3 + causes @ effects), generator=generator)
seen, unseen = slice(0, 200), slice(200, 400)


def model(X, y=None):
    keep = pyro.sample("keep", dist.Bernoulli(0.5).expand([X.shape[1]]).to_event(1), infer={"branching": True})
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    b = pyro.sample("b", dist.Normal(0.0, 2.0))
    with pyro.plate("patients", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=b + X @ (w * keep)), obs=y)


begun = time.process_time()
posterior = LaplaceEvidence(model).run(X[seen], y[seen])
print(f"{len(posterior.found):,} models in {time.process_time() - begun:.1f} s")
_ = posterior.plot()

# %% [markdown]
# Left, the probability of each column; right, the best models, each below the best one that it extends, with the nats
# that the further column is worth.
#
# The data are of two hundred patients, yes or no. The first three columns have an effect; the next three are the first
# three with noise added, so that they look as if they had one; the last six are noise.
#
# The model has one line more than a logistic regression: `keep` multiplies the weights, and its annotation says that it
# is a structure. Each column is in with probability a half; effects are standard normal where it is.
#
# The two strong causes are in, the noise is out. The third cause and its shadow, column 5, are about as probable: the
# data cannot tell which of them it is, and nothing has to decide. No threshold was set: a column whose effect the data
# do not show costs evidence, because its prior spreads over effects that did not happen.

# %%
inclusion = posterior.inclusion("keep")
print(posterior.structures(6))

# %% [markdown]
# The best model has a small part of the probability: many say nearly the same. A prediction from it alone would be too
# sure of itself. The average over all of them is one call.

# %%
winner = posterior.member(0)
averaged = posterior.predict(X[unseen])
alone = winner.predict(X[unseen])
everything = LaplaceEvidence(poutine.condition(model, data={"keep": torch.ones(12)})).run(X[seen], y[seen])
full = everything.predict(X[unseen], site="y")
for name, p in {"averaged": averaged, "the best model": alone, "all columns": full}.items():
    print(f"{name:>15}: {float(dist.Bernoulli(p).log_prob(y[unseen]).mean()):.4f} nats a new patient")

# %% [markdown]
# ## NUTS on the winner
# `posterior.structure(0)` is what `poutine.condition` takes: the same program with its columns fixed.

# %%
pyro.set_rng_seed(0)
fixed = poutine.block(poutine.condition(model, data=posterior.structure(0)), hide=["keep"])
mcmc = MCMC(NUTS(fixed), num_samples=300, warmup_steps=200, disable_progbar=True)
mcmc.run(X[seen], y[seen])
chain, normal = mcmc.get_samples()["w"], winner.get_samples(4000, seed=0)["w"]
chosen = posterior.structure(0)["keep"].nonzero().flatten()
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
places = torch.arange(len(chosen))
for shift, draws, label in ((-0.1, chain, "NUTS"), (0.1, normal, "Laplace")):
    mean, sd = draws[:, chosen].mean(0), draws[:, chosen].std(0)
    axes.errorbar(places + shift, mean, 2.0 * sd, fmt="o", label=label)
axes.set(xticks=places, xticklabels=[f"column {int(i)}" for i in chosen], ylabel="effect, two standard deviations")
_ = axes.legend()

# %% [markdown]
# ## The claim in numbers
# The strong causes are told from shadows and noise, the average foretells new patients better than all columns
# together, and NUTS agrees on the winner.

# %%
assert bool((inclusion[:2] > 0.99).all()) and bool((inclusion[6:] < 0.35).all())
scores = [float(dist.Bernoulli(p).log_prob(y[unseen]).mean()) for p in (averaged, full)]
assert scores[0] > scores[1]
away = (chain[:, chosen].mean(0) - normal[:, chosen].mean(0)).abs() / chain[:, chosen].std(0)
assert bool((away < 0.3).all())
