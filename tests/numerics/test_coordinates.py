"""One flat unconstrained vector against transforms applied by hand."""

from functools import partial

import pytest
import torch
from torch import Size
from torch.distributions import Transform, biject_to, constraints

from pyro_evidence.numerics.coordinates import Coordinates, is_identity

assert_exact = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)

Parts = dict[str, tuple[Transform, Size]]


def coordinates() -> Coordinates:
    parts: Parts = {
        "w": (biject_to(constraints.real), Size([2])),
        "p": (biject_to(constraints.simplex), Size([2, 3])),
        "s": (biject_to(constraints.positive), Size([])),
        "L": (biject_to(constraints.corr_cholesky), Size([3, 3])),
        "b": (biject_to(constraints.independent(constraints.interval(-1.0, 3.0), 1)), Size([2])),
    }
    return Coordinates(parts)


def test_names_are_sorted_and_sizes_are_unconstrained() -> None:
    found = coordinates()
    assert found.names == ("L", "b", "p", "s", "w")
    assert found.size == 3 + 2 + 4 + 1 + 2
    assert found.slices == {
        "L": slice(0, 3),
        "b": slice(3, 5),
        "p": slice(5, 9),
        "s": slice(9, 10),
        "w": slice(10, 12),
    }
    assert [p.size for p in found] == [3, 2, 4, 1, 2]


def test_constrained_values_are_the_transforms_of_the_slices() -> None:
    found = coordinates()
    u = torch.randn(found.size)
    values = found.constrained(u)
    assert_exact(values["s"], u[9].exp())
    assert_exact(values["b"], -1.0 + 4.0 * u[3:5].sigmoid())
    assert_exact(values["p"], biject_to(constraints.simplex)(u[5:9].reshape(2, 2)))
    assert_exact(values["w"], u[10:])
    assert_exact(values["L"].square().sum(-1), torch.ones(3))
    assert {n: v.shape for n, v in values.items()} == {p.name: p.shape for p in found}


def test_log_det_is_that_of_the_jacobian_matrix() -> None:
    parts: Parts = {
        "s": (biject_to(constraints.positive), Size([2])),
        "b": (biject_to(constraints.interval(-1.0, 3.0)), Size([])),
        "p": (biject_to(constraints.simplex), Size([3])),
        "w": (biject_to(constraints.real), Size([1])),
    }
    found = Coordinates(parts)
    u = torch.randn(found.size)
    values, log_det = found.constrained_with_log_det(u)

    def free(v: torch.Tensor) -> torch.Tensor:
        """The values without the last element of the simplex, which the others determine."""
        x = found.constrained(v)
        return torch.cat([x["b"].reshape(1), x["p"][:-1], x["s"], x["w"]])

    J = torch.autograd.functional.jacobian(free, u)
    assert_exact(log_det, torch.linalg.slogdet(J).logabsdet)
    assert_exact(values["p"], found.constrained(u)["p"])


def test_flat_undoes_constrained() -> None:
    found = coordinates()
    u = torch.randn(found.size)
    assert_exact(found.flat(found.constrained(u)), u, rtol=1e-8, atol=1e-8)
    assert Coordinates({}).flat({}).shape == (0,)


@pytest.mark.parametrize("batch", [(4,), (2, 3)])
def test_a_batch_equals_a_loop(batch: tuple[int, ...]) -> None:
    found = coordinates()
    u = torch.randn(*batch, found.size)
    values, log_det = found.constrained_with_log_det(u)
    flat = u.reshape(-1, found.size)
    loop = [found.constrained_with_log_det(row) for row in flat]
    assert_exact(log_det, torch.stack([d for _, d in loop]).reshape(batch))
    for name, value in values.items():
        rows = torch.stack([v[name] for v, _ in loop])
        assert_exact(value, rows.reshape(batch + rows.shape[1:]))
        assert_exact(found.constrained(u)[name], value)


def test_label_names_the_site_and_the_element() -> None:
    found = coordinates()
    assert "'p'" in found.label(6) and "element 1" in found.label(6)
    assert "'w'" in found.label(11) and "element 1" in found.label(11)


@pytest.mark.parametrize(
    "constraint", [constraints.real, constraints.real_vector, constraints.independent(constraints.real, 2)]
)
def test_identity_is_recognised(constraint: constraints.Constraint) -> None:
    assert is_identity(biject_to(constraint))


@pytest.mark.parametrize("constraint", [constraints.positive, constraints.simplex, constraints.unit_interval])
def test_other_transforms_are_not_the_identity(constraint: constraints.Constraint) -> None:
    assert not is_identity(biject_to(constraint))
