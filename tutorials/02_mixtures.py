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
# # Tutorial 02: mixtures that do not overfit
#
# A Gaussian mixture fitted by maximum likelihood wants to be wrong. It can put a kernel on a single point, let its
# width go to zero, and collect an infinite likelihood. What saves us in practice is a validation set, or luck.
#
# `EvidenceEM` takes another way. The centres of the kernels get a prior, they are integrated over instead of being
# fitted, and widths and shares are set by the evidence. There is no validation set, and the number of kernels need
# not be known. Husmeier (2000) is the source of the method; here are his pictures.

# %%
import warnings

import matplotlib.pyplot as plt
import torch
from sklearn.mixture import GaussianMixture

from pyro_evidence import EvidenceEM, Start, class_conditional, datasets
from pyro_evidence.compare import learning_curve
from pyro_evidence.mixture import BoundedInflation, RandomWeights, Unregularised
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.plots import mixture as plots_mixture

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## 125 points, and many more to be predicted
#
# One class of Ripley's synthetic problem. It was drawn from two Gaussians; we do not tell. The model is an ordinary
# Pyro model, with an enumerated component for each datum, and any Pyro engine can run it.

# %%
train, test = datasets.ripley_train(), datasets.ripley_test()
Y, Y_test = train.X[train.t == 0], test.X[test.t == 0]
model = gaussian_mixture(10)

# %% [markdown]
# `learning_curve` runs an engine and looks at every round. Three starts each: on the left the likelihood alone,
# on the right the evidence.

# %%
settings = {"start": Start(restarts=3), "initial": RandomWeights(width=0.5, warm_up=0)}
plain = learning_curve(EvidenceEM(model, update=Unregularised(), **settings), (Y,), (Y_test,), num_steps=100)
evidence = learning_curve(EvidenceEM(model, update=BoundedInflation(), **settings), (Y,), (Y_test,), num_steps=100)

figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
plots_mixture.learning_curves(axes[0], {"plain EM": plain})
plots_mixture.learning_curves(axes[1], {"evidence": evidence})
_ = axes[0].set_ylim(-0.8, 1.0)

# %% [markdown]
# The training error of plain EM falls and falls. Its test error has a minimum after a few rounds and then rises, and
# nobody who sees only the training data knows when to stop. With the evidence the two stay together, and it does not
# matter when one stops.
#
# Where does the difference come from? Look at the kernels of the first start. An ellipse holds 90 % of its kernel,
# and its line is the wider the larger its share.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharex=True, sharey=True)
for ax, name, curve in zip(axes, ("plain EM", "evidence"), (plain, evidence), strict=True):
    ax.plot(*Y.T.tolist(), ".", color="grey", markersize=3)
    plots_mixture.ellipses(ax, curve.density(100))
    ax.set_title(f"{name}: {int(curve.num_components[100, 0])} components, test {curve.test_nll[100, 0]:.3f} nats")

# %% [markdown]
# Some of the kernels on the left are needles. On the right a kernel that has fewer data than well-determined
# parameters is left out, and those that stay are a little wider than maximum likelihood would have them.
#
# ## From twenty kernels to two
#
# Start with far too many and watch. The frame is cut, because kernels that are about to go may be far wider.

# %%
many = EvidenceEM(gaussian_mixture(20), start=Start(restarts=1, seed=4), initial=RandomWeights(warm_up=0))
path = learning_curve(many, (Y,), (Y_test,), num_steps=150)
figure, axes = plt.subplots(1, 4, figsize=(14, 3.5), sharey=True)
_ = plots_mixture.component_path(axes, path, Y, steps=[0, 15, 30, 150])

# %% [markdown]
# The default engine does a little more: it begins with a few unregularised rounds, from five starts at once, and at
# the end it tries to do without each kernel in turn. A deletion is accepted if the evidence, corrected for the number
# of hyperparameters, goes up.

# %%
posterior = EvidenceEM(gaussian_mixture(20)).run(Y)
print(f"{posterior.num_components} components, log evidence {float(posterior.log_evidence):.2f} nats")
figure, ax = plt.subplots(figsize=(5, 4))
_ = plots_mixture.scatter(ax, posterior, Y)

# %% [markdown]
# ## Does it depend on the number of kernels one starts with?
#
# Husmeier's Figure 4: the same starts, with and without the evidence, after 20 rounds; initial K from 5 to 20, two
# widths, three draws of the centres. Below the diagonal the evidence is better.

# %%
pairs = {}
for K in (5, 10, 15, 20):
    results = ([], [])
    for width in (0.5, 1.0):
        initial = RandomWeights(width=width, warm_up=0)
        for found, update in zip(results, (Unregularised(), BoundedInflation()), strict=True):
            engine = EvidenceEM(gaussian_mixture(K), update=update, start=Start(restarts=3), initial=initial)
            found += learning_curve(engine, (Y,), (Y_test,), num_steps=20).test_nll[-1].tolist()
    pairs[f"K = {K}"] = results
figure, ax = plt.subplots(figsize=(5, 4))
plots_mixture.matched_pairs(ax, pairs)
_ = ax.set(xlabel="test NLL, plain EM", ylabel="test NLL, evidence")

# %% [markdown]
# The abscissa spreads, the ordinate does not. A density for each class makes a classifier; the best possible error
# on these data is about 8 %.

# %%
classifier = class_conditional(EvidenceEM(gaussian_mixture(10)), train.X, train.t)
error = float((classifier.labels(test.X) != test.t).double().mean())
print(f"test error {100 * error:.1f} %, components {[p.num_components for p in classifier.posteriors]}")
figure, ax = plt.subplots(figsize=(5, 4))
_ = classifier.plot(ax, X=train.X, labels=train.t)

# %% [markdown]
# ## Galaxies: how many clusters?
#
# The velocities of 82 galaxies. scikit-learn's `lower_bound_` is the mean log likelihood of the training data. It
# prefers more components, always; so it cannot answer. We put the log evidence beside it, for each K that one may
# start with.

# %%
velocities = datasets.galaxies().X / 1000.0
evidences, left, bounds = {}, {}, {}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # scikit-learn has not always converged
    for K in range(1, 11):
        fits = [EvidenceEM(gaussian_mixture(K), start=Start(seed=seed)).run(velocities) for seed in range(3)]
        evidences[K] = [float(fit.log_evidence) for fit in fits]
        left[K] = [fit.num_components for fit in fits]
        peer = GaussianMixture(K, covariance_type="diag", n_init=5, random_state=0).fit(velocities.numpy())
        bounds[K] = [len(velocities) * peer.lower_bound_]

figure, ax = plt.subplots(figsize=(7, 4))
plots_mixture.evidence_over_components(ax, evidences, label="log evidence, EvidenceEM")
plots_mixture.evidence_over_components(ax, bounds, label="log likelihood, scikit-learn")
ax.set(xlabel="number of components to start with", ylabel="nats")
_ = ax.legend()
for K, numbers in left.items():
    print(f"start with {K:2d}: left {numbers}, log evidence {max(evidences[K]):.2f}")

# %% [markdown]
# Up to four components the evidence gains. After that it does not move, whatever one starts with, since the engine
# returns to four, now and then to three. Between three and four it does not decide with any force (two or three nats):
# that is an honest answer for 82 numbers. The likelihood goes on climbing for as long as one lets it.

# %%
figure, ax = plt.subplots(figsize=(7, 3.5))
best = EvidenceEM(gaussian_mixture(6), start=Start(restarts=10)).run(velocities)
grid = torch.linspace(5.0, 40.0, 400)[:, None]
ax.hist(velocities[:, 0].tolist(), bins=40, density=True, color="lightgrey")
ax.plot(grid[:, 0].tolist(), best.log_prob(grid).exp().tolist())
_ = ax.set(xlabel="velocity / 1000 km/s", ylabel="density", title=f"{best.num_components} components")

# %% [markdown]
# ## The claim in numbers

# %%
assert bool((plain.test_nll[100] > plain.test_nll.amin(0) + 0.1).all())  # plain EM overfits ...
assert bool((evidence.test_nll[100] < evidence.test_nll.amin(0) + 0.02).all())  # ... the evidence does not
assert path.num_components[0, 0] == 20 and path.num_components[150, 0] <= 3
assert posterior.num_components == 2
for unregularised, regularised in pairs.values():
    assert max(regularised) < 0.12 and max(regularised) < max(unregularised)
assert error <= 0.091
assert all(3 <= number <= 6 for K in range(5, 11) for number in left[K])
assert max(evidences[10]) < max(evidences[3]) + 6.0  # starting with more gains little ...
assert bounds[10][0] > bounds[3][0] + 15.0  # ... where the likelihood gains a lot
