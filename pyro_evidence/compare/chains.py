"""NUTS on a model with its params put in: one chain here, several in processes of their own."""

import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from torch import Tensor

from pyro_evidence.infer.laplace_nuts import LaplaceNUTS
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.program.log_joint import Model

Draws = dict[str, Tensor]
Data = tuple[tuple[Any, ...], dict[str, Any]]
Length = tuple[int, int]  # of a chain: draws, and warm-up steps before them
MOST_SAID = 300  # characters of another's error message
FEWEST = 4  # draws of a chain, below which Pyro computes no diagnostics at all
UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)


@dataclass(frozen=True, eq=False)
class Chains:
    """Draws of NUTS, by chain.

    :ivar draws: constrained values by site, ``(C, T) + site shape``.
    :ivar diverging: which transitions diverged, bool, ``(C, T)``.
    :ivar model: what it ran on.
    :ivar note: why the chains ran one after the other, or an empty string.
    """

    draws: Draws
    diverging: Tensor
    model: Model
    note: str = ""

    def get_samples(self, num_samples: int | None = None, group_by_chain: bool = False) -> Draws:
        """Draws by site, as ``MCMC.get_samples`` returns them; the last ``num_samples`` of each chain."""
        kept = {n: v if num_samples is None else v[:, -num_samples:] for n, v in self.draws.items()}
        return kept if group_by_chain else {n: v.flatten(0, 1) for n, v in kept.items()}


def run_chains(
    model: Model, data: Data, length: Length, seeds: Sequence[int], posterior: LaplacePosterior | None = None
) -> Chains:
    """Chains of NUTS, one for each seed, whatever process they run in.

    Several chains run in spawned processes, one thread each.  These have no param store and do not inherit the
    default dtype: the model must hold its hyperparameters, and the dtype is handed over.  A model that cannot be
    pickled (a lambda, a function typed into a notebook) runs here, chain after chain, and a note says so.

    :param posterior: whose model and data these are, to run in its own coordinates, chain after chain in this process.
    """
    note, parts = "", None
    if posterior is not None:
        parts = [_one_chain(LaplaceNUTS(posterior), length, seed, ((), {})) for seed in seeds]
    elif len(seeds) > 1:
        parts, note = _elsewhere(model, data, length, seeds)
    parts = parts or [_one_chain(NUTS(model), length, seed, data) for seed in seeds]
    draws = {n: torch.stack([part[n] for part, _ in parts]) for n in parts[0][0]}
    return Chains(draws, torch.stack([diverging for _, diverging in parts]), model, note)


def _one_chain(kernel: MCMCKernel, length: Length, seed: int, data: Data) -> tuple[Draws, Tensor]:
    """Draws ``(T,) + site shape`` and which transitions diverged, ``(T,)``."""
    mcmc = MCMC(kernel, *length, disable_progbar=True)
    torch.manual_seed(seed)
    mcmc.run(*data[0], **data[1])
    return dict(mcmc.get_samples()), divergences(mcmc)[0]


def divergences(mcmc: MCMC) -> Tensor:
    """Which transitions of finished chains diverged, bool ``(C, T)``; all False for fewer than four draws a chain."""
    chains, length = next(iter(mcmc.get_samples(group_by_chain=True).values())).shape[:2]
    diverging = torch.zeros(chains, length, dtype=torch.bool)
    found: Mapping[str, list[int]] = mcmc.diagnostics().get("divergences", {}) if length >= FEWEST else {}
    for name, indices in found.items():
        diverging[int(name.split()[-1]), [int(i) for i in indices]] = True
    return diverging


def _elsewhere(
    model: Model, data: Data, length: Length, seeds: Sequence[int]
) -> tuple[list[tuple[Draws, Tensor]] | None, str]:
    """The chains from other processes; nothing, and the reason, where that is not possible.

    :raises SystemExit: in a process that is only importing an unguarded script, which must not run it all again.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit("put the script's statements under if __name__ == '__main__': to run chains in processes.")
    try:
        content = pickle.dumps((model, data, length))
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(len(seeds), multiprocessing.cpu_count()), mp_context=context) as pool:
            tasks = [(torch.get_default_dtype(), content, seed) for seed in seeds]
            return [pickle.loads(part) for part in pool.map(_in_a_process, tasks)], ""
    except (*UNPICKLABLE, RuntimeError) as error:  # a broken pool among them
        return None, (
            "its chains ran one after the other, because the model does not go into another process "
            f"({error_line(error)}). Define it in a module that can be imported."
        )


def error_line(error: Exception) -> str:
    """An error's class and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_SAID]}"


def _in_a_process(task: tuple[torch.dtype, bytes, int]) -> bytes:
    """One chain in a fresh process, as bytes: tensors would need shared memory."""
    dtype, content, seed = task
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)  # before the model's module is imported
    model, data, length = pickle.loads(content)
    return pickle.dumps(_one_chain(NUTS(model), length, seed, data))
