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
# # 15. Which kernel, by evidence
# A series of monthly numbers rises, swings with the seasons and wanders in between. A Gaussian process can say each of
# these things by a kernel, and sums of kernels say several at once. Which of them do the data ask for? The log evidence
# answers from the same months that the kernels were fitted to. Here it is held against months that no fit has seen.

# %%
import time

import matplotlib.pyplot as plt
import torch

from pyro_evidence import LaplaceEvidence
from pyro_evidence.models.basis import Learned
from pyro_evidence.models.gp import gp_regression
from pyro_evidence.models.kernels import RBF, Kernel, Linear, Matern52, Periodic

torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(4)

# %% [markdown]
# ## The data
# Ten years; every fifth month is kept aside. The season is no sine: it has a sharp peak.

# %%
month = torch.arange(120) / 12.0
season = 1.5 * torch.exp(2.0 * (torch.cos(2.0 * torch.pi * month) - 1.0))
wander = 0.4 * torch.sin(1.7 * month + 1.0)
y = 0.25 * (month - 5.0) + season + wander + 0.15 * torch.randn(120, generator=generator)
y = y - y.mean()
X = (month - 5.0).unsqueeze(-1)
aside = torch.arange(120) % 5 == 2

# %% [markdown]
# ## Six kernels, one line each
# Widths (started at a third of a year, where they are alone), heights and the noise are learned; that a season takes a
# year is known, and stays. A period could be learned as well, but its evidence has many peaks: start it near the
# truth, `Periodic(period=Learned(1.0))`.

# %%
kernels: dict[str, Kernel] = {
    "smooth": RBF(lengthscale=Learned(0.3)),
    "rougher": Matern52(lengthscale=Learned(0.3)),
    "a line": Linear(),
    "seasons": Periodic(period=1.0),
    "line + seasons": Linear() + Periodic(period=1.0),
    "line + seasons + smooth": Linear() + Periodic(period=1.0) + RBF(),
}
fits, seconds = {}, {}
for name, kernel in kernels.items():
    start = time.process_time()
    fits[name] = LaplaceEvidence(gp_regression(kernel)).run(X[~aside], y[~aside])
    seconds[name] = time.process_time() - start

# %% [markdown]
# ## What the evidence says
# With Gaussian noise the log evidence is exact. Differences of a few nats are worth attention, of ten they are beyond
# doubt: the worse model is then exp(-10) times as probable as the better one.

# %%
evidence = {name: float(fit.log_evidence) for name, fit in fits.items()}
for name in sorted(evidence, key=lambda n: -evidence[n]):
    print(f"{name:>24}: {evidence[name]:8.2f} nats")

# %% [markdown]
# ## What the other months say
# The log density of each of the 24 months that were kept aside, averaged, in nats.

# %%
unseen = {}
for name, fit in fits.items():
    mean, sd = fit.predict(X[aside], return_std=True)
    unseen[name] = float(torch.distributions.Normal(mean, sd).log_prob(y[aside]).mean())
for name in kernels:
    print(f"{name:>24}: log evidence {evidence[name]:8.2f}, others {unseen[name]:6.2f} a month, {seconds[name]:4.1f} s")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
for name, style in (("smooth", "--"), ("line + seasons + smooth", "-")):
    mean, sd = fits[name].predict(X, return_std=True)
    left.plot(month, mean, style, label=name)
    left.fill_between(month, mean - 2.0 * sd, mean + 2.0 * sd, alpha=0.15)
left.plot(month[~aside], y[~aside], "k.", markersize=3, label="fitted")
left.plot(month[aside], y[aside], "kx", markersize=4, label="kept aside")
left.set_xlabel("years")
left.set_ylabel("y")
left.legend(loc="upper left", fontsize=8)
right.scatter(list(evidence.values()), list(unseen.values()))
for name in kernels:
    right.annotate(name, (evidence[name], unseen[name]), fontsize=8)
right.set_xlabel("log evidence of 96 months / nats")
right.set_ylabel("log density of the 24 others / nats a month")
_ = right.set_title("who explains some months foretells the others")

# %% [markdown]
# ## The claim in numbers
# The sum of all three is preferred by tens of nats, and foretells the months that were kept aside best.

# %%
best = max(evidence, key=lambda name: evidence[name])
print("preferred:", best, fits[best].hyperparameters)
assert best == "line + seasons + smooth" == max(unseen, key=lambda name: unseen[name])
assert evidence[best] > max(value for name, value in evidence.items() if name != best) + 10.0
