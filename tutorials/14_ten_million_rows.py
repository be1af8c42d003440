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
# # 14. Ten million rows on a laptop
# Rows that do not fit into memory are read in chunks, as often as a fit needs them. What a chunk contributes to a fit
# is a few sums: responsibilities times data for a mixture, slope and curvature for a regression. Sums of chunks add
# up, so the fit is that of all rows at once, to ten digits, however they are cut; and sums of several processes add
# up too, so that the same script runs under `torchrun`. Here there are `NUM = 60_000` rows, because this page is run
# whenever the package is tested; set it to ten million, and only the time changes.

# %%
import resource
import time
from collections.abc import Iterator

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from pyro_evidence import EvidenceEM, LaplaceEvidence, Stop
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.plots import mixture as plots_mixture

torch.set_default_dtype(torch.float64)
NUM, SIZE = 60_000, 20_000
QUIET = Stop(progress=False)


# %% [markdown]
# ## Chunks
# A chunk is a tuple of the model's arguments for some of the rows. What is handed over is anything that gives the same
# chunks every time it is gone through: a list, a `DataLoader` without shuffling, `Slices(numpy.load(path,
# mmap_mode="r"))` or `Parquet(path, ["x", "y"])` of `pyro_evidence.data`, or one's own class. This one makes its rows
# when they are asked for, so that nothing is stored at all; it counts how often that is.


# %%
class Customers:
    """Two columns about each customer, six kinds of them."""

    def __init__(self, num: int, size: int) -> None:
        self.num, self.size, self.passes = num, size, 0

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        self.passes += 1
        angle = torch.arange(6.0) * torch.pi / 3.0
        centres = 8.0 * torch.stack([angle.cos(), angle.sin()], -1)
        for number in range(self.num // self.size):
            generator = torch.Generator().manual_seed(number)
            kind = torch.randint(6, (self.size,), generator=generator)
            yield (centres[kind] + torch.randn(self.size, 2, generator=generator),)


# %% [markdown]
# ## A mixture
# Twelve components are offered. Restarts run on a sample of the rows, chosen by their numbers, which is all that is
# kept; the best of them goes on with all rows, a pass for each round.

# %%
customers = Customers(NUM, SIZE)
before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
posterior = EvidenceEM(gaussian_mixture(12), stop=QUIET).run_chunks(customers)
memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
print(posterior)
print(f"{customers.passes} passes, {time.process_time() - begin:.1f} s, {memory:.0f} MiB more than before the fit")

# %% [markdown]
# It is the fit of all rows at once:

# %%
(whole,) = (torch.cat(column) for column in zip(*customers, strict=True))
together = EvidenceEM(gaussian_mixture(12), stop=QUIET).run(whole)
apart = float((posterior.log_evidence - together.log_evidence).abs() / together.log_evidence.abs())
print(f"relative difference of the log evidences: {apart:.0e}")

# %%
few = next(iter(customers))[0][:3000]
figure, ax = plt.subplots(figsize=(5, 4))
plots_mixture.scatter(ax, together, few)
_ = ax.set(title="3,000 customers and the kinds that were found", xlabel="first column", ylabel="second column")

# %% [markdown]
# ## A regression
# Value, slope and curvature of a generalised linear model are sums over rows as well, and so is the exact gradient of
# its log evidence in the hyperparameters. `LaplaceEvidence` takes any model whose observed sites see the latents
# through linear predictors.


# %%
class Purchases(Customers):
    """The same customers, and whether each of them bought."""

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for number, (X,) in enumerate(super().__iter__()):
            u = torch.rand(self.size, generator=torch.Generator().manual_seed(10_000 + number))
            yield X, (u < (0.3 * X[:, 0] - 0.4).sigmoid()).double()


purchases = Purchases(NUM, SIZE)
bought = LaplaceEvidence(classifier(Linear()), stop=QUIET).run_chunks(purchases)
print(bought)
print({name: value.tolist() for name, value in bought.mode.items()}, purchases.passes, "passes")

# %% [markdown]
# ## Many processes
# The same under `torchrun --nproc-per-node=8 fit.py`: every process has its own rows, and only sums travel.
#
# ```python
# from pyro_evidence.data.distributed import shards
#
# with shards() as ranks:
#     mine = ...  # the rows of process number ranks.rank, all together or in chunks
#     posterior = EvidenceEM(gaussian_mixture(12)).run_chunks(mine)
# ```
#
# Every process returns the same posterior. It does not depend on who has which rows: their numbers, counted through in
# the order of the processes, decide about samples. What is wrong on one of them (a nan, another number of columns) is
# said on all. [Many rows](../docs/many_rows.md) says what it costs, up to 64 machines.
#
# A fit of hours keeps a checkpoint, `Stop(checkpoint="fit.ckpt")`, and `engine.resume("fit.ckpt").run_chunks(chunks)`
# goes on from there.

# %%
assert posterior.num_components == 6
assert apart < 1e-10
assert float((bought.mode["w"] - 0.3).abs().min()) < 0.02
assert memory < 300
