"""Which penalty, how many kernels: choices that the likelihood cannot make, by cross-validation and by addition."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.data.rows import Rows
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.em import repeated
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.models.prbf import PRBF, Labels, Shared
from pyro_evidence.posterior.base import ClassProbabilities
from pyro_evidence.prbf.data import DataTotals, Labelled, rows_in_memory
from pyro_evidence.prbf.densities import column_variance, log_density
from pyro_evidence.prbf.fit import AlphaPerKernel, begin, next_round
from pyro_evidence.prbf.posterior import PRBFPosterior
from pyro_evidence.prbf.start import StartFrom
from pyro_evidence.settings import check_count, check_function, real_number, seeded

MULTIPLES = (0.0, 5.0, 10.0, 15.0, 20.0)  # of the penalty: none, and those of the source
MOST_ROUNDS = 100  # of the source; every network of a batch goes as far
Score = Callable[[Tensor, Tensor], Tensor]  # log P(C_k | x_n) (N, K) and labels (N,) to a number; smaller is better


def error_rate(log_proba: Tensor, labels: Tensor) -> Tensor:
    """Share of data whose likeliest class is another, shape ``()``."""
    return (log_proba.argmax(-1) != labels).to(log_proba).mean()


def log_loss(log_proba: Tensor, labels: Tensor) -> Tensor:
    """Mean of ``-log P(label_n | x_n)``, nats per datum, shape ``()``."""
    return -log_proba.gather(-1, labels.unsqueeze(-1)).mean()


@dataclass(frozen=True)
class AlphaChoice:
    """Scores of every penalty on every fold.

    :ivar multiples: in units of ``N / (K M)``.
    :ivar scores: shape ``(number of multiples, number of folds)``.
    :ivar posterior: the engine's fit to all data with the chosen penalty.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> from pyro_evidence.prbf import choose_alpha
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> found = choose_alpha(OverlapEM(prbf(2)), Y, labels, multiples=(0.0, 10.0), num_folds=2)
    >>> tuple(found.scores.shape), found.alpha.c in found.multiples
    ((2, 2), True)
    """

    multiples: tuple[float, ...]
    scores: Tensor
    posterior: PRBFPosterior

    @property
    def alpha(self) -> AlphaPerKernel:
        """The multiple of the smallest mean score; the smaller one of equals."""
        return _best(self.multiples, self.scores)


def _best(multiples: Sequence[float], scores: Tensor) -> AlphaPerKernel:
    return AlphaPerKernel(multiples[int(scores.mean(-1).argmin())])


@entry_point
def choose_alpha(
    engine: Any,
    X: Tensor,
    labels: Labels,
    *,
    multiples: Sequence[float] = MULTIPLES,
    score: Score = error_rate,
    num_folds: int = 3,
    seed: int | None = 0,
) -> AlphaChoice:
    """Inner cross-validation over ``alpha``; in each fold all penalties and restarts are one batch of the same starts.

    There is no evidence for ``alpha``, as the penalty is not a prior.  The penalty lowers the error and spoils the
    probabilities, so :func:`error_rate` asks for much of it and :func:`log_loss` for little or none.

    :param engine: whose model, updates, start and, up to the source's 100, ``stop.num_steps`` are used; its ``alpha``
        is not.
    :param labels: rows without one are left out.
    :raises BadInput: when a class has fewer than two data or would vanish, or on settings that cannot be meant.
    """
    _check_engine(engine)
    check_function("score", score, "error_rate")
    multiples, given = _checked(multiples), (X, labels)
    X, y = _labelled(engine.model, X, labels)
    X, y = X[y >= 0], y[y >= 0]
    fold = _folds(y, num_folds, seed)
    table = torch.zeros(len(multiples), num_folds, dtype=torch.float64)
    for f in range(num_folds):
        train, held = (X[fold != f], y[fold != f]), fold == f
        task = begin(engine, Rows.resident(train, len(train[0])), *map(AlphaPerKernel, multiples))
        found = repeated(task.batch, min(engine.stop.num_steps, MOST_ROUNDS), next_round).point
        best = found.objective.reshape(len(multiples), -1).argmax(-1)  # of the restarts
        rows = torch.arange(len(found.alpha), device=X.device).reshape(len(multiples), -1)
        net = found.net[rows.gather(-1, best.unsqueeze(-1)).squeeze(-1)]
        each = log_density(net, found.kind, found.kind.features(X[held] - task.shift))
        for i, joint in enumerate(each + net.class_prior.log().unsqueeze(1)):
            table[i, f] = float(score(joint.log_softmax(-1), y[held]))
    return AlphaChoice(multiples, table, replace(engine, alpha=_best(multiples, table)).run(*given))


def _check_engine(engine: Any) -> None:
    if not isinstance(getattr(engine, "model", None), PRBF):
        raise BadInput(f"engine is a {type(engine).__name__}; expected OverlapEM(prbf(...)). Data come after it.")


def _checked(multiples: Sequence[float]) -> tuple[float, ...]:
    """The multiples as floats.

    :raises BadInput: unless they are numbers that can weigh a penalty.
    """
    found = tuple(map(real_number, multiples if hasattr(multiples, "__iter__") else ()))
    if not found or not all(0.0 <= c < math.inf for c in found):
        raise BadInput(
            f"multiples={multiples!r}; expected one or more finite numbers of at least 0, such as (0.0, 5.0, 20.0)."
        )
    return found


def _labelled(model: PRBF, X: Tensor, labels: Labels) -> Labelled:
    """Inputs in float64 and labels as int64, all checked."""
    rows = rows_in_memory(model, X, labels)
    DataTotals.of(rows, model.num_classes)
    return rows.example


def _folds(y: Tensor, num_folds: int, seed: int | None) -> Tensor:
    """Fold of each datum, classes spread evenly, shape ``(N,)``."""
    counts = y.bincount()
    num_folds = check_count("num_folds", num_folds)
    if not 2 <= num_folds <= len(y) or int(counts.min()) < 2:
        raise BadInput(
            f"num_folds={num_folds} for {len(y)} labelled data, class {int(counts.argmin())} with "
            f"{int(counts.min())}; expected from 2 folds to one for each datum, and at least 2 data of each "
            f"class, or a fold would be empty or train without that class. Take more data of it."
        )
    order = torch.randperm(len(y), generator=seeded(seed)).to(y.device)
    order = order[y[order].argsort(stable=True)]
    return torch.empty_like(y).index_copy_(0, order, torch.arange(len(y), device=y.device) % num_folds)


@entry_point
@dataclass(frozen=True)
class NetworkAverage(ClassProbabilities):
    """Networks whose class probabilities are averaged; the source's first idea for later work.

    :ivar posteriors: the networks.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> from pyro_evidence.prbf import average_networks
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> average = average_networks(OverlapEM(prbf(2)), Y, labels, multiples=(0.0, 10.0))
    >>> tuple(average.predict_proba(Y).shape)
    (60, 2)
    """

    posteriors: tuple[PRBFPosterior, ...]

    def log_proba(self, X: Tensor) -> Tensor:
        """Log of the mean over networks of ``P(C_k | x_n)``, shape ``(N, K)``."""
        each = torch.stack([p.log_proba(X) for p in self.posteriors])
        return each.logsumexp(0) - math.log(len(each))


@entry_point
def average_networks(
    engine: Any, X: Tensor, labels: Labels, *, multiples: Sequence[float] = MULTIPLES[1:]
) -> NetworkAverage:
    """One network for each ``alpha``, from the same start.

    :param engine: its ``alpha`` is not used.
    :raises BadInput: without multiples; see :meth:`pyro_evidence.OverlapEM.run` for the rest.
    """
    _check_engine(engine)
    return NetworkAverage(tuple(replace(engine, alpha=AlphaPerKernel(c)).run(X, labels) for c in _checked(multiples)))


@dataclass(frozen=True)
class KernelPath:
    """Networks of 1, 2, ... kernels.

    :ivar posteriors: in this order.
    :ivar bic: Bayesian information criterion of each, nats, larger is better, shape ``(most,)``.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> from pyro_evidence.prbf import add_kernels
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> path = add_kernels(OverlapEM(prbf(1)), Y, labels, most=2)
    >>> len(path.posteriors), tuple(path.bic.shape)
    (2, (2,))
    """

    posteriors: tuple[PRBFPosterior, ...]
    bic: Tensor

    @property
    def best(self) -> PRBFPosterior:
        """The network of the largest criterion."""
        return self.posteriors[int(self.bic.argmax())]


@entry_point
def add_kernels(
    engine: Any, X: Tensor, labels: Labels, *, most: int, num_candidates: int = 200, seed: int | None = 0
) -> KernelPath:
    """Greedy addition: from one kernel on, the candidate that promises most log likelihood, then a fit of all.

    Candidates stand on data, with the data's covariance shrunk to the width of a kernel density estimate; what each
    promises is its log likelihood at the share that a second-order expansion gives.  Vlassis and Likas (2002),
    "A greedy EM algorithm for Gaussian mixture learning"; here every class has its own share in the new kernel.

    :param engine: its start and the number of kernels of its model are not used.
    :param most: the largest number of kernels.
    :param num_candidates: data to try at each addition, drawn without replacement.
    :raises BadInput: on kernels that are not shared, and settings that cannot be meant.
    """
    _check_engine(engine)
    most = check_count("most", most)
    num_candidates = check_count("num_candidates", num_candidates)
    if not isinstance(engine.model.sharing, Shared):
        raise BadInput(f"add_kernels with {engine.model.sharing}; expected kernels that all classes share: Shared().")
    Z, y = _labelled(engine.model, X, labels)
    generator = seeded(seed)
    start, found = StartFrom(Z.mean(0, keepdim=True)), []
    for M in range(1, most + 1):
        found.append(replace(engine, model=replace(engine.model, num_kernels=M), initial=start).run(X, labels))
        chosen = torch.randperm(len(Z), generator=generator)[:num_candidates].to(Z.device)
        start = _extended(found[-1], Z, y, chosen)
    criterion = [float(p.log_likelihood) - 0.5 * num_parameters(p) * math.log(len(Z)) for p in found]
    return KernelPath(tuple(found), torch.tensor(criterion, dtype=torch.float64))


def num_parameters(posterior: PRBFPosterior) -> int:
    """Free numbers of mixing, centres and covariances."""
    K, M = posterior.mixing.shape
    dim, shape = posterior.loc.shape[-1], posterior.network.covariance.shape[2:]
    each = dim * (dim + 1) // 2 if len(shape) == 2 else shape[0]
    return K * (M - 1) + M * (dim + each)


def _extended(posterior: PRBFPosterior, X: Tensor, y: Tensor, chosen: Tensor) -> StartFrom:
    """The network with the most promising candidate as a further kernel."""
    kind, dim = posterior.model.kernels, X.shape[-1]
    width = (4.0 / ((dim + 2) * len(X))) ** (2.0 / (dim + 4))
    whole = torch.cov(X.mT, correction=0).reshape(dim, dim).diagonal_scatter(column_variance(X))
    covariance = kind.floored(width * kind.restricted(whole), kind.floor * column_variance(X))
    wide = covariance.expand(len(chosen), *covariance.shape)
    new = kind.natural(X[chosen] - X.mean(0), wide) @ kind.features(X - X.mean(0)).mT  # (candidates, N)
    old = posterior.log_density(X)
    gain, share = zip(*(_promise(old[y == k, k], new[:, y == k]) for k in range(old.shape[-1])), strict=True)
    best = torch.stack(gain).sum(0).argmax()
    a = torch.stack(share)[:, best].unsqueeze(-1)  # (K, 1)
    mixing = torch.cat([(1.0 - a) * posterior.mixing, a], -1)
    loc = torch.cat([posterior.loc, X[chosen[best]].unsqueeze(0)])
    return StartFrom(loc, torch.cat([posterior.network.covariance[0], covariance.unsqueeze(0)]), mixing)


def _promise(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Log likelihood that a class would have with each candidate, and the candidate's share of it, ``(C,)`` each."""
    delta = torch.tanh(0.5 * (old - new))  # (f - phi) / (f + phi)
    first, second = delta.sum(-1), delta.square().sum(-1)
    share = 0.5 - 0.5 * first / torch.where(second > 0, second, 1.0)
    share = share.clamp(1e-3, 0.5)  # the expansion is about one half; a candidate gets some share, never all
    exact = torch.logaddexp(old + torch.log1p(-share).unsqueeze(-1), new + share.log().unsqueeze(-1))
    return exact.sum(-1), share
