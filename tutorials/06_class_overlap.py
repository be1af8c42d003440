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
# # 6. Should classes share kernels that they hardly share?
# The probabilistic RBF network gives every class a mixture of Gaussians, and all classes draw on the same pool of
# kernels.  A kernel that stands between two classes and overlaps with neither serves both badly.  Constantinopoulos,
# Titsias and Likas (2001) punish such kernels: each pays $\alpha\,\delta_j$, where $\delta_j$ is the expected
# Bhattacharyya distance between the kernel and the part of it that each class uses.
#
# What does the penalty do, and does it help?  The answer has two halves.

# %%
import matplotlib.pyplot as plt
import torch

from pyro_evidence import OverlapEM, Start, Stop
from pyro_evidence.datasets import csv, ripley_test, ripley_train
from pyro_evidence.models.prbf import prbf
from pyro_evidence.prbf import Ascent, KMeans, RandomPoints, choose_alpha, log_loss
from pyro_evidence.prbf.updates import prbf2001_update

torch.set_default_dtype(torch.float64)
train, test = ripley_train(), ripley_test()
stop = Stop(tolerance=0.0, num_steps=100, progress=False)  # the paper's 100 rounds

# %% [markdown]
# ## Eight kernels on Ripley's data, before and after
# All fits begin from the same clusters.  A circle is one standard deviation of a kernel; its colour says whose data
# it holds, from blue through grey to red; a thick line means a large $\delta_j$: the classes use different sides.


# %%
def fit_all(model, initial, X, t):
    engines = {
        "plain EM": OverlapEM(model, alpha=0.0, initial=initial, stop=stop),
        "published update": OverlapEM(model, update=prbf2001_update, initial=initial, stop=stop),
        "ascent (default)": OverlapEM(model, initial=initial, stop=stop),
    }
    return {name: engine.run(X, t) for name, engine in engines.items()}


def draw(fits, X, t, plane):
    _, axes = plt.subplots(1, 3, figsize=(12, 4), sharex=True, sharey=True)
    for ax, (name, posterior) in zip(axes, fits.items(), strict=True):
        for label, marker in enumerate("ox"):
            ax.plot(*(X[t == label] @ plane).T, marker, color=plt.cm.coolwarm(float(label)), markersize=3)
        kernels = zip(posterior.loc @ plane, posterior.covariance, posterior.purity, posterior.overlap, strict=True)
        for centre, matrix, share, delta in kernels:
            circle = plt.Circle(centre.tolist(), float(matrix[0, 0].sqrt()), fill=False)
            circle.set(color=plt.cm.coolwarm(float(share[1])), linewidth=min(1.0 + 40.0 * float(delta), 4.0))
            ax.add_patch(circle)
        ax.set(title=f"{name}: total overlap distance {float(posterior.overlap.sum()):.3f}", aspect="equal")
        ax.set(xlabel="first direction", ylabel="second direction")
        ax.title.set_fontsize(9)


def overlap_bars(ax, fits, title):
    for shift, (name, posterior) in enumerate(fits.items()):
        place = torch.arange(len(posterior.overlap)) + 0.27 * (shift - 1)
        ax.bar(place.tolist(), posterior.overlap.tolist(), width=0.25, label=name)
    ax.set(title=title, xlabel="kernel", ylabel=r"$\delta_j$ / nats")


fits = fit_all(prbf(8), KMeans(), train.X, train.t)
draw(fits, train.X, train.t, torch.eye(2))

# %% [markdown]
# The penalty does what it promises: kernels become pure, or are used by both classes alike.

# %%
for name, posterior in fits.items():
    log_proba = posterior.log_proba(test.X)
    wrong = float((log_proba.argmax(-1) != test.t).double().mean())
    nll = -float(log_proba.gather(-1, test.t.long()[:, None]).mean())
    print(
        f"{name:18s} test error {100 * wrong:5.1f} %   test NLL {nll:.3f} nats   rejections {len(posterior.rejections)}"
    )
assert float(fits["ascent (default)"].overlap.sum()) < 0.2 * float(fits["plain EM"].overlap.sum())

# %% [markdown]
# ## The same on a real set
# Ionosphere: 351 radar returns, 34 inputs, good ones in red.  Six kernels from the same six random returns, drawn in
# the plane of the two largest principal components.  A circle there is a ball in 34 dimensions, so most returns lie
# near its shell: look at the colours and the widths of the lines.

# %%
data = csv("ionosphere")
scale = data.X.std(0)
X = (data.X - data.X.mean(0)) / torch.where(scale > 0, scale, 1.0)
real = fit_all(prbf(6), RandomPoints(), X, data.t)
draw(real, X, data.t, torch.linalg.svd(X, full_matrices=False)[2][:2].T)

# %% [markdown]
# And $\delta_j$ of each kernel, before (plain EM) and after, on both sets:

# %%
figure, axes = plt.subplots(1, 2, figsize=(10, 3.2))
overlap_bars(axes[0], fits, "Ripley")
overlap_bars(axes[1], real, "Ionosphere")
axes[1].legend()
for name, posterior in real.items():
    pure = int((posterior.purity.amax(-1) > 0.99).sum())
    print(
        f"{name:18s} kernels with 99 % of one class: {pure} of 6   sum of delta_j: {float(posterior.overlap.sum()):.3f}"
    )
for name in ("published update", "ascent (default)"):
    assert float(real[name].overlap.sum()) < 0.1 * float(real["plain EM"].overlap.sum())

# %% [markdown]
# Which kernels rejected which class, and when, is in `posterior.rejections`; with the published update a rejection is
# for good.  Were a class rejected by every kernel at once, `posterior.held` would name it and `run` would warn.

# %%
for rejection in real["published update"].rejections:
    print(rejection)

# %% [markdown]
# ## What each round does to the objective
# The published update freezes part of what it should move, and sets shares that become negative to zero.  So it is
# not an ascent: the penalised log likelihood, eq. 22, falls in some rounds.  The default climbs the exact gradient of
# eq. 22 after a warm-up by plain EM, and never falls.

# %%
figure, ax = plt.subplots()
falls = {}
for name in ("published update", "ascent (default)"):
    path = torch.tensor(real[name].objectives)
    falls[name] = int((path.diff() < 0).sum())
    ax.plot(range(2, len(path)), path[2:], label=f"{name}: falls in {falls[name]} of {len(path) - 1} rounds")
ax.set(xlabel="round", ylabel="penalised log likelihood / nats")
ax.legend()
assert falls["published update"] > 0 and falls["ascent (default)"] == 0

# %% [markdown]
# ## Does it help?
# Five-fold cross-validation over the weight $\alpha = c\,N/(KM)$; all weights of a fold run as one batch.  We score
# the same fits twice: by error, and by the log loss of the probabilities.

# %%
multiples = (0.0, 1.0, 5.0, 20.0)
scores = {}
for name, updates in (("published update", prbf2001_update), ("ascent (default)", Ascent())):
    for seed in range(3):
        engine = OverlapEM(prbf(6), update=updates, start=Start(seed=seed), stop=stop)
        settings = {"multiples": multiples, "num_folds": 5, "seed": seed}
        error = 100 * choose_alpha(engine, X, data.t, **settings).scores.mean(-1)
        loss = choose_alpha(engine, X, data.t, score=log_loss, **settings).scores.mean(-1)
        scores.setdefault(name, []).append(torch.stack([error, loss]))

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
for name, runs in scores.items():
    for ax, line in zip(axes, torch.stack(runs).mean(0), strict=True):
        ax.plot(range(len(multiples)), line, marker="o", label=name)
for ax, label in zip(axes, ("error / %", "log loss / nats"), strict=True):
    ax.set(
        xlabel="weight c of the overlap",
        ylabel=label,
        xticks=range(len(multiples)),
        xticklabels=[f"{c:g}" for c in multiples],
    )
_ = axes[0].legend()

# %%
mean = {name: torch.stack(runs).mean(0) for name, runs in scores.items()}
for name, (error, loss) in mean.items():
    print(f"{name:18s} error {error[0]:.1f} -> {error[-1]:.1f} %   log loss {loss[0]:.2f} -> {loss[-1]:.2f} nats")

# %% [markdown]
# ## The honest sentence
# With the published update **the error falls** on Pima, Ionosphere and Satimage, and hardly moves on Phoneme; **the
# probabilities get worse** on all four, because classes are shut out of kernels for good.  Most of the gain is that
# clamp and not the penalty: of the gain at $c = 20$, averaged over the paper's tables, an exact update without a clamp
# keeps a quarter on Satimage, about half on Ionosphere, and only on Pima all of it (`benchmarks/papers/prbf2001.md`).
# Mixtures that share no kernels at all come close.  So choose by what you need: for labels, the published update with
# `choose_alpha` on the error; for probabilities, plain EM, or a small weight chosen on the log loss.

# %%
published = mean["published update"]
assert float(published[0, -1]) < float(published[0, 0]) - 1.0  # error falls
assert float(published[1, -1]) > float(published[1, 0]) + 0.2  # probabilities get worse
assert float(mean["ascent (default)"][1, -1]) < float(published[1, -1])
