"""Messages of engines about their settings and the models that they take, each with what it leads to."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import MCMC, NUTS, config_enumerate
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import (
    REVM,
    RVM,
    VRVM,
    BadInput,
    EvidenceEM,
    ImproperPosterior,
    LaplaceEvidence,
    LaplaceKernel,
    LaplaceNUTS,
    OverlapEM,
    Start,
    Stop,
    UnsupportedModel,
    diagonal,
)
from pyro_evidence.models import marginalised
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import FullNoise, gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import regression
from tests.refusals.remedies import LABELS, LINE, SEPARATED, Remedy, X, Y, draw, fit, normal, observed, plain
from tests.refusals.remedies import regression as by_hand
from tests.refusals.remedies_programs import BLOBS, T

BELONGS = torch.arange(40) // 20
GROUPS = torch.arange(5).repeat_interleave(8)
BASIS = regression(Linear(), beta=4.0)
LOGISTIC = by_hand(plain, lambda m: dist.Bernoulli(logits=m))
CHUNKS = [(X[:20], Y[:20]), (X[20:], Y[20:])]


def groups(g: Tensor, y: Tensor) -> None:
    """A hierarchy whose scale is integrated around Laplace."""
    tau = pyro.sample("tau", dist.HalfNormal(T))
    with pyro.plate("groups", 5):
        a = pyro.sample("a", dist.Normal(T * 0.0, tau))
    observed("y", dist.Normal(a[g], 0.5), y)


def flat_scale(proper: bool) -> Any:
    """One group: the density of its spread falls as 1 / tau, unless the prior does."""

    def model(y: Tensor) -> None:
        flat = dist.ImproperUniform(constraints.positive, (), ())
        tau = pyro.sample("tau", dist.HalfNormal(T) if proper else flat)
        observed("y", dist.Normal(pyro.sample("a", dist.Normal(T * 0.0, tau)), 0.5), y)

    return model


def scales_alone(y: Tensor) -> None:
    observed("y", dist.Normal(0.0, pyro.sample("sigma", dist.HalfNormal(T))), y)


def many_scales(X: Tensor, y: Tensor) -> None:
    tau = pyro.sample("tau", dist.HalfNormal(torch.ones(40).double()).to_event(1))
    w = pyro.sample("w", dist.Normal(torch.zeros(40).double(), tau).to_event(1))
    observed("y", dist.Normal(X @ w, 0.5), y)


WIDE = torch.cat([X, draw(40, 38, seed=7)], -1)


def scored_rows(rows: Tensor, y: Tensor) -> None:
    observed("y", dist.Normal(normal("w", 2).tanh() @ rows.mT, 0.5), y)


def constrained(prior: Any) -> Any:
    return by_hand(lambda: prior.to_event(1))


def named_noise(X: Tensor, y: Tensor) -> None:
    sigma = pyro.param("sigma", lambda: T.clone(), constraint=constraints.positive)
    observed("y", dist.Normal(X @ normal("w", 2), sigma), y)


def labelled(X: Tensor, y: Tensor) -> None:
    sigma = pyro.param("sigma", lambda: T.clone(), constraint=constraints.positive)
    observed("y", dist.Bernoulli(logits=X @ normal("w", 2) / sigma), y)


def mcmc(kernel: Any, *data: Any, **settings: Any) -> Any:
    chains = MCMC(kernel, **{"num_samples": 10, "disable_progbar": True} | settings)
    chains.run(*data)
    return chains.get_samples()


def stepped(engine: Any, *data: Any) -> Any:
    engine.step(*data)
    return engine.posterior


def nuts_on(posterior: Any, *data: Any) -> Any:
    return mcmc(LaplaceNUTS(posterior), *data, warmup_steps=5)


def rotated(fixed: bool) -> Any:
    def model(Y: Tensor) -> None:
        W = normal("W", 4, 2).tril() if fixed else normal("W", 4, 2)
        with pyro.plate("data", len(Y)):
            pyro.sample("y", dist.LowRankMultivariateNormal(T.new_zeros(4), W, T.new_full((4,), 0.5)), obs=Y)

    return model


def resumed(same: bool, path: Any, other: Any = None) -> Any:
    stop = Stop(num_steps=2, throw=False, progress=False, checkpoint=path, checkpoint_interval=0.0)
    RVM(BASIS, stop=stop).run(X, Y)
    return RVM(BASIS if other is None else other).resume(path).run(X, Y if same else Y + 1.0)


HALF = dist.HalfNormal(torch.ones(2).double())
FOUR = draw(30, 2) @ draw(2, 4, seed=3) + 0.5 * draw(30, 4, seed=4)
ENGINES: dict[str, Remedy] = {
    "chunks of what is integrated": Remedy(
        UnsupportedModel,
        r"pass them to run\(\.\.\.\)",
        lambda: LaplaceEvidence(groups).run_chunks([(GROUPS, Y)]),
        lambda: LaplaceEvidence(groups).run(GROUPS, Y),
    ),
    "the same, maximised": Remedy(
        UnsupportedModel,
        r"maximise=\['tau'\]",
        lambda: LaplaceEvidence(groups).run_chunks([(GROUPS, Y)]),
        lambda: LaplaceEvidence(groups, maximise=["tau"]).run_chunks([(GROUPS, Y)]),
    ),
    "chunks of blocks": Remedy(
        UnsupportedModel,
        r"expected nodes=1, or run",
        lambda: LaplaceEvidence(LINE, nodes=5).run_chunks(CHUNKS),
        lambda: LaplaceEvidence(LINE).run_chunks(CHUNKS),
    ),
    "chunks read once": Remedy(
        BadInput,
        "expected a list, a DataLoader",
        lambda: LaplaceEvidence(LINE).run_chunks(iter(CHUNKS)),
        lambda: LaplaceEvidence(LINE).run_chunks(list(iter(CHUNKS))),
    ),
    "chunks of a curved predictor": Remedy(
        UnsupportedModel,
        r"Pass all data to run\(\.\.\.\)",
        lambda: RVM(scored_rows).run_chunks(CHUNKS),
        lambda: LaplaceEvidence(scored_rows).run(X, Y),
    ),
    "chunks of a mixture by hand": Remedy(
        UnsupportedModel,
        r"Pass all data of other models to run\(\.\.\.\)",
        lambda: EvidenceEM(MIXTURE).run_chunks([(BLOBS,)]),
        lambda: EvidenceEM(MIXTURE).run(BLOBS),
    ),
    "gaps in chunks": Remedy(
        BadInput,
        r"EvidenceEM\(marginalised\(model\)\)",
        lambda: EvidenceEM(gaussian_mixture(2)).run_chunks([(gaps(),)]),
        lambda: EvidenceEM(marginalised(gaussian_mixture(2))).run(gaps()),
    ),
    "gaps": Remedy(
        BadInput,
        r"EvidenceEM\(marginalised\(model\)\)",
        lambda: EvidenceEM(gaussian_mixture(2)).run(gaps()),
        lambda: EvidenceEM(marginalised(gaussian_mixture(2))).run(gaps()),
    ),
    "an improper scale": Remedy(
        ImproperPosterior,
        "Give them proper priors, such as HalfNormal",
        lambda: fit(flat_scale(False), Y),
        lambda: fit(flat_scale(True), Y),
    ),
    "the same scale, maximised": Remedy(
        ImproperPosterior,
        "or maximise them by maximise=",
        lambda: fit(flat_scale(False), Y),
        lambda: fit(flat_scale(False), Y, maximise=["tau"]),
    ),
    "nothing inside": Remedy(
        BadInput,
        r"pass marginalise=\(\)",
        lambda: fit(scales_alone, Y, marginalise=["sigma"]),
        lambda: fit(scales_alone, Y, marginalise=()),
    ),
    "too many scales": Remedy(
        BadInput,
        r"marginalise=\(\) puts one Gaussian over everything",
        lambda: fit(many_scales, WIDE, Y),
        lambda: fit(many_scales, WIDE, Y, maximise=["tau"]),
    ),
    "marginalise names what is summed out": Remedy(
        BadInput,
        "leave it out of marginalise",
        lambda: fit(MIXTURE, BLOBS, marginalise=["z"]),
        lambda: fit(MIXTURE, BLOBS),
    ),
    "nodes and a curvature": Remedy(
        BadInput,
        "Leave one of them out",
        lambda: fit(groups, GROUPS, Y, nodes=5, curvature=diagonal),
        lambda: fit(groups, GROUPS, Y, nodes=5),
    ),
    "warm-up": Remedy(
        BadInput,
        r"MCMC\(\.\.\., warmup_steps=0\)",
        lambda: mcmc(LaplaceKernel(LINE), X, Y, warmup_steps=5),
        lambda: mcmc(LaplaceKernel(LINE), X, Y, warmup_steps=0),
    ),
    "where a kernel begins": Remedy(
        BadInput,
        r"start=Start\(restarts=8\)",
        lambda: mcmc(LaplaceKernel(LINE), X, Y, warmup_steps=0, initial_params={"w": X[:1, :2]}),
        lambda: mcmc(LaplaceKernel(LaplaceEvidence(LINE, start=Start(restarts=8))), X, Y, warmup_steps=0),
    ),
    "a kernel of another engine": Remedy(
        BadInput,
        r"engine\.run\(\.\.\.\)\.get_samples",
        lambda: LaplaceKernel(RVM(LINE)),
        lambda: RVM(LINE).run(X, Y).get_samples(10)["w"],
    ),
    "where LaplaceNUTS begins": Remedy(
        BadInput,
        "use NUTS",
        lambda: mcmc(LaplaceNUTS(fit(LINE, X, Y)), warmup_steps=5, initial_params={"w": X[:1, :2]}),
        lambda: mcmc(NUTS(LINE), X, Y, warmup_steps=5, initial_params={"w": X[0]}),
    ),
    "LaplaceNUTS of a model": Remedy(
        BadInput,
        r"expected a posterior of LaplaceEvidence\(\.\.\.\)\.run\(\.\.\.\)",
        lambda: LaplaceNUTS(LINE),
        lambda: nuts_on(fit(LINE, X, Y)),
    ),
    "LaplaceNUTS on other data": Remedy(
        BadInput,
        r"call run\(\) without any",
        lambda: nuts_on(fit(LINE, X, Y), X, Y + 1.0),
        lambda: nuts_on(fit(LINE, X, Y)),
    ),
    "nothing fitted by RVM": Remedy(
        BadInput, r"call run\(\.\.\.\), or step", lambda: RVM(LINE).posterior, lambda: stepped(RVM(LINE), X, Y)
    ),
    "nothing fitted by REVM": Remedy(
        BadInput, r"call run\(\.\.\.\)", lambda: REVM(LINE).posterior, lambda: stepped(REVM(LINE), X, Y)
    ),
    "nothing fitted": Remedy(
        BadInput,
        r"call run\(\.\.\.\), or step",
        lambda: LaplaceEvidence(LINE).posterior,
        lambda: stepped(LaplaceEvidence(LINE), X, Y),
    ),
    "no mixture fitted": Remedy(
        BadInput,
        r"or step\(\.\.\.\)",
        lambda: EvidenceEM(gaussian_mixture(2)).posterior,
        lambda: stepped(EvidenceEM(gaussian_mixture(2)), BLOBS),
    ),
    "no network fitted": Remedy(
        BadInput,
        r"call run\(\.\.\.\)",
        lambda: OverlapEM(prbf(2)).posterior,
        lambda: OverlapEM(prbf(2)).run(BLOBS, BELONGS).log_prob(BLOBS),
    ),
    "validation data for a program": Remedy(
        UnsupportedModel,
        "leave it out",
        lambda: EvidenceEM(mppca(1, 1)).track_validation(BLOBS).run(BLOBS),
        lambda: EvidenceEM(mppca(1, 1)).run(BLOBS),
    ),
    "weights that are positive": Remedy(
        BadInput,
        "Use LaplaceEvidence",
        lambda: RVM(constrained(HALF)).run(X, Y),
        lambda: fit(constrained(HALF), X, Y),
    ),
    "noise that no param is": Remedy(
        BadInput,
        "expected one of the model's",
        lambda: RVM(named_noise, noise="tau").run(X, Y),
        lambda: RVM(named_noise, noise="sigma").run(X, Y),
    ),
    "noise of labels": Remedy(
        UnsupportedModel,
        "Leave noise out",
        lambda: RVM(labelled, noise="sigma").run(X, LABELS),
        lambda: RVM(labelled).run(X, LABELS),
    ),
    "three classes by VRVM": Remedy(
        UnsupportedModel,
        "RVM takes softmax",
        lambda: VRVM(classifier(Linear(), num_classes=3)).run(X, (X[:, 0] > 0).long() + (X[:, 1] > 0)),
        lambda: RVM(classifier(Linear(), num_classes=3)).run(X, (X[:, 0] > 0).long() + (X[:, 1] > 0)),
    ),
    "separable classes without a ridge": Remedy(
        ImproperPosterior,
        "Pass ridge=1e-2",
        lambda: REVM(LOGISTIC, ridge=0.0).run(X, SEPARATED),
        lambda: REVM(LOGISTIC, ridge=1e-2).run(X, SEPARATED),
    ),
    "columns that the ridge outweighs": Remedy(
        BadInput,
        "Multiply the design matrix by",
        lambda: REVM(LINE).run(X * 1e-4, Y),
        lambda: REVM(LINE).run(X * 1e-4 * 1e4, Y),
    ),
    "the same columns, a weaker ridge": Remedy(
        BadInput,
        "or pass ridge=",
        lambda: REVM(LINE).run(X * 1e-4, Y),
        lambda: REVM(LINE, ridge=1e-11).run(X * 1e-4, Y),
    ),
    "a latent space that turns": Remedy(
        UnsupportedModel,
        "zeros above the diagonal hold it",
        lambda: fit(rotated(False), FOUR),
        lambda: fit(rotated(True), FOUR),
    ),
    "the same by EvidenceEM": Remedy(
        UnsupportedModel,
        r"EvidenceEM\(model\)\.run\(Y\)",
        lambda: fit(mppca(1, 2), FOUR),
        lambda: EvidenceEM(mppca(1, 2)).run(FOUR),
    ),
    "a checkpoint of other data": Remedy(
        BadInput,
        "fit anew without resume",
        lambda: in_a_folder(partial(resumed, False)),
        lambda: in_a_folder(partial(resumed, True)),
    ),
    "a checkpoint of another model": Remedy(
        BadInput,
        "resume with the engine that was interrupted",
        lambda: in_a_folder(partial(resumed, True, other=regression(Linear(), beta=1.0))),
        lambda: in_a_folder(partial(resumed, True)),
    ),
    "a class that does not occur": Remedy(
        BadInput,
        "Set num_classes to the number of classes that occur",
        lambda: OverlapEM(prbf(2, num_classes=3)).run(BLOBS, BELONGS),
        lambda: OverlapEM(prbf(2, num_classes=2)).run(BLOBS, BELONGS).log_prob(BLOBS),
    ),
    "more kernels than data": Remedy(
        BadInput,
        "Ask for fewer kernels",
        lambda: OverlapEM(prbf(99)).run(BLOBS, BELONGS),
        lambda: OverlapEM(prbf(4)).run(BLOBS, BELONGS).log_prob(BLOBS),
    ),
    "planes for one plane too many": Remedy(
        BadInput,
        r"gaussian_mixture\(K, noise=FullNoise\(\)\)|fewer columns than the data have|FullNoise",
        lambda: EvidenceEM(mppca(1, 2)).run(BLOBS),
        lambda: EvidenceEM(full(1)).run(BLOBS),
    ),
    "an infinite datum of planes": Remedy(
        BadInput,
        r"Drop such rows: Y\[~Y\.isinf\(\)\.any\(1\)\]",
        lambda: EvidenceEM(mppca(1, 1)).run(infinite()),
        lambda: EvidenceEM(mppca(1, 1)).run(infinite()[~infinite().isinf().any(1)]),
    ),
    "planes of huge numbers": Remedy(
        BadInput,
        "else divide by a typical value",
        lambda: EvidenceEM(mppca(1, 1)).run(FOUR * 1e200),
        lambda: EvidenceEM(mppca(1, 1)).run(FOUR * 1e200 / (FOUR * 1e200).abs().max()),
    ),
}


def gaps() -> Tensor:
    found = BLOBS.clone()
    found[3, 0] = torch.nan
    return found


def infinite() -> Tensor:
    found = FOUR.clone()
    found[3, 0] = torch.inf
    return found


def full(num: int) -> Any:
    return gaussian_mixture(num, noise=FullNoise())


def in_a_folder(use: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return use(path=Path(folder) / "fit.pt")


@config_enumerate
def MIXTURE(Y: Tensor) -> None:
    """Two kernels, written by hand."""
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2, 2).double(), 10.0).to_event(2))
    with pyro.plate("data", len(Y)):
        z = pyro.sample("z", dist.Categorical(torch.full((2,), 0.5).double()))
        pyro.sample("y", dist.Normal(mean[z], 1.0).to_event(1), obs=Y)
