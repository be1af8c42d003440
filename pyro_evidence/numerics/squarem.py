"""Leaps for iterations that crawl."""

from torch import Tensor

LONGEST = 16.0  # steps of one leap; longer ones are often refused, and cost a pass


def leap(start: Tensor, first: Tensor, second: Tensor) -> Tensor:
    r"""Where a fixed-point iteration is heading, from three iterates in unconstrained coordinates.

    .. math:: x_0 + 2 a r + a^2 v, \qquad r = x_1 - x_0, \quad v = (x_2 - x_1) - r, \quad a = \|r\| / \|v\|

    With ``a = 1`` this is the second iterate; ``a`` is held between 1 and :data:`LONGEST`.  One common rate of
    contraction ``1 - 1 / a`` is left out at once.  Varadhan and Roland (2008), scheme SqS3.

    :param start: rows ``(R, P)``, as are the others.
    :return: rows ``(R, P)``.
    """
    r = first - start
    v = second - first - r
    smallest = 1e-300  # an iteration that stands still has neither step nor bend
    length = r.norm(dim=-1, keepdim=True) / v.norm(dim=-1, keepdim=True).clamp(min=smallest)
    length = length.clamp(1.0, LONGEST)
    return start + 2.0 * length * r + length.square() * v
