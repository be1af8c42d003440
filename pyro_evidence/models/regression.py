r"""Linear regression on a basis, and the Gaussian prior on weights that it shares with the classifiers.

.. math:: w_m \sim N(0, \alpha_{g(m)}^{-1}), \qquad t_n \sim N(\phi(x_n)^\top w, \beta^{-1})

Bishop (2006), sec. 3.3 and 3.5; MacKay (1992), "Bayesian interpolation".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Size, Tensor
from torch.distributions import constraints

from pyro_evidence.errors import BadInput
from pyro_evidence.models.basis import LEARNED as LEARNED
from pyro_evidence.models.basis import (
    Basis,
    TensorValue,
    class_predictor,
    design_matrix,
    has_bias,
    linear_predictor,
)
from pyro_evidence.models.basis import Learned as Learned
from pyro_evidence.models.basis import Precision as Precision
from pyro_evidence.models.likelihoods import Output, Regression, observe
from pyro_evidence.program.checks import LARGEST
from pyro_evidence.settings import check_function, check_tensor


@dataclass(frozen=True, eq=False)
class WeightPrior(TensorValue):
    """Which prior precision each weight has.  Built by :func:`weight_prior`.

    :ivar alpha: of the weights: one for all, shape ``()``; one each, ``(M,)``; or one per group, ``(G,)``.
    :ivar alpha_bias: of the bias, the last weight; None when no weight is set apart.
    :ivar groups: group of each weight, whole numbers from 0, shape ``(M,)``, the bias not counted; None for
        no groups.
    """

    alpha: Precision
    alpha_bias: Precision | None
    groups: Tensor | None

    def precision(self, Phi: Tensor) -> Tensor:
        """Prior precision of each weight, shape ``(M,)``, bias last.  Declares the params of the prior."""
        num_weights = Phi.shape[-1] - int(self.alpha_bias is not None)
        own = start_of(self.alpha).shape if self.groups is None else Size([int(self.groups.max()) + 1])
        alpha = precision_value("alpha", self.alpha, own, Phi)
        if self.groups is not None:
            alpha = alpha[self.groups.to(alpha.device)]
        if alpha.shape not in (Size(), Size([num_weights])):
            name = "alpha" if self.groups is None else "groups"
            raise BadInput(
                f"{name} has {len(alpha)} entries, but the basis has {num_weights} functions"
                f"{'' if self.alpha_bias is None else ' (the bias, which has alpha_bias, not counted)'}; expected "
                "as many."
            )
        alpha = alpha.expand(num_weights)
        if self.alpha_bias is None:
            return alpha
        alpha_bias = precision_value("alpha_bias", self.alpha_bias, Size(), Phi)
        return torch.cat([alpha, alpha_bias.expand(1)])


def weight_prior(basis: Basis, alpha: Precision, alpha_bias: Precision | None, groups: Tensor | None) -> WeightPrior:
    """The checked prior; ``alpha_bias`` is dropped when ``basis`` has no bias column.

    :raises BadInput: on values that are no precisions, on groups that skip a number, and on a precision for a
        bias that ``basis`` does not have.
    """
    check_function("basis", basis, "Linear()")
    check_precision("alpha", alpha, largest_dim=1)
    if groups is not None:
        check_tensor("groups", groups, "whole numbers, one per weight, shape (M,)")
        if groups.dim() != 1 or groups.is_floating_point() or groups.dtype == torch.bool:
            raise BadInput(
                f"groups has shape {tuple(groups.shape)} and dtype {groups.dtype}; expected whole numbers, one "
                f"per weight, shape (M,)."
            )
        used = groups.unique()
        if not torch.equal(used, torch.arange(len(used), dtype=used.dtype, device=used.device)) or len(used) == 0:
            raise BadInput(f"groups uses the numbers {used.tolist()}; expected all of 0, 1, ..., G - 1.")
        check_precision("alpha", alpha, 1, Size([len(used)]), "one per group")
    if alpha_bias is not None:
        check_precision("alpha_bias", alpha_bias)
    if not has_bias(basis):
        if alpha_bias is not None and alpha_bias is not LEARNED:
            raise BadInput(f"alpha_bias={alpha_bias}, but {basis!r} has no bias column; give it bias=True.")
        alpha_bias = None
    return WeightPrior(alpha, alpha_bias, groups)


def check_precision(
    name: str, setting: Precision, largest_dim: int = 0, shape: Size | None = None, meaning: str = ""
) -> None:
    """Refuse what cannot be a precision or the start of one.

    :param shape: of several; None for any of at most ``largest_dim`` dimensions.
    :param meaning: of their number, in words.
    :raises BadInput: unless all values are finite and greater than 0, in a tensor of such a shape.
    """
    value = start_of(setting)
    if shape is not None and value.shape not in (Size(), shape):
        raise BadInput(f"{name} has shape {tuple(value.shape)}; expected () or {tuple(shape)}, {meaning}.")
    if value.dim() > largest_dim:
        expected = "one number" if largest_dim == 0 else "one number, or one per weight or group"
        raise BadInput(f"{name} has shape {tuple(value.shape)}; expected {expected}.")
    if not value.numel():
        raise BadInput(f"{name} has no value, shape {tuple(value.shape)}; expected a number greater than 0.")
    extreme = value[value.isfinite() & (value > 0) & ((value > LARGEST) | (value < 1.0 / LARGEST))]
    if len(extreme):
        raise BadInput(
            f"{name} has the value {float(extreme[0]):g}; expected precisions from {1.0 / LARGEST:g} to {LARGEST:g}, "
            f"whose powers are floats. Choose other units for the data."
        )
    refused = value[~(value.isfinite() & (value > 0))]
    if len(refused) > 0:
        raise BadInput(
            f"{name} has the value {float(refused[0]):g}; expected finite and greater than 0, for it is a "
            f"precision (1 / variance). For a flat prior pass something small, such as 1e-3."
        )


def precision_value(
    name: str,
    setting: Precision,
    shape: Size,
    like: Tensor,
    constraint: Any = constraints.positive,
    begin: Callable[[], Tensor | None] | None = None,
) -> Tensor:
    """The precision called ``name``, expanded to ``shape``, in the dtype and on the device of ``like``.

    :param constraint: of another number that is learned likewise.
    :param begin: where it begins if it is learned; None: at its start.
    :raises BadInput: when the param store holds another model's ``name``, of another shape or dtype.
    """

    def start() -> Tensor:
        return start_of(setting).to(like.device, like.dtype).expand(shape)

    if not isinstance(setting, Learned):
        return start()

    def begun() -> Tensor:
        told = None if begin is None else begin()
        return (start() if told is None else told).clone()

    value: Tensor = pyro.param(name, begun, constraint=constraint)
    if value.shape != shape or value.dtype != like.dtype:
        raise BadInput(
            f"{name!r} has shape {tuple(value.shape)} and dtype {value.dtype}; these data need {tuple(shape)} and "
            f"{like.dtype}. If the model was fitted in another precision, convert the data: X.to({value.dtype}). If "
            f"the param store holds a value left over from another model, call pyro.clear_param_store() first."
        )
    return value


def start_of(setting: Precision) -> Tensor:
    """The value of a setting, or where it starts.

    :raises BadInput: for what is no real number, or several.
    """
    value = setting.start if isinstance(setting, Learned) else setting
    if isinstance(value, str | type) or value is None:
        raise BadInput(f"a precision is set to {value!r}; expected a number greater than 0, or Learned().")
    try:
        found = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        found = torch.zeros((), dtype=torch.bool)
    if found.dtype == torch.bool or found.is_complex() or found.is_meta:
        raise BadInput(f"a precision is set to {value!r}; expected a real number greater than 0, or Learned().")
    return found


@dataclass(frozen=True, eq=False)
class LinearModel(TensorValue):
    """The Pyro model that :func:`regression` and ``classifier`` return: call it with ``X`` and ``t``, or ``X`` alone.

    Sites: ``w``, shape ``(M,)``, and ``t``, shape ``(N,)``, in the plate ``data``: Normal, Bernoulli or, for more than
    two classes, Categorical.  Params: those of ``alpha``, ``alpha_bias`` and ``beta`` that are learned.

    Of more than two classes ``w`` has shape ``(C, M)``, and the classes share the precisions.  All ``C`` rows are
    free: adding one vector to each changes no probability, so only the prior holds that direction.
    """

    basis: Basis
    prior: WeightPrior
    likelihood: Output

    def __call__(self, X: Tensor, t: Tensor | None = None) -> Tensor:
        """Targets or labels, shape ``(N,)``: ``t`` where given, drawn otherwise.

        :param X: inputs, shape ``(N, D)``.
        """
        Phi, C = design_matrix(self.basis, X), self.likelihood.num_outputs
        alpha = self.prior.precision(Phi)
        given = self.likelihood.precisions.items()
        noise = {name: precision_value(name, beta, Size(), Phi).unsqueeze(-1) for name, beta in given}
        prior = dist.Normal(loc=torch.zeros_like(alpha), scale=alpha.rsqrt())
        w = pyro.sample("w", prior.to_event(1) if C == 1 else prior.expand([C, len(alpha)]).to_event(2))
        eta = linear_predictor(Phi, w).unsqueeze(-1) if C == 1 else class_predictor(Phi, w)
        return observe(self.likelihood, eta, noise, t)


def regression(
    basis: Basis,
    *,
    alpha: Precision = LEARNED,
    alpha_bias: Precision | None = LEARNED,
    groups: Tensor | None = None,
    beta: Precision = LEARNED,
) -> LinearModel:
    """Bayesian linear regression on ``basis``, an ordinary Pyro model ``model(X, t=None)``.

    Every precision is learned (a ``pyro.param`` under its name) unless the caller passes its value.

    :param basis: ``X`` to ``Phi``, such as :class:`~pyro_evidence.models.basis.Linear`.
    :param alpha: prior precision of the weights: one, one per weight, or one per group.
    :param alpha_bias: prior precision of the bias when the basis has one.  None: the bias is a weight like
        the others and is counted in ``groups``.
    :param groups: group of each weight (automatic relevance determination), shape ``(M,)``; groups share a
        precision.  ``torch.arange(M)`` gives each weight its own.
    :param beta: noise precision, in units of ``t`` to the power -2.
    :raises BadInput: on settings that do not fit each other.
    """
    check_precision("beta", beta)
    return LinearModel(basis, weight_prior(basis, alpha, alpha_bias, groups), Regression(beta=beta))
