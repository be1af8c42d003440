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
# # 12. Persons and items
# Persons answer items. Some persons say yes more readily, some items are easier to say yes to: two plates that
# cross, and every answer touches one of each. Neither can be taken apart from the other, and neither is nested. The
# engine eliminates the larger plate and keeps a dense matrix for the smaller one.

# %%
import time

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence

torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The data
# 3,000 persons, 60 items; each person gets twenty items at random. Persons have a measured temper, items come in
# three kinds, and beyond that both differ for reasons that nobody measured.

# %%
PERSONS, ITEMS, EACH = 3000, 60, 20
person = torch.arange(PERSONS).repeat_interleave(EACH)
item = torch.rand(PERSONS, ITEMS).argsort(-1)[:, :EACH].flatten()
temper, kind = torch.randn(PERSONS), torch.arange(ITEMS) % 3
X = torch.stack([torch.ones(len(person)), temper[person], (kind[item] == 1).double(), (kind[item] == 2).double()], -1)
readiness, easiness = 1.3 * torch.randn(PERSONS), 0.5 * torch.randn(ITEMS)
truth = torch.tensor([0.3, 0.4, -0.8, -1.5])
yes = torch.bernoulli((X @ truth + readiness[person] + easiness[item]).sigmoid())
print(f"{len(yes):,} answers, {float(yes.mean()):.0%} of them yes")

# %% [markdown]
# ## The model
# Fixed effects and the two spreads are parameters, the effects of persons and items are latent.


# %%
def model(X: Tensor, person: Tensor, item: Tensor, yes: Tensor | None = None) -> Tensor:
    b = pyro.param("b", torch.zeros(X.shape[-1]))
    person_sd = pyro.param("person_sd", torch.tensor(1.0), constraint=constraints.positive)
    item_sd = pyro.param("item_sd", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("persons", PERSONS):
        ready = pyro.sample("ready", dist.Normal(0.0, person_sd))
    with pyro.plate("items", ITEMS):
        easy = pyro.sample("easy", dist.Normal(0.0, item_sd))
    with pyro.plate("answers", len(X)):
        return pyro.sample("yes", dist.Bernoulli(logits=X @ b + ready[person] + easy[item]), obs=yes)


start = time.process_time()
posterior = LaplaceEvidence(model).run(X, person, item, yes)
print(f"{time.process_time() - start:.1f} s, log evidence {float(posterior.log_evidence):.2f}")
print(posterior.structure)
hypers = posterior.hyperparameters
print({name: [round(float(x), 3) for x in value.reshape(-1)] for name, value in hypers.items()})
assert abs(float(hypers["person_sd"]) - 1.3) < 0.1
assert abs(float(hypers["item_sd"]) - 0.5) < 0.15

# %% [markdown]
# ## The same score is not the same person
# Two persons with the same number of yeses may have had different items. Those who were asked the harder ones must
# be readier than those who were asked the easy ones. The model knows; the score does not.

# %%
score = torch.zeros(PERSONS).index_add(0, person, yes)
ease = (X[:, [0, 2, 3]] @ truth[[0, 2, 3]] + posterior.mode["easy"][item]).reshape(PERSONS, EACH).mean(-1)
level = posterior.mode["ready"] + hypers["b"][1] * temper
figure, ax = plt.subplots()
points = ax.scatter(score + 0.4 * (torch.rand(PERSONS) - 0.5), level, c=ease, s=6, cmap="coolwarm")
figure.colorbar(points, label="how easy this person's items were, log odds")
ax.set(xlabel="number of yeses out of twenty", ylabel="readiness", title="the same score, other items")
same = score == 10
slope = float(torch.cov(torch.stack([level[same], ease[same]]))[0, 1] / ease[same].var())
print(f"of {int(same.sum())} persons with ten yeses: readiness falls by {-slope:.2f} for each unit of easiness")
assert slope < -0.5

# %% [markdown]
# ## Items
# Sixty items are seen a thousand times each: known well, and the intervals say how well. An item is its kind and what
# is its own; the sum is what the answers determine. The intervals hold the fixed effects at their best values, and so
# are a little narrow.

# %%
low, high = posterior.quantiles([0.05, 0.95])["easy"]
mode = posterior.mode["easy"]
by_kind = torch.cat([torch.zeros(1), hypers["b"][2:]])[kind]
true_ease = torch.cat([torch.zeros(1), truth[2:]])[kind] + easiness + truth[0] - hypers["b"][0]
order = (mode + by_kind).argsort()
figure, ax = plt.subplots()
reach = [(mode - low)[order], (high - mode)[order]]
ax.errorbar(range(ITEMS), (mode + by_kind)[order], yerr=torch.stack(reach).numpy(), fmt=".", label="90 percent")
ax.plot(range(ITEMS), true_ease[order], "k.", markersize=3, label="truth")
ax.set(xlabel="item, from hard to easy", ylabel="easiness, log odds", title="items, with their kinds")
ax.legend()
inside = float(((true_ease > low + by_kind) & (true_ease < high + by_kind)).double().mean())
print(f"{inside:.0%} of the items lie inside")
assert inside > 0.7

# %% [markdown]
# ## Who is readier?
# The posterior is joint: the probability that one person is readier than another comes from draws of both, items and
# all.

# %%
draws = posterior.get_samples(2000)["ready"]
first, second = (int(i) for i in posterior.mode["ready"].argsort()[[2000, 2400]])
probability = float((draws[:, second] > draws[:, first]).double().mean())
print(f"person {second} is readier than person {first} with probability {probability:.2f}")
assert 0.5 < probability < 1.0

# %% [markdown]
# ## Do both plates belong?
# The evidence compares three models of the same answers. A plate that is left out can be put back at a spread of
# zero, so the larger model never does worse; how much better says whether it is needed.


# %%
def persons_only(X: Tensor, person: Tensor, yes: Tensor) -> None:
    b = pyro.param("b", torch.zeros(X.shape[-1]))
    person_sd = pyro.param("person_sd", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("persons", PERSONS):
        ready = pyro.sample("ready", dist.Normal(0.0, person_sd))
    with pyro.plate("answers", len(X)):
        pyro.sample("yes", dist.Bernoulli(logits=X @ b + ready[person]), obs=yes)


def items_only(X: Tensor, item: Tensor, yes: Tensor) -> None:
    b = pyro.param("b", torch.zeros(X.shape[-1]))
    item_sd = pyro.param("item_sd", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("items", ITEMS):
        easy = pyro.sample("easy", dist.Normal(0.0, item_sd))
    with pyro.plate("answers", len(X)):
        pyro.sample("yes", dist.Bernoulli(logits=X @ b + easy[item]), obs=yes)


evidence = {
    "both": float(posterior.log_evidence),
    "persons only": float(LaplaceEvidence(persons_only).run(X, person, yes).log_evidence),
    "items only": float(LaplaceEvidence(items_only).run(X, item, yes).log_evidence),
}
for name, value in evidence.items():
    print(f"{name:>13}: {value:12.2f}, {value - evidence['both']:10.2f} against both")
assert evidence["both"] > max(evidence["persons only"], evidence["items only"]) + 100.0

# %% [markdown]
# ## The honest sentence
# With twenty answers for each person, Laplace's evidence is off by a little for each of them, and a spread of persons
# that is fitted by it comes out slightly small. Crossed plates have no blocks that are independent given the rest, so
# there is no cheap quadrature that would mend it; the draws of NUTS would.
