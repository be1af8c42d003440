"""What quadrature in blocks costs beside Laplace: CPU seconds of whole fits, one thread, the two in turn.

    python benchmarks/block_quadrature_speed.py [GROUPS ...]

Random intercepts with ten binary rows a group, three fixed effects, as params and as latent sites; two runs of each
after a small one, the faster counts.  ``error`` is ``posterior.log_evidence_error`` and what it costs.
"""

import sys
import time
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_evidence import LaplaceEvidence, Stop


def data(groups: int, rows: int = 10) -> tuple[Tensor, Tensor, int, Tensor]:
    """Inputs, the group of each row, the number of groups, binary targets."""
    generator = torch.Generator().manual_seed(0)
    group = torch.arange(groups).repeat_interleave(rows)
    X = torch.randn(len(group), 3, generator=generator)
    X[:, 0] = 1.0
    b = torch.randn(groups, generator=generator)
    eta = X @ torch.tensor([-0.3, 0.5, -0.5]) + b[group]
    return X, group, groups, (torch.rand(len(group), generator=generator) < eta.sigmoid()).double()


def params(X: Tensor, group: Tensor, num: int, y: Tensor) -> None:
    """Fixed effects are maximised."""
    w = pyro.param("w", torch.zeros(3))
    _rest(w, X, group, num, y)


def latent(X: Tensor, group: Tensor, num: int, y: Tensor) -> None:
    """Fixed effects are integrated."""
    w = pyro.sample("w", dist.Normal(0.0, 5.0).expand([3]).to_event(1))
    _rest(w, X, group, num, y)


def _rest(w: Tensor, X: Tensor, group: Tensor, num: int, y: Tensor) -> None:
    s = pyro.param("s", torch.tensor(1.0), constraint=constraints.positive)
    with pyro.plate("groups", num):
        b = pyro.sample("b", dist.Normal(0.0, s))
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Bernoulli(logits=X @ w + b[group]), obs=y)


def seconds(nodes: int, model: Any, *given: Any) -> tuple[float, Any]:
    """CPU seconds of one fit, and its posterior."""
    begin = time.process_time()
    posterior = LaplaceEvidence(model, nodes=nodes, stop=Stop(progress=False)).run(*given)
    return time.process_time() - begin, posterior


def main(sizes: list[int]) -> None:
    """Print the table."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    print(
        "groups  fixed effects  Laplace s  7 nodes s  ratio  log evidences, nats  error of Laplace (s)  of 7 nodes (s)"
    )
    for model in (params, latent):
        seconds(7, model, *data(20))
    for size in sizes:
        given = data(size)
        for model in (params, latent):
            runs = [(seconds(1, model, *given), seconds(7, model, *given)) for _ in range(2)]
            (one, by_laplace), (seven, posterior) = (min(pair, key=lambda x: x[0]) for pair in zip(*runs, strict=True))
            errors = []
            for found in (by_laplace, posterior):
                begin = time.process_time()
                error = found.log_evidence_error
                errors.append(f"{error.signed:.4g} ({time.process_time() - begin:.2f})")
            values = f"{float(by_laplace.log_evidence):.3f} {float(posterior.log_evidence):.3f}"
            print(f"{size} {model.__name__} {one:.2f} {seven:.2f} {seven / one:.2f} {values} {' '.join(errors)}")


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or [1_000, 10_000])
