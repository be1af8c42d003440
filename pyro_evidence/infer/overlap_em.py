"""Classifiers of shared kernels: EM with a penalty on kernels whose classes overlap weakly."""

import warnings
from dataclasses import KW_ONLY, dataclass, replace

from torch import Tensor

from pyro_evidence.data.chunks import Chunks
from pyro_evidence.data.ranks import COMMUNICATOR
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.checkpoint import NOT_FITTED, Resumable
from pyro_evidence.fitting.iterate import MANY_STEPS, Fit, Status, Stop, check_stop, iterate, require_convergence
from pyro_evidence.models.prbf import PRBF, Labels
from pyro_evidence.prbf.data import rows_in_memory, rows_of_chunks
from pyro_evidence.prbf.fit import (
    Alpha,
    AlphaPerKernel,
    Lost,
    PRBFFit,
    alpha_of,
    begin,
    keep_dead_kernels,
    next_round,
    posterior_of,
)
from pyro_evidence.prbf.posterior import PRBFPosterior
from pyro_evidence.prbf.start import Initial, RandomPoints
from pyro_evidence.prbf.updates import Ascent, Update
from pyro_evidence.program.checks import Arguments, as_tensors, same_arguments
from pyro_evidence.settings import Start, check_family, check_function, check_random_start, stacklevel

STOP = Stop(tolerance=1e-8, gradient_tolerance=1e-3, num_steps=MANY_STEPS)
ALPHA, UPDATE, INITIAL = AlphaPerKernel(20.0), Ascent(), RandomPoints()


@dataclass(eq=False, repr=False)
class OverlapEM(Resumable):
    r"""Takes the place of ``SVI`` for :func:`~pyro_evidence.models.prbf.prbf`: maximises eq. 22.

    .. math:: \sum_n \log p(x_n | C_{k_n}) - \alpha \sum_j \delta_j

    where ``delta_j`` is the expected Bhattacharyya distance of kernel j and the shares of the classes in it.  This is
    a penalty that looks at the data, not a prior, so there is no evidence for ``alpha``; see
    :func:`~pyro_evidence.prbf.choice.choose_alpha`.  The priors of the model's sites play no part.

    The default update, ``Ascent()``, never lowers eq. 22, rejects no class for good and keeps probabilities sane.  The
    published one, ``prbf2001_update``, lowers eq. 22 in about one round of six and makes probabilities too sure, but
    often has the lower error: most of that comes from its clamp, which rejects classes from kernels.  On Ionosphere
    with six kernels at ``AlphaPerKernel(20.0)`` and the source's 100 rounds, error and test NLL: plain EM 16.6 % and
    0.43 nats, ascent 15.4 % and 0.52, published 10.9 % and 0.97.

    Constantinopoulos, Titsias and Likas (2001).

    :param model: from :func:`~pyro_evidence.models.prbf.prbf`.
    :param alpha: weight of the overlap in nats, or ``AlphaPerKernel(c)`` for ``c N / (K M)`` as in the source.  0 is
        plain EM, and so is every ``alpha`` where no two classes share a kernel.
    :param update: one round: ``Ascent()``; ``prbf2001_update``, ``exact_m_step`` or ``em`` of ``pyro_evidence.prbf``;
        or one's own function of a :class:`~pyro_evidence.prbf.densities.Point`.
    :param start: number of restarts, run as one batch of which the best by eq. 22 is kept, None: one; and their seed.
    :param initial: what a restart begins with: ``RandomPoints()``, ``KMeans()`` or ``StartFrom(loc)``, or one's own
        function of a :class:`~pyro_evidence.prbf.data.Training` and ``start=``.
    :param lost: what becomes of a kernel without data: ``keep_dead_kernels``, or one's own function of the
        point, the lost kernels ``(B, M)`` and the round.
    :param stop: tolerances, the most rounds, whether to raise and to show a progress bar.  The source's 100 rounds,
        counted: ``Stop(tolerance=0.0, num_steps=100)``.

    >>> import torch
    >>> from pyro_evidence import OverlapEM
    >>> from pyro_evidence.models.prbf import prbf
    >>> Y = torch.cat([torch.randn(30, 2), torch.randn(30, 2) + 6.0])
    >>> labels = torch.arange(60) // 30
    >>> posterior = OverlapEM(prbf(2)).run(Y, labels)
    >>> float((posterior.labels(Y) == labels).double().mean())
    1.0
    """

    model: PRBF
    _: KW_ONLY
    alpha: Alpha = ALPHA
    update: Update = UPDATE
    start: Start = Start()
    initial: Initial = INITIAL
    lost: Lost = keep_dead_kernels
    stop: Stop = STOP

    def __post_init__(self) -> None:
        if not isinstance(self.model, PRBF):
            kind = type(self.model).__name__
            raise BadInput(f"model is a {kind}; expected models.prbf.prbf(...). Data go to run(...).")
        check_function("update", self.update, "Ascent()")
        check_family(self.update, "prbf", "mixture")
        check_random_start(self.start)
        check_function("initial", self.initial, "KMeans()")
        check_function("lost", self.lost, "keep_dead_kernels")
        check_stop(self.stop)
        alpha_of(self.alpha, 1.0, self.model)
        self._task: PRBFFit | None = None
        self._data: Arguments = ((), {})

    def run(self, X: Tensor, labels: Labels | None = None) -> PRBFPosterior:
        """Fit to data, from scratch; the best restart by eq. 22.

        Warns of a class that every kernel rejected at once; see :attr:`PRBFPosterior.held`.

        :param X: inputs, shape ``(N, D)``, any float dtype; the fit is in float64.
        :param labels: whole numbers from 0 to ``K - 1``, shape ``(N,)``; None, nan or -1 where unknown.
        :raises BadInput: on data that cannot be used, an absent class, or an ``alpha`` that leaves a class no kernel.
        :raises NotConverged: unless converged, or ``stop.throw`` is off, or ``stop.tolerance`` is 0.
        """
        return self._finished(self._begin(X, labels))

    def run_chunks(self, chunks: Chunks) -> PRBFPosterior:
        """Fit to data of which a chunk of rows is in memory at a time: the fit that :meth:`run` makes of all rows.

        A round is a pass, ``Ascent()`` takes two or more.  The posterior has no training data.

        :param chunks: tuples ``(X, labels)`` of tensors or arrays, ``(X,)`` of one class; gone through once a pass.
        :raises BadInput: for what can be gone through only once, in addition to what :meth:`run` raises.
        """
        return self._finished(begin(self, rows_of_chunks(self.model, chunks, COMMUNICATOR.get())))

    def _finished(self, task: PRBFFit) -> PRBFPosterior:
        fit = iterate(next_round, task.batch, self.stop, "OverlapEM", "eq. 22")
        posterior = posterior_of(task, fit)
        for held in posterior.held:
            warnings.warn(
                f"class {held.label} would have vanished: every kernel rejected it (eq. 29) in round {held.step}, and "
                f"in {held.num_rounds} rounds until {held.last}; it kept the mixing that it had. alpha="
                f"{posterior.alpha:.4g} is too large: pass a smaller one, ask for more kernels, or take "
                f"update=Ascent(), which lets no class vanish.",
                stacklevel=stacklevel(),
            )
        require_convergence("OverlapEM", fit.status, posterior, self.stop)
        return posterior

    def step(self, X: Tensor, labels: Labels | None = None) -> float:
        """One round of all restarts, as ``SVI.step``; the first call begins, other data begin anew.

        :return: minus eq. 22 of the best restart after the round, nats.
        """
        data: Arguments = ((X, labels), {})
        if self._task is None or not same_arguments(self._data, data):
            self._task, self._data = self._begin(X, labels), data
        self._task = replace(self._task, batch=next_round(self._task.batch))
        return -self._task.batch.objective

    @property
    def posterior(self) -> PRBFPosterior:
        """The posterior at the state that :meth:`step` has reached.

        :raises BadInput: before the first step.
        """
        if self._task is None:
            raise BadInput(NOT_FITTED)
        return posterior_of(self._task, Fit(self._task.batch, Status.BY_HAND, ()))

    def _begin(self, X: Tensor, labels: Labels | None) -> PRBFFit:
        (X, labels), _ = as_tensors((X, labels), {})
        return begin(self, rows_in_memory(self.model, X, labels))
