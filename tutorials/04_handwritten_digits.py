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
# # 4. Handwritten digits: how many planes, and of how many dimensions?
# A picture of 8 by 8 pixels is a point in 64 dimensions, but handwriting does not fill them: near each way of writing
# a digit, pictures vary in a few directions only.  A mixture of probabilistic PCA says just that: some centres, and
# through each a plane of a few dimensions.  How many planes, and of how many dimensions, the evidence can tell.

# %%
import matplotlib.pyplot as plt
import torch

from pyro_evidence import EvidenceEM, Start, Stop, class_conditional
from pyro_evidence.datasets import digits
from pyro_evidence.models.mppca import PerColumn, mppca

torch.set_default_dtype(torch.float64)
data = digits()
order = torch.randperm(len(data.X), generator=torch.Generator().manual_seed(0))
X, t = data.X[order] / 16, data.t[order]
X, t, X_test, t_test = X[:1347], t[:1347], X[1347:], t[1347:]
stop = Stop(tolerance=1e-5, gradient_tolerance=0.1, num_steps=60, throw=False, progress=False)


def fit(Y, num_components, num_latents, **prior):
    start = Start(restarts=1, seed=1)
    return EvidenceEM(mppca(num_components, num_latents, **prior), start=start, stop=stop, deletion=None).run(Y)


# %% [markdown]
# ## Ten planes of four dimensions
# The top row shows the centres, the rows below what happens along the first three axes of each plane.  Nobody told the
# model which picture is which digit.

# %%
ten = fit(X, 10, 4)
figure, axes = plt.subplots(4, 10, figsize=(10, 4.2))
for k, plane in enumerate(ten.principal_subspaces()):
    pictures = [ten.analysers.mu[0, k], *plane.axes.T[:3]]
    for row, picture in enumerate(pictures):
        axes[row, k].imshow(picture.reshape(8, 8).numpy(), cmap="gray_r" if row == 0 else "coolwarm")
        axes[row, k].axis("off")
_ = figure.suptitle("centres, and first three axes")

# %% [markdown]
# ## Of how many dimensions is a three?
# One plane through threes that a bad scanner has read, each pixel with an error of 0.1; with 2 to 20 dimensions.  The
# density of the training data rises with every dimension.  That of new threes stops rising, and the log evidence,
# which has not seen them, stops at about the same place.  With a prior precision for each dimension (`PerColumn`) one
# fit is enough: of 24 dimensions offered, those that are not needed are switched off.

# %%
noisy, new = (Y + 0.1 * torch.randn(Y.shape, generator=torch.Generator().manual_seed(0)) for Y in (X, X_test))
threes, new_threes = noisy[t == 3], new[t_test == 3]
dimensions = [2, 4, 8, 12, 16, 20]
fits = [fit(threes, 1, q) for q in dimensions]
evidence = torch.tensor([float(p.log_evidence) for p in fits]) / len(threes)
train = torch.tensor([float(p.log_prob().mean()) for p in fits])
test = torch.tensor([float(p.log_prob(new_threes).mean()) for p in fits])
own = fit(threes, 1, 24, alpha=PerColumn())
kept = int(own.num_latents[0])
figure, ax = plt.subplots()
ax.plot(dimensions, train, "--", color="grey", label="log density of training threes")
ax.plot(dimensions, test, "o-", label="log density of new threes")
ax.plot(dimensions, evidence, "s-", label="log evidence")
ax.plot(kept, float(own.log_evidence) / len(threes), "k*", markersize=12, label="one precision per dimension")
ax.set(xlabel="dimensions of the plane", ylabel="nats per picture")
ax.legend()
best = dimensions[int(evidence.argmax())]
print(f"most evidence: {best} dimensions; best for new threes: {dimensions[int(test.argmax())]}; kept of 24: {kept}")

# %% [markdown]
# ## How many planes?
# Only the directions of the planes are integrated, their centres are not.  For the number of planes there is a log
# evidence that charges for centres and widths as well, `log_evidence_occam`.

# %%
numbers = [1, 4, 8, 16, 32, 48]
mixtures = [fit(X, K, 4) for K in numbers]
occam = torch.tensor([p.log_evidence_occam for p in mixtures]) / len(X)
test_density = torch.tensor([float(p.log_prob(X_test).mean()) for p in mixtures])
figure, ax = plt.subplots()
ax.plot(numbers, occam, "s-", label="log evidence, charged for centres")
ax.plot(numbers, test_density, "o-", label="log density of new pictures")
ax.set(xlabel="planes", ylabel="nats per picture")
ax.legend()
most = numbers[int(occam.argmax())]
print(f"most evidence: {most} planes; best for new pictures: {numbers[int(test_density.argmax())]}")

# %% [markdown]
# ## Four numbers for a picture, and half a picture for a whole
# `reconstruct` keeps the component and four coordinates of each picture.  What is `nan` is missing: it is integrated
# out, and filled in by what the seen part lets expect.

# %%
mixture = mixtures[numbers.index(16)]
few = X_test[:8]
half = few.clone().reshape(-1, 8, 8)
half[:, 4:] = torch.nan
rows = [few, mixture.reconstruct(few), half.reshape(-1, 64), mixture.reconstruct(half.reshape(-1, 64))]
figure, axes = plt.subplots(4, 8, figsize=(8, 4.2))
for axis_row, pictures in zip(axes, rows, strict=True):
    for ax, picture in zip(axis_row, pictures, strict=True):
        ax.imshow(picture.reshape(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
        ax.axis("off")
figure.suptitle("picture, from four numbers, upper half, filled in")
error = (mixture.reconstruct(X_test) - X_test).square().mean().sqrt()
plain = (X_test - X.mean(0)).square().mean().sqrt()
print(
    f"rms error per pixel: {float(error):.3f} from four numbers and a label, {float(plain):.3f} from the mean picture"
)

# %% [markdown]
# ## Classification
# One density for each digit, then Bayes' rule.

# %%
engine = EvidenceEM(mppca(1, 12, alpha=PerColumn()), start=Start(restarts=1), stop=stop, deletion=None)
classifier = class_conditional(engine, X, t)
wrong = float((classifier.labels(X_test) != t_test).double().mean())
print(f"test error {100 * wrong:.1f} %, dimensions {[int(p.num_latents[0]) for p in classifier.posteriors]}")

# %%
assert wrong < 0.03
assert error < 0.7 * plain
assert test[dimensions.index(best)] > test.max() - 0.5 and 8 <= kept < 20
assert occam.argmax() not in (0, len(numbers) - 1)
assert test_density[numbers.index(most)] > test_density.max() - 1.0
