"""Do the fits still end where they ended?  The 23 fits of ``portable.py``, and every fit that a tutorial makes.

    python benchmarks/baseline.py                   # this tree against benchmarks/results/baseline.json
    python benchmarks/baseline.py --against FOLDER  # this tree against another checkout, measured on this machine
    python benchmarks/baseline.py --write           # this tree into the file; the commit says which fit moved, and why

Prints every fit that differs and exits with 1 if there is one.  Another machine or another torch rounds differently:
take ``--against`` there.  A part of a name (``--only "RVM"``, ``--only 02_mixtures``) restricts what is measured.

What is kept of a fit: why it ended and what it decided (components, latents, kept axes, pruned groups, modes), the log
evidence or what stands for it, mode, hyperparameters, gamma, and the standard deviations of the posterior, half the
distance of its quantiles at -1 and 1.  Of a tensor with more than ``KEPT`` numbers, so many at equal distances, and its
norm.

Two tolerances.  The strict one, for a change that moves code: the same decisions; the log evidence within
1e-9 (1 + its size); numbers within 1e-9 of the largest in their tensor, or of their standard deviation if that is more.
``--loose``, for a change of an algorithm: the same decisions; the log evidence not lower by more than 1e-6 nats; modes
within .001 standard deviations.  Where the posterior gives none (too many coordinates, or a point), modes and
hyperparameters within 1e-4 of the largest number in their tensor.

One thread, double precision, one process for the 23 fits and one for each tutorial, one after another: five minutes of
a processor.  Wants PYRO_EVIDENCE_DATA; what a tutorial cannot find ends it, and is said.
"""

import argparse
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT_FIGURES = ROOT / "benchmarks" / "results" / "baseline.json"
KEPT = 12  # numbers of one tensor
MOST_COORDINATES = 500  # of a posterior that is asked for its standard deviations: for some they are a matrix inverse
ONE_SIGMA = (0.15865525393145707, 0.8413447460685429)  # the normal distribution function at -1 and 1
ENGINES = ("LaplaceEvidence", "EvidenceEM", "OverlapEM", "RVM", "VRVM", "REVM")
Figures = dict[str, Any]  # of one fit
INSIDE = threading.local()  # whether this thread is inside a run

STRICT = 1e-9  # relative; a sum of 10,000 numbers in another order moves by 1e-12
LOWER = 1e-6  # nats by which --loose lets a log evidence fall
OF_SD = 1e-3  # standard deviations by which it lets a mode move
WITHOUT_SD = 1e-4  # of the largest number in a tensor, where no standard deviation is known


def attribute(posterior: Any, name: str) -> Any:
    """What a posterior has under a name; None where it has nothing, or says why it cannot have it."""
    try:
        return getattr(posterior, name)
    except (AttributeError, ArithmeticError, ValueError, RuntimeError):
        return None


def objective(posterior: Any) -> float:
    """The log evidence or what stands for it, nats; nan where the posterior has none of them."""
    for name in ("log_evidence", "log_bound", "objectives", "log_evidences"):
        value = attribute(posterior, name)
        if value is not None:
            return float(value[-1] if isinstance(value, tuple | list) else value)
    return math.nan


def decisions(posterior: Any) -> dict[str, Any]:
    """Why a fit ended, and how many of what it left."""
    found: dict[str, Any] = {"status": str(attribute(posterior, "status")).split(":")[0]}
    for name in ("num_components", "num_modes", "num_kernels"):
        if (number := attribute(posterior, name)) is not None:
            found[name] = int(number)
    if (latents := attribute(posterior, "num_latents")) is not None:
        found["num_latents"] = sorted(latents.tolist())
    if (active := attribute(posterior, "active")) is not None:
        found["active"] = int(active.sum())
    if isinstance(pruned := attribute(posterior, "pruned"), dict):
        found["pruned"] = sum(int(each.sum()) for each in pruned.values())
    return found


def sample(value: Any) -> list[float]:
    """The numbers of a tensor; of more than ``KEPT`` so many at equal distances, and the norm of all behind them."""
    import torch

    flat = torch.as_tensor(value).detach().double().reshape(-1)
    if len(flat) <= KEPT:
        return [rounded(number) for number in flat.tolist()]
    index = torch.linspace(0, len(flat) - 1, KEPT).round().long()
    return [rounded(number) for number in [*flat[index].tolist(), float(flat.norm())]]


def rounded(number: float) -> float:
    """A number to 12 significant digits."""
    return float(f"{number:.12g}")


def samples(values: Any) -> dict[str, list[float]]:
    """:func:`sample` of each tensor by name; empty for what is no dict of tensors."""
    return {name: sample(value) for name, value in values.items()} if isinstance(values, Mapping) else {}


def deviations(posterior: Any, mode: Mapping[str, Any]) -> dict[str, list[float]]:
    """Half the distance between quantiles at -1 and 1; empty where the posterior has none, or too many."""
    if attribute(posterior, "quantiles") is None or sum(value.numel() for value in mode.values()) > MOST_COORDINATES:
        return {}
    try:
        quantiles = posterior.quantiles(list(ONE_SIGMA))
    except (ArithmeticError, ValueError, RuntimeError):
        return {}
    return {name: sample((q[1] - q[0]) / 2.0) for name, q in quantiles.items()}


def figures(engine: str, posterior: Any) -> Figures:
    """What is kept of one fit; the caller's random numbers stay where they are."""
    import torch

    with torch.random.fork_rng(devices=[]):
        mode = attribute(posterior, "mode") or {}
        return {
            "engine": engine,
            "decided": decisions(posterior),
            "log_evidence": rounded(objective(posterior)),
            "mode": samples(mode),
            "sd": deviations(posterior, mode),
            "hyperparameters": samples(attribute(posterior, "hyperparameters")),
            "gamma": samples(attribute(posterior, "gamma")),
        }


def failure(engine: str, error: BaseException) -> Figures:
    """What is kept of a fit that ended in an error: that, and the posterior that the error may carry."""
    carried = getattr(error, "posterior", None)
    found = figures(engine, carried) if carried is not None else {"engine": engine, "decided": {}}
    found["decided"]["error"] = type(error).__name__
    return found


def portable_fits(only: str) -> Iterable[tuple[str, Figures]]:
    """Name and figures of the fits of ``portable.py``; those of sets that are not there are left out."""
    import pyro

    sys.path.insert(0, str(ROOT / "benchmarks"))
    from portable import fits

    for name, fit in fits().items():
        if only not in name:
            continue
        engine = name.split(",")[0]
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        try:
            yield name, figures(engine, fit())
        except FileNotFoundError:
            print(f"{name}: left out, its data are not there", file=sys.stderr)
        except Exception as error:
            yield name, failure(engine, error)


def recording(run: Callable[..., Any], engine: str, keep: Callable[[Figures], None]) -> Callable[..., Any]:
    """``run`` of an engine, whose result is kept; runs inside another run count as a part of that."""

    @wraps(run)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if getattr(INSIDE, "a_run", False):
            return run(*args, **kwargs)
        INSIDE.a_run = True
        try:
            posterior = run(*args, **kwargs)
            keep(figures(engine, posterior))
        except Exception as error:
            keep(failure(engine, error))
            raise
        finally:
            INSIDE.a_run = False
        return posterior

    return recorded


def tutorial_fits(path: Path) -> Iterable[tuple[str, Figures]]:
    """Name and figures of each fit of a tutorial, in the order in which they end."""
    import matplotlib.pyplot as plt

    import pyro_evidence

    found: list[Figures] = []
    for engine in ENGINES:
        kind = getattr(pyro_evidence, engine)
        for name in ("run", "run_chunks"):
            if hasattr(kind, name):
                setattr(kind, name, recording(getattr(kind, name), engine, found.append))
    try:
        runpy.run_path(str(path))
    except Exception as error:
        print(f"{path.stem}: ended by {type(error).__name__}: {error}", file=sys.stderr)
    plt.close("all")
    return [(f"{path.stem} #{number}", each) for number, each in enumerate(found, start=1)]


def measure_here(source: str, only: str, into: Path) -> None:
    """Fits of this process, written as one JSON object."""
    import pyro
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    warnings.simplefilter("ignore")
    fits = portable_fits(only) if source == "portable" else tutorial_fits(ROOT / "tutorials" / f"{source}.py")
    into.write_text(json.dumps({name: found for name, found in fits if only in name}), encoding="utf-8")


def measured(only: str) -> dict[str, Figures]:
    """Fits of this tree by processes of their own."""
    tutorials = sorted(path.stem for path in (ROOT / "tutorials").glob("[0-9]*.py"))
    wanted = [name for name in tutorials if only in name or only.startswith(name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    environment |= {"PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
    found: dict[str, Figures] = {}
    for source in [*(["portable"] if not only or not wanted else []), *wanted]:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "found.json"
            command = [sys.executable, __file__, "--source", source, "--only", only, "--into", str(into)]
            subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
            found |= json.loads(into.read_text(encoding="utf-8"))
        print(f"{source}: {len(found)} fits so far", file=sys.stderr, flush=True)
    return found


def measured_elsewhere(folder: Path, only: str) -> dict[str, Figures]:
    """Fits of another checkout of the project, by its own copy of this script."""
    script = folder.resolve() / "benchmarks" / "baseline.py"
    if not script.exists():
        raise SystemExit(f"{folder} has no benchmarks/baseline.py; expected a checkout of this project that has one.")
    with tempfile.TemporaryDirectory() as kept:
        into = Path(kept) / "found.json"
        subprocess.run([sys.executable, str(script), "--only", only, "--keep", str(into)], check=True, cwd=folder)
        return json.loads(into.read_text(encoding="utf-8"))["fits"]


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "pyro-ppl", "numpy")}


def write(path: Path, fits: Mapping[str, Figures]) -> None:
    """A line for each tensor of a fit, so that two versions of the file show which fit moved, and in what."""
    text = json.dumps({"versions": versions(), "fits": fits}, sort_keys=True, indent=1)
    text = re.sub(
        r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text
    )
    path.write_text(text + "\n", encoding="utf-8")


def far(now: float, before: float, most: float) -> bool:
    """Whether two numbers differ by more than ``most``; inf equals inf, and nan equals nan."""
    if now == before or (math.isnan(now) and math.isnan(before)):
        return False
    return not abs(now - before) <= most


def moved(now: Figures, before: Figures, what: str, loose: bool) -> list[str]:
    """Names of the tensors under ``what`` that moved by more than the tolerance, and by how much."""
    found = []
    a, b, sds = now.get(what, {}), before.get(what, {}), before.get("sd", {}) if what == "mode" else {}
    for name in sorted({*a, *b}):
        if len(a.get(name, [])) != len(b.get(name, [])):
            found.append(f"{what} {name}: {len(a.get(name, []))} numbers, before {len(b.get(name, []))}")
            continue
        largest = max((abs(x) for x in b[name] if math.isfinite(x)), default=0.0)
        sd = sds.get(name, [])
        each = [tolerance(largest, sd[i] if i < len(sd) else None, loose) for i in range(len(b[name]))]
        pairs = list(zip(a[name], b[name], each, strict=True))
        if loose and sd and len(sd) > KEPT:
            pairs.pop()  # the norm, which adds up what all coordinates may move
        worst = [(x, y) for x, y, most in pairs if far(x, y, most)]
        if worst:
            x, y = max(worst, key=lambda pair: abs(pair[0] - pair[1]))
            found.append(f"{what} {name}: {x:.12g}, before {y:.12g}")
    return found


def tolerance(largest: float, sd: float | None, loose: bool) -> float:
    """By how much a number may move whose tensor has ``largest`` as its largest one."""
    if not loose:
        return STRICT * max(largest, sd or 0.0)
    return WITHOUT_SD * largest if sd is None else max(OF_SD * sd, STRICT * largest)


def differences(now: Figures, before: Figures, loose: bool) -> list[str]:
    """What moved in one fit by more than the tolerance, in words; empty for nothing."""
    found = []
    for name in sorted({*now["decided"], *before["decided"]}):
        a, b = now["decided"].get(name), before["decided"].get(name)
        if a != b:
            found.append(f"{name}: {a}, before {b}")
    a, b = now.get("log_evidence", math.nan), before.get("log_evidence", math.nan)
    rose = loose and a > b
    if not rose and far(a, b, LOWER if loose else STRICT * (1.0 + abs(b))):
        found.append(f"log evidence: {a:.12g}, before {b:.12g}, by {a - b:.3g}")
    found += moved(now, before, "mode", loose)
    if not loose or not before.get("sd"):
        found += moved(now, before, "hyperparameters", loose)
    return found if loose else found + moved(now, before, "gamma", loose)


def compared(now: Mapping[str, Figures], before: Mapping[str, Figures], loose: bool) -> dict[str, list[str]]:
    """Fit -> what moved, for those in which something did."""
    found = {}
    for name in sorted({*now, *before}):
        if name not in now or name not in before:
            found[name] = ["is new" if name in now else "is gone"]
        elif said := differences(now[name], before[name], loose):
            found[name] = said
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the figures of this tree in benchmarks/results")
    parser.add_argument("--against", type=Path, help="another checkout, to be measured here, instead of the file")
    parser.add_argument("--loose", action="store_true", help="the tolerance for a change of an algorithm")
    parser.add_argument("--only", default="", help="fits whose name has this in it, or all of one tutorial")
    parser.add_argument("--keep", type=Path, help="measure only, and keep the figures in this file")
    parser.add_argument("--source", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.source:
        measure_here(asked.source, asked.only, asked.into)
        return
    now = measured(asked.only)
    if asked.keep or asked.write:
        write(asked.keep or KEPT_FIGURES, now)
        return
    if asked.against:
        before = measured_elsewhere(asked.against, asked.only)
    else:
        kept = json.loads(KEPT_FIGURES.read_text(encoding="utf-8"))
        before = {name: found for name, found in kept["fits"].items() if asked.only in name}
        if kept["versions"] != versions():
            print(f"the file is of {kept['versions']}, this is {versions()}: expect other rounding")
    found = compared(now, before, asked.loose)
    for name, said in found.items():
        print(name, *said, sep="\n    ")
    print(f"{len(now)} fits, {len(found)} differ")
    sys.exit(int(bool(found)))


if __name__ == "__main__":
    main()
