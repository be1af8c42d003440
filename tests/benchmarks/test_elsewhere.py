"""What the benchmark on other data counts, and how it splits them."""

from types import SimpleNamespace

import elsewhere
import torch


def test_a_kernel_is_on_an_atom_if_it_is_narrow_there_and_many_rows_have_that_value() -> None:
    """Of 40 rows 10 have the value 0 in the first column; a single row has the value 3 in the second."""
    Y = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    Y[:10, 0], Y[0, 1] = 0.0, 3.0
    narrow = 10.0 / elsewhere.NARROW**2
    beta = torch.tensor([[narrow, 1.0], [1.0, 1.0], [1.0, narrow], [narrow, 1.0]])
    w = torch.tensor([[0.0, 0.5], [0.0, 0.5], [0.0, 3.0], [0.0, 0.5]])
    active = torch.tensor([True, True, True, False])
    fit = SimpleNamespace(hyperparameters={"beta": beta}, mode={"w": w}, active=active)
    assert elsewhere.on_atoms(fit, Y) == 1


def test_a_split_has_so_many_of_each_class_no_row_twice_and_axes_of_variance_one() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.cat([torch.randn(90, 4, generator=generator), torch.ones(90, 1)], 1)
    t = (torch.arange(90) % 3 == 0).long()
    A, a, B, b = elsewhere.split(X, t, 20, 2, seed=1)
    assert a.bincount().tolist() == [20, 20] and len(b) == 50
    assert A.shape == (40, 2) and B.shape == (50, 2)
    torch.testing.assert_close(A.T.cov(), torch.eye(2), rtol=1e-10, atol=1e-10)
    whole = torch.cat(elsewhere.split(X, t, 20, None, seed=1)[::2])
    assert whole.shape == (90, 4), "the column that does not vary is left out"
    assert len(whole.unique(dim=0)) == 90
