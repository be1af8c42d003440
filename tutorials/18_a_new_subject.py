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
# # 18. A new subject
# Eighteen people slept three hours a night, and their reaction time was measured on each of ten days (Belenky and
# others 2003). What will a nineteenth person's be? One formula takes us from the table to that interval.

# %%
import matplotlib.pyplot as plt
import pandas
import torch

from pyro_evidence import LaplaceEvidence, Stop, datasets
from pyro_evidence.models.formula import mixed
from pyro_evidence.plots import fitted

torch.set_default_dtype(torch.float64)

# %% [markdown]
# ## The data

# %%
table = datasets.csv("sleepstudy")
frame = pandas.DataFrame(table.X.numpy(), columns=table.names).astype({"Subject": int})
figure, axes = plt.subplots(figsize=(7.0, 4.0))
for _, rows in frame.groupby("Subject"):
    axes.plot(rows.Days, rows.Reaction, color="grey", linewidth=0.8)
_ = axes.set(xlabel="days of three hours' sleep", ylabel="reaction time, ms")
# %% [markdown]
# ## The model
# Everybody has an intercept and a slope of their own, correlated: `(Days | Subject)`. A flat prior on the fixed effects
# makes the fit a restricted maximum likelihood (REML), and keeps their uncertainty in every interval below.

# %%
model, data = mixed("Reaction ~ Days + (Days | Subject)", frame, priors={"b": "flat"})
posterior = LaplaceEvidence(model, stop=Stop(progress=False)).run(*data)
print(*model.heading, "", posterior.fixed(), "", posterior.variances(), sep="\n")

# %% [markdown]
# These are lme4's numbers. The formula wrote a Pyro program, which can be taken and changed.

# %%
print(model.source)

# %% [markdown]
# ## Who stands out

# %%
figure, axes = plt.subplots(1, 2, figsize=(9.0, 5.0), layout="constrained")
for place, effect in zip(axes, ("Intercept", "Days"), strict=True):
    fitted.caterpillar(place, posterior, site="u_Subject", effect=effect)
print(posterior.effects("Subject"))

# %% [markdown]
# ## Is it a straight line?
# A smooth is a line and what departs from it, `s(Days)`. The spread of the departure, in milliseconds, is estimated
# like that of subjects. It is small beside the 10 ms of a day and the noise of 26: a line will do.

# %%
curved, data = mixed("Reaction ~ s(Days, k=6) + (Days | Subject)", frame, priors={"b": "flat"})
smooth = LaplaceEvidence(curved, stop=Stop(progress=False)).run(*data)
print(smooth.variances())
gain = float(smooth.log_evidence - posterior.log_evidence)
print(f"log restricted likelihood: {gain:+.2f} nats for the curve")
figure, axes = plt.subplots(figsize=(7.0, 4.0))
_ = fitted.average_predictions(axes, smooth, column="Days", kind="population")

# %% [markdown]
# ## A new subject
# A subject of the study has effects that ten measurements determine. A new subject has effects that are only known to
# vary as those of the others do, so the interval is wider; its mean is that of the average person, and exact.

# %%
days = pandas.DataFrame({"Days": range(10)})
line = posterior.predict(days, kind="population")
known = posterior.predict(days.assign(Subject=308), quantiles=[0.05, 0.5, 0.95], num_samples=4000)
new = posterior.predict(days.assign(Subject="new"), quantiles=[0.05, 0.5, 0.95], num_samples=4000)
mean = posterior.predict(days.assign(Subject="new"))
figure, axes = plt.subplots(figsize=(7.0, 4.0))
for found, colour, hatch, label in ((new, "tab:orange", "", "a new subject"), (known, "tab:blue", "//", "subject 308")):
    axes.fill_between(days.Days, found[0], found[2], color=colour, alpha=0.3, hatch=hatch, label=f"{label}, 90 %")
axes.plot(days.Days, line, color="black", label="the average person")
seen = frame[frame.Subject == 308]
axes.plot(seen.Days, seen.Reaction, "o", color="tab:blue", label="subject 308, measured")
_ = axes.set(xlabel="days of three hours' sleep", ylabel="reaction time, ms")
_ = axes.legend(loc="upper left")
# %% [markdown]
# ## What a day costs
# `slopes` averages a derivative over the rows, `means` sets a column to a value in all of them.

# %%
print(posterior.slopes("Days", kind="population"))
print(posterior.means("Days", values=[0, 9], kind="population"))

# %%
b = posterior.mode["b"]
assert abs(float(posterior.log_evidence) + 871.814) < 1e-2  # lme4's restricted log likelihood
assert torch.allclose(b, torch.tensor([251.405, 10.467]), atol=1e-2)
assert torch.allclose(mean, line, atol=1e-6) and torch.allclose(line, b[0] + b[1] * torch.arange(10.0), atol=1e-6)
assert float((new[2] - new[0])[9]) > 1.5 * float((known[2] - known[0])[9])
assert gain < 3.0
