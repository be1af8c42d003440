"""Pyro's forecasting models fitted by Laplace: a forecaster for ``pyro.contrib.forecast`` and its ``backtest``."""

from typing import Any

import torch
from pyro.contrib.forecast import ForecastingModel, HMCForecaster
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.infer.laplace_evidence import LaplaceEvidence
from pyro_evidence.posterior.base import NUM_DRAWS
from pyro_evidence.program.sites import sample_nodes
from pyro_evidence.settings import check_count


class LaplaceForecaster(HMCForecaster):
    """Takes the place of ``Forecaster`` and ``HMCForecaster``: the fit is :class:`LaplaceEvidence`'s.

    ``forecaster(data, covariates, num_samples)`` draws what follows the data, as Pyro's do, and
    ``backtest(..., forecaster_fn=LaplaceForecaster)`` takes it.

    :param model: a ``ForecastingModel``; its latents may be reparametrised inside it.
    :param data: ``(..., T, size)``, time second to last.
    :param covariates: ``(..., T, number)``.
    :param num_samples: of the posterior, from which every forecast takes its own.
    :param seed: of these draws.
    :param settings: of :class:`LaplaceEvidence`.
    :ivar posterior: the fit, with its log evidence, nats.

    >>> from pyro import distributions as dist, sample
    >>> class Level(ForecastingModel):
    ...     def model(self, zero_data, covariates):
    ...         with self.time_plate:
    ...             step = sample("step", dist.Normal(zero_data[..., 0], 0.1))
    ...         self.predict(dist.Normal(0.0, 0.1), step.cumsum(-1).unsqueeze(-1))
    >>> forecaster = LaplaceForecaster(Level(), torch.ones(5, 1), torch.zeros(5, 0))
    >>> forecaster(torch.ones(5, 1), torch.zeros(7, 0), num_samples=100).shape
    torch.Size([100, 2, 1])

    :raises BadInput: for a model of another kind, and data and covariates of different lengths.
    """

    def __init__(
        self,
        model: ForecastingModel,
        data: Tensor,
        covariates: Tensor,
        *,
        num_samples: int = NUM_DRAWS,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if not isinstance(model, ForecastingModel) or data.size(-2) != covariates.size(-2):
            raise BadInput(
                f"LaplaceForecaster({type(model).__name__}) on data {tuple(data.shape)} and covariates "
                f"{tuple(covariates.shape)}; expected a ForecastingModel, and both of one length along dimension -2."
            )
        torch.nn.Module.__init__(self)
        self._num_samples = check_count("num_samples", num_samples)
        self.posterior = LaplaceEvidence(model, **settings).run(data, covariates)
        joint, (u, theta) = self.posterior.state.problem.joint, self.posterior._mode_at
        self._samples = self.posterior.get_samples(num_samples, seed)
        trace = joint.trace(u, theta)
        frames = [frame for node in sample_nodes(trace).values() for frame in node["cond_indep_stack"]]
        self.max_plate_nesting = max([1, *(-frame.dim for frame in frames)])
        for name, node in list(trace.nodes.items()):
            if name not in self._samples:
                del trace.nodes[name]
                continue
            front = (1,) * (1 + self.max_plate_nesting - len(node["fn"].batch_shape))
            node["value"] = node["value"].detach().reshape(*front, *node["value"].shape)
        self._trace, self.model = trace, self.posterior.model  # with the fitted params, whatever the store holds
        self.model._prefix_condition_data = model._prefix_condition_data
