"""Small networks on small data, for the tests of the kernels."""

import torch
from torch import Tensor

from pyro_evidence.models.covariances import Covariance
from pyro_evidence.prbf.densities import Network


def three_classes(num: int = 90, seed: int = 0, apart: float = 1.0) -> tuple[Tensor, Tensor]:
    """Overlapping blobs in three inputs, unequal classes."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), num, replacement=True, generator=g)
    middle = apart * torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.5, 0.0], [-1.0, 1.0, 1.0]])
    return middle[labels] + torch.randn(num, 3, generator=g), labels


def random_network(kind: Covariance, rows: int = 2, seed: int = 1, sizes: tuple[int, int, int] = (3, 4, 3)) -> Network:
    """Anything that is a network; ``sizes`` are classes, kernels, inputs."""
    K, M, D = sizes
    g = torch.Generator().manual_seed(seed)
    mixing = torch.rand(rows, K, M, generator=g) + 0.2
    A = torch.randn(rows, M, D, D, generator=g)
    matrix = 0.3 * A @ A.mT + torch.eye(D)
    prior = torch.rand(rows, K, generator=g) + 0.5
    loc = torch.randn(rows, M, D, generator=g)
    return Network(
        mixing / mixing.sum(-1, keepdim=True), loc, kind.restricted(matrix).clone(), prior / prior.sum(-1, True)
    )
