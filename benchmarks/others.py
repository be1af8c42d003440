"""Other people's programs with one line changed, the engine: which run, what they say, and what they cost.

    python -m benchmarks.others [NAME ...]

Each program of tests/gallery/programs runs in a fork of this process, one thread, with a limit of processor time. Ends:

- runs: a posterior, and a summary without alarms;
- warned: a posterior whose summary says what is not to be trusted;
- refused: an error of the package, whose beginning is shown, expected by the table or not;
- slow: not done within the limit (fit and summary);
- crash: any other error.

The gap is importance sampling less Laplace, in nats.
"""

import argparse
import io
import multiprocessing
import resource
import signal
import time
import warnings
from contextlib import redirect_stdout
from multiprocessing.connection import Connection
from typing import Any

import pyro
import torch

torch.set_default_dtype(torch.float64)  # before models make tensors

from pyro_evidence import Stop
from tests.cases.expect import OWN_ERRORS
from tests.gallery.test_programs import ALARMS, PROGRAMS

LIMIT = 60  # seconds of the processor
FORK = multiprocessing.get_context("fork")


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


def limited(name: str, to: Connection) -> None:
    """In a fork: the end of one program, within a limit of processor time."""
    used = int(time.process_time()) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (used + LIMIT, used + LIMIT))
    to.send(ended(name))


def row(name: str) -> tuple[str, dict[str, Any]]:
    """One line of the table."""
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=limited, args=(name, there))
    process.start()
    there.close()
    found = {"end": "slow", "said": ""}
    try:
        found |= here.recv()
    except EOFError:  # killed
        process.join()
        if process.exitcode not in (-signal.SIGXCPU, -signal.SIGKILL):
            found = {"end": "crash", "said": f"exit code {process.exitcode}"}
    numbers = " | ".join(f"{found[c]:.2f}" if c in found else "" for c in ("k_hat", "gap", "fit", "summary"))
    return f"| {name} | {found['end']} | {numbers} | {str(found['said'])[:100]} |", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of programs; by default all")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    ended("scale")  # what the first fit of a process costs belongs to no program
    print("| program | end | k-hat | gap | fit, CPU s | summary, CPU s | said |\n|---|---|---|---|---|---|---|")
    ends: dict[str, int] = {}
    for name in asked.names or PROGRAMS:
        line, found = row(name)
        ends[found["end"]] = ends.get(found["end"], 0) + 1
        print(line, flush=True)
    print("\n" + ", ".join(f"{end}: {num}" for end, num in sorted(ends.items())))


if __name__ == "__main__":
    main()
