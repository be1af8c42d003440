"""The posterior of a fit on a few axes of weight space."""

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from pyro_evidence import display
from pyro_evidence.display import Axes, Table
from pyro_evidence.errors import BadInput
from pyro_evidence.files import Array, Record
from pyro_evidence.fitting.process_state import own_random_numbers, put_into_store
from pyro_evidence.laplace.approximation import laplace_problem, laplace_state
from pyro_evidence.numerics.derivatives import jacobian
from pyro_evidence.numerics.evidence import well_determined
from pyro_evidence.numerics.quadrature.rules import quasi_normal
from pyro_evidence.posterior import archive, predict
from pyro_evidence.posterior.base import Posterior
from pyro_evidence.posterior.guide import LaplaceGuide
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.reweighted import CorrectedPosterior
from pyro_evidence.program.failed_run import new_data
from pyro_evidence.program.links import LOGISTIC, SOFTMAX, Link, hermite, moderated_output, softmax_average
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.program.predictors import unwrapped
from pyro_evidence.relevance.axis_priors import (
    AXES,
    AxisPrior,
    GaussianFit,
    GaussianPrior,
    GroupPrior,
    L1Prior,
    OnAxes,
    SparseState,
    WithWeights,
    gaussian_fit,
)
from pyro_evidence.relevance.weights import Weights, weights_of
from pyro_evidence.settings import check_count, check_probability

OURS: dict[str, Any] = {p.__name__: p for p in (GaussianPrior, GroupPrior, L1Prior)}  # priors that a file may name
AXES_POSTERIOR = {
    "format": str,
    "kind": str,
    "prior": list,
    "sites": [str],
    "args": [object],
    "kwargs": {str: object},
    "held": {str: Array(finite=False)},
    "log_joint_beside": Array(""),
    "log_evidence": Array(""),
}
NO_AXIS = "every axis was pruned, so {}; use get_samples(...), whose weights are 0."
DRAWN = 12  # axes in a picture
CHECKS = (
    "gradient_norm smallest_eigenvalue pareto_k log_evidence_importance log_evidence_importance_se "
    "effective_sample_size largest_mean_shift largest_sd_ratio"
).split()
Integral = Callable[[Tensor, Tensor], Tensor]  # mean and variance of eta -> probability


@dataclass(frozen=True, repr=False)
class AxesPosterior(Posterior):
    """Gaussian approximation in the active axes, at the mode of likelihood times learned prior.

    :ivar of: the weights it is of.
    :ivar state: the fit; every number below is of this one.
    """

    of: Weights
    state: SparseState

    def __getstate__(self) -> dict[str, Any]:
        """The fields that were given, without what follows from them."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(log_evidence={float(self.log_evidence):.6g}, sites={list(self.of.sites)}, "
            f"active={self.num_active} of {len(self.active)}, status={self.status!r})"
        )

    @cached_property
    def _fit(self) -> GaussianFit:
        return gaussian_fit(self.of, self.state)

    @property
    def log_evidence(self) -> Tensor:
        """``log p(D | alpha)`` by Laplace's approximation at the mode, nats, constants included.

        Where the axes come from the data, as in REVM, it cannot choose a ridge, a kernel or a prior:
        cross-validate.
        """
        return self._fit.log_evidence

    @property
    def evidence_note(self) -> str:
        """A sentence on the use of the log evidence; the summary ends with it."""
        return (
            "that of a prior learned from the same data: it cannot choose a kernel, its width, a basis, a ridge or a "
            "prior. Cross-validate."
        )

    @property
    def alpha(self) -> Tensor:
        """Learned hyperparameter of each axis, ``inf`` where pruned, shape ``(K,)``.

        A precision under the Gaussian prior, twice the rate under the Laplace prior.
        """
        return self.state.alpha

    @property
    def active(self) -> Tensor:
        """Which axes carry weight at the mode, bool, shape ``(K,)``."""
        return self.state.active

    @property
    def num_active(self) -> int:
        """Number of active axes."""
        return self.state.num_active

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights at the mode, by site."""
        return {n: v for n, v in self.mode.items() if n in self.of.sites}

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """``alpha`` of every axis, and the model's params."""
        return {**self.of.joint.held, "alpha": self.alpha}

    @property
    def _joint(self) -> LogJoint:
        return self.of.joint

    @property
    def _mode_at(self) -> tuple[Tensor, Tensor]:
        return self.of.flat(self.state.y), self.of.joint.initial_theta

    @property
    def gamma(self) -> dict[str, Tensor]:
        """Well-determinedness of each active axis, 0 to 1; Gaussian prior only."""
        if not isinstance(self.state.prior, GaussianPrior) or not len(self.state.x):
            return {}
        variance = torch.cholesky_inverse(self._fit.precision_tril).diagonal()[: self.num_active]
        return {"alpha": well_determined(self.alpha[self.active], variance)}

    @property
    def _num_directions(self) -> int:
        return len(self.state.x)

    def _draws(self, white: Tensor) -> Tensor:
        return self.of.flat((self.state.x + self._unwhiten(white.to(self.state.x))) @ self.state.embedding.mT)

    def _away(self, z: Tensor) -> Tensor:
        axes = self.state.embedding @ self._unwhiten(torch.eye(len(self.state.x)).to(self.state.x)).mT
        sd = axes.square().sum(-1).sqrt()  # axes @ axes.mT is the posterior covariance of the weights and the others
        return self.of.flat(self.state.y + z.unsqueeze(-1) * sd)

    def _unwhiten(self, white: Tensor) -> Tensor:
        tril = self._fit.precision_tril
        return torch.linalg.solve_triangular(tril.mT, white.mT, upper=True).mT if len(tril) else white

    @cached_property
    def _laplace(self) -> LaplacePosterior:
        """This mode as a Laplace posterior of :attr:`model`."""
        self._needs_data("a guide")
        joint = LogJoint(self.model, self.of.joint.args, self.of.joint.kwargs, maximise=())
        values = self.mode | {AXES: self.state.x[: self.num_active].to(joint.dtype)}
        u = joint.latents.flat({n: values[n] for n in joint.latents.names}).double()
        state = laplace_state(laplace_problem(joint), joint.initial_theta, u)
        return LaplacePosterior(state, "converged", (float(state.log_evidence),), state.log_evidence.reshape(1))

    def columns(self) -> dict[str, Tensor]:
        """Columns of :meth:`table`, one number per active axis."""
        return {"alpha": self.alpha[self.active], "u": self.state.x[: self.num_active]}

    def table(self) -> Table:
        """The axes that are kept, a row each, and how many are pruned; ``.to_pandas()`` has the numbers."""
        columns, index = self.columns(), torch.nonzero(self.active).flatten().tolist()
        rows = {f"axis {i}": {n: float(c[k]) for n, c in columns.items()} for k, i in enumerate(index)}
        pruned = len(self.active) - len(index)
        said = [f"{pruned} of {len(self.active)} axes are pruned"] if pruned else []
        return Table(rows, dict.fromkeys(columns, ""), said, digits=4)

    def summary(self) -> None:
        """Print the axes that are kept, then the log evidence and how far to trust it."""
        lines = [str(self.table()), *(f"{k} = {v}" for k, v in self.diagnostics().items())]
        lines.append(f"the log evidence is {self.evidence_note}")
        print("\n".join(lines))  # noqa: T201 - printing is what summary() is for, as in MCMC

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{self.table()._repr_html_()}"

    def plot(self, axes: Axes | None = None, *, prob: float = 0.9) -> Axes:
        """The axes that are kept, twelve at most, those furthest from zero: a point and an interval for each weight.

        >>> posterior.plot()  # doctest: +SKIP

        :param axes: to draw on; None takes matplotlib's present ones.
        :param prob: in the intervals.
        :raises BadInput: where every axis was pruned.
        :raises ImportError: without matplotlib.
        """
        axes = display.matplotlib("pyplot").gca() if axes is None else axes
        display.check_axes(axes)
        check_probability("prob", prob)
        if not self.num_active:
            raise BadInput(NO_AXIS.format("there is nothing to draw"))
        sd = self._whitened(torch.eye(len(self.state.x)).to(self.state.x)).square().sum(0).sqrt()[: self.num_active]
        middle = self.state.x[: self.num_active]
        order = (middle.abs() / sd).argsort(descending=True)[:DRAWN].sort().values
        reach = float(torch.special.ndtri(torch.tensor(0.5 + 0.5 * prob, dtype=torch.float64))) * sd
        names = [f"axis {int(i)}" for i in torch.nonzero(self.active).flatten()[order]]
        display.intervals(axes, names, *((middle + k * reach)[order].tolist() for k in (0, -1, 1)))
        axes.set_xlabel(f"weight, {100.0 * prob:.4g} % interval")
        return axes

    def importance_resampled(self, num_samples: int = 4_000, seed: int = 0) -> CorrectedPosterior:
        """The same posterior without Laplace's error in shape, the learned prior held: draws weighted (PSIS).

        Its sites are those of :attr:`model`, ``axes`` among them, and the weights that follow from these.

        :param num_samples: draws to be weighted; with k-hat they tell how many they are worth.
        :raises BadInput: for fewer than 100 draws, without an active axis, or where the data came in chunks.
        """
        self._needs_data("a correction")
        if not self.num_active:
            raise BadInput(NO_AXIS.format("there is nothing to correct"))
        found = self._laplace.importance_resampled(num_samples, seed)
        axes = found.draws[AXES]
        return replace(found, draws=found.draws | self.of.values(axes @ self.state.directions.to(axes).mT))

    @property
    def guide(self) -> LaplaceGuide:
        """The posterior as a guide of :attr:`model`, whose latent site is ``axes``."""
        if not len(self.state.x):
            raise BadInput(NO_AXIS.format("a guide has nothing to sample"))
        return self._laplace.guide

    @property
    def model(self) -> Model:
        """The user's model with the learned prior, for NUTS and Predictive, in any process.

        Its latent site ``axes``, shape ``(num_active,)``, takes the place of the weights, which are
        deterministic sites of their own names.  Every prior precision is finite there: pruned axes are not in
        it.
        """
        joint = self.of.joint
        user = joint.substituted(joint.initial_theta)
        if not self.num_active:
            return WithWeights(user, self.weights)
        prior = self.state.prior.distribution(self.alpha[self.active].to(joint.dtype))
        shapes = {n: tuple(v.shape) for n, v in self.weights.items()}
        return OnAxes(user, self.state.directions.to(joint.dtype), prior, shapes)

    def _needs_data(self, what: str) -> None:
        """Refuse what looks at the training data as a whole, where they came in chunks."""
        if not self.of.target.is_resident:
            raise BadInput(
                f"{what} needs the training data, which came in chunks and were not kept; pass the model's arguments "
                "for some rows to predictor, probability or log_prob, or run NUTS on posterior.model with data."
            )

    def predictor(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance of the first observed site's predictor, each of its shape.

        :param args: the model's arguments; the targets may be left out.  Random state is left alone.
        """
        eta, J = self._tangents(args, kwargs)
        return eta, (self._whitened(J.mT)).square().sum(0).reshape(eta.shape)

    def _tangents(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The first observed site's predictor at the mode, and its derivative in ``x``, ``(size, K + V)``."""
        joint, slot = self._with(args, kwargs), self.of.slots[0]
        x = self.state.x.clone().requires_grad_()
        with own_random_numbers(), new_data(joint.args, joint.kwargs):
            trace = joint.trace(self.of.flat(self.state.embedding @ x), joint.initial_theta)
        eta = slot.link.inverse(slot.value(trace)).double()  # of any number of new inputs
        return eta.detach(), jacobian(eta.reshape(-1), x)

    def _averaged(self, args: tuple[Any, ...], kwargs: dict[str, Any], num_samples: int, seed: int) -> Tensor:
        """``E softmax`` at each row by itself, ``(N, C)``."""
        eta, J = self._tangents(args, kwargs)
        white = self._whitened(J.mT).mT.reshape(*eta.shape, -1)
        points = quasi_normal(check_count("num_samples", num_samples), eta.shape[-1], seed)
        return softmax_average(eta, white @ white.mT, points.to(eta))

    def _whitened(self, columns: Tensor) -> Tensor:
        """``L^-1`` times columns ``(K + V, S)``, the posterior precision being ``L L'``."""
        tril = self._fit.precision_tril
        return torch.linalg.solve_triangular(tril, columns, upper=False) if len(tril) else columns

    def probability(
        self,
        *args: Any,
        integral: Integral = moderated_output,
        site: str | None = None,
        num_samples: int = 1000,
        **kwargs: Any,
    ) -> Tensor:
        """Class probabilities averaged over the posterior: of label 1 ``(N,)``, or of each class ``(N, C)``.

        :param integral: of the sigmoid under a Gaussian, for a Bernoulli site in log odds: :func:`moderated_output`,
            :func:`hermite`, or your own; none of the two changes a decision.
        :param site: the observed site, where there are several.
        :param num_samples: points at which several classes are averaged, the same for each row.
        :raises UnsupportedModel: for a site that has no classes.
        """
        if site is None and self._sees(Bernoulli, *LOGISTIC):
            return integral(*self.predictor(*args, **kwargs))
        if site is None and self._sees(Categorical, *SOFTMAX):
            return self._averaged(args, kwargs, num_samples, 0)
        return predict.probability(self, self._with(args, kwargs), site=site, num_samples=num_samples)

    def predict(
        self,
        *args: Any,
        return_std: bool = False,
        quantiles: float | Sequence[float] | None = None,
        site: str | None = None,
        num_samples: int = 1000,
        seed: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Means, standard deviations or quantiles; see :meth:`LaplacePosterior.predict`.

        Probabilities of classes are averaged at each row by itself, without draws.
        """
        if not return_std and quantiles is None and site is None:
            if self._sees(Bernoulli, *LOGISTIC):
                return hermite(*self.predictor(*args, **kwargs))
            if self._sees(Categorical, *SOFTMAX):
                return self._averaged(args, kwargs, num_samples, seed)
        how: Any = dict(return_std=return_std, quantiles=quantiles, site=site, num_samples=num_samples, seed=seed)
        return predict.predict(self, self._with(args, kwargs), **how)

    def _sees(self, kind: type[Any], *links: Link) -> bool:
        """Whether the one observed site is of this kind and sees one predictor for each class but the first."""
        slot, joint = self.of.slots[0], self.of.joint
        if slot.link not in links or len(joint.observed) > 1 or (slot.layout.num_coupled > 1 and kind is Bernoulli):
            return False
        node = joint.trace(joint.initial_u, joint.initial_theta).nodes[slot.site]
        return isinstance(unwrapped(node["fn"]).base, kind)

    def update_param_store(self) -> None:
        """Write the params to Pyro's global param store; ``alpha`` is none of them."""
        put_into_store(self.of.joint.held, self.of.joint.param_constraints)

    def diagnostics(self) -> dict[str, Any]:
        """Diagnostics by name; importance sampling is that of :class:`LaplacePosterior`.

        Above .2 and 1.2 for the largest shift of a mean and ratio of deviations take :meth:`importance_resampled`.
        """
        found = {"status": self.status, "log_evidence": float(self.log_evidence), "num_active": self.num_active}
        if not len(self.state.x) or not self.of.target.is_resident:
            return found
        laplace = self._laplace.diagnostics()
        return found | {k: laplace[k] for k in CHECKS}

    @property
    def status(self) -> str:
        """Why the fit stopped, as a sentence."""
        return "converged"

    def save(self, path: str | Path) -> None:
        """Write tensors and settings, no code, in the layout of safetensors; the file is whole or is not there.

        :raises BadInput: where the data came in chunks, and for arguments or a prior that a file cannot hold.
        :raises NotWritten: when the disk is full or the folder cannot be written to; what was there before stays.
        """
        archive.write(self._record(), path)

    def _record(self) -> dict[str, Any]:
        joint, prior = self.of.joint, self.state.prior
        self._needs_data("a file")
        archive.storable(joint.args, "positional arguments")
        archive.storable(joint.kwargs, "keyword arguments")
        if type(prior) not in OURS.values():
            raise BadInput(
                f"prior is a {type(prior).__name__}, which a file of tensors cannot hold; expected GaussianPrior, "
                "GroupPrior or L1Prior."
            )
        return {
            "format": archive.FORMAT,
            "kind": type(self).__name__,
            "prior": [type(prior).__name__, *vars(prior).values()],
            "sites": list(self.of.sites),
            "args": list(joint.args),
            "kwargs": dict(joint.kwargs),
            "state": self.state.record(),
            "held": {n: v.detach().clone() for n, v in joint.held.items()},
            "log_joint_beside": self._log_joint_beside,
            "log_evidence": self.log_evidence,
        }

    @property
    def _log_joint_beside(self) -> Tensor:
        """Log joint one posterior standard deviation beside the mode, in a direction without symmetry, nats, ``()``."""
        white = (1.7 * torch.arange(1.0, len(self.state.x) + 1.0)).sin().to(self.state.x).unsqueeze(0)
        x = self.state.x + self._unwhiten(white / white.norm())
        alpha = self.state.alpha[self.state.active]
        prior = self.state.prior.distribution(alpha).log_prob(x[0, : len(alpha)]).sum()
        return prior + self.of.target.along(self.state.embedding).value(x)[0]

    @classmethod
    def load(cls, path: str | Path, model: Model, *, map_location: Any = None) -> "AxesPosterior":
        """A saved posterior, over the same model.

        The log evidence at the saved mode is computed anew; a variational lower bound is believed, and so are a ridge
        and the axes that it leads to.

        :param map_location: a device, or a dict of devices: ``"cpu"`` for a file that was written with a GPU.
        :raises BadInput: when the file is not one of ours, or the model is another.
        """
        record = archive.read(path, map_location)
        if record.get("kind") != cls.__name__:
            raise BadInput(f"{path} holds a {record.get('kind', 'LaplacePosterior')}; expected a {cls.__name__}.")
        with archive.checked(record, AXES_POSTERIOR | {"state": cls.schema}):
            joint = LogJoint(model, record["args"], record["kwargs"], maximise=())
            if joint.held.keys() != record["held"].keys():
                raise BadInput(f"it holds params {sorted(record['held'])}; this model has {sorted(joint.held)}.")
            joint.held = dict(record["held"])
            of = weights_of(joint, record["sites"])
            name, *settings = record["prior"]
            if name not in OURS:
                raise BadInput(f"its prior is {str(name)[:60]!r}; expected one of {sorted(OURS)}.")
            posterior = cls(of, cls.restored(record["state"], OURS[name](*settings)))
            posterior._require_agreement(record)
            return posterior

    schema: ClassVar[dict[str, Any]]  # of the state in a file

    def _require_agreement(self, record: Record) -> None:
        """Refuse numbers of a file that do not follow from the mode, the model and its data.

        :raises BadInput: with the number of the file and the one that follows.
        """
        state, of = self.state, self.of
        if len(state.x) != state.num_active + of.num_others or len(state.directions) != of.num_weights:
            raise BadInput(f"the mode has {len(state.x)} elements, and {state.num_active} axes are active.")
        another = "It is another density: load it with the model that it was fitted to."
        for name, found in (("log_evidence", self.log_evidence), ("log_joint_beside", self._log_joint_beside)):
            archive.require_equal(name, found, record[name], torch.float64, another)

    @staticmethod
    def restored(record: Mapping[str, Any], prior: AxisPrior) -> SparseState:
        """The state of a file's record."""
        raise NotImplementedError
