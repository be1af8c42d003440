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
# # Tutorial 03: conditional densities
#
# A regression that returns a number is of no use where the answer is "either here or there". This tutorial fits the
# whole density p(y | x) of a noisy time series whose next value has two ways to go. The model is a mixture of linear
# regressions on random tanh units; the engine is `EvidenceEM`, which keeps it from overfitting without a validation
# set. The example is that of Husmeier (2000), section 4.2.

# %%
import matplotlib.pyplot as plt
import torch

from pyro_evidence import EvidenceEM, Start, Stop, datasets
from pyro_evidence.compare import learning_curve
from pyro_evidence.mixture import BoundedInflation, RandomWeights, Unregularised, WeightDecay
from pyro_evidence.models.basis import RandomVectorFunctionalLink
from pyro_evidence.models.mixture import linear_mixture
from pyro_evidence.plots import mixture as plots_mixture

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## A series with two branches
#
# With probability 2/3 the next value is a noisy parabola of the present one, otherwise it comes from the other branch.
# Both are noisy, and the width of the noise depends on where one is. 200 pairs to fit, 1000 to test. Because we made
# the series, we know its density, and with it the best test error that any model can have.

# %%
series = datasets.stochastic_series(1200, seed=0)
X, Y = series.X[:200], series.t[:200, None]
X_test, Y_test = series.X[200:], series.t[200:, None]
limit = -float(datasets.stochastic_series_log_density(X_test[:, 0], Y_test[:, 0]).mean())
print(f"Bayes limit on the test data: {limit:.3f} nats per datum")

x, y = torch.linspace(0.02, 0.98, 60), torch.linspace(0.005, 0.995, 120)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), sharey=True)
axes[0].plot(X[:, 0].tolist(), Y[:, 0].tolist(), ".", markersize=4)
axes[0].set(xlabel="y_t", ylabel="y_{t+1}", title="200 pairs")
plots_mixture.density_strips(axes[1], datasets.stochastic_series_log_density, x, y)
axes[1].collections[0].set_clim(0.0, 8.0)
_ = axes[1].set(xlabel="y_t", ylabel="", title="the density that made them")

# %% [markdown]
# ## A mixture of linear regressions
#
# Ten kernels; the mean of each is linear in ten tanh units with random weights, in the input, and in a constant. That
# is a random vector functional link: the hidden layer is drawn and stays, so that everything that is fitted enters
# linearly. 120 weights for 200 pairs: this model can overfit.


# %%
def random_basis(seed):
    generator = torch.Generator().manual_seed(seed)
    weights, biases = 3.0 * torch.randn(1, 10, generator=generator), 3.0 * torch.randn(10, generator=generator)
    return RandomVectorFunctionalLink(weights, biases)


model = linear_mixture(10, random_basis(0))
posterior = EvidenceEM(model, deletion=None).run(X, Y)
test_error = -float(posterior.log_prob(X_test, Y_test).mean())
print(f"{posterior.num_components} kernels left, log evidence {float(posterior.log_evidence):.1f} nats")
print(f"well-determined weights: {float(sum(g.sum() for g in posterior.gamma.values())):.0f} of 120")
print(f"test error {test_error:.3f} nats per datum")

# %% [markdown]
# A strip shows the density at one input, the darker the likelier.

# %%
start, initial = Start(restarts=1), RandomWeights(width=3.0, warm_up=0)
stop = Stop(tolerance=0.0, num_steps=100, throw=False)  # a hundred rounds, no more and no less
plain = EvidenceEM(model, update=Unregularised(), start=start, initial=initial, deletion=None, stop=stop).run(X, Y)
plain_error = -float(plain.log_prob(X_test, Y_test).mean())
print(f"test error of maximum likelihood {plain_error:.3f} nats per datum")
figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), sharey=True)
plots_mixture.density_strips(axes[0], datasets.stochastic_series_log_density, x, y)
for ax, fit in zip(axes[1:], (posterior, plain), strict=True):
    plots_mixture.density_strips(ax, lambda a, b, fit=fit: fit.log_prob(a[:, None], b[:, None]), x, y)
for ax, title in zip(axes, ("truth", "evidence", "maximum likelihood"), strict=True):
    ax.set(xlabel="y_t", ylabel="y_{t+1}", title=title)
    ax.collections[0].set_clim(0.0, 8.0)

# %% [markdown]
# The evidence finds both branches and smooths where there are few data. Maximum likelihood finds them too, and draws
# thin lines through single points.
#
# ## What one can ask of such a density
#
# A mean would be a poor summary here: at many inputs it lies where the series never goes. Quantiles and draws are
# better.

# %%
at = torch.tensor([[0.1], [0.5], [0.9]])
density = posterior.density(at)
low, high = density.quantile([0.05, 0.95])[:, :, 0]
for i, now in enumerate(at[:, 0].tolist()):
    draws = posterior.sample(3, at, seed=1)[:, i, 0]
    print(
        f"after {now:.1f}: mean {density.mean[i, 0]:.2f}, 90 % in [{low[i]:.2f}, {high[i]:.2f}], "
        f"three draws {[round(v, 2) for v in draws.tolist()]}"
    )

# %% [markdown]
# ## Figure 5, in small
#
# How does the test error depend on the training time? Eight networks, each with a hidden layer of its own, and five
# ways to regularise. (`benchmarks/papers/husmeier2000.py` does it with eighty networks.) The fixed priors are a weight
# decay and a gamma prior on the noise precision, of two strengths. The evidence begins with ten rounds without it, so
# that the kernels find their places.

# %%
regularisers = {
    "plain EM": (Unregularised(), 0),
    "weight decay 0.01": (WeightDecay(0.01), 0),
    "fixed priors, 0.1 and 0.1": (WeightDecay(0.1, rho=0.1), 0),
    "fixed priors, 0.1 and 1": (WeightDecay(0.1, rho=1.0), 0),
    "evidence": (BoundedInflation(), 10),
}
curves, committees = {}, {}
for name, (update, warm_up) in regularisers.items():
    initial = RandomWeights(width=3.0, warm_up=warm_up)
    settings = {"update": update, "start": start, "initial": initial}
    engines = [EvidenceEM(linear_mixture(10, random_basis(s)), **settings) for s in range(8)]
    networks = [learning_curve(engine, (X, Y), (X_test, Y_test), num_steps=100) for engine in engines]
    curves[name] = torch.stack([n.test_nll[:, 0] for n in networks]).mean(0)
    committees[name] = -float(torch.stack([n.test[-1, 0] for n in networks]).exp().mean(0).log().mean())

figure, ax = plt.subplots(figsize=(7, 4))
for name, curve in curves.items():
    ax.plot(curve.tolist(), label=name)
ax.axhline(limit, color="grey", linewidth=0.8)
ax.set(xlabel="round", ylabel="mean test NLL / nats", ylim=(-1.25, 0.6))
_ = ax.legend()
for name in curves:
    print(
        f"{name:26s} best {curves[name].min():.3f}  round 100 {curves[name][-1]:.3f}  committee {committees[name]:.3f}"
    )

# %% [markdown]
# Plain EM and weak weight decay are at their best after twenty rounds and then overfit. Fixed priors on weights and
# noise are safe, if one guesses their strength: 0.1 is as good as the evidence here, 1 is too stiff. The evidence finds
# its own strength, and stays where it is. A committee, which averages the densities of all eight networks, is better
# than its members by most where they overfit, each in its own way.
#
# The grey line is the Bayes limit. Some distance remains, and no engine can make it vanish with 200 data: the true
# noise is uniform within sharp borders that move with the input, and every kernel here has the same width everywhere.
#
# ## The claim in numbers

# %%
assert limit < -1.0
assert posterior.num_components >= 2
assert test_error < plain_error
for name in ("plain EM", "weight decay 0.01"):
    assert curves[name][-1] > curves[name].min() + 0.2  # overfits
assert (curves["evidence"][30:] - curves["evidence"].min()).max() < 0.06  # flat from round 30 on
for name in ("plain EM", "weight decay 0.01", "fixed priors, 0.1 and 1"):
    assert curves["evidence"][-1] < curves[name][-1] - 0.04  # and better than they are in the end
assert limit < committees["evidence"] < curves["evidence"][-1]  # a committee helps, and nothing beats the limit
