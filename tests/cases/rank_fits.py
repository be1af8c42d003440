"""A fit on several ranks, of which the last is different: ``python rank_fits.py NAME RANKS [SIGNAL]``.

The ranks are forked from one process.  What each of them says is printed as a list: its log evidence, its error, or the
signal by which it ended.  With a signal, the last rank is struck by it in the middle of its fit.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_evidence import EvidenceEM, LaplaceEvidence, Start, Stop
from pyro_evidence.data import distributed
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture

ROWS = 1200
PATIENCE = timedelta(seconds=5)  # that a rank waits for the others
LIMIT = 40.0  # seconds after which a rank counts as hanging
FIXED = Stop(num_steps=30, tolerance=0.0, progress=False, throw=False)

Fit = Callable[[], Any]


def rows() -> tuple[Tensor, Tensor]:
    """Three heaps in four dimensions, and a label that tells the first from the others."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    heap = torch.arange(ROWS) % 3
    centres = 3.0 * torch.randn(3, 4, generator=generator)
    return centres[heap] + torch.randn(ROWS, 4, generator=generator), (heap > 0).double()


def mixture(components: int = 5, restarts: int = 2, seed: int = 0, stop: Stop = FIXED) -> EvidenceEM:
    return EvidenceEM(gaussian_mixture(components), start=Start(restarts=restarts, seed=seed), stop=stop)


def logistic(is_last: bool = False, is_other: str = "") -> Callable[..., Any]:
    """A logistic regression; on the last rank it may have another prior, site or link, or raise in its sixth run."""
    other = is_other if is_last else ""
    calls = 0

    def model(X: Tensor, t: Tensor | None = None) -> Any:
        nonlocal calls
        calls += 1
        if other == "error" and calls == 6:
            raise RuntimeError("the sixth run of this rank")
        if other == "delay":
            time.sleep(0.05)
        scale = 2.0 if other == "prior" else 1.0
        w = pyro.sample("v" if other == "site" else "w", dist.Normal(torch.zeros(4), scale).to_event(1))
        eta = X @ w
        of_t = dist.Bernoulli(probs=torch.special.ndtr(eta)) if other == "link" else dist.Bernoulli(logits=eta)
        with pyro.plate("data", len(X)):
            return pyro.sample("t", of_t, obs=t)

    return model


def changed(x: Tensor, value: float) -> Tensor:
    found = x.clone()
    found.view(-1)[7] = value
    return found


class Shrinking:
    """Rows of which some are missing, more in each pass."""

    def __init__(self, Y: Tensor, lost: int) -> None:
        self.Y, self.lost, self.passes = Y, lost, 0

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        self.passes += 1
        yield (self.Y[: len(self.Y) - self.lost * self.passes],)


def leaving() -> None:
    raise SystemExit(0)


def failing() -> None:
    raise ZeroDivisionError("of this rank, before its fit")


def share(Y: Tensor, few: int, rank: int, size: int) -> Tensor:
    """The rows of a rank where the last has so few of them, and the others have the rest."""
    most, least = Y.split([len(Y) - few, few])
    return least if rank == size - 1 else most.chunk(size - 1)[rank]


def prepared(name: str, rank: int, size: int) -> Fit:
    """The fit of one rank, ready to be run."""
    Y, labels = (x.chunk(size)[rank] for x in rows())
    last = rank == size - 1
    em, laplace = mixture(), LaplaceEvidence(classifier(Linear()), stop=Stop(progress=False))
    own = {
        other: LaplaceEvidence(logistic(last, other), stop=Stop(progress=False))
        for other in ("prior", "site", "link", "error", "delay")
    }
    everything = rows()[0]
    shares = {0: share(everything, 0, rank, size), 1: share(everything, 1, rank, size)}
    long = mixture(12, 4, stop=Stop(num_steps=4000, tolerance=0.0, progress=False, throw=False))
    fits: dict[str, Fit] = {
        "nothing": lambda: em.run(Y),
        "delay": lambda: own["delay"].run(Y, labels),
        "no rows": lambda: em.run(shares[0]),
        "one row": lambda: em.run(shares[1]),
        "chunks": lambda: em.run_chunks([(Y,)]) if last else em.run(Y),
        "nan": lambda: em.run(changed(Y, torch.nan) if last else Y),
        "inf": lambda: em.run(changed(Y, torch.inf) if last else Y),
        "huge": lambda: em.run(changed(Y, 1e300) if last else Y),
        "nan, Laplace": lambda: laplace.run(changed(Y, torch.nan) if last else Y, labels),
        "nan label": lambda: laplace.run(Y, changed(labels, torch.nan) if last else labels),
        "label 7": lambda: laplace.run(Y, changed(labels, 7.0) if last else labels),
        "float32": lambda: em.run(Y.float() if last else Y),
        "columns": lambda: em.run(Y[:, :3] if last else Y),
        "components": lambda: mixture(4 if last else 5).run(Y),
        "engine": lambda: laplace.run(Y, labels) if last else em.run(Y),
        "all empty": lambda: em.run(Y[:0]),
        "no chunk": lambda: em.run_chunks([] if last else [(Y,)]),
        "generator": lambda: em.run_chunks((y for y in [(Y,)]) if last else [(Y,)]),
        "seed": lambda: mixture(seed=rank).run(Y),
        "restarts": lambda: mixture(restarts=2 + rank).run(Y),
        "stop": lambda: mixture(stop=Stop(num_steps=20 + 30 * rank, tolerance=0.0, progress=False, throw=False)).run(Y),
        "shrinking": lambda: em.run_chunks(Shrinking(Y, 20 if last else 0)),
        "leaves": lambda: leaving() if last else em.run(Y),
        "fails before": lambda: failing() if last else em.run(Y),
        "long": lambda: long.run(Y),
        **{other: (lambda other=other: own[other].run(Y, labels)) for other in own},
    }
    return fits[name]


def worker(name: str, rank: int, size: int, say: Any) -> None:
    """One rank, from its beginning to its end."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fit = prepared(name, rank, size)
    with contextlib.suppress(SystemExit):
        try:
            with distributed.shards(timeout=PATIENCE):
                print("began", file=say, flush=True)
                said: dict[str, Any] = {"log_evidence": float(fit().log_evidence)}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps(said), file=say, flush=True)


def forked(name: str, rank: int, size: int) -> tuple[int, Any]:
    """Process and output of a rank."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, os.fdopen(read)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    with os.fdopen(write, "w") as say:
        worker(name, rank, size, say)
    os._exit(0)


def ended(pid: int, until: float) -> int | None:
    """The signal that ended a process, 0 for none, None where it hangs."""
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def main(name: str, size: int, strike: str = "") -> list[dict[str, Any]]:
    """What each rank says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    ranks = [forked(name, rank, size) for rank in range(size)]
    began = [output.readline() == "began\n" for _, output in ranks]
    if strike:
        time.sleep(1.0)
        os.kill(ranks[-1][0], getattr(signal, strike))
    said, until = [], time.monotonic() + LIMIT
    for (pid, output), has_begun in zip(ranks, began, strict=True):
        if strike == "SIGSTOP" and pid == ranks[-1][0]:
            os.kill(pid, signal.SIGKILL)
        number = ended(pid, until)
        text = output.read() or "{}"
        said.append({"began": has_begun, "signal": number, **json.loads(text)})
    return said


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
