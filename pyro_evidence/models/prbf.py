r"""The probabilistic RBF network: one mixture for each class, on kernels that the classes share.

.. math:: p(x, k) = P(C_k) \sum_j \pi_{jk}\, N(x | \mu_j, S_j)

Titsias and Likas (2001), "Shared kernel models for class conditional density estimation"; Constantinopoulos, Titsias
and Likas (2001), eqs. 2 to 5.  An ordinary Pyro model, for any engine; ``OverlapEM`` is the one made for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence.data.arrays import require_matrix
from pyro_evidence.errors import BadInput
from pyro_evidence.models.covariances import Covariance
from pyro_evidence.models.covariances import Diagonal as Diagonal
from pyro_evidence.models.covariances import Full as Full
from pyro_evidence.models.covariances import Spherical as Spherical
from pyro_evidence.models.mixture import Units, data_units
from pyro_evidence.program.checks import check_sizes
from pyro_evidence.settings import check_count, check_methods

Kernels = Covariance
Labels = Tensor | Sequence[Any]


@dataclass(frozen=True)
class Shared:
    """Every class may use every kernel: site ``mixing``, ``(K, M)``, rows uniform on the simplex."""

    def allowed(self, num_classes: int, num_kernels: int) -> Tensor:
        """All kernels, for every class."""
        return torch.ones(num_classes, num_kernels, dtype=torch.bool)

    def __call__(self, num_classes: int, like: Tensor, num_kernels: int) -> Tensor:
        """Declares ``mixing``: each class's shares of all kernels."""
        flat = like.new_ones(num_classes, num_kernels)
        return torch.as_tensor(pyro.sample("mixing", dist.Dirichlet(flat).to_event(1)))

    def sites(self, mixing: Tensor) -> dict[str, Tensor]:
        return {"mixing": mixing}


@dataclass(frozen=True)
class Separate:
    """A mixture of its own for each class: sites ``mixing_0``, ``mixing_1``, ..., one for each class.

    :ivar sizes: kernels of each class, in order; they add up to the model's.
    """

    sizes: tuple[int, ...]

    def allowed(self, num_classes: int, num_kernels: int) -> Tensor:
        """A block for each class.

        :raises BadInput: when the sizes do not fit.
        """
        if len(self.sizes) != num_classes or sum(self.sizes) != num_kernels or min(self.sizes) < 1:
            raise BadInput(
                f"Separate(sizes={self.sizes}) does not fit {num_classes} classes and {num_kernels} kernels; expected "
                f"{num_classes} numbers of at least 1 that add up to {num_kernels}."
            )
        owner = torch.arange(num_classes).repeat_interleave(torch.tensor(self.sizes))
        return owner == torch.arange(num_classes).unsqueeze(-1)

    def __call__(self, num_classes: int, like: Tensor, num_kernels: int) -> Tensor:
        """Declares a site for each class."""
        own = [pyro.sample(f"mixing_{k}", dist.Dirichlet(like.new_ones(size))) for k, size in enumerate(self.sizes)]
        starts = [sum(self.sizes[:k]) for k in range(num_classes)]
        pads = [(start, num_kernels - start - size) for start, size in zip(starts, self.sizes, strict=True)]
        return torch.stack([torch.nn.functional.pad(v, pad) for v, pad in zip(own, pads, strict=True)], -2)

    def sites(self, mixing: Tensor) -> dict[str, Tensor]:
        allowed = self.allowed(*mixing.shape)
        return {f"mixing_{k}": mixing[k, allowed[k]] for k in range(len(mixing))}


Sharing = Shared | Separate  # which class may use which kernels


@dataclass(frozen=True)
class PRBF:
    """The Pyro model that :func:`prbf` returns: call it with inputs and labels.

    Sites: ``class_prior`` ``(K,)``, those of the mixing, ``loc`` ``(M, D)``, those of the kernels; ``label`` and ``x``
    in the plate ``data``, and ``x_unlabelled`` in the plate ``unlabelled``.
    """

    num_kernels: int
    num_classes: int
    kernels: Kernels
    sharing: Sharing
    units: Units

    def __call__(self, X: Tensor, labels: Labels | None = None) -> None:
        """Observe the data.

        :param X: inputs, shape ``(N, D)``.
        :param labels: whole numbers from 0 to ``K - 1``, shape ``(N,)``; None, nan or -1 where unknown.
        """
        check_network_inputs(X)
        y = class_labels(labels, len(X), self.num_classes)
        mean, unit = self.units(X)
        class_prior = pyro.sample("class_prior", dist.Dirichlet(X.new_ones(self.num_classes)))
        mixing = self.sharing(self.num_classes, X, self.num_kernels)
        prior = dist.Normal(mean, unit).expand([self.num_kernels, X.shape[-1]]).to_event(2)
        loc = pyro.sample("loc", prior)
        components = self.kernels(self.num_kernels, unit)(loc)
        known, hidden = X[y >= 0], X[y < 0]
        if len(known):
            own = mixing[..., y[y >= 0], :]
            with pyro.plate("data", len(known)):
                pyro.sample("label", dist.Categorical(class_prior), obs=y[y >= 0])
                pyro.sample("x", _mixture(own, components), obs=known)
        if len(hidden):
            whole = (class_prior.unsqueeze(-2) @ mixing).squeeze(-2)
            with pyro.plate("unlabelled", len(hidden)):
                pyro.sample("x_unlabelled", _mixture(whole.expand(len(hidden), -1), components), obs=hidden)


def _mixture(mixing: Tensor, components: Any) -> Any:
    """One mixture for each row of ``mixing`` ``(N, M)``."""
    return dist.MixtureSameFamily(dist.Categorical(mixing), components.expand(mixing.shape))


def check_network_inputs(X: Tensor) -> None:
    """Refuse anything but finite floats of shape ``(N, D)`` that vary.

    :raises BadInput: with shape, dtype or the first bad element.
    """
    require_matrix("X", X)
    check_sizes((), {"X": X})
    if len(broken := (~X.isfinite()).nonzero()):
        row, column = broken[0].tolist()
        raise BadInput(
            f"X[{row}, {column}] is {float(X[row, column])}, and {len(broken)} elements in all are not finite; "
            f"expected numbers. Leave out these rows, or fill in what is missing, before the fit."
        )


def class_labels(labels: Labels | None, num_data: int, num_classes: int) -> Tensor:
    """Labels as int64, -1 where unknown, shape ``(N,)``.

    :param labels: whole numbers of any dtype, bool, or a list; None, nan or -1 where unknown; None for all unknown.
    :raises BadInput: on anything else, with the first bad value.
    """
    if labels is None:
        return torch.full((num_data,), -1)
    if isinstance(labels, Tensor):
        if labels.is_complex():
            raise BadInput(f"labels has dtype {labels.dtype}; expected whole numbers from 0 on.")
        found = labels.detach().double()  # no unsigned type holds -1
    else:
        try:
            found = torch.as_tensor([math.nan if t is None else float(t) for t in labels], dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise BadInput(
                f"labels of type {type(labels).__name__} are not numbers ({error}); expected whole numbers from 0 on, "
                f"such as numpy.unique(labels, return_inverse=True)[1]."
            ) from error
    if found.shape != (num_data,):
        raise BadInput(f"labels has shape {tuple(found.shape)}; expected ({num_data},), one for each row of X.")
    known = torch.where(found.isnan(), -1.0, found)
    bad = (known != known.round()) | (known < -1) | (known >= num_classes)
    if bool(bad.any()):
        raise BadInput(
            f"labels[{int(bad.nonzero()[0])}] is {known[bad][0].item():g}; expected whole numbers from 0 to "
            f"{num_classes - 1}, and None, nan or -1 where unknown. labels.unique(return_inverse=True)[1] makes them "
            f"so; num_classes={num_classes} is the model's."
        )
    return known.long()


def prbf(
    num_kernels: int,
    num_classes: int = 2,
    *,
    kernels: Kernels = Spherical(),
    sharing: Sharing = Shared(),
    units: Units = data_units,
) -> PRBF:
    """The probabilistic RBF network as a Pyro model ``model(X, labels)``.

    :param num_kernels: ``M``, of all classes together.
    :param num_classes: ``K``; 1 makes it a Gaussian mixture.
    :param kernels: :class:`Spherical`, :class:`Diagonal` or :class:`Full`.
    :param sharing: :class:`Shared`, or :class:`Separate` for a mixture of its own in each class.
    :param units: origin and unit of each input, for the priors.
    :raises BadInput: on settings that cannot be meant.
    """
    check_count("num_kernels", num_kernels)
    check_count("num_classes", num_classes)
    if not isinstance(kernels, Kernels):
        raise BadInput(f"kernels={kernels!r}; expected Spherical(), Diagonal() or Full(), an object.")
    check_methods("sharing", sharing, ("allowed",), "Shared() or Separate((2, 3))")
    if not 0.0 <= kernels.floor < 1.0:
        raise BadInput(f"kernels={kernels!r}; expected a floor of at least 0 and below 1, in units of the variance.")
    sharing.allowed(num_classes, num_kernels)
    return PRBF(num_kernels, num_classes, kernels, sharing, units)
