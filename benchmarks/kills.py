"""Fits that are killed with SIGKILL at random moments and resumed: is anything lost?

    OMP_NUM_THREADS=1 python benchmarks/kills.py                  # 50 kills, Markdown on stdout
    OMP_NUM_THREADS=1 python benchmarks/kills.py --kills 500 --seed 1

Each of some engines writes its state after every step to one file, in a process of its own that is killed after a
random share of the time that the fit takes.  What the file holds is read, the fit goes on from there, and its end is
compared with that of a fit that nobody killed.  Exits with 1 unless every file was whole and every end the same to
1e-12.  Linux and macOS.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_evidence import RVM, EvidenceEM, LaplaceEvidence, OverlapEM, Start, Stop, files
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import Learned

COUNTED = {"tolerance": 0.0, "progress": False, "throw": False}


def data() -> tuple[Tensor, Tensor]:
    """Three clusters in four columns, and two labels."""
    generator = torch.Generator().manual_seed(0)
    centres = 2.0 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    which = torch.arange(600) % 3
    Y = centres[which] + torch.randn(600, 4, generator=generator, dtype=torch.float64)
    return Y, (which > 0).double()


Y, LABELS = data()
FITS: dict[str, tuple[Callable[[Stop], Any], tuple[Tensor, ...]]] = {
    "EvidenceEM": (lambda stop: EvidenceEM(gaussian_mixture(5), start=Start(restarts=2), stop=stop), (Y,)),
    "EvidenceEM, planes": (lambda stop: EvidenceEM(mppca(3, 1), start=Start(restarts=2), stop=stop), (Y,)),
    "LaplaceEvidence": (
        lambda stop: LaplaceEvidence(
            classifier(Linear(), alpha=Learned(torch.tensor(1.0, dtype=torch.float64))), stop=stop
        ),
        (Y, LABELS),
    ),
    "RVM": (lambda stop: RVM(classifier(Polynomial(2)), stop=stop), (Y, LABELS)),
    "OverlapEM": (lambda stop: OverlapEM(prbf(4), stop=stop), (Y, LABELS)),
}


@dataclass(frozen=True)
class Kill:
    """One fit that was killed."""

    engine: str
    share: float  # of the fit's time, after which the signal was sent
    steps: int  # that the file held; -1 for no file yet
    whole: bool  # whether the file could be read
    same: bool  # whether the resumed fit ended where the other did


def stop_of(path: Path | None) -> Stop:
    return Stop(num_steps=60, checkpoint=path, checkpoint_interval=0.0, **COUNTED)  # type: ignore[arg-type]


def height(found: Any) -> float:
    return float(found.objectives[-1] if isinstance(found.__dict__.get("objectives"), tuple) else found.log_evidence)


def killed(name: str, path: Path, after: float) -> None:
    """A fit in a process of its own, and its end by force."""
    make, args = FITS[name]
    if not (child := os.fork()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(stop_of(path)).run(*args)
        os._exit(0)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def one(name: str, expected: float, seconds: float, draw: random.Random) -> Kill:
    make, args = FITS[name]
    share = draw.random()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fit.ckpt"
        killed(name, path, share * seconds)
        if not path.exists():
            return Kill(name, share, -1, whole=True, same=True)
        try:
            loops = files.read(path)["loops"]
        except Exception:
            return Kill(name, share, 0, whole=False, same=False)
        found = height(make(stop_of(None)).resume(path).run(*args))
    same = abs(found - expected) <= 1e-12 * abs(expected)
    return Kill(name, share, len(loops), whole=True, same=same)


def kills(number: int, seed: int) -> Iterator[Kill]:
    draw, known = random.Random(seed), dict[str, tuple[float, float]]()
    for name, (make, args) in FITS.items():
        with tempfile.TemporaryDirectory() as folder:
            make(stop_of(Path(folder) / "first")).run(*args)  # what is loaded once
            begin = time.monotonic()
            found = height(make(stop_of(Path(folder) / "second")).run(*args))
            known[name] = found, time.monotonic() - begin
    names = list(FITS)
    for i in range(number):
        name = names[i % len(names)]
        yield one(name, *known[name], draw)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    found = list(kills(arguments.kills, arguments.seed))
    print("| engine | kills | before the first writing | file whole | same end |\n|---|---|---|---|---|")
    for name in FITS:
        own = [k for k in found if k.engine == name]
        none = sum(k.steps < 0 for k in own)
        print(f"| {name} | {len(own)} | {none} | {sum(k.whole for k in own)} | {sum(k.same for k in own)} |")
    sys.exit(not all(k.whole and k.same for k in found))


if __name__ == "__main__":
    main()
