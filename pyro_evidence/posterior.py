"""What a fit returns: numbers, draws, a guide, and how far to trust them."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer.mcmc.util import print_summary
from pyro.ops.stats import fit_generalized_pareto
from torch import Tensor

from pyro_evidence import archive
from pyro_evidence.errors import BadInput
from pyro_evidence.guide import LaplaceGuide
from pyro_evidence.laplace import LaplaceState
from pyro_evidence.ops import importance
from pyro_evidence.program import LogJoint, Model


@dataclass(frozen=True)
class LaplacePosterior:
    """The Gaussian approximation at the posterior mode, in unconstrained space, and its evidence.

    :ivar state: the last iterate; every number below is of this one.
    :ivar status: why the fit stopped, as a sentence.
    :ivar log_evidences: log evidence (plus log hyperprior, where sites were maximised) after each outer step, nats.
    :ivar restarts: log evidence each restart arrived at, shape ``(R,)``; nan where it failed.
    :ivar failures: what the failed restarts said.
    """

    state: LaplaceState
    status: str
    log_evidences: tuple[float, ...]
    restarts: Tensor
    failures: tuple[str, ...] = ()

    @property
    def _joint(self) -> LogJoint:
        return self.state.problem.joint

    @property
    def log_evidence(self) -> Tensor:
        """``log p(D | hyperparameters)`` by Laplace's approximation, nats, total, constants included, shape ``()``."""
        return self.state.log_evidence

    @property
    def log_hyperposterior(self) -> Tensor:
        """Log evidence plus the log prior density of maximised latent sites, nats, shape ``()``."""
        return self.state.log_evidence + self.state.log_hyperprior

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """Constrained values by the model's own names; a pruned precision is ``inf``, a pruned scale 0."""
        params, sites = self._joint.split_hypers(self._limit())
        return {n: v.detach() for n, v in (params | sites).items()}

    def _limit(self) -> Tensor:
        """Unconstrained hyperparameters with the pruned ones at infinity."""
        groups, active = self.state.problem.structure.groups, self.state.problem.active
        if groups is None or bool(active.all()):
            return self.state.theta
        pruned = groups.member[~active].unique()
        return self.state.theta.index_copy(0, pruned, groups.power[pruned].sign() * math.inf)

    @property
    def mode(self) -> dict[str, Tensor]:
        """Constrained site values at the mode of the density in unconstrained space."""
        return self._joint.latents.constrained(self.state.u.to(self._joint.dtype))

    @property
    def gamma(self) -> dict[str, Tensor]:
        """Number of well-determined parameters of each precision that a hyperparameter holds; 0 where pruned.

        MacKay (1992), eq. 4.9.  Only hyperparameters that are recognised as precisions (or variances, scales, log
        precisions) of Gaussian latents are listed; each entry has the hyperparameter's shape.
        """
        hypers, gamma = self._joint.hypers, self.state.gamma
        parts = {p.name: gamma[hypers.slices[p.name]] for p in hypers}
        return {p.name: parts[p.name].reshape(p.unconstrained_shape) for p in hypers if not parts[p.name].isnan().all()}

    @property
    def pruned(self) -> dict[str, Tensor]:
        """Which elements of each site were switched off, bool masks of the sites' unconstrained shapes."""
        return self._joint.latents.unconstrained(~self.state.problem.active)

    def get_samples(self, num_samples: int = 1000, seed: int | None = None) -> dict[str, Tensor]:
        """Independent draws, shaped and constrained as ``MCMC.get_samples()`` gives them: ``(S,) + site shape``.

        :param seed: None continues from the caller's generator; either way that generator is left where it was.
        """
        u, _ = self._draw(num_samples, seed)
        return self._joint.latents.constrained(u.to(self._joint.dtype))

    def _draw(self, num_samples: int, seed: int | None) -> tuple[Tensor, Tensor]:
        """Unconstrained draws ``(S, D)`` and their log density under the approximation ``(S,)``."""
        with torch.random.fork_rng():
            if seed is not None:
                torch.manual_seed(seed)
            white = torch.randn(num_samples, len(self.state.u), dtype=torch.float64).to(self.state.u.device)
        white = white * self.state.problem.active
        log_norm = 0.5 * (self.state.precision.log_det[0] - self.state.problem.active.sum() * math.log(math.tau))
        return self.state.u + self.state.precision.colour(white), log_norm - 0.5 * white.square().sum(-1)

    @property
    def guide(self) -> LaplaceGuide:
        """The posterior as a Pyro guide."""
        return LaplaceGuide(self.state)

    @property
    def model(self) -> Model:
        """The user's model with the hyperparameters put in as constants, for NUTS and Predictive, in any process.

        A pruned precision is put in as a finite value at which the data move the weight by less than 1e-4 of its
        prior variance.
        """
        return self._joint.substituted(self.state.theta)

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Median of each site, as ``AutoGuide.median``; the arguments are not looked at."""
        return self.mode

    def quantiles(self, q: float | Sequence[float], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Marginal quantiles, taken in unconstrained space as ``AutoGuide.quantiles`` takes them: ``(len(q),) + shape``."""
        levels = torch.as_tensor(q, dtype=torch.float64, device=self.state.u.device)
        sd = self.state.precision.variance[0].sqrt() * self.state.problem.active
        u = self.state.u + torch.special.ndtri(levels).unsqueeze(-1) * sd
        return self._joint.latents.constrained(u.to(self._joint.dtype))

    def log_likelihood(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Pointwise log density of every observed site at the mode, nats; the training data without arguments."""
        joint = self._joint
        if args or kwargs:
            joint = copy.copy(joint)
            joint.args, joint.kwargs = args, kwargs
        trace = joint.trace(self.state.u, self.state.theta)
        missing = [n for n in joint.observed if not trace.nodes[n]["is_observed"]]
        if missing:
            raise BadInput(f"site(s) {missing} have no data in these arguments; pass the targets as in run(...).")
        return {n: v.detach() for n, v in joint.pointwise(self.state.u, self.state.theta).items()}

    def log_prob(self, *args: Any, **kwargs: Any) -> Tensor:
        """Pointwise log predictive density at the mode, nats, shape ``(N,)``, summed over observed sites of one shape.

        :raises BadInput: when the model has observed sites of different shapes; see :meth:`log_likelihood`.
        """
        parts = self.log_likelihood(*args, **kwargs)
        shapes = {n: tuple(v.shape) for n, v in parts.items()}
        if len(set(shapes.values())) != 1:
            raise BadInput(f"observed sites have different shapes, {shapes}; use log_likelihood(...), one entry per site.")
        return torch.stack(list(parts.values())).sum(0)

    def log_weights(self, num_samples: int = 10_000, seed: int = 0) -> Tensor:
        """Log importance ratios of draws from the approximation to the exact density, nats, shape ``(S,)``."""
        u, log_density = self._draw(num_samples, seed)
        with torch.no_grad(), pyro.validation_enabled(False):
            parts = [self.state.problem.density.log_joint(part, self.state.theta) for part in u.split(512)]
        log_weights = torch.cat(parts) - log_density
        return torch.where(log_weights.isnan(), -math.inf, log_weights)  # outside the support: density 0

    def diagnostics(self, num_samples: int = 10_000, seed: int = 0) -> dict[str, Any]:
        """How far to trust the numbers.

        ``pareto_k`` is the shape of the importance ratios' tail (Vehtari et al. 2024): below 0.5 the importance-sampled
        log evidence and its standard error (nats) are reliable, above 0.7 neither it nor the approximation is.
        """
        log_weights = self.log_weights(num_samples, seed)
        return {
            "status": self.status,
            "log_evidence": float(self.log_evidence),
            "log_evidence_per_step": list(self.log_evidences),
            "log_evidence_per_restart": self.restarts.tolist(),
            "failed_restarts": list(self.failures),
            "gradient_norm": math.sqrt(max(self.state.decrement, 0.0)),
            "smallest_eigenvalue": self._smallest_eigenvalue(),
            "curvature": getattr(self.state.problem.curvature, "__name__", str(self.state.problem.curvature)),
            "num_pruned": int((~self.state.problem.active).sum()),
            "pareto_k": _pareto_k(log_weights),
            "log_evidence_importance": float(importance.log_mean(log_weights)),
            "log_evidence_importance_se": float(importance.standard_error(log_weights)),
            "effective_sample_size": float(importance.effective_sample_size(log_weights)),
        }

    def _smallest_eigenvalue(self) -> float:
        adjoint, active = self.state.precision.adjoint[0], self.state.problem.active
        variances = adjoint[active] if adjoint.dim() == 1 else torch.linalg.eigvalsh(adjoint[active][:, active])
        return float(1.0 / variances.max())

    def summary(self, prob: float = 0.9) -> None:
        """Print the table that ``MCMC.summary()`` prints, then hyperparameters, log evidence and how far to trust it."""
        samples = {n: v.reshape(4, 250, *v.shape[1:]) for n, v in self.get_samples(1000, seed=0).items()}
        print_summary(samples, prob)
        print("\n".join(self._report()))  # noqa: T201 - printing is what summary() is for, as in MCMC

    def _report(self) -> list[str]:
        found, gamma = self.diagnostics(), self.gamma
        lines = [f"{n} = {_short(v)}" + (f"   (gamma {_short(gamma[n])})" if n in gamma else "") for n, v in self.hyperparameters.items()]
        check = f"{found['log_evidence_importance']:.4f} +- {found['log_evidence_importance_se']:.4f}"
        lines += [f"log evidence = {float(self.log_evidence):.4f} nats   (importance sampling {check}, k-hat {found['pareto_k']:.2f})"]
        if not found["pareto_k"] <= 0.7:
            lines += ["k-hat is above 0.7: the posterior is far from Gaussian; trust neither number, run NUTS on posterior.model."]
        levels = self.restarts[~self.restarts.isnan()]
        if len(levels) > 1 and float(levels.max() - levels.min()) > 1e-3:
            lines += [f"restarts reached different modes: log evidences {sorted(set(levels.round(decimals=3).tolist()), reverse=True)}"]
        return [*lines, f"status: {self.status}", *self.failures]

    def update_param_store(self) -> None:
        """Write the params to Pyro's global param store, so that the rest of an SVI script reads them there.

        Pruned precisions are written as the finite values that :attr:`model` uses.
        """
        store = pyro.get_param_store()
        params, _ = self._joint.split_hypers(self.state.theta)
        for name, value in params.items():
            store.setdefault(name, value.detach().clone(), self._joint.param_constraints[name])
            store[name] = value.detach().clone()

    def save(self, path: str | Path) -> None:
        """Write tensors and settings, no code: what ``torch.load(..., weights_only=True)`` accepts.

        :raises BadInput: when the model's arguments are not tensors, numbers, strings or containers of them.
        """
        record = archive.record(self.state)
        record |= {"status": self.status, "log_evidences": list(self.log_evidences), "restarts": self.restarts}
        archive.write(record | {"failures": list(self.failures)}, path)

    @classmethod
    def load(cls, path: str | Path, model: Model) -> "LaplacePosterior":
        """A saved posterior, over the same model.

        :raises BadInput: when the file is not one of ours, or the model is another.
        """
        record: Mapping[str, Any] = archive.read(path)
        state = archive.restore(record, model)
        return cls(state, record["status"], tuple(record["log_evidences"]), record["restarts"], tuple(record["failures"]))


def _pareto_k(log_weights: Tensor) -> float:
    excess = importance.tail(log_weights)
    return float(fit_generalized_pareto(excess)[0]) if len(excess) >= 5 else math.inf


def _short(value: Tensor) -> str:
    flat = [f"{v:.4g}" for v in value.reshape(-1)[:12].tolist()]
    inside = ", ".join(flat + (["..."] if value.numel() > 12 else []))
    return f"[{inside}]" if value.dim() else inside
