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
# # 8. Gaussian processes: a prior on functions, and the evidence for its scales
# A Gaussian process puts a Gaussian prior directly on the values of a function. Its covariance function, the
# *kernel*, says what kind of function: smooth or rough, fast or slow, periodic or not. The evidence chooses the
# kernel's hyperparameters. For regression it is exact; for classes it is Laplace's.

# %%
import math

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS

from pyro_evidence import LaplaceEvidence, LaplaceMarginal, predict_latent
from pyro_evidence.models.gp import gp_classifier, gp_regression
from pyro_evidence.models.kernels import RBF, Linear, Periodic

torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## Functions from the prior
# Four kernels, three functions each: slow, fast, periodic, and slow with a trend (MacKay 2003, figure 45.1). A
# sum of kernels is the kernel of a sum of functions.

# %%
x = torch.linspace(-3.0, 5.0, 200)[:, None]
kernels = {
    "smooth, lengthscale 1.5": RBF(1.5, 2.0),
    "smooth, lengthscale 0.35": RBF(0.35, 2.0),
    "periodic, period 3": Periodic(3.0, 0.5, 2.0),
    "smooth and a trend": RBF(1.5, 2.0) + Linear(1.0),
}
figure, axes = plt.subplots(2, 2, figsize=(8, 5), sharex=True)
for ax, (name, kernel) in zip(axes.flat, kernels.items(), strict=True):
    values, vectors = torch.linalg.eigh(kernel(x))
    root = vectors * values.clamp(min=0.0).sqrt()  # exercise 16.7: through the eigenvectors
    ax.plot(x[:, 0], root @ torch.randn(200, 3))
    ax.set(title=name, xlabel="x", ylabel="f(x)")

# %% [markdown]
# Two exercises of Schölkopf and Smola. *16.7*: draws under a linear kernel are straight lines, because its
# covariance matrix has as many non-zero eigenvalues as there are inputs; the RBF's has many. *16.6*: to observe
# one of two correlated variables leaves the other less variance, by $c^2 / v$.

# %%
X = torch.rand(50, 2)
ranks = {"linear": torch.linalg.matrix_rank(Linear(1.0)(X)), "RBF": torch.linalg.matrix_rank(RBF(0.3, 1.0)(X))}
C = torch.tensor([[1.0, 0.75], [0.75, 0.75]])
first, second = C[0, 0] - C[0, 1] ** 2 / C[1, 1], C[1, 1] - C[0, 1] ** 2 / C[0, 0]
print(f"ranks { ({name: int(rank) for name, rank in ranks.items()}) }; variances left {first:.4f} and {second:.4f}")
assert ranks["linear"] == 2 and ranks["RBF"] > 20
assert abs(first - 0.25) < 1e-12 and abs(second - 0.1875) < 1e-12

# %% [markdown]
# ## Regression
# The model is an ordinary Pyro model: `f` has a Gaussian prior, the data see `f` and noise. `RBF()` leaves
# lengthscale and variance to be learned, and so is the noise precision `beta`. `predict_latent` knows `f` at new
# inputs.

# %%
train = 8.0 * torch.rand(40, 1) - 3.0
t = (1.5 * train[:, 0]).sin() + 0.2 * torch.randn(40)
posterior = LaplaceEvidence(gp_regression(RBF())).run(train, t)
found = predict_latent(posterior, x)
sd = found.variance.clamp(min=0.0).sqrt()
figure, ax = plt.subplots()
ax.plot(train[:, 0], t, "k.", label="data")
ax.plot(x[:, 0], found.mean, label="posterior mean")
ax.fill_between(x[:, 0], found.mean - 2 * sd, found.mean + 2 * sd, alpha=0.3, label="two standard deviations of f")
ax.set(title=f"log evidence {float(posterior.log_evidence):.2f}", xlabel="x", ylabel="t")
ax.legend()
hypers = {n: float(v) for n, v in posterior.hyperparameters.items()}
print({n: round(v, 3) for n, v in hypers.items()})

# %% [markdown]
# For Gaussian noise the evidence is exact. Here it is again, with `f` integrated out on paper.

# %%
K = RBF(hypers["kernel.lengthscale"], hypers["kernel.variance"])(train) + 1e-6 * torch.eye(40)
exact = dist.MultivariateNormal(torch.zeros(40), K + torch.eye(40) / hypers["beta"]).log_prob(t)
assert abs(float(posterior.log_evidence - exact)) < 1e-8
assert 0.12 < hypers["beta"] ** -0.5 < 0.3

# %% [markdown]
# ## Classification
# Only the last line of the model changes: the data are labels, and `f` is their log odds. The posterior of `f` is
# no longer Gaussian, and Laplace's approximation takes its place. The probability of a class is averaged over
# `f`, not taken at its mean: where `f` is uncertain, it stays nearer to one half.

# %%
inputs = torch.randn(120, 2)
labels = ((inputs[:, 0] * 2.0).sin() + inputs[:, 1] + 0.4 * torch.randn(120) > 0).double()
classifier = LaplaceEvidence(gp_classifier(RBF())).run(inputs, labels)
side = torch.linspace(-3.0, 3.0, 25)
grid = torch.cartesian_prod(side, side)
new = predict_latent(classifier, grid)
averaged, plugged = new.probability(), new.mean.sigmoid()
figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
for ax, p, name in zip(axes, (averaged, plugged), ("averaged", "at the mean"), strict=True):
    ax.contourf(side, side, p.reshape(25, 25).T, levels=torch.linspace(0, 1, 11).tolist(), cmap="coolwarm")
    for label, marker in ((0, "o"), (1, "^")):
        ax.plot(
            *inputs[labels == label].T, marker, color="black", markersize=4, fillstyle="none", label=f"class {label}"
        )
    ax.set(title=f"probability of class 1, {name}", xlabel="input 0", ylabel="input 1")
_ = ax.legend()
print(f"log evidence {float(classifier.log_evidence):.2f}; by chance {-120 * math.log(2.0):.2f}")
assert float(classifier.log_evidence) > -120 * math.log(2.0)
assert bool(((averaged - 0.5).abs() <= (plugged - 0.5).abs() + 1e-6).all())

# %% [markdown]
# ## How sure are we of the hyperparameters?
# With priors on them they become latent sites. `LaplaceMarginal` integrates `f` out by Laplace and leaves a Pyro
# model over the hyperparameters alone, on which NUTS runs: two dimensions in place of forty-two.

# %%
priors = RBF(dist.LogNormal(0.0, 0.7), dist.LogNormal(1.0, 0.7))
marginal = LaplaceMarginal(gp_classifier(priors, jitter=1e-4), integrate=["f"])
mcmc = MCMC(NUTS(marginal, max_tree_depth=4), num_samples=100, warmup_steps=60, disable_progbar=True)
mcmc.run(inputs[:40], labels[:40])
draws = mcmc.get_samples()
figure, ax = plt.subplots()
ax.loglog(draws["kernel.lengthscale"], draws["kernel.variance"], ".")
ax.set(xlabel="lengthscale", ylabel="variance", title="posterior of the hyperparameters, 40 labels")
spread = float(draws["kernel.lengthscale"].log().std())
print(f"the log lengthscale has posterior standard deviation {spread:.2f}, prior 0.70")
assert 0.05 < spread < 0.7

# %% [markdown]
# ## The honest sentence
# All this costs the cube of the number of data; a thousand are seconds, ten thousand are not for this code. Labels
# say little about the variance of `f`; where it is large, the posterior of `f` is skewed and Laplace's evidence
# can be off by nats; `classifier.diagnostics()` says so by its `pareto_k`. With little data do not trust one best
# lengthscale: look at its posterior, as above.
