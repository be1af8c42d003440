"""Leaps of fixed-point iterations against iterations whose end is known."""

import torch

from pyro_evidence.numerics.squarem import LONGEST, leap


def test_a_leap_ends_at_the_fixed_point_of_an_iteration_with_one_rate() -> None:
    end = torch.tensor([[1.0, -2.0, 3.0], [0.0, 5.0, 0.5]], dtype=torch.float64)
    rate = torch.tensor([[0.5], [0.9]], dtype=torch.float64)
    x = [end + rate**i * torch.tensor([2.0, -1.0, 0.3], dtype=torch.float64) for i in range(3)]
    torch.testing.assert_close(leap(*x), end, rtol=1e-12, atol=1e-12)


def test_a_leap_is_no_longer_than_allowed_and_no_shorter_than_two_rounds() -> None:
    """A rate of almost 1 asks for thousands of steps at once, one that turns back for less than one."""
    slow = [torch.tensor([[0.9999**i]], dtype=torch.float64) for i in range(3)]
    r, v = slow[1] - slow[0], slow[2] - 2.0 * slow[1] + slow[0]
    torch.testing.assert_close(leap(*slow), slow[0] + 2.0 * LONGEST * r + LONGEST**2 * v, rtol=1e-14, atol=0.0)
    turning = [torch.tensor([[(-0.9) ** i]], dtype=torch.float64) for i in range(3)]
    torch.testing.assert_close(leap(*turning), turning[2], rtol=1e-14, atol=1e-15)
    still = torch.ones(1, 2, dtype=torch.float64)
    assert torch.equal(leap(still, still, still), still)
