"""How a posterior with maximised hyperparameters and diagnostics of its own shows itself."""

from typing import Any

from torch import Tensor

from pyro_evidence.laplace import report
from pyro_evidence.laplace.approximation import LaplaceState
from pyro_evidence.laplace.hyperparameters.uncertainty import HyperparameterCovariance, letter
from pyro_evidence.laplace.summary.elements import Layout, Rows
from pyro_evidence.laplace.summary.hypers import hyper_rows
from pyro_evidence.laplace.summary.shown import Shown


class ShownWhole(Shown):
    """Hyperparameters above the sites of the table, evidence and warnings below it."""

    state: LaplaceState

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """Constrained values by name."""
        raise NotImplementedError

    @property
    def gamma(self) -> dict[str, Tensor]:
        """Numbers of well-determined parameters."""
        raise NotImplementedError

    @property
    def pruned(self) -> dict[str, Tensor]:
        """Masks of what was switched off."""
        raise NotImplementedError

    def diagnostics(self) -> dict[str, Any]:
        """How far to trust the numbers."""
        raise NotImplementedError

    def _said_of_blocks(self) -> list[str]:
        """What there is to say of the error of the log evidence."""
        raise NotImplementedError

    def _alive(self) -> dict[str, Tensor]:
        return {n: ~mask for n, mask in self.pruned.items()}

    def _hypers(self, spread: HyperparameterCovariance | None, layout: Layout) -> tuple[Rows, list[str]]:
        return hyper_rows(self.state, self.hyperparameters, self.gamma, spread, layout)

    def _below(self, spread: HyperparameterCovariance | None) -> list[str]:
        edges = () if spread is None else spread.edges
        said = [*(letter(edge) for edge in edges), *self._said_of_blocks()]
        return report.lines(self.diagnostics(), said)
