"""Rows with curves in them, of low-discrepancy numbers that R and Python make alike: peers were given them too."""

from typing import Any

import numpy as np
import pandas
import torch

ROWS = 120


def part(rate: float) -> Any:
    """Numbers between 0 and 1."""
    return (rate * np.arange(1, ROWS + 1)) % 1.0


def curves() -> Any:
    """A frame with numbers ``x`` and ``z``, a factor ``g``, a response ``y`` and counts ``k``."""
    d = pandas.DataFrame({"x": part(0.6180339887), "z": part(0.7548776662)})
    d["g"] = np.array(list("abc"))[np.arange(1, ROWS + 1) % 3]
    noise = torch.special.ndtri(torch.tensor(part(0.5698402910))).numpy()
    d["y"] = np.sin(6 * d.x) + d.z**2 + (d.g == "b") * np.cos(5 * d.x) + 0.3 * noise
    d["k"] = np.floor(np.exp(d.y / 2) + part(0.4142135624))
    return d
