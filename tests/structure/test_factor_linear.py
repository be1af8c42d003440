"""Products with a sparse design against the same with the dense matrix ``J``, ``(N, C, D)``."""

import pytest
import torch

from pyro_evidence.structure.factor_linear import SparseRows

N, C, D = 40, 2, 9


def design(kind: str) -> tuple[SparseRows, torch.Tensor]:
    """Coordinates that all data see, that none do, and that some share; and the same as a dense matrix."""
    generator = torch.Generator().manual_seed(0)
    group, item = (torch.randint(3, (N,), generator=generator) + first for first in (2, 5))
    columns = {
        "shared": [torch.zeros(N).long(), torch.ones(N).long()],
        "own": [group],
        "crossed": [torch.zeros(N).long(), group, item],
    }
    index = torch.stack(columns[kind], -1)
    value = torch.randn(N, C, index.shape[-1], generator=generator, dtype=torch.float64)
    dense = torch.zeros(N, C, D, dtype=torch.float64)
    for n in range(N):
        for place, coordinate in enumerate(index[n].tolist()):
            dense[n, :, coordinate] = value[n, :, place]
    return SparseRows(index, value, D), dense


@pytest.mark.parametrize("kind", ["shared", "own", "crossed"])
def test_products_are_those_of_the_dense_matrix(kind: str) -> None:
    rows, J = design(kind)
    generator = torch.Generator().manual_seed(1)
    u, s = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, D), (N, C)))
    torch.testing.assert_close(rows.product(u), torch.einsum("ncd,rd->rnc", J, u))
    torch.testing.assert_close(rows.back(s), torch.einsum("ncd,nc->d", J, s))


@pytest.mark.parametrize("kind", ["shared", "own", "crossed"])
def test_small_matrices_add_up_to_the_curvature_and_weigh_each_datum(kind: str) -> None:
    rows, J = design(kind)
    root = torch.randn(N, C, C, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    B = root @ root.mT
    total = torch.zeros(D, D, dtype=torch.float64)
    for index, element in zip(rows.distinct, rows.elements(B.unsqueeze(0))[0], strict=True):
        total[index[:, None], index] += element
    torch.testing.assert_close(total, torch.einsum("nad,nab,nbe->de", J, B, J))
    inverse = torch.linalg.inv(total + torch.eye(D, dtype=torch.float64))
    weights = torch.stack([inverse[index[:, None], index] for index in rows.distinct])
    torch.testing.assert_close(rows.sandwiched(weights), J @ inverse @ J.mT)
