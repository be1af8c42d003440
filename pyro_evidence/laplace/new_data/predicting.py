"""What every posterior over latents has in common when it predicts."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pyro_evidence import prediction
from pyro_evidence.laplace.new_data.moments import PredictiveDraws, predicted
from pyro_evidence.memory import WithinMemory
from pyro_evidence.prediction import Rows
from pyro_evidence.program.failed_run import new_data
from pyro_evidence.program.log_joint import LogJoint


class Predicting(WithinMemory):
    """A posterior that predicts: what the observed sites are given its latents, averaged."""

    def _with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LogJoint:
        """The log joint with other arguments; with its own, where there are none."""
        raise NotImplementedError

    def _observed_rows(self, joint: LogJoint, num_samples: int, seed: int, draws: bool) -> dict[str, Rows]:
        """Every observed site at the arguments of ``joint``, a row for each draw of the latents."""
        raise NotImplementedError

    def predict(
        self,
        *args: Any,
        return_std: bool = False,
        quantiles: float | Sequence[float] | None = None,
        site: str | None = None,
        num_samples: int = 1000,
        seed: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Means of new data, or class probabilities, averaged over the posterior at fixed hyperparameters.

        Means of the likelihood are averaged, not draws of it; a Gaussian process by itself is integrated by quadrature.

        :param args: the model's arguments at new inputs; targets may be left out.  Without any, the training inputs.
        :param return_std: with the predictive standard deviation, noise included.
        :param quantiles: return instead quantiles of new data, for classes those of the probability over the posterior.
        :param site: the observed site, where there are several.
        :param num_samples: draws of the latents, half of them mirror images of the others.
        :param seed: of the draws.
        :return: shape ``(N,)`` (for a Bernoulli site the probability of 1), ``(N, C)`` for a categorical one; a pair
            with ``return_std``; ``(Q,) + shape`` for quantiles.
        :raises BadInput: when the model cannot be run on the arguments, and for a distribution without a mean.

        >>> mean, sd = posterior.predict(X_new, return_std=True)  # doctest: +SKIP
        """
        joint = self._with(args, kwargs)
        if quantiles is None and site is None and len(joint.observed) == 1 and not joint.discrete:
            draws = PredictiveDraws(num_samples, seed)
            with new_data(joint.args, joint.kwargs):
                return predicted(self, joint, joint.args, joint.kwargs, draws, return_std=return_std)
        rows = self._observed_rows(joint, num_samples, seed, quantiles is not None)
        return prediction.answer(prediction.chosen(rows, site), return_std, quantiles)

    def probability(self, *args: Any, site: str | None = None, num_samples: int = 1000, **kwargs: Any) -> Tensor:
        """Class probabilities averaged over the posterior: of label 1 ``(N,)``, or of each class ``(N, C)``.

        :raises UnsupportedModel: for a site that is not Bernoulli, Categorical or OneHotCategorical.
        """
        rows = self._observed_rows(self._with(args, kwargs), num_samples, 0, draws=False)
        return prediction.probabilities(prediction.chosen(rows, site), site)
