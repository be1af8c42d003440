"""One recognised mixture of probabilistic PCA on its way: from the Pyro model to restarts, and back to a posterior."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.arrays import require_dense
from pyro_evidence.data.chunks import Chunks, agree_on_kind, first_rows
from pyro_evidence.data.ranks import COMMUNICATOR
from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.component_moves import Chosen, Deletion, EMSettings
from pyro_evidence.fitting.iterate import Fit, Stop
from pyro_evidence.fitting.restarts import Step
from pyro_evidence.mixture.fit import AUTOMATIC, RandomWeights
from pyro_evidence.mixture.recognise import most_components, with_components
from pyro_evidence.mixture.updates import SharedParameters
from pyro_evidence.models.mppca import MPPCA
from pyro_evidence.models.wrappers import Marginalised, marginalised
from pyro_evidence.mppca import rounds
from pyro_evidence.mppca import start as mppca_start
from pyro_evidence.mppca.data import Observations, has_gaps
from pyro_evidence.mppca.expectation import FactorAnalysers
from pyro_evidence.mppca.orbit import laplace_state
from pyro_evidence.mppca.posterior import MPPCAPosterior
from pyro_evidence.mppca.recognise import MPPCAStructure, ScalarUnits, recognise_mppca
from pyro_evidence.mppca.rounds import MPPCARestarts
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
    Y: Observations  # all data in the units inside; the restarts may be on a sample

    @property
    def jacobian(self) -> float:
        """What the log evidence loses by going to the model's units, nats."""
        return self.units.log_jacobian(self.Y)

    @property
    def times(self) -> float:
        """How often the restarts' data would have to be had to be all."""
        return len(self.Y) / len(self.batch.Y)

    def is_closed(self, settings: EMSettings) -> bool:
        """Not known to be."""
        return False

    def together(self, stop: Stop, deletion: Deletion) -> Stop:
        """Restarts are compared where they converge, for they overtake one another late; on a sample, before."""
        return stop if self.times == 1.0 else replace(stop, num_steps=min(stop.num_steps, deletion.after))

    def watched(self, step: Step[MPPCARestarts]) -> Step[MPPCARestarts]:
        """The round as it is."""
        return step

    def chosen(self, fit: Fit[MPPCARestarts], deletion: Deletion | None) -> Chosen[MPPCARestarts]:
        """The restart of the highest Occam-corrected log evidence."""
        batch = fit.state
        best = first_highest(batch.occam).reshape(1)
        heights = torch.where(batch.failed, torch.nan, self.times * batch.log_evidence)
        return Chosen(replace(fit, state=batch.selected(best)), int(best), heights, batch.reasons)

    def whole(self, alone: MPPCARestarts) -> MPPCARestarts:
        """The chosen restart on all data."""
        return alone if self.times == 1.0 else alone.on(self.Y, alone.parameters)

    def resized(self, alone: MPPCARestarts, deletion: Deletion) -> tuple[MPPCARestarts, str]:
        """The chosen restart with components left out and split, on the restarts' data and then on all."""
        few = alone if self.times == 1.0 else alone.on(self.batch.Y, alone.parameters)
        after, limit = deletion(few), ""
        if bool(after.parameters.active.all()):
            before, ties, num = after, self.structure.ties, self.structure.start.W.shape[1]
            room = most_components(self.structure.joint.model, num, len(self.Y), alike=ties.mixing_free)
            after, limit = deletion.split(before, ties, room)
            after = after if after is before else deletion(after)
        return (after if self.times == 1.0 else deletion(self.whole(after))), limit

    def posterior(self, chosen: Chosen[MPPCARestarts]) -> MPPCAPosterior:
        """The chosen restart at its mode, in the model's units."""
        fit, batch = chosen.fit, chosen.fit.state
        structure = enlarged(self.structure, batch.parameters.W.shape[1])
        found = laplace_state(structure, self.units, batch.Y, batch.it)
        return MPPCAPosterior(
            found.state,
            fit.status.value,
            tuple(v - self.jacobian for v in fit.objectives),
            chosen.heights - self.jacobian,
            chosen.reasons,
            recognised=structure,
            analysers=found.analysers,
            refusal=found.refusal,
            log_evidence_literal=found.literal,
            log_evidence_occam=float(batch.occam[0]) - self.jacobian,
            limit=chosen.limit,
        )


def begin(joint: LogJoint, settings: EMSettings, *, sampled: bool = False) -> MPPCAFit:
    """All restarts before the first round.

    :param sampled: whether restarts run on a sample where data are more than :data:`SAMPLE`.
    :raises UnsupportedModel: when it is one that the engine cannot read.
    """
    thin, ours = joint, own_model(joint.model)
    if ours is not None:  # some of its rows tell what it is
        thin = copy.copy(joint)
        thin.args = (some_rows(ours, joint.args[0]),)
    rounds.rule_of(settings.update)  # which refuses others before the model is read
    structure = recognise_mppca(thin)
    if thin is not joint:
        structure = replace(structure, joint=joint, Y=joint.args[0].double())
    return _begun(structure, Observations.resident(structure.Y), settings, sampled)


def _begun(structure: MPPCAStructure, raw: Observations, settings: EMSettings, sampled: bool) -> MPPCAFit:
    """All restarts before the first round.

    :param raw: data in the caller's units.
    :raises BadInput: for too few rows or columns.
    """
    _require_size(raw, structure.start)
    units = ScalarUnits.of(raw)
    Y = replace(raw, rows=raw.rows.mapped(lambda y: (y - units.origin).div_(units.unit)))
    whole = Y.filled
    variance = _noise_scale(whole, structure.ties, structure.start)
    analysers = _start(whole, units.standard(structure.start), structure.ties, settings.start, settings.initial)
    few = Y.shared_sample(SAMPLE) if sampled and len(Y) > SAMPLE else Y
    batch = rounds.first(few, analysers, structure.ties, variance, rounds.rule_of(settings.update))
    return MPPCAFit(structure, units, batch, Y)


def begin_chunks(model: Any, chunks: Chunks, settings: EMSettings) -> MPPCAFit:
    """All restarts before the first round of a model of ours, which a few rows tell, on data in chunks.

    :raises BadInput: for chunks that can be gone through only once, hold no rows, or cannot be used.
    """
    ours, gappy, communicator = own_model(model), isinstance(model, Marginalised), COMMUNICATOR.get()
    rounds.rule_of(settings.update)  # which refuses others before the data are read
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
    return _begun(replace(recognise_mppca(joint), Y=rows.example[:0]), Observations.of(rows), settings, sampled=True)


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
    beta = torch.full_like(model.beta, initial.width**-2) if ties.all_free[1] else model.beta
    alpha = torch.full_like(model.alpha, initial.alpha) if ties.all_free[0] else model.alpha
    flat = torch.zeros_like(model.log_mixing).log_softmax(-1) if ties.mixing_free else model.log_mixing
    W = 0.1 * torch.randn(R, K, m, q, generator=generator, dtype=torch.float64).to(model.W)  # zero would stay so in EM
    analysers = replace(model, W=W, beta=beta, alpha=alpha, log_mixing=flat)
    wide = {
        n: getattr(analysers, n).expand(R, *getattr(analysers, n).shape[1:])
        for n in ("beta", "alpha", "log_mixing", "columns")
    }
    return replace(analysers, mu=mu, **wide)


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
