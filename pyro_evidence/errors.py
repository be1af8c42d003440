"""Exceptions of the package.  A message says what came, what was expected, and what to do."""

from collections.abc import Callable
from typing import Any


class BadInput(ValueError):
    """The data or the settings cannot be used as they are.

    >>> from pyro_evidence import LaplaceEvidence
    >>> LaplaceEvidence("model")
    Traceback (most recent call last):
        ...
    pyro_evidence.errors.BadInput: model is a str; expected a callable Pyro model. Data go to run(...).
    """


class UnsupportedModel(ValueError):
    """The model is outside what the engines can integrate, or it is not a fixed density.

    >>> import pyro, pyro.distributions as dist, torch
    >>> from pyro_evidence import LaplaceEvidence
    >>> def counts(t):
    ...     k = pyro.sample("k", dist.Poisson(torch.tensor(3.0)))
    ...     pyro.sample("t", dist.Normal(k, 1.0), obs=t)
    >>> LaplaceEvidence(counts).run(torch.tensor(2.0))
    Traceback (most recent call last):
        ...
    pyro_evidence.errors.UnsupportedModel: ...
    """


class NotPositiveDefinite(ArithmeticError):
    """A matrix that the theory says is positive definite is not.

    >>> import torch
    >>> from pyro_evidence.numerics.linalg import cholesky
    >>> cholesky(torch.diag(torch.tensor([1.0, -1.0])), "a matrix")
    Traceback (most recent call last):
        ...
    pyro_evidence.errors.NotPositiveDefinite: a matrix, shape (2, 2), has smallest eigenvalue -1.00e+00; ...

    :param message: or what writes it, once somebody reads: it takes eigenvalues, and searches meet many of these.
    """

    args: tuple[Any, ...]

    def __init__(self, message: str | Callable[[], str]) -> None:
        super().__init__(message)

    def __str__(self) -> str:
        if callable(self.args[0]):
            self.args = (self.args[0](),)
        return str(self.args[0])

    def __reduce__(self) -> tuple[type["NotPositiveDefinite"], tuple[str]]:
        return type(self), (str(self),)


class NotAMode(ArithmeticError):
    """The point that was reached is not an interior maximum of the log joint density.

    >>> import pyro, pyro.distributions as dist, torch
    >>> from pyro_evidence import LaplaceEvidence, Start
    >>> def kink():
    ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
    ...     pyro.factor("kink", -100.0 * (w - 1.0).abs())
    >>> LaplaceEvidence(kink, start=Start(restarts=2)).run()
    Traceback (most recent call last):
        ...
    pyro_evidence.errors.NotAMode: all restarts failed...
    """


class NotSmooth(NotAMode):
    """The log density has a corner, or a wrong second derivative, where its curvature is needed.

    >>> import pyro, pyro.distributions as dist, torch
    >>> from pyro_evidence import LaplaceEvidence, Start
    >>> def kink():
    ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
    ...     pyro.factor("kink", -100.0 * (w - 1.0).abs())
    >>> LaplaceEvidence(kink, start=Start(restarts=1)).run()
    Traceback (most recent call last):
        ...
    pyro_evidence.errors.NotSmooth: the log density of site 'kink', a Unit, has a kink...
    """


class ImproperPosterior(ArithmeticError):
    """The log joint density has no maximum at a finite point, or is flat along a direction.

    >>> import pyro, pyro.distributions as dist, torch
    >>> from torch.distributions import constraints
    >>> from pyro_evidence import LaplaceEvidence
    >>> def model(t):
    ...     w = pyro.sample("w", dist.ImproperUniform(constraints.real, (), ()))
    ...     pyro.sample("t", dist.Bernoulli(logits=w), obs=t)
    >>> LaplaceEvidence(model).run(torch.tensor(1.0))
    Traceback (most recent call last):
        ...
    pyro_evidence.errors.ImproperPosterior: ...
    """


class Unbounded(ImproperPosterior):
    """The log density rises without end, as where noise may vanish and data are met exactly."""


class TooLarge(MemoryError):
    """A dense matrix would not fit into memory.

    >>> import torch
    >>> from pyro_evidence.numerics.linalg import require_memory
    >>> require_memory(10**15, "a dense matrix", torch.device("cpu"))
    Traceback (most recent call last):
        ...
    pyro_evidence.errors.TooLarge: ...
    """


class NotWritten(OSError):
    """A file could not be written; the one that was there before is as it was."""


class NotConverged(RuntimeError):
    """The iteration stopped for another reason than convergence.

    :ivar posterior: the posterior at the last good state, or None when there was none.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence, NotConverged, Stop
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> try:
    ...     posterior = LaplaceEvidence(regression(Linear()), stop=Stop(num_steps=1)).run(X, t)
    ... except NotConverged as error:
    ...     posterior = error.posterior
    >>> len(posterior.log_evidences)  # the start and one step
    2
    """

    def __init__(self, message: str, posterior: object = None) -> None:
        super().__init__(message)
        self.posterior = posterior
