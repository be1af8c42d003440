r"""Gaussian processes as ordinary Pyro models: a latent function ``f`` with a dense Gaussian prior, and a likelihood.

.. math:: f \sim N(m, K_\theta(X, X) + \text{jitter}\, I), \qquad t_n \sim p(t \mid f_n)

Rasmussen and Williams (2006), chapters 2, 3 and 5; MacKay (2003), chapter 45.  Everything is computed in double
precision, whatever the dtype of the inputs: a covariance matrix of smooth functions is nearly singular.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import LEARNED, Learned, OneEntryCache, TensorValue
from pyro_evidence.models.kernels import Kernel, Setting, check_inputs
from pyro_evidence.models.likelihoods import Counts, Output, Regression, classes, observe
from pyro_evidence.models.regression import check_precision, precision_value, start_of
from pyro_evidence.settings import FINITE, check_count, check_number

JITTER = 1e-6  # variance, in units of f squared: keeps the covariance of inputs close together positive definite


def declared(
    name: str,
    setting: Setting,
    like: Tensor,
    constraint: Any = constraints.positive,
    begin: Callable[[], Tensor | None] | None = None,
) -> Tensor:
    """The value of a setting inside a model: fixed, a ``pyro.param``, or a ``pyro.sample`` from its prior.

    :param begin: where it begins if it is learned and the user has not said where; None: at its start.
    :raises BadInput: when the param store holds another model's ``name``, of another shape.
    """
    if isinstance(setting, Learned | int | float | Tensor):
        return precision_value(name, setting, start_of(setting).shape, like, constraint, begin)
    if not hasattr(setting, "sample"):
        raise BadInput(
            f"{name} is set to {setting!r}; expected a number, Learned(start), or a distribution, its prior."
        )
    return torch.as_tensor(pyro.sample(name, setting)).to(like)


def declared_of(kernel: Kernel, name: str, setting: Setting, X: Tensor, t: Tensor | None) -> Tensor:
    """A setting of a kernel; one that is learned as inputs ``(N, D)`` and targets bound it and tell where to begin.

    Above the least value that the inputs can tell it begins at ``setting.start`` or, where that is lower, at twice the
    least; one that the user begins outside of its bounds on purpose has none.  For one setting of several inputs the
    least of theirs counts.
    """
    X, own = X.double(), name.rpartition(".")[2]
    constraint: Any = constraints.real if own in kernel.real else constraints.positive
    if not isinstance(setting, Learned) or not len(X) or X.requires_grad:
        return declared(name, setting, X, constraint)
    start, is_free = torch.as_tensor(setting.start).to(X), setting == LEARNED
    least, most = kernel.least(own, X), kernel.most(own, X)
    if least is not None:
        least = least if start.dim() else least.nan_to_num(torch.inf).amin()
        most = torch.full_like(least, torch.inf) if most is None else most if start.dim() else most.amax()
        if bool(least.isfinite().all()) and (is_free or bool(((least < start) & (start < most)).all())):
            setting = Learned(torch.where(start > least, start, 2.0 * least))
            is_open = bool(most.isinf().all())
            constraint = constraints.greater_than(least) if is_open else constraints.interval(least, most)
    return declared(name, setting, X, constraint, partial(kernel.begin, own, X, t) if is_free else None)


@dataclass(frozen=True, eq=False)
class LatentFunction(TensorValue):
    """The prior of ``f``: kernel, constant mean, and the jitter that the caller sees.

    :ivar kernel: its settings are declared under ``kernel.lengthscale`` and so on.
    :ivar mean: of ``f`` everywhere; a number, ``Learned(...)`` or a distribution, declared as ``mean``.
    :ivar jitter: variance of independent noise that is part of ``f``, added to the diagonal of the covariance.
    """

    kernel: Kernel
    mean: Setting
    jitter: float
    last: OneEntryCache = field(default_factory=OneEntryCache, repr=False)

    def prior(self, X: Tensor, t: Tensor | None = None) -> Any:
        """The distribution of ``f`` at the inputs ``(N, D)``.

        :param t: targets, by which settings that are learned may begin.

        :raises LinAlgError: for a covariance that is numerically singular, as torch has it.
        """
        check_inputs(X)
        settings: list[Tensor] = []

        def read(name: str, setting: Setting, kernel: Kernel) -> Tensor:
            settings.append(declared_of(kernel, name, setting, X, t))
            return settings[-1]

        kernel = self.kernel.resolved(read)
        mean = declared("mean", self.mean, X.double(), constraints.real)
        return self.last.recall(X, [*settings, mean], lambda: self._made(kernel, mean, X))

    def _made(self, kernel: Kernel, mean: Tensor, X: Tensor) -> Any:
        if not bool(X.isfinite().all()):
            raise BadInput(f"X, shape {tuple(X.shape)}, holds inf or nan; expected finite numbers. Fill them in first.")
        X = X.double()
        K = kernel(X)
        if self.jitter:
            K = K.clone()  # what the kernel made, it may need for derivatives
            K.diagonal(dim1=-2, dim2=-1).add_(self.jitter)
        try:  # symmetric by its making, and if it is not positive definite, that is said below
            return dist.MultivariateNormal(mean.expand(len(X)), covariance_matrix=K, validate_args=False)
        except (LinAlgError, ValueError) as error:
            if not bool(K.isfinite().all()):
                message = "the kernel's covariance, which is singular, holds inf or nan: a setting ran away."
                raise LinAlgError(message) from error
            distance = torch.cdist(X, X).fill_diagonal_(torch.inf)
            first, second = divmod(int(distance.argmin()), len(X))
            raise LinAlgError(
                f"the covariance of f, {tuple(K.shape)} with jitter={self.jitter:g}, is numerically singular; expected "
                f"positive definite. Inputs {first} and {second} are {float(distance[first, second]):.3g} apart. Give "
                f"it more jitter (jitter={JITTER:g} is the default), or leave out inputs that occur twice."
            ) from error


@dataclass(frozen=True, eq=False)
class GaussianProcess(TensorValue):
    """The Pyro model that :func:`gp_regression`, :func:`gp_classifier` and :func:`gp_poisson` return.

    Call it with ``X`` and ``t``, or with ``X`` alone.  Sites: ``f``, shape ``(N,)``, and ``t``, shape ``(N,)``, in the
    plate ``data``: Normal about ``f``, Bernoulli with log odds ``f``, or Poisson with log rate ``f``.  For more than
    two classes ``f`` has shape ``(C, N)``, one function per class, independent a priori and of one kernel, and ``t`` is
    Categorical.  Hyperparameters: those of the kernel, ``mean`` and, for regression, ``beta``.
    """

    function: LatentFunction
    likelihood: Output

    def __call__(self, X: Tensor, t: Tensor | None = None) -> Tensor:
        """Targets, labels or counts, shape ``(N,)``: ``t`` where given, drawn otherwise.

        :param X: inputs, shape ``(N, D)``.
        """
        prior, C = self.function.prior(X, t), self.likelihood.num_outputs
        f = pyro.sample("f", prior if C == 1 else prior.expand([C]).to_event(1))
        noise = {n: declared(n, beta, f).unsqueeze(-1) for n, beta in self.likelihood.precisions.items()}
        return observe(self.likelihood, f.unsqueeze(-1) if C == 1 else f.mT, noise, t)


def _function(kernel: Kernel, mean: Setting, jitter: float) -> LatentFunction:
    if not isinstance(kernel, Kernel):
        raise BadInput(f"kernel is a {type(kernel).__name__}; expected one, such as RBF(lengthscale=Learned(0.5)).")
    expected = f"a variance of at least 0 in units of f squared, such as {JITTER}"
    return LatentFunction(kernel, mean, check_number("jitter", jitter, expected, 0.0, FINITE))


def gp_regression(
    kernel: Kernel, *, beta: Setting = LEARNED, mean: Setting = 0.0, jitter: float = JITTER
) -> GaussianProcess:
    """Gaussian process regression with Gaussian noise, an ordinary Pyro model ``model(X, t=None)``.

    :param kernel: such as ``RBF()``; a setting is fixed (a number), learned (``Learned(start)``), or has a prior (a
        Pyro distribution), and then ``LaplaceEvidence`` integrates it, or
        maximises it, prior counted, where ``maximise`` names it.
    :param beta: noise precision, in units of ``t`` to the power -2; likewise.
    :param mean: of ``f``, a constant; likewise.
    :param jitter: variance added to the diagonal of the covariance of ``f``; it is part of the model.
    :raises BadInput: on settings that cannot be meant.
    """
    if isinstance(beta, int | float | Tensor | Learned):
        check_precision("beta", beta)
    return GaussianProcess(_function(kernel, mean, jitter), Regression(beta=beta))


def gp_classifier(
    kernel: Kernel, *, num_classes: int = 2, mean: Setting = 0.0, jitter: float = JITTER
) -> GaussianProcess:
    """Gaussian process classification with the logistic or softmax function, an ordinary Pyro model.

    :param num_classes: labels are the whole numbers from 0 to ``num_classes - 1``.
    :raises BadInput: on settings that cannot be meant; others as for :func:`gp_regression`.
    """
    num_classes = check_count("num_classes", num_classes, 2, "It counts the different labels.")
    return GaussianProcess(_function(kernel, mean, jitter), classes(num_classes))


def gp_poisson(kernel: Kernel, *, mean: Setting = LEARNED, jitter: float = JITTER) -> GaussianProcess:
    """Counts whose log rate is a Gaussian process, an ordinary Pyro model.

    :param mean: of the log rate, by default learned; others as for :func:`gp_regression`.
    :raises BadInput: on settings that cannot be meant.
    """
    return GaussianProcess(_function(kernel, mean, jitter), Counts())
