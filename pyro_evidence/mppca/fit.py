"""One recognised mixture of probabilistic PCA on its way: from the Pyro model to restarts, and back to a posterior."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.arrays import require_dense
from pyro_evidence.data.chunks import Chunks, agree_on_kind, first_rows
from pyro_evidence.data.ranks import Communicator
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting import restarts
from pyro_evidence.fitting.component_moves import Deletion, unless_interrupted
from pyro_evidence.fitting.iterate import Fit, Status, iterate
from pyro_evidence.fitting.restarts import advance, require_any, slowly_converging
from pyro_evidence.mixture.fit import AUTOMATIC, RandomWeights, Settings, warn_unless_converged
from pyro_evidence.mixture.recognise import most_components, with_components
from pyro_evidence.models.mppca import MPPCA
from pyro_evidence.models.wrappers import Marginalised, marginalised
from pyro_evidence.mppca import rounds
from pyro_evidence.mppca import start as mppca_start
from pyro_evidence.mppca.data import Observations, has_gaps
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.orbit import laplace_state
from pyro_evidence.mppca.posterior import MPPCAPosterior
from pyro_evidence.mppca.recognise import MPPCAStructure, ScalarUnits, is_mppca, recognise_mppca
from pyro_evidence.mppca.rounds import MPPCARestarts
from pyro_evidence.mppca.updates import Rule, SharedParameters
from pyro_evidence.numerics.batched import first_highest
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import Start, seeded

SLICE = 256  # most data on which a model of ours is recognised: the rest is only looked at by the engine
SLICE_SIZE = 2**21  # most numbers in their loadings, which Pyro expands to one set for each datum
LEAST_NOISE = 1e-6  # of the data's variance
SAMPLE = 2**13  # data on which restarts run where there are more; the chosen one goes on with all
CANDIDATES = 4096  # data among which centres are drawn


@dataclass(frozen=True)
class NormalCentres(RandomWeights):
    """Centres drawn from a Normal about the mean of the data, of the data's variance; Husmeier (2000), footnote 14.

    >>> import torch
    >>> from pyro_evidence import EvidenceEM, Start
    >>> from pyro_evidence.models.mppca import mppca
    >>> from pyro_evidence.mppca import NormalCentres
    >>> Y = torch.randn(60, 1) @ torch.randn(1, 4) + 0.1 * torch.randn(60, 4)
    >>> EvidenceEM(mppca(1, 2), start=Start(restarts=2), initial=NormalCentres()).run(Y).restarts.shape
    torch.Size([2])
    """

    def centres(self, Y: Tensor, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Shape ``(R, K, m)``, in standard units."""
        noise = torch.randn(*shape, Y.shape[1], generator=generator, dtype=torch.float64)
        return self.spread * noise.to(Y)


def log_joint(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LogJoint:
    """The log joint of any model; that of a mixture of probabilistic PCA of ours without running it on all data.

    :raises BadInput: when its data cannot be used.
    """
    ours, gappy = own_model(model), isinstance(model, Marginalised)
    if ours is None:
        return LogJoint(model, args, kwargs)
    Y = checked_data(args, kwargs, gappy=gappy)
    joint = LogJoint(marginalised(ours.marginalised) if gappy else ours.marginalised, (some_rows(ours, Y),))
    joint.args = (Y,)
    return joint


def own_model(model: Model) -> MPPCA | None:
    """A model of ours, also where gaps are allowed."""
    model = model.model if isinstance(model, Marginalised) else model
    return model if isinstance(model, MPPCA) else None


def some_rows(model: MPPCA, Y: Tensor) -> Tensor:
    """A few data, evenly spaced, their gaps filled with the means: to look at the model, not to fit it."""
    num = max(16, min(SLICE, SLICE_SIZE // (model.num_components * Y.shape[1] * model.num_latents)))
    few = Y[:: max(1, len(Y) // num)]
    return few.where(~few.isnan(), Y.nanmean(0)) if has_gaps(Y) else few


def checked_data(args: tuple[Any, ...], kwargs: dict[str, Any], *, gappy: bool) -> Tensor:
    """The data alone, fit to be used.

    :raises BadInput: where they are not.
    """
    Y = args[0] if len(args) == 1 and not kwargs else kwargs.get("Y") if not args and len(kwargs) == 1 else None
    if not isinstance(Y, Tensor) or Y.dim() != 2 or Y.dtype not in (torch.float32, torch.float64) or not Y.numel():
        named = [("", a) for a in args] + [(f"{n}=", a) for n, a in kwargs.items()]
        kinds = ", ".join(f"{n}a {type(a).__name__}" for n, a in named) or "no argument"
        got = f"shape {tuple(Y.shape)}, {Y.dtype}" if isinstance(Y, Tensor) else kinds
        raise BadInput(
            f"run(Y) expects the data alone, a tensor of shape (N, m), N >= 1, m >= 1, float32 or float64; got {got}. "
            f"Write run(torch.as_tensor(Y).double())."
        )
    require_dense("Y", Y)
    if has_gaps(Y) or not bool(Y.sum().isfinite()):  # the sum needs no memory
        _require_numbers(Y, gappy=gappy)
    whole, largest = Y.nan_to_num(0.0) if has_gaps(Y) else Y, torch.finfo(Y.dtype).max ** 0.25
    found = float(torch.stack(whole.aminmax()).abs().max())
    if found > largest:
        raise BadInput(
            f"Y, shape {tuple(Y.shape)}, holds {found:.3g} in size; expected less than {largest:.2g} in {Y.dtype}, or "
            f"powers of it are not finite. Rescale: Y / Y.std()."
        )
    return Y.detach()


def _require_numbers(Y: Tensor, *, gappy: bool) -> None:
    bad = Y.isinf() if gappy else ~Y.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        num = [int(Y.isnan().sum()), int(Y.isinf().sum())]
        raise BadInput(
            f"Y, shape {tuple(Y.shape)}, contains {num[0]} nan and {num[1]} inf, first in row {row}, column {column}; "
            f"expected numbers. Drop such rows: Y[Y.isfinite().all(1)]."
        )


@dataclass(frozen=True)
class MPPCAFit:
    """A recognised model, the units inside, and all restarts."""

    structure: MPPCAStructure
    units: ScalarUnits
    batch: MPPCARestarts
    Y: Observations  # all data in the units inside

    @property
    def jacobian(self) -> float:
        """What the log evidence loses by going to the model's units, nats."""
        return self.units.log_jacobian(self.Y)


def current_posterior(task: MPPCAFit) -> MPPCAPosterior:
    """The posterior where the best restart stands."""
    batch = task.batch
    restarts = torch.where(batch.failed, torch.nan, batch.log_evidence) - task.jacobian
    return posterior_of(task, Fit(_best(batch), Status.BY_HAND, (batch.objective,)), restarts)


def begin(joint: LogJoint, start: Start, initial: RandomWeights, update: object) -> MPPCAFit | None:
    """All restarts before the first round; None where the model is no mixture of Gaussians of low rank.

    :raises UnsupportedModel: when it is one that the engine cannot read.
    """
    thin, ours = joint, own_model(joint.model)
    if ours is not None:  # some of its rows tell what it is
        thin = copy.copy(joint)
        thin.args = (some_rows(ours, joint.args[0]),)
    if not is_mppca(thin):
        return None
    rule = rounds.rule_of(update)
    structure = recognise_mppca(thin)
    if thin is not joint:
        structure = replace(structure, joint=joint, Y=joint.args[0].double())
    return begun(structure, Observations.resident(structure.Y), start, initial, rule)


def begun(structure: MPPCAStructure, raw: Observations, start: Start, initial: RandomWeights, rule: Rule) -> MPPCAFit:
    """All restarts before the first round.

    :param raw: data in the caller's units.
    :raises BadInput: for too few rows or columns.
    """
    _require_size(raw, structure.start)
    units = ScalarUnits.of(raw)
    Y = replace(raw, rows=raw.rows.mapped(lambda y: (y - units.origin).div_(units.unit)))
    whole = Y.filled
    variance = _noise_scale(whole, structure.ties, structure.start)
    analysers = _start(whole, units.standard(structure.start), structure.ties, start, initial)
    return MPPCAFit(structure, units, rounds.first(Y, analysers, structure.ties, variance, rule), Y)


def begin_chunks(
    model: Any, chunks: Chunks, communicator: Communicator, start: Start, initial: RandomWeights, update: object
) -> MPPCAFit:
    """All restarts before the first round of a model of ours, which a few rows tell, on data in chunks.

    :raises BadInput: for chunks that can be gone through only once, hold no rows, or cannot be used.
    """
    rule, ours, gappy = rounds.rule_of(update), own_model(model), isinstance(model, Marginalised)
    assert ours is not None  # others go another way
    agree_on_kind(model, chunks, communicator)
    rows = Rows.of_chunks(
        model,
        chunks,
        lambda number, args: args[0].detach().double(),
        check=lambda number, args: checked_data(args, {}, gappy=gappy),
        communicator=communicator,
    )
    (few,) = first_rows(chunks, communicator)
    marginal = marginalised(ours.marginalised) if gappy else ours.marginalised
    joint = LogJoint(marginal, (some_rows(ours, few),))
    joint.has_data = False
    return begun(replace(recognise_mppca(joint), Y=rows.example[:0]), Observations.of(rows), start, initial, rule)


def _require_size(Y: Observations, analysers: FactorAnalysers) -> None:
    (N, m), q = Y.shape, analysers.W.shape[-1]
    if q >= m:
        raise BadInput(f"the loadings have {q} columns and the data {m}; expected fewer columns than the data have.")
    if N < 2:
        raise BadInput(f"Y has {N} row; expected at least two, or nothing varies.")


def _noise_scale(Y: Observations, ties: SharedParameters, analysers: FactorAnalysers) -> Tensor:
    """Variances to which the gamma prior of the noise refers: what one component with all latents leaves over.

    Shared out by the outputs' variances if each has its own noise.
    """
    m = Y.shape[1]
    like = analysers.W
    on = torch.ones(1, 1, like.shape[-1], dtype=torch.bool, device=like.device)
    flat = like.new_zeros(1, 1, m)
    one = FactorAnalysers(like[:, :1], flat, flat + 1.0, like.new_zeros(1, 1), on + 0.0, on)
    rest = mppca_start.direct(Y, one).beta[0, 0, 0].reciprocal()
    rest = torch.maximum(rest, rest.new_tensor(LEAST_NOISE))  # data of low rank leave nothing over
    if not bool((ties.beta_group != ties.beta_group[:, :1]).any()):
        return rest.expand(m)
    return rest * Y.variances.clamp(min=1e-3)  # a constant output has no scale


def _start(
    Y: Observations, model: FactorAnalysers, ties: SharedParameters, start: Start, initial: RandomWeights
) -> FactorAnalysers:
    """All restarts: centres, no loadings, one width; what the model holds fixed is kept."""
    R, (K, m, q) = start.number(AUTOMATIC), model.W.shape[1:]
    generator = seeded(start.seed)
    if isinstance(initial, NormalCentres):
        mu = initial.centres(model.mu[:, 0], (R, K), generator)
    else:
        few = Y.sampled(CANDIDATES)
        place = torch.randperm(len(few), generator=generator).to(few.device)
        uniform = torch.rand(R, K, generator=generator, dtype=torch.float64).to(few)
        mu = mppca_start.spread_centres(few[place], uniform)
    mu = mu if ties.mean_free else model.mu.expand(R, K, m)
    beta = torch.full_like(model.beta, initial.width**-2) if ties.beta_free else model.beta
    alpha = torch.full_like(model.alpha, initial.alpha) if ties.alpha_free else model.alpha
    flat = torch.zeros_like(model.log_mixing).log_softmax(-1) if ties.mixing_free else model.log_mixing
    W = 0.1 * torch.randn(R, K, m, q, generator=generator, dtype=torch.float64).to(model.W)  # zero would stay so in EM
    analysers = replace(model, W=W, beta=beta, alpha=alpha, log_mixing=flat)
    wide = {
        n: getattr(analysers, n).expand(R, *getattr(analysers, n).shape[1:])
        for n in ("beta", "alpha", "log_mixing", "columns")
    }
    return replace(analysers, mu=mu, **wide)


def run(task: MPPCAFit, settings: Settings) -> MPPCAPosterior:
    """EM, deletion, and the posterior of the best.

    :raises NotConverged: with ``stop.throw``, unless converged; or when every restart failed, with all reasons.
    """
    deletion, stop = settings.deletion, settings.stop
    few, together = task.batch, stop
    if deletion is not None and len(few.Y) > SAMPLE:
        few = few.on(few.Y.shared_sample(SAMPLE), few.parameters)
        together = replace(stop, num_steps=min(stop.num_steps, deletion.after))
    fit = restarts.em(few, settings.initial.warm_up, together)
    require_any(fit.state, "BoundedInflation()")
    times = len(task.batch.Y) / len(few.Y)
    heights = torch.where(fit.state.failed, torch.nan, times * fit.state.log_evidence) - task.jacobian
    batch, limit, structure = _best(fit.state), "", task.structure
    fit = replace(fit, state=batch)
    if deletion is not None and fit.status is not Status.INTERRUPTED:
        batch, limit = unless_interrupted(lambda: _numbered(task, batch, deletion), (batch, "interrupted"))
        before = fit.objectives if times == 1.0 else (batch.objective,)
        step = advance if stop.counted else slowly_converging
        rest = iterate(step, replace(restarts.ready(batch), num_rounds=0), stop, "EvidenceEM, best restart")
        fit = Fit(rest.state, rest.status, (*before, *rest.objectives))
        structure = enlarged(structure, rest.state.parameters.W.shape[1])
    found = replace(posterior_of(replace(task, structure=structure), fit, heights), limit=limit)
    return warn_unless_converged(found, stop)


def _best(batch: MPPCARestarts) -> MPPCARestarts:
    """The restart of the highest Occam-corrected log evidence, alone."""
    return batch.selected(first_highest(batch.occam).reshape(1))


def _numbered(task: MPPCAFit, batch: MPPCARestarts, deletion: Deletion) -> tuple[MPPCARestarts, str]:
    """The best restart with as many components as its evidence wants, on all data, and what kept it from more."""
    after, limit, whole = deletion(batch), "", task.batch.Y
    if bool(after.parameters.active.all()):
        before = after
        ties, num = task.structure.ties, task.structure.start.W.shape[1]
        room = most_components(task.structure.joint.model, num, len(whole), alike=ties.mixing_free)
        after, limit = deletion.split(before, ties, room)
        after = after if after is before else deletion(after)
    return (after if len(whole) == len(batch.Y) else deletion(after.on(whole, after.parameters))), limit


def enlarged(structure: MPPCAStructure, num_components: int) -> MPPCAStructure:
    """The same model with at least so many components."""
    if num_components <= structure.start.W.shape[1]:
        return structure
    joint, model = structure.joint, with_components(structure.joint.model, num_components)
    ours = own_model(model)
    assert ours is not None  # others have no more
    found = recognise_mppca(LogJoint(model, (some_rows(ours, joint.args[0]),)))
    whole = copy.copy(found.joint)
    whole.args, whole.has_data = joint.args, joint.has_data
    return replace(found, joint=whole, Y=structure.Y)


def posterior_of(task: MPPCAFit, fit: Fit[MPPCARestarts], restarts: Tensor) -> MPPCAPosterior:
    """One restart at its mode, in the model's units."""
    batch = fit.state
    path = tuple(v - task.jacobian for v in fit.objectives)
    found = laplace_state(task.structure, task.units, batch.Y, batch.it)
    occam = float(batch.occam[0]) - task.jacobian
    return MPPCAPosterior(
        found.state, fit.status.value, path, restarts, (), task.structure, found.analysers, found.refusal,
        found.literal, occam,
    )  # fmt: skip
