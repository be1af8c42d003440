"""Other people's programs with one line changed, the engine: which run, what they say, and what they cost.

    python -m benchmarks.others [NAME ...]
    python -m benchmarks.others --nuts SECONDS [NAME ...]

Each program of tests/gallery/programs runs in a fork of this process, one thread, with a limit of processor time. Ends:

- runs: a posterior, and a summary without alarms;
- warned: a posterior whose summary says what is not to be trusted;
- refused: an error of the package, whose beginning is shown, expected by the table or not;
- slow: not done within the limit (fit and summary);
- crash: any other error.

The gap is importance sampling less Laplace, in nats.

With ``--nuts``, instead, one chain of Pyro's NUTS for each, 300 draws after 300 of warm-up, by default settings, until
it has taken so many seconds of the processor: how far it has come, and the largest split R-hat of its draws.  Params
stay where the program begins.
"""

import argparse
import io
import itertools
import multiprocessing
import resource
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pyro
import pyro.distributions as dist
import torch

torch.set_default_dtype(torch.float64)  # before models make tensors

from pyro.infer import MCMC, NUTS
from pyro.ops.stats import split_gelman_rubin

from benchmarks.gallery_references import some_value
from pyro_evidence import Stop
from tests.cases.expect import OWN_ERRORS
from tests.gallery.test_programs import ALARMS, PROGRAMS

LIMIT = 60  # seconds of the processor
DRAWS = 300
FORK = multiprocessing.get_context("fork")


def fitted(name: str, to: Connection) -> None:
    """Sends how one program ends."""
    to.send(ended(name))


def ended(name: str) -> dict[str, Any]:
    """How one program ends."""
    program = PROGRAMS[name]
    pyro.set_rng_seed(0)
    warnings.simplefilter("ignore")
    start = time.process_time()
    try:
        fit = program.engine(program.model, stop=Stop(progress=False), **program.settings)
        posterior = fit.run(*program.data())
        seconds, printed = time.process_time() - start, io.StringIO()
        with redirect_stdout(printed):
            posterior.summary()
        summary = time.process_time() - start - seconds
        found = posterior.diagnostics()
    except OWN_ERRORS as error:
        words = " ".join(str(error).split())
        end = "refused" if program.refused and program.refused in words else "refused, not expected"
        return {"end": end, "said": f"{type(error).__name__}: {words}"}
    except Exception as error:
        return {"end": "crash", "said": f"{type(error).__name__}: {error}"}
    alarms = [line.strip() for line in printed.getvalue().splitlines() if any(alarm in line for alarm in ALARMS)]
    return {
        "end": "warned" if alarms else "runs",
        "said": alarms[0] if alarms else "",
        "k_hat": found["pareto_k"],
        "gap": found["log_evidence_importance"] - found["log_evidence"],
        "fit": seconds,
        "summary": summary,
    }


def sampled(name: str, to: Connection) -> None:
    """Sends how many draws NUTS has made, warm-up included, and at the end what they are worth."""
    program, start, made = PROGRAMS[name], time.process_time(), itertools.count(1)
    pyro.set_rng_seed(0)
    warnings.simplefilter("ignore")

    def note(*_: Any) -> None:
        to.send({"draws": next(made), "seconds": time.process_time() - start})

    mcmc = MCMC(NUTS(program.model), DRAWS, warmup_steps=DRAWS, disable_progbar=True, hook_fn=note)
    with mock.patch.object(dist.ImproperUniform, "sample", some_value):
        mcmc.run(*program.data())
    worst = {n: float(split_gelman_rubin(v.unsqueeze(0)).nan_to_num(1.0).max()) for n, v in mcmc.get_samples().items()}
    site = max(worst, key=lambda n: worst[n])
    to.send(
        {
            "end": "done",
            "r_hat": worst[site],
            "said": f"{site}; {len(mcmc.diagnostics()['divergences']['chain 0'])} divergences",
        }
    )


def limited(run: Callable[[str, Connection], None], seconds: int, name: str, to: Connection) -> None:
    """In a fork: one program, within a limit of processor time."""
    used = int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, used + seconds))
    run(name, to)


def row(name: str, run: Callable[[str, Connection], None], seconds: int, columns: Sequence[str]) -> tuple[str, str]:
    """One line of the table, and how it ended."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=limited, args=(run, seconds, name, there))
    process.start()
    there.close()
    found: dict[str, Any] = {"end": "slow", "said": ""}
    try:
        while True:
            found |= here.recv()
    except EOFError:  # done, or killed
        process.join()
        if process.exitcode not in (0, -signal.SIGXCPU, -signal.SIGKILL):
            found = {"end": "crash", "said": f"exit code {process.exitcode}"}
    numbers = " | ".join(f"{found[c]:.2f}" if c in found else "" for c in columns)
    return f"| {name} | {found['end']} | {numbers} | {str(found['said'])[:100]} |", found["end"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of programs; by default all")
    parser.add_argument("--nuts", type=int, metavar="SECONDS", help="Pyro's NUTS instead, within this limit")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    run, seconds, columns = fitted, LIMIT, ("k_hat", "gap", "fit", "summary")
    if asked.nuts is not None:
        run, seconds, columns = sampled, asked.nuts, ("draws", "seconds", "r_hat")
    ended("scale")  # what the first fit of a process costs belongs to no program
    print(f"| program | end | {' | '.join(columns)} | said |\n{'|---' * (len(columns) + 3)}|")
    ends: dict[str, int] = {}
    for name in asked.names or PROGRAMS:
        line, end = row(name, run, seconds, columns)
        ends[end] = ends.get(end, 0) + 1
        print(line, flush=True)
    print("\n" + ", ".join(f"{end}: {num}" for end, num in sorted(ends.items())))


if __name__ == "__main__":
    main()
