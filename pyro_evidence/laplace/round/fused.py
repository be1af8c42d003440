"""A function and its gradient as one list of tensor operations, without the handlers that it was written with."""

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_evidence.threads import own_warnings

Function = Callable[[Tensor], Tensor]
WithGradient = Callable[[Tensor], tuple[Tensor, Tensor]]
Listed = Callable[[Tensor], tuple[Tensor, ...]]  # value, gradient, and whether each factorisation failed
INFO = {  # operations that say by a number whether they have failed, and which of their results that is
    torch.ops.aten.linalg_cholesky_ex: 1,
    torch.ops.aten.linalg_inv_ex: 1,
    torch.ops.aten.linalg_lu_factor_ex: 2,
    torch.ops.aten._linalg_solve_ex: 3,
}


def with_gradient(f: Function) -> WithGradient:
    """Values ``()`` and gradients ``(D,)`` by autograd."""

    def found(z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            value = f(z)
            return value.detach(), torch.autograd.grad(value, z)[0]

    return found


def fused(f: Function, places: Tensor) -> WithGradient:
    """The same by the tensor operations that one run makes, in the order in which it makes them.

    A run whose Python depends on numbers cannot be written down so, and stays as it is; and so does one whose list
    gives other values than ``f`` at any of ``places``.

    :param places: ``(S, D)``, at the first of which the run is made.
    """
    plain = with_gradient(f)
    try:
        with own_warnings("ignore"):
            listed = _list(plain, places[0])
        same = all(_same(listed(z)[:2], plain(z)) for z in places)
    except Exception:  # whatever it is that Python does here: the plain way is always right
        return plain
    return _guarded(listed, plain) if same else plain


def _list(plain: WithGradient, place: Tensor) -> Listed:
    """The operations of one run, put together by torch's own interpreter."""
    graph = make_fx(plain)(place.clone())
    graph.graph.eliminate_dead_code()
    _tell_failures(graph.graph)
    graph.recompile()
    with torch.no_grad():
        listed: Listed = torch.jit.trace(graph.eval(), (place.clone(),), check_trace=False)
    return listed


def _tell_failures(graph: Graph) -> None:
    """Let a list of operations give the failures of its factorisations too, which nothing in it looks at."""
    output = next(node for node in graph.nodes if node.op == "output")
    infos = []
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in INFO:
            with graph.inserting_before(output):
                infos.append(graph.call_function(operator.getitem, (node, INFO[node.target.overloadpacket])))
    output.args = ((*output.args[0], *infos),)


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(
        torch.allclose(x, y, rtol=1e-9, atol=1e-9 * (1.0 + float(y.abs().max()))) for x, y in zip(a, b, strict=True)
    )


def _guarded(listed: Listed, plain: WithGradient) -> WithGradient:
    """The list, and the plain way where it fails, as where a matrix is singular."""

    def found(z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            value, gradient, *infos = listed(z.detach())
        return plain(z) if any(bool(info.any()) for info in infos) else (value, gradient)

    return found
