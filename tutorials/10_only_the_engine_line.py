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
# # Tutorial 10: only the engine line changes
#
# Well-known Pyro scripts, their models written as one writes them for NUTS, and one line for all of them:
#
#     posterior = LaplaceEvidence(model).run(*data)
#
# What comes back says of itself whether it can be believed. Where it cannot, the remedy is shown.

# %%
from time import perf_counter

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, Start, Stop, importance_sampling

torch.set_default_dtype(torch.float64)  # log determinants need double precision
pyro.set_rng_seed(0)
gallery = {}

# %% [markdown]
# ## Eight schools, non-centred
#
# Treatment effects in eight schools, their spread `tau` unknown.


# %%
def eight_schools(errors, y):
    eta = pyro.sample("eta", dist.Normal(0.0, 1.0).expand([8]).to_event(1))
    mu = pyro.sample("mu", dist.Normal(0.0, 10.0))
    tau = pyro.sample("tau", dist.HalfCauchy(25.0))
    pyro.sample("y", dist.Normal(mu + tau * eta, errors).to_event(1), obs=y)


errors = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])
effects = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
gallery["eight schools"] = eight_schools, (errors, effects), {}

# %% [markdown]
# ## A Gaussian mixture with enumerated assignments, and a toy mixture of 10,000 points
#
# Discrete sites are summed out, whatever their settings.


# %%
def mixture(data):
    weights = pyro.sample("weights", dist.Dirichlet(2.0 * torch.ones(2)))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 10.0))
    with pyro.plate("data", len(data)):
        z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
        pyro.sample("x", dist.Normal(locs[z], scale), obs=data)


clusters = torch.cat([torch.randn(30), 10.0 + torch.randn(20)])
gallery["Gaussian mixture"] = mixture, (clusters,), {"start": Start(restarts=4)}


def hidden(data):
    p_b = pyro.sample("p_B", dist.Beta(torch.tensor([2.0, 8.0]), torch.tensor([8.0, 2.0])).to_event(1))
    p_c = pyro.sample("p_C", dist.Beta(torch.tensor([2.0, 8.0]), torch.tensor([8.0, 2.0])).to_event(1))
    with pyro.plate("data", len(data)):
        b = pyro.sample("B", dist.Bernoulli(p_b[data[:, 0].long()]), infer={"enumerate": "parallel"})
        pyro.sample("C", dist.Bernoulli(p_c[b.long()]), obs=data[:, 1])


a = torch.bernoulli(torch.full((10_000,), 0.5))
b = torch.bernoulli(torch.where(a > 0, 0.8, 0.2))
pairs = torch.stack([a, torch.bernoulli(torch.where(b > 0, 0.9, 0.1))], -1)
gallery["hidden coin, N = 10,000"] = hidden, (pairs,), {}

# %% [markdown]
# ## Correlations (LKJ), survival along a Markov chain, counts


# %%
def correlations(y):
    theta = pyro.sample("theta", dist.HalfCauchy(1.0).expand([3]).to_event(1))
    tril = pyro.sample("L_omega", dist.LKJCholesky(3, torch.tensor(1.0)))
    with pyro.plate("observations", len(y)):
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(3), scale_tril=theta.sqrt().diag() @ tril), obs=y)


omega = torch.tensor([[1.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 1.0]])
gallery["correlations, LKJ"] = correlations, (torch.randn(300, 3) @ torch.linalg.cholesky(omega).T,), {}


def capture_recapture(captured):
    phi = pyro.sample("phi", dist.Uniform(0.0, 1.0))
    rho = pyro.sample("rho", dist.Uniform(0.0, 1.0))
    with pyro.plate("animals", len(captured), dim=-1):
        z, seen = torch.ones(len(captured)), torch.zeros(len(captured), dtype=torch.bool)
        for time in pyro.markov(range(captured.shape[1])):
            survival = torch.where(seen, z * phi, 1.0)
            z = pyro.sample(f"z_{time}", dist.Bernoulli(survival), infer={"enumerate": "parallel"})
            with pyro.poutine.mask(mask=seen):
                pyro.sample(f"y_{time}", dist.Bernoulli(z * rho), obs=captured[:, time])
            seen = seen | (captured[:, time] > 0)


alive = torch.bernoulli(torch.full((150, 4), 0.7)).cumprod(1)
captured = torch.cat([torch.ones(150, 1), alive * torch.bernoulli(torch.full((150, 4), 0.6))], 1)
gallery["capture-recapture"] = capture_recapture, (captured,), {}


def counts(X, y):
    scale = pyro.param("scale", torch.tensor(1.0), constraint=constraints.positive)
    coef = pyro.sample("coef", dist.Normal(0.0, scale).expand([X.shape[1]]).to_event(1))
    concentration = pyro.sample("concentration", dist.LogNormal(0.0, 1.0))
    with pyro.plate("bins", len(X)):
        pyro.sample("y", dist.GammaPoisson(concentration, concentration / (X @ coef).exp()), obs=y)


X = torch.randn(100, 2)
observed = dist.GammaPoisson(4.0, 4.0 / (X @ torch.tensor([1.0, -0.5])).exp()).sample()
gallery["Gamma-Poisson regression"] = counts, (X, observed), {}

# %% [markdown]
# ## A PyroModule, a Gaussian process, and scales that may vanish
#
# The horseshoe needs a word. Its joint density has no mode: as a local scale goes to zero with its weight, it rises
# without limit. So the scales must be maximised rather than integrated: `maximise=["local"]`.


# %%
class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.linear = PyroModule[nn.Linear](2, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

    def forward(self, x, y=None):
        sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
        mean = self.linear(x).squeeze(-1)  # outside the plate: the weights are drawn here
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)


gallery["PyroModule regression"] = Regression(), (X, X @ torch.tensor([0.5, -1.0]) + 9.0 + torch.randn(100)), {}


def process(x, y):
    lengthscale = pyro.sample("lengthscale", dist.LogNormal(0.0, 0.5))
    noise = pyro.sample("noise", dist.LogNormal(-3.0, 0.5))
    square = ((x.unsqueeze(-1) - x) / lengthscale).square()
    covariance = 0.25 * torch.exp(-0.5 * square) + (0.01 + noise) * torch.eye(len(x))
    pyro.sample("y", dist.MultivariateNormal(torch.zeros(len(x)), covariance), obs=y)


x = torch.linspace(0.0, 5.0, 20)
gallery["Gaussian process"] = process, (x, 0.5 * torch.sin(3.0 * x) + 0.2 * torch.randn(20)), {}


def horseshoe(X, y):
    local = pyro.sample("local", dist.HalfCauchy(1.0).expand([X.shape[1]]).to_event(1))
    w = pyro.sample("w", dist.Normal(0.0, local).to_event(1))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=y)


wide = torch.randn(60, 6)
sparse = wide @ torch.tensor([2.0, 0.0, 0.0, -1.0, 0.0, 0.0]) + 0.5 * torch.randn(60)
gallery["horseshoe"] = horseshoe, (wide, sparse), {"maximise": ["local"]}


def network(x, y):
    first = pyro.sample("first", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    second = pyro.sample("second", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", len(x)):
        mean = torch.tanh(torch.stack([x, torch.ones_like(x)], -1) @ first) @ second
        pyro.sample("y", dist.Normal(mean, 0.2), obs=y)


grid = torch.linspace(-2.0, 2.0, 40)
gallery["Bayesian network, 3 units"] = (
    network,
    (grid, torch.tanh(1.5 * grid) + 0.2 * torch.randn(40)),
    {"start": Start(restarts=4)},
)

# %% [markdown]
# ## The engine line

# %%
quiet = Stop(progress=False)
posteriors, checks, seconds = {}, {}, {}
for name, (model, data, settings) in gallery.items():
    start = perf_counter()
    posteriors[name] = LaplaceEvidence(model, stop=quiet, **settings).run(*data)
    seconds[name] = perf_counter() - start
    checks[name] = importance_sampling(posteriors[name], num_samples=2000)
    found = checks[name]
    stop_reason = "" if found.reliable else "do not believe it"
    print(
        f"{name:26s} Laplace {float(posteriors[name].log_evidence):10.2f}   checked {found.log_evidence:10.2f} "
        f"+- {found.standard_error:4.2f}   k-hat {found.diagnostics['pareto_k']:5.2f}  {stop_reason}"
    )

# %% [markdown]
# Eight pass, the eight schools among them: their spread `tau` is integrated numerically around the rest, because the
# joint density of a scale and what it scales has no useful mode. Two do not pass, and say so: the hidden coin is seen
# through another coin only, which gives a ridge; a network has ridges and mirrored modes besides.
# NUTS on `posterior.model` is the remedy there. The mixture has two labellings of equal height. Both are found,
# integrated together and drawn from; `at_mode` has one of them alone, which holds half of the mass, log 2 nats less.

# %%
both = posteriors["Gaussian mixture"]
one = importance_sampling(both.at_mode(0))
print(both.modes)
print(f"evidence of one labelling {one.log_evidence:.3f}, of both {float(both.log_evidence):.3f}")

# %%
figure, axes = plt.subplots(figsize=(7, 3.5))
styles = (("pass", "tab:blue", ""), ("do not believe it", "tab:orange", "//"))
for (label, color, hatch), reliable in zip(styles, (True, False), strict=True):
    heights = {n: check.diagnostics["pareto_k"] for n, check in checks.items() if check.reliable == reliable}
    shown = [min(max(k, 0.0), 1.5) for k in heights.values()]
    bars = axes.barh(list(heights), shown, color=color, hatch=hatch, label=label)
    axes.bar_label(bars, ["exact" if k == -torch.inf else f"{k:.2f}" for k in heights.values()], padding=3)
axes.axvline(0.7, color="black")
axes.invert_yaxis()
axes.set(xlim=(0.0, 1.75), xlabel="Pareto k-hat, cut at 1.5: right of the line the Gaussian is not to be trusted")
axes.legend(loc="upper right")
figure.tight_layout()

# %% [markdown]
# ## The claim in numbers

# %%
assert len(gallery) == 10
assert sum(found.reliable for found in checks.values()) == 8
assert checks["eight schools"].reliable
assert not checks["Bayesian network, 3 units"].reliable
assert abs(both.log_evidence - one.log_evidence - torch.tensor(2.0).log()) < 0.1
local = posteriors["horseshoe"].hyperparameters["local"]
assert local[[0, 3]].min() > local[[1, 2, 4, 5]].max()
assert abs(posteriors["capture-recapture"].mode["phi"] - 0.7) < 0.1
