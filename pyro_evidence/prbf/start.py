"""Where the probabilistic RBF network begins."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.prbf.data import Training
from pyro_evidence.prbf.densities import Network, column_variance
from pyro_evidence.settings import Start, check_tensor, seeded

AUTOMATIC = 1  # restarts of a network


# a network for each restart, as one batch: of the training data, as many as start= says, random numbers from its seed
Initial = Callable[..., Network]


@dataclass(frozen=True)
class RandomPoints:
    """Centres on random data, the covariance of all data for every kernel, equal mixing.

    The first restarts of many are those of few.

    >>> import torch
    >>> from pyro_evidence import OverlapEM, Start
    >>> from pyro_evidence.models.prbf import prbf
    >>> from pyro_evidence.prbf import RandomPoints
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> OverlapEM(prbf(2), start=Start(restarts=3), initial=RandomPoints()).run(Y, labels).status
    'converged'
    """

    def __call__(self, training: Training, start: Start = Start()) -> Network:
        """All restarts.

        :raises BadInput: when there are fewer data than kernels.
        """
        usable, restarts = training.usable, start.number(AUTOMATIC)
        M = usable.shape[-1]
        generator = seeded(start.seed)
        patterns, group = usable.unique(dim=1, return_inverse=True)
        centres = []
        for _ in range(restarts):
            order = torch.randperm(len(usable), generator=generator).to(usable.device)
            place = torch.zeros(M, dtype=torch.long, device=usable.device)  # a datum for each kernel, none twice
            for g in range(patterns.shape[1]):
                kernels, candidates = (group == g).nonzero().squeeze(-1), order[patterns[order, g]]
                if len(candidates) < len(kernels):
                    raise BadInput(
                        f"{len(kernels)} kernels have only {len(candidates)} data to begin on; expected at least as "
                        f"many data as kernels, in each class where classes have kernels of their own. Ask for fewer "
                        f"kernels."
                    )
                place[kernels] = candidates[: len(kernels)]
            centres.append(training.X[place])
        wide = training.covariance.expand(restarts, M, *[-1] * training.kind.event_dim)
        return training.network(torch.stack(centres), wide)


@dataclass(frozen=True)
class KMeans:
    """Centres and covariances of the clusters that Lloyd's algorithm finds; equal mixing.

    It begins on data that are far from each other: greedy k-means++, Arthur and Vassilvitskii (2007).

    :ivar num_steps: rounds of Lloyd's algorithm.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> from pyro_evidence.prbf import KMeans
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> OverlapEM(prbf(2), initial=KMeans()).run(Y, labels).status
    'converged'
    """

    num_steps: int = 50

    def __call__(self, training: Training, start: Start = Start()) -> Network:
        """All restarts.

        :raises BadInput: when there are fewer data than kernels.
        """
        begun = RandomPoints()(training, start)
        features = training.kind.features(training.X)
        forbidden = torch.where(training.usable, 0.0, torch.inf).to(training.X)
        generator = seeded(start.seed)
        loc = torch.stack([training.X[_spread(training, generator)] for _ in range(len(begun.loc))])
        for _ in range(self.num_steps):
            moments = _assigned(features, loc, forbidden)
            counts = moments[..., :1]
            mean = moments[..., 1 : loc.shape[-1] + 1] / torch.where(counts > 0, counts, 1.0)
            before, loc = loc, torch.where(counts > 0, mean, loc)
            if torch.equal(before, loc):
                break
        moments = _assigned(features, loc, forbidden)
        several = moments[..., 0] > 1.5  # the covariance of a single datum is zero
        shape = (*several.shape, *[1] * training.kind.event_dim)
        counts = torch.where(several, moments[..., 0], 1.0).reshape(shape)
        own = torch.where(several.reshape(shape), training.kind.scatter(moments, loc) / counts, begun.covariance)
        return training.network(loc, training.kind.floored(own, training.kind.floor * column_variance(training.X)))


def _spread(training: Training, generator: torch.Generator) -> Tensor:
    """A datum for each kernel, far from those of the kernels before it, shape ``(M,)``."""
    usable, place = training.usable, []
    near = torch.full(usable.shape, torch.inf, dtype=training.X.dtype, device=usable.device)  # squared distances
    for j in range(usable.shape[-1]):
        rivals = (usable == usable[:, j : j + 1]).all(0)  # kernels of the same classes
        weight = torch.where(usable[:, j], near[:, j], 0.0)
        weight = torch.where(weight.isinf() | (weight.sum() == 0), usable[:, j].to(weight), weight)
        tried = torch.multinomial(weight.cpu(), 2 + usable.shape[-1].bit_length(), True, generator=generator)
        squares = (training.X - training.X[tried].unsqueeze(1)).square().sum(-1)  # (tried, N)
        left = torch.minimum(squares, near[:, j])
        best = int(torch.where(usable[:, j], left, 0.0).sum(-1).argmin())
        near = torch.where(rivals, left[best].unsqueeze(-1), near)
        place.append(int(tried[best]))
    return torch.tensor(place, device=usable.device)


def _assigned(features: Tensor, loc: Tensor, forbidden: Tensor) -> Tensor:
    """Sums of the features over the data that are closest to each centre, shape ``(R, M, P)``."""
    dim = loc.shape[-1]
    squares = loc.square().sum(-1).unsqueeze(-2) - 2.0 * features[:, 1 : dim + 1] @ loc.mT + forbidden
    nearest = torch.nn.functional.one_hot(squares.argmin(-1), loc.shape[1]).to(features)
    return nearest.mT @ features


@dataclass(frozen=True)
class DataCovariance:
    """The centres of another one, with the covariance of all data for every kernel and equal mixing.

    :ivar centres: where they come from, as ``KMeans()``.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> from pyro_evidence.prbf import DataCovariance, KMeans
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> OverlapEM(prbf(2), initial=DataCovariance(KMeans())).run(Y, labels).status
    'converged'
    """

    centres: Initial

    def __call__(self, training: Training, start: Start = Start()) -> Network:
        net = self.centres(training, start)
        return training.network(net.loc, training.covariance.expand_as(net.covariance))


@dataclass(frozen=True, eq=False)
class StartFrom:
    """A network of the caller's own, in the units of the data; as many restarts as it has rows.

    :ivar loc: centres, shape ``(M, D)``, or ``(R, M, D)`` for several starts.
    :ivar covariance: in the shape of the kind, ``(M, 1)``, ``(M, D)`` or ``(M, D, D)``, with or without starts in
        front; None for the covariance of all data.
    :ivar mixing: shape ``(K, M)`` or ``(R, K, M)``, rows adding up to 1; None for equal shares.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> from pyro_evidence.prbf import StartFrom
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> OverlapEM(prbf(2), initial=StartFrom(torch.tensor([[0.0, 0.0], [6.0, 6.0]]))).run(Y, labels).status
    'converged'
    """

    loc: Tensor
    covariance: Tensor | None = None
    mixing: Tensor | None = None

    def __call__(self, training: Training, start: Start = Start()) -> Network:
        """All starts, of which ``start`` is not asked.

        :raises BadInput: on shapes that do not fit the model, and numbers that are no shares or variances.
        """
        K, M = training.allowed.shape
        dim, event = training.X.shape[-1], training.kind.event_dim
        loc = self._part("loc", self.loc, training, (M, dim))
        loc = loc if loc.dim() > 2 else loc.unsqueeze(0)
        shape, given = training.covariance.shape, self.covariance
        covariance = training.covariance.expand(M, *shape) if given is None else given
        covariance = self._part("covariance", covariance, training, (M, *shape))
        mixing = self._part("mixing", training.mixing if self.mixing is None else self.mixing, training, (K, M))
        whole = ((mixing.sum(-1) - 1.0).abs() < 1e-5).all() & (mixing >= 0).all()
        if not bool(whole) or bool((mixing * ~training.allowed != 0).any()):
            raise BadInput(
                "StartFrom(mixing=...) has rows that are not proportions, or uses a kernel of another class; expected "
                "numbers of at least 0, rows adding up to 1."
            )
        if bool((torch.linalg.eigvalsh(training.kind.matrix(covariance, dim)) <= 0).any()):
            raise BadInput(
                "StartFrom(covariance=...) is not positive; expected variances, or positive definite matrices."
            )
        rows = len(loc)
        wide = covariance.expand(rows, M, *[-1] * event)
        prior = training.class_prior.expand(rows, -1).contiguous()
        return Network(mixing.expand(rows, K, M).contiguous(), loc, wide.contiguous(), prior)

    def _part(self, name: str, value: Tensor, training: Training, shape: tuple[int, ...]) -> Tensor:
        """One of the three, of the right shape at its end, finite, like the inputs."""
        check_tensor(f"StartFrom({name}=...)", value, f"shape {shape} at its end")
        if tuple(value.shape[-len(shape) :]) != shape:
            raise BadInput(f"StartFrom({name}=...) has shape {tuple(value.shape)}; expected {shape} at its end.")
        if not bool(value.isfinite().all()):
            raise BadInput(f"StartFrom({name}=...) has elements that are not finite; expected numbers.")
        return value.detach().to(training.X)
