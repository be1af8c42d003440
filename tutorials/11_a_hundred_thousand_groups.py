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
# # 11. A hundred thousand groups
# A shop counts the orders of 100,000 customers, a few weeks each. Every customer has a level of their own, most of
# them seen too briefly to be known alone. The model is an ordinary hierarchical one; the posterior has 100,000
# coordinates, and no matrix of that size is ever made: each datum touches one customer, which the engine finds in
# the program, so that the customers are eliminated one by one.

# %%
import resource
import time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence

torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The data
# Between one and eleven weeks for each customer; in some weeks there is a sale. We know the truth, because we make
# it: customers' levels vary by 0.8 on the log scale.


# %%
def orders(num_customers: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    weeks = torch.randint(1, 12, (num_customers,))
    customer = torch.arange(num_customers).repeat_interleave(weeks)
    sale = (torch.rand(len(customer)) < 0.3).double()
    level = 0.8 * torch.randn(num_customers)
    return sale, customer, torch.poisson((0.2 + 0.5 * sale + level[customer]).exp()), level


def model(sale: Tensor, customer: Tensor, num_customers: int, count: Tensor | None = None) -> Tensor:
    base = pyro.param("base", torch.tensor(0.0))
    effect = pyro.param("effect", torch.tensor(0.0))
    spread = pyro.param("spread", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("customers", num_customers):
        level = pyro.sample("level", dist.Normal(0.0, spread))
    with pyro.plate("weeks", len(sale)):
        return pyro.sample("count", dist.Poisson((base + effect * sale + level[customer]).exp()), obs=count)


# %% [markdown]
# ## The fit
# One line, as for eight schools.

# %%
NUM = 100_000
sale, customer, count, truth = orders(NUM)
start = time.process_time()
posterior = LaplaceEvidence(model).run(sale, customer, NUM, count)
seconds = time.process_time() - start
memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(f"{NUM:,} customers, {len(count):,} weeks: {seconds:.1f} s, at most {memory:.2f} GiB in this process")
print(posterior.structure)
print({name: round(float(value), 4) for name, value in posterior.hyperparameters.items()})
assert abs(float(posterior.hyperparameters["spread"]) - 0.8) < 0.02
assert abs(float(posterior.hyperparameters["effect"]) - 0.5) < 0.02

# %% [markdown]
# ## Shrinkage
# What each customer's own weeks say, against what the model says. Who was seen for one week is drawn far to the
# middle, who was seen for eleven hardly. A customer without any order has no level of their own at all (minus
# infinity), and a sensible one here.

# %%
weeks = torch.bincount(customer)
expected = torch.zeros(NUM).index_add(0, customer, (0.2 + 0.5 * sale).exp())
alone = (torch.zeros(NUM).index_add(0, customer, count) / expected).log()
mode = posterior.mode["level"]
figure, ax = plt.subplots()
for number, unwhiten in ((1, "tab:orange"), (4, "tab:green"), (11, "tab:blue")):
    some = torch.nonzero((weeks == number) & alone.isfinite()).squeeze(-1)[:400]
    ax.plot(alone[some], mode[some], ".", color=unwhiten, markersize=3, label=f"seen for {number} weeks")
ax.axline((0.0, 0.0), slope=1.0, color="black", linewidth=0.8)
ax.set(xlabel="the customer's own weeks", ylabel="posterior mode", title="shrinkage")
ax.legend()
few, many = (
    float((mode[keep] / alone[keep])[alone[keep].abs() > 0.5].median())
    for keep in (alone.isfinite() & (weeks == 1), alone.isfinite() & (weeks == 11))
)
print(f"of a customer's own deviation stay {few:.2f} after one week, {many:.2f} after eleven")
assert few < many - 0.1

# %% [markdown]
# ## Are the intervals right?
# Ninety percent of the true levels should lie between the quantiles of 5 and 95 percent. And joint draws of all
# 100,000 levels come from the same factor.

# %%
low, high = posterior.quantiles([0.05, 0.95])["level"]
covered = float(((truth > low) & (truth < high)).double().mean())
start = time.process_time()
draws = posterior.get_samples(100)["level"]
print(f"covered: {covered:.3f}; 100 draws of everything: {time.process_time() - start:.1f} s")
assert abs(covered - 0.9) < 0.02
assert draws.shape == (100, NUM)

# %% [markdown]
# ## The same on 500 customers, beside NUTS
# NUTS samples the same density, with the scale and the effects where the evidence put them.

# %%
SMALL = 500
small = orders(SMALL)
sale, customer, count, truth = small
start = time.process_time()
few = LaplaceEvidence(model).run(sale, customer, SMALL, count)
ours = time.process_time() - start
few.update_param_store()
start = time.process_time()
mcmc = MCMC(NUTS(model), num_samples=250, warmup_steps=100, disable_progbar=True)
mcmc.run(sale, customer, SMALL, count)
theirs = time.process_time() - start
levels = mcmc.get_samples()["level"]
mean, sd = levels.mean(0), levels.std(0)
far = (few.mode["level"] - mean) / sd
figure, ax = plt.subplots()
ax.errorbar(mean, few.mode["level"], xerr=sd, fmt=".", markersize=3, elinewidth=0.4)
ax.axline((0.0, 0.0), slope=1.0, color="black", linewidth=0.8)
ax.set(xlabel="NUTS, mean and standard deviation", ylabel="Laplace, mode", title="500 customers")
ratio = float(few.get_samples(2000)["level"].std(0).div(sd).median())
print(f"Laplace {ours:.1f} s with its scales, NUTS {theirs:.1f} s without; standard deviations differ by {ratio:.2f}")
half = float(far.abs().median())
print(f"modes lie {float(far.mean()):.2f} standard deviations from the means, half of them within {half:.2f}")
assert half < 0.3
assert 0.9 < ratio < 1.1

# %% [markdown]
# ## The honest sentence
# The mode of a skewed posterior is not its mean; with counts near zero it lies above it, here by an eighth of a
# standard deviation on average. That is Laplace's error: it is the same for each customer, so it does not fall when
# there are more of them, and the log evidence carries it once for each. Intervals and scales hardly feel it.
