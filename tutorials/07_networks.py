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
# # 7. How many hidden units, and which inputs?
# A multilayer perceptron has many weights and no obvious size.  The evidence answers both questions from the training
# data alone: it sets the weight decay of every group of weights, it says which of two networks the data speak for, and
# with one precision per input it switches off inputs that do not matter.

# %%
import math

import matplotlib.pyplot as plt
import torch

from pyro_evidence import LaplaceEvidence, Start, Stop, committee
from pyro_evidence.compare import linearised
from pyro_evidence.models.mlp import MLP, ard
from pyro_evidence.models.random_network import PriorScales, random_functions
from pyro_evidence.plots import posterior as plots_posterior

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## What a network believes before it has seen data
# Draw the weights from their prior and look at the functions.  Larger input weights make functions that change faster;
# more hidden units at the same total variance make them more Gaussian, but no more complex.

# %%
x = torch.linspace(-2.0, 2.0, 200)[:, None]
figure, panels = plt.subplots(1, 3, figsize=(11, 3), sharey=True)
for panel, sigma_in in zip(panels, (1.0, 4.0, 16.0), strict=True):
    scales = PriorScales(sigma_in=sigma_in, sigma_bias=sigma_in, sigma_out=1.0 / math.sqrt(400))
    panel.plot(x, random_functions(x, 400, scales, num_samples=5, seed=1).T)
    panel.set(title=f"sigma_in = {sigma_in:g}", xlabel="x", ylabel="f(x)")

# %% [markdown]
# ## How many hidden units?
# Forty points from a curve with three bends.  For each size we fit from several random starts, all of them one batch.
# By default networks get the Gauss-Newton curvature: their exact Hessian can become singular where two modes meet, and
# there Laplace's evidence means nothing.
#
# Predictions come from `linearised`: the outputs' mean and variance with the network replaced by its tangent at the
# mode.  That is the network the Gauss-Newton curvature belongs to.  Weights drawn from the Gaussian posterior and put
# through the network itself can be far off: the Gaussian is wide in directions along which the tangent does not change
# and the network does.


# %%
def curve(num, seed):
    generator = torch.Generator().manual_seed(seed)
    X = 4.0 * torch.rand(num, 1, generator=generator) - 2.0
    return X, torch.sin(2.5 * X[:, 0]) + 0.15 * torch.randn(num, generator=generator)


X, t = curve(40, seed=0)
X_test, t_test = curve(500, seed=1)
stop = Stop(tolerance=1e-5, gradient_tolerance=0.02, num_steps=40, throw=False, progress=False)


def fit(num_hidden):
    engine = LaplaceEvidence(MLP(1, num_hidden), start=Start(restarts=3), stop=stop)
    engine.run(X, t)
    return engine


engines = {num_hidden: fit(num_hidden) for num_hidden in (1, 2, 3, 4, 6)}
posteriors = {H: engine.posterior for H, engine in engines.items()}


def error(H):
    f, _ = linearised(posteriors[H], X_test)
    return float((f[:, 0] - t_test).square().mean().sqrt())


errors = {H: error(H) for H in engines}
figure, ax = plt.subplots()
plots_posterior.evidence_by_size(ax, posteriors, errors=errors)
_ = ax.set_xlabel("hidden units")

# %% [markdown]
# The evidence rises steeply until the network can make the curve, and then stays level: units that are not needed are
# paid for by the prior, not by overfitting.  The test error, which the evidence never saw, tells the same story.
#
# A network of $H$ tanh units has $2^H H!$ copies of every mode.  That number is reported on its own, because it is
# right only when the copies are far apart; units that came out as copies of each other, or as zero, are not counted.

# %%
for H, posterior in posteriors.items():
    net = engines[H].model
    gamma = sum(float(g.sum()) for g in posterior.gamma.values())
    copies = net.log_copies(posterior.mode)
    print(
        f"{H} units: log evidence {float(posterior.log_evidence):6.2f}, log copies {copies:5.2f} "
        f"of {net.log_symmetries():5.2f}, well-determined {gamma:4.1f} of {3 * H + 1}, test error {errors[H]:.3f}"
    )

# %% [markdown]
# ## A committee
# Different starts may end in different modes.  Instead of choosing one, let each vote by its evidence.

# %%
modes = engines[4].posteriors
vote = committee(modes)
mean, variance = vote.linearised(x)
sd = (variance[:, 0] + 1.0 / modes[0].hyperparameters["beta"]).sqrt()
figure, ax = plt.subplots()
ax.fill_between(x[:, 0], mean[:, 0] - 2 * sd, mean[:, 0] + 2 * sd, alpha=0.3)
ax.plot(x[:, 0], mean)
ax.plot(X[:, 0], t, "k.")
_ = ax.set(title=f"{len(modes)} mode(s), shares {[round(float(w), 2) for w in vote.weights]}", xlabel="x", ylabel="t")

# %% [markdown]
# ## Which inputs matter?
# Five inputs, of which the target depends on the first two.  `ard(5)` gives the weights that leave each input a
# precision of their own.

# %%
generator = torch.Generator().manual_seed(2)
Z = torch.randn(100, 5, generator=generator)
s = torch.tanh(1.5 * Z[:, 0]) - 0.8 * torch.tanh(2.0 * Z[:, 1]) + 0.1 * torch.randn(100, generator=generator)
relevant = LaplaceEvidence(MLP(5, 3, alpha=ard(5)), stop=stop).run(Z, s)
figure, ax = plt.subplots()
plots_posterior.well_determined(ax, relevant)
alpha = relevant.hyperparameters["alpha_W1"]
print("precision of each input's weights:", [f"{float(a):.3g}" for a in alpha])

# %% [markdown]
# ## The honest sentence
# The evidence is Laplace's, around modes that were found, and a network has many: use restarts.  In the examples above
# it agreed with the test error.  That is no law: Penny and Roberts (1999) found the order of networks useful only from
# 5 to 10 data per weight on.  Where a choice matters and data can be spared, check it on data held out.

# %%
heights = {H: float(p.log_evidence) for H, p in posteriors.items()}
assert max(heights.values()) - heights[1] > 10.0
assert errors[max(heights, key=heights.get)] < 0.8 * errors[1]
assert bool((alpha[2:] > 100.0 * alpha[:2].max()).all())
assert abs(float(vote.weights.sum()) - 1.0) < 1e-12
