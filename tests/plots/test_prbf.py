"""The kernels of a network, each as wide as it is and in the colour of its class."""

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.axes import Axes
from torch import Tensor

from pyro_evidence import BadInput, OverlapEM, Stop
from pyro_evidence.display import DASHES
from pyro_evidence.models.prbf import prbf
from pyro_evidence.prbf.posterior import PRBFPosterior


def clouds() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    return X + 8.0 * (torch.arange(60) // 30).unsqueeze(-1), torch.arange(60) // 30


@pytest.fixture(scope="module")
def network() -> PRBFPosterior:
    return OverlapEM(prbf(2), alpha=0.0, stop=Stop(progress=False)).run(*clouds())


@pytest.fixture
def axes() -> Axes:
    _, axes = plt.subplots()
    yield axes
    plt.close("all")


def test_each_kernel_is_drawn_one_standard_deviation_wide(axes: Axes, network: PRBFPosterior) -> None:
    network.plot(axes, inputs=(0, 2))
    for j, line in enumerate(axes.lines[:2]):
        centre, sd = network.loc[j, [0, 2]], network.covariance[j].diagonal().sqrt()[[0, 2]]
        points = torch.as_tensor(line.get_xydata())
        torch.testing.assert_close(points.amax(0), centre + sd, rtol=1e-3, atol=0.0)
        label = int(network.purity[j].argmax())
        assert (line.get_color(), line.get_linestyle()) == (f"C{label}", DASHES[label])
    assert axes.get_xlabel() == "input 0" and axes.get_ylabel() == "input 2"
    assert [t.get_text() for t in axes.get_legend().get_texts()] == ["kernels of class 0", "kernels of class 1"]


@pytest.mark.parametrize("inputs", [(0, 0), (0, 3)])
def test_inputs_that_are_no_plane_are_refused(axes: Axes, network: PRBFPosterior, inputs: tuple[int, int]) -> None:
    with pytest.raises(BadInput, match=r"expected two different numbers from 0 to 2"):
        network.plot(axes, inputs=inputs)


def test_the_table_has_a_row_for_each_kernel(network: PRBFPosterior) -> None:
    rows = network.table().rows
    assert sum(row["data"] for row in rows.values()) == pytest.approx(60.0)
    assert rows["kernel 1"]["P(class 0)"] == pytest.approx(float(network.purity[1, 0]))
    assert "<td>kernel 1</td>" in network._repr_html_()
