"""Posterior of a mixture, its density of data, and the gain that correlated noise would bring."""

import copy
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_evidence import display
from pyro_evidence.display import PROB, Axes
from pyro_evidence.errors import BadInput
from pyro_evidence.files import Array
from pyro_evidence.fitting.process_state import own_random_numbers
from pyro_evidence.mixture.density import MixtureDensity
from pyro_evidence.mixture.evidence import well_determined
from pyro_evidence.mixture.expectation import Mixture
from pyro_evidence.mixture.recognise import (
    Kernels,
    MixtureStructure,
    held_at,
    kernels,
    recognise_mixture,
    with_components,
)
from pyro_evidence.posterior import archive
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.checks import as_tensors, new_data, require_kept
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import check_count, check_probability, seeded

NOTABLE_GAIN = 10.0  # nats beyond half the added parameters times log N


@dataclass(frozen=True)
class NoiseGain:
    """A rise of the log likelihood by other noise.

    :ivar nats: that is gained at the responsibilities as they are; the whole rise is larger.
    :ivar chance: nats that may be gained by chance.
    :ivar advice: a sentence with the remedy.
    """

    nats: float
    chance: float
    advice: str

    @property
    def notes(self) -> list[str]:
        """The advice where the gain is beyond chance."""
        return [self.advice] if self.nats > self.chance else []


def gain(residuals: Tensor, weight: Tensor) -> float:
    """Minus half the weight times the log determinant of the correlations of residuals ``(N, m)``, nats."""
    S = (residuals * weight.unsqueeze(-1)).mT @ residuals
    scale = S.diagonal().sqrt()
    return float(-0.5 * weight.sum() * torch.linalg.slogdet(S / torch.outer(scale, scale)).logabsdet)


class ComponentPosterior(LaplacePosterior):
    """A Laplace posterior of a model with components, of which some may be pruned; subclasses are frozen dataclasses.

    :ivar recognised: the model's structure.
    :ivar active: components that are not pruned, shape ``(K,)`` bool.
    :ivar limit: what ended the search for the number of components before the evidence did; empty if nothing.
    """

    _maximises_evidence: ClassVar[bool] = False
    _mirrors: ClassVar[Any] = ()  # of labels and of turns it has its own count
    recognised: Any
    active: Any
    limit: str

    @property
    def num_components(self) -> int:
        """Number of components that are left."""
        return int(self.active.sum())

    _num_components = property(attrgetter("num_components"))
    _num_maximised = property(attrgetter("recognised.joint.hypers.size"))


@dataclass(frozen=True, repr=False)
class MixturePosterior(ComponentPosterior):
    """A Laplace posterior over the weights of a mixture, with what the mixture says about data.

    Pruned components keep their place, with mixing 0 and their weights at the prior, so that shapes are the model's.
    Each round's log evidence is in ``log_evidences``, its errors in ``train_nll`` and ``test_nll``; for all restarts,
    datum by datum, see :func:`~pyro_evidence.compare.learning_curve.learning_curve`.

    :ivar recognised: the model's structure.
    :ivar mixture: weights and hyperparameters, one row, in the model's units.
    :ivar num_clipped: negative eigenvalues of the curvature that the last round took as zero.
    :ivar paths: ``train_nll``, and ``test_nll`` if there is one.
    :ivar limit: what ended the search for the number of components before the evidence did; empty if nothing.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM
    >>> from pyro_evidence.models.mixture import gaussian_mixture
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> posterior = EvidenceEM(gaussian_mixture(4)).run(Y)
    >>> posterior.num_components, tuple(posterior.responsibilities(Y).shape), tuple(posterior.log_prob(Y).shape)
    (2, (60, 4), (60,))
    """

    schema: ClassVar[Mapping[str, Any]] = archive.LAPLACE | {"paths": [Array("S")], "num_components": int, "limit": str}
    _in_blocks: ClassVar[bool] = False

    _: KW_ONLY
    recognised: MixtureStructure
    mixture: Mixture
    num_clipped: int = 0
    paths: tuple[Tensor, ...] = ()
    limit: str = ""

    @property
    def train_nll(self) -> Tensor:
        """Minus the mean log density of the training data after each round, nats per datum, shape ``(S,)``.

        The way of the restart that was chosen, at the weights of the round: the start, ``warm_up`` rounds, and then as
        ``log_evidences``, whose first entry is the last of these.  Rounds inside the deletion are left out.
        """
        return self.paths[0]

    @property
    def test_nll(self) -> Tensor:
        """Negative log density of the watched data, round by round, nats per datum, shape ``(S,)``.

        :raises BadInput: when there are none.
        """
        if len(self.paths) < 2:
            raise BadInput(
                "no data were watched; fit by EvidenceEM(model).track_validation(Y_test).run(Y) to have their errors."
            )
        return self.paths[1]

    @property
    def active(self) -> Tensor:
        """Components that are not pruned, shape ``(K,)`` bool."""
        return self.mixture.active[0]

    @property
    def gamma(self) -> dict[str, Tensor]:
        """Number of well-determined parameters of each prior precision, in the hyperparameter's shape.

        From the full Hessian at the mode.
        """
        tril = self.state.precision.tril[0]  # type: ignore[attr-defined]
        place = self.recognised.index.flatten()
        A = (tril @ tril.mT)[place][:, place] - self.mixture.alpha.flatten().diag()
        each = well_determined(A[None, None], self.mixture.alpha).gamma[0]
        return self.recognised.alpha.totals(self.recognised.joint.hypers, each)

    @property
    def pruned(self) -> dict[str, Tensor]:
        """Which elements of weights and hyperparameters are of pruned components alone, bool masks of their shapes."""
        of, off, hypers = self.recognised, ~self.active, self.recognised.joint.hypers
        w = torch.zeros(of.joint.latents.size, dtype=torch.bool, device=off.device)
        w[of.index[off].flatten()] = True
        found = of.joint.latents.unconstrained(w)
        for scaling in (of.alpha, of.beta):
            on = self.active.reshape(-1, *[1] * (scaling.index.dim() - 1)).expand(scaling.index.shape).double()
            found |= {name: total == 0.0 for name, total in scaling.totals(hypers, on).items()}
        found |= {} if of.mixing is None else {of.mixing: off}
        size = of.Y.shape[1]
        return found | ({} if of.correlation is None else {of.correlation: off[:, None, None].expand(-1, size, size)})

    def density(self, *args: Any, **kwargs: Any) -> MixtureDensity:
        """The fitted density at the mode; for a conditional model one for each row of the inputs given.

        It has moments, quantiles, a distribution function, draws, and marginal and conditional densities.  The noise is
        that of the training data, also where a model measures it in units of the data that it is given, and so is the
        box of a background.

        :param args: as for the model, responses optional; the training data without arguments.
        """
        return self._density(self._kernels(args, kwargs))

    def log_prob(self, *args: Any, **kwargs: Any) -> Tensor:
        """Log density of each datum at the mode, nats, shape ``(N,)``; the training data without arguments.

        Missing values are integrated out.

        :raises BadInput: when the arguments hold no responses.
        """
        found = self._given(args, kwargs)
        return self._density(found).log_prob(found.value)

    def responsibilities(self, *args: Any, **kwargs: Any) -> Tensor:
        """``p(component | datum)`` at the mode, shape ``(N, K)``; the training data without arguments.

        Rows add up to one, or to what a background leaves of it.

        :raises BadInput: when the arguments hold no responses.
        """
        found = self._given(args, kwargs)
        return self._density(found).responsibilities(found.value)

    def plot(
        self,
        axes: Axes | None = None,
        *,
        prob: float = PROB,
        Y: Tensor | None = None,
        outputs: tuple[int, int] = (0, 1),
    ) -> Axes:
        """Data in colour and shape of their likeliest component, with an ellipse around each and its share.

        Of one output a histogram with the density and each component's part; the table of a conditional density, and of
        one output where the data were not kept.

        :param axes: to draw on; None makes a figure of its own.
        :param prob: mass of a component inside its ellipse.
        :param Y: data ``(N, m)``; the training data by default, where they were kept.
        :param outputs: the two on the axes; over the others the density is integrated.
        :raises BadInput: for outputs that are not there.
        :raises ImportError: without matplotlib.
        """
        density = self.density() if self.recognised.G is None else None
        given = self.recognised.Y if Y is None else Y
        if density is None or (density.loc.shape[-1] == 1 and not len(given)):
            return super().plot(axes, prob=prob)
        check_probability(prob)
        if density.loc.shape[-1] == 1:
            return self._one_output(display.axes_or_own(axes), density, given[~given.isnan()])
        display.check_plane("outputs", outputs, density.loc.shape[-1])
        axes, plane = display.axes_or_own(axes), density.marginal(outputs)
        owner = self.responsibilities(given).argmax(-1) if len(given) else given.new_zeros(0)
        for number, k in enumerate(self.active.nonzero().flatten().tolist()):
            share, style = plane.log_mixing[0, k].exp(), display.points_of(number)
            style |= {"markersize": display.SMALL, "label": f"{float(share):.0%} of the data"}
            axes.plot(*given[owner == k][:, outputs].T.tolist(), **style, alpha=0.5)
            display.kernel_ellipses(
                axes, share[None], plane.loc[0, [k]], plane.tril[0, [k]], mass=prob, color=style["color"]
            )
        x, y = (f"output {number}" for number in outputs)
        axes.legend(title=f"ellipses hold {display.percent(prob)} % of each", fontsize="small")
        return display.with_labels(axes, x, y, legend=False)

    def _one_output(self, axes: display.Axes, density: MixtureDensity, Y: Tensor) -> display.Axes:
        """A histogram of the data ``(N,)``, the density and the part of each component."""
        axes.hist(Y.tolist(), bins="sqrt", density=True, color="lightgrey", label="the data")
        grid = torch.linspace(float(Y.min()), float(Y.max()), display.NUM_GRID).to(density.loc).unsqueeze(-1)
        parts, x = density.component_log_prob(grid).exp(), grid[:, 0].tolist()
        axes.plot(x, density.log_prob(grid).exp().tolist(), color="black", label="density")
        for number, k in enumerate(self.active.nonzero().flatten().tolist()):
            label = f"{float(density.log_mixing[0, k].exp()):.0%} of the data"
            axes.plot(x, parts[:, k].tolist(), **display.line_of(number), label=label)
        return display.with_labels(axes, "output 0", "density")

    def _kernels(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kernels:
        """The kernels at these arguments; at the training data without any."""
        structure = self.recognised
        joint = held_at(structure.joint, structure.params(self.mixture))
        if args or kwargs:
            joint = copy.copy(joint)
            joint.args, joint.kwargs = as_tensors(args, kwargs)
        else:
            require_kept(joint, "a method without arguments")
        with own_random_numbers():  # a response that is not given is drawn, and not looked at
            with new_data(joint.args, joint.kwargs):
                trace = joint.trace(structure.flat(self.mixture.w[0]), joint.initial_theta)
        return kernels(joint, trace)

    def _density(self, found: Kernels) -> MixtureDensity:
        loc, noise, background = found.loc.movedim(0, 1).detach(), self.mixture.noise[0], self.recognised.background
        tril = noise.rsqrt().diag_embed() if noise.dim() == 2 else torch.linalg.cholesky(torch.linalg.inv(noise))
        tril = tril.to(loc).expand(1, *loc.shape[1:], loc.shape[-1])
        return MixtureDensity(found.probs.detach().log().unsqueeze(0), loc, tril, background)

    def _given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kernels:
        """The kernels at arguments with responses, as many as were fitted."""
        found = self._kernels(args, kwargs)
        if not found.is_observed:
            raise BadInput("the arguments hold no responses; expected them as for run(...).")
        given, fitted = found.value.shape[-1], self.recognised.Y.shape[-1]
        if given != fitted:
            raise BadInput(
                f"the data have {given} column(s); the mixture was fitted to {fitted}. Pass the same columns, in the "
                f"same order; marginals are had from density(...).marginal."
            )
        return found

    def mean(self, *args: Any, **kwargs: Any) -> Tensor:
        """Mean of the response, shape ``(N, m)``, or ``(1, m)`` for an unconditional density."""
        return self.density(*args, **kwargs).mean

    def variance(self, *args: Any, **kwargs: Any) -> Tensor:
        """Variance of the response, shape ``(N, m)``, or ``(1, m)`` for an unconditional density."""
        return self.density(*args, **kwargs).variance

    def sample(self, num_samples: int, *args: Any, seed: int | None = 0, **kwargs: Any) -> Tensor:
        """Draws of the response at the mode, shape ``(S, N, m)``, or ``(S, 1, m)`` for an unconditional density."""
        num_samples = check_count("num_samples", num_samples)
        generator = seeded(seed)
        return self.density(*args, **kwargs).sample(num_samples, generator)

    @property
    def _num_checked(self) -> int:
        return 10_000

    def _described(self, check: dict[str, Any]) -> dict[str, Any]:
        """And the number of components and of clipped eigenvalues."""
        found, gain = super()._described(check), self.correlation_gain
        return found | {
            "num_components": self.num_components,
            "num_components_limited_by": self.limit,
            "num_clipped": self.num_clipped,
            "correlation_gain": 0.0 if gain is None else gain.nats,
            "notes": [] if gain is None else gain.notes,
        }

    def _weighed(self, num_samples: int, seed: int, kept: bool = True) -> tuple[Tensor, Tensor]:
        self._needs_data("log_weights")
        return super()._weighed(num_samples, seed, kept)

    @property
    def _is_checkable(self) -> bool:
        return self._joint.has_data

    @property
    def correlation_gain(self) -> NoiseGain | None:
        r"""Gain of one round of EM by correlated noise; None where it is so, or data were not kept or have gaps.

        .. math:: -\tfrac12 \sum_k N_k \log |R_k|

        with the correlations ``R_k`` of a component's residuals, each datum by how likely it is of it.
        """
        Y, G, mixture, active = self.recognised.Y, self.recognised.G, self.mixture, self.active
        if not self._joint.has_data or mixture.has_full_noise or not bool(Y.isfinite().all()):
            return None
        means = [w[:, 0] if G is None else G @ w.mT for w in mixture.w[0, active]]
        weights = self.responsibilities().mT[active] * self.recognised.weight
        nats = sum(gain(Y - mean, weight) for mean, weight in zip(means, weights, strict=True))
        num = len(means) * Y.shape[1] * (Y.shape[1] - 1) // 2
        advice = (
            f"correlated noise would gain at least {nats:.0f} nats by {num} more parameters (chance alone gives "
            f"{0.5 * num:.0f}): fit the model with noise=FullNoise() and compare the log evidences."
        )
        return NoiseGain(nats, NOTABLE_GAIN + 0.5 * num * math.log(len(Y)), advice)

    def _record(self) -> dict[str, Any]:
        return super()._record() | {"paths": self.paths, "num_components": len(self.active), "limit": self.limit}

    @classmethod
    def _restored(cls, content: Mapping[str, Any], model: Model, sizes: Mapping[str, int]) -> "MixturePosterior":
        num = content["num_components"]
        if not 0 < num <= sizes["D"]:
            raise BadInput(f"num_components is {num:.4g}; expected 1 to {sizes['D']}, one weight each at least.")
        model = with_components(model, num)
        state = archive.restore(content, model)
        archive.require_laplace(state)
        structure = recognise_mixture(LogJoint(model, content["args"], content["kwargs"]))
        mixture = replace(recognise_mixture(state.problem.joint).start, w=state.u[structure.index].unsqueeze(0))
        own = {"recognised": structure, "mixture": mixture, "paths": tuple(content["paths"]), "limit": content["limit"]}
        return cls(state, *archive.history(content), **own)
