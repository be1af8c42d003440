"""Cholesky factors that are right or refused, and the memory that a dense matrix asks for."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_evidence.errors import NotPositiveDefinite, TooLarge

Label = Callable[[int], str]  # flat coordinate -> what a reader calls it


def coordinate(index: int) -> str:
    """The default :data:`Label`: the bare position."""
    return f"coordinate {index}"


def cholesky(A: Tensor, name: str, label: Label = coordinate) -> Tensor:
    """Lower Cholesky factor of ``A``, shape ``(..., M, M)``, in float64; nothing is ever added to ``A``.

    :param name: what the reader calls the matrix.
    :param label: names a row, so that the letter can say where the trouble lies.
    :raises NotPositiveDefinite: with the smallest eigenvalue and the row it points at.
    """
    tril, info = torch.linalg.cholesky_ex(A.double())
    if bool(info.any()):
        raise NotPositiveDefinite(_not_positive_definite(A.double(), name, label))
    return tril


def _not_positive_definite(A: Tensor, name: str, label: Label) -> str:
    if not bool(torch.isfinite(A).all()):
        return f"{name}, shape {tuple(A.shape)}, contains inf or nan; expected finite curvature. Look for a density that is not smooth at the mode."
    values, vectors = torch.linalg.eigh(A.reshape(-1, *A.shape[-2:]))
    worst = int(values[:, 0].argmin())
    row = int(vectors[worst, :, 0].abs().argmax())
    return (
        f"{name}, shape {tuple(A.shape)}, has smallest eigenvalue {float(values[worst, 0]):.2e}; expected all > 0. "
        f"The direction points at {label(row)}. Either the point is a saddle (try restarts=8), or two columns of a "
        f"design coincide and the prior is flat: give that site a proper prior. "
        f"To damp on purpose, pass curvature=damped(exact_hessian, 1e-3)."
    )


def available_bytes(device: torch.device) -> int:
    """Free memory of ``device`` in bytes, as far as the system tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def require_memory(num_bytes: int, what: str, device: torch.device) -> None:
    """Refuse before allocating.

    :raises TooLarge: when ``num_bytes`` exceeds the free memory of ``device``.
    """
    free = available_bytes(device)
    if num_bytes > free:
        raise TooLarge(
            f"{what} needs {num_bytes:,} bytes; {free:,} are free on {device}. Integrate fewer sites "
            f"(integrate=[...]), or pass curvature=diagonal, which keeps one number per coordinate."
        )
