"""Pictures of posteriors: each function draws on the Axes that it is given, and returns them.

matplotlib is an extra and is imported when something is drawn.  Ticks, titles and the rest stay the caller's.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_evidence.display import CENTRAL, DASHES, MARKERS, SHADE, SMALL, Axes, check_axes, rows, with_labels
from pyro_evidence.errors import BadInput
from pyro_evidence.posterior.laplace import LaplacePosterior
from pyro_evidence.posterior.nested import NestedPosterior
from pyro_evidence.structure.names import Names, names_of

NUMBERED = Names({}, {})
SHOWN = 0.001  # of the mass beyond each end of a density's line


def well_determined(axes: Axes, posterior: LaplacePosterior) -> Axes:
    """One bar per learned prior precision: how many of the parameters that it governs the data determine.

    From top to bottom in the order of ``posterior.gamma``, the learned value beside the name.  A precision
    that was pruned has an empty bar.

    :raises BadInput: when no hyperparameter is recognised as a precision of Gaussian latents.
    """
    check_axes(axes)
    gamma = posterior.gamma
    if not gamma:
        raise BadInput(
            f"There is no gamma to draw: none of the hyperparameters {list(posterior.hyperparameters)} is recognised "
            "as the precision of Gaussian latents, as alpha is in Normal(0, alpha**-0.5). Write the prior so."
        )
    known = names_of(posterior._joint)
    names = [label for name in gamma for label in element_labels(name, gamma[name], known)]
    values = [v for name in gamma for v in posterior.hyperparameters[name].reshape(-1).tolist()]
    axes.barh(range(len(names)), [v for part in gamma.values() for v in part.reshape(-1).tolist()])
    rows(axes, [f"{name} = {value:.3g}" for name, value in zip(names, values, strict=True)])
    return with_labels(axes, "number of well-determined parameters", legend=False)


def evidence_path(axes: Axes, posterior: LaplacePosterior) -> Axes:
    """Log evidence after each step of the fit, in nats; step 0 is the model as it was given.

    Where latent sites were maximised their log prior is included, and the label says so.
    """
    check_axes(axes)
    axes.plot(range(len(posterior.log_evidences)), posterior.log_evidences, marker=".")
    axes.xaxis.get_major_locator().set_params(integer=True)
    alone = torch.equal(posterior.log_hyperposterior, posterior.log_evidence)
    value = "log evidence / nats" if alone else "log evidence + log hyperprior / nats"
    return with_labels(axes, "step", value, legend=False)


def marginals(axes: Axes, posteriors: Mapping[str, Mapping[str, Tensor]], *, site: str) -> Axes:
    """Median and central 90 % interval of every element of one site, the posteriors below each other.

    Elements run from top to bottom in the order of ``reshape(-1)``.

    :param posteriors: from a name for the legend to draws, those of ``get_samples()`` here or of MCMC.
    :param site: a latent site that all of them have, draws of shape ``(S,) + shape``.
    :raises BadInput: when a posterior lacks the site or has it in another shape.
    """
    check_axes(axes)
    if not posteriors:
        raise BadInput("posteriors is empty; expected at least one name with its draws.")
    if lacking := {name: list(samples) for name, samples in posteriors.items() if site not in samples}:
        raise BadInput(f"No site {site!r} in these posteriors: {lacking}; expected it in every one.")
    draws = {name: samples[site].detach() for name, samples in posteriors.items()}
    shapes = {name: tuple(values.shape[1:]) for name, values in draws.items()}
    if len(set(shapes.values())) > 1:
        raise BadInput(f"Site {site!r} has the shapes {shapes} behind the draws; expected one and the same.")
    for number, (name, values) in enumerate(draws.items(), start=1):
        flat = values.reshape(len(values), -1)
        median, (low, high) = flat.quantile(0.5, 0), flat.quantile(values.new_tensor(CENTRAL), 0)
        places = [row - 0.5 + number / (len(draws) + 1) for row in range(len(median))]
        errors = torch.stack([median - low, high - median]).tolist()
        axes.errorbar(
            median.tolist(), places, xerr=errors, fmt=MARKERS[number % len(MARKERS)], markersize=SMALL, label=name
        )
    rows(axes, element_labels(site, next(iter(draws.values()))[0]))
    return with_labels(axes, f"{site}, median and 90 % interval")


def marginal(axes: Axes, posterior: NestedPosterior, *, site: str) -> Axes:
    """The posterior density of every element of one site, as a smooth line, with its mean and central 90 %.

    >>> marginal(plt.gca(), posterior, site="tau")  # doctest: +SKIP

    :param posterior: of a model with sites that were integrated numerically.
    :param site: a latent site whose elements have densities of their own.
    :raises BadInput: for any other site.
    """
    check_axes(axes)
    found = posterior.marginal(site)
    values = found.values.flatten(1) if found.values.dim() > 1 else found.values.unsqueeze(-1)
    density, mean = found.density.reshape(values.shape), found.mean.reshape(-1)
    levels = found.quantiles([SHOWN, *CENTRAL, 1.0 - SHOWN])
    levels = levels.reshape(len(levels), -1)
    for number, label in enumerate(element_labels(site, found.mean, names_of(posterior._joint))):
        x, y = values[:, number], density[:, number]
        first, low, high, last = levels[:, number]
        shown = (x >= first) & (x <= last)
        (line,) = axes.plot(x[shown].tolist(), y[shown].tolist(), DASHES[number % len(DASHES)], label=label)
        inside = shown & (x >= low) & (x <= high)
        axes.fill_between(x[inside].tolist(), y[inside].tolist(), alpha=SHADE, color=line.get_color())
        axes.axvline(float(mean[number]), linestyle=":", color=line.get_color())
    axes.set_ylim(bottom=0.0)
    return with_labels(axes, f"{site}, mean and 90 %", "posterior density")


def element_labels(name: str, value: Tensor, known: Names = NUMBERED) -> list[str]:
    """``name`` for a scalar, otherwise ``name[i, j]`` for each element, by words where these are known."""
    return [known.label(name, index) for index in torch.ones(value.shape).nonzero().tolist()]


def evidence_by_size(
    axes: Axes, posteriors: Mapping[float, LaplacePosterior], *, errors: Mapping[float, float] | None = None
) -> Axes:
    """Log evidence in nats against the size of the model, and test errors beside it where they are given.

    MacKay (1992), "A practical Bayesian framework for backpropagation networks", has this picture with hidden units.

    :param posteriors: from a size, such as the number of hidden units, to the posterior of that model.
    :param errors: from the same sizes to an error on other data, drawn on a second axis to the right.
    :raises BadInput: for no posteriors, or errors of other sizes.
    """
    check_axes(axes)
    sizes = sorted(posteriors)
    if not sizes or (errors is not None and sorted(errors) != sizes):
        raise BadInput(
            f"posteriors has the sizes {sizes}, errors {sorted(errors or {})}; expected the same, at least one."
        )
    axes.plot(sizes, [float(posteriors[s].log_evidence) for s in sizes], marker="o")
    if errors is not None:
        beside = axes.twinx()
        beside.plot(sizes, [errors[s] for s in sizes], marker="s", linestyle="--", color="C1")
        beside.set_ylabel("test error (dashed)")
    return with_labels(axes, "size", "log evidence / nats", legend=False)
