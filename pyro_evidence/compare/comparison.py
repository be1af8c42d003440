"""Several engines on one model and the same data: how far apart, how fast, and what they predict."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.compare import discrepancy
from pyro_evidence.compare.chains import Data, error_line
from pyro_evidence.compare.held_out import HeldOut, Loss, held_out, misclassified_or_squared
from pyro_evidence.compare.labels import matched
from pyro_evidence.compare.runs import EngineRun, run_engine
from pyro_evidence.display import Shown, Table
from pyro_evidence.errors import BadInput
from pyro_evidence.fitting.process_state import entry_point
from pyro_evidence.posterior.base import varies
from pyro_evidence.program.log_joint import LogJoint, Model
from pyro_evidence.settings import seed_of, seeded

NUM_DIRECTIONS = 50  # of projections: their mean distance is then known to a seventh of its spread over directions

SITE_COLUMNS: dict[str, str] = {
    "mean": "largest |difference of means|, in sds of the reference",
    "mean_se": "its Monte-Carlo standard error, from both effective sample sizes",
    "sd": "ratio of sds furthest from 1",
    "quantile": "largest quantile error, in sds of the reference",
    "wasserstein": "sliced Wasserstein distance, in sds of the reference",
    "wasserstein_se": "its Monte-Carlo standard error",
}

COLUMNS: dict[str, str] = {
    **SITE_COLUMNS,
    "noise": "sliced Wasserstein distance between two halves of the reference: what agreement looks like",
    "density": "mean log predictive density of held-out data, nats per datum",
    "held_out": "the same minus the reference's",
    "held_out_se": "paired standard error of that difference",
    "error": "mean loss on held-out data",
    "error_gap": "the same minus the reference's",
    "error_se": "paired standard error of that difference",
    "ess": "smallest effective sample size",
    "r_hat": "largest split R-hat",
    "divergences": "divergent transitions",
    "switches": "label switches within chains",
    "seconds": "wall clock",
    "seconds_per_ess": "wall clock for one effective draw",
}


@dataclass(frozen=True, repr=False)
class Comparison(Shown):
    """Runs of several engines and their distances to one of them.

    :ivar runs: by name, in the order given; draws of mixtures under one labelling.
    :ivar reference: name of the run that all are compared with.
    :ivar rows: by name, the numbers that :data:`COLUMNS` explains; nan where there is none.
    :ivar sites: by name and site, the numbers that :data:`SITE_COLUMNS` explains.
    :ivar held_out: by name, predictions of the held-out data.

    >>> import torch
    >>> from pyro_evidence import LaplaceEvidence, compare
    >>> from pyro_evidence.models.basis import Linear
    >>> from pyro_evidence.models.regression import regression
    >>> X = torch.linspace(-1.0, 1.0, 30).unsqueeze(-1)
    >>> t = 2.0 * X[:, 0] + 0.3 * torch.cos(40.0 * X[:, 0])
    >>> model = regression(Linear())
    >>> found = compare(model, X, t, engines={"a": LaplaceEvidence(model), "b": LaplaceEvidence(model)})
    >>> found.reference
    'b'
    """

    runs: dict[str, EngineRun]
    reference: str
    rows: dict[str, dict[str, float]]
    sites: dict[str, dict[str, dict[str, float]]]
    held_out: dict[str, HeldOut] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Sentences on rows that could not run, sites that are missing, and divergences."""
        found = [f"{n}: did not run. {r.failure}" for n, r in self.runs.items() if r.failure]
        found += [
            f"{n}: {r.divergences} divergent transitions; its draws are biased. Reparametrise (non-centred "
            "scales), or warm up longer."
            for n, r in self.runs.items()
            if r.divergences
        ]
        return found + [f"{n}: {note}" for n, r in self.runs.items() for note in r.notes]

    def table(self) -> Table:
        """One row per engine."""
        named = {f"{n} (reference)" if n == self.reference else n: row for n, row in self.rows.items()}
        return Table(named, COLUMNS, self.notes, "engine")

    def site_table(self) -> Table:
        """One row per engine and site, the reference left out."""
        rows = {f"{n}: {s}": numbers for n, sites in self.sites.items() for s, numbers in sites.items()}
        return Table(rows, SITE_COLUMNS, (), "engine: site")

    def __repr__(self) -> str:
        return f"Comparison({list(self.runs)}, reference={self.reference!r})"

    def to_pandas(self) -> Any:
        """The numbers as a ``pandas.DataFrame``, one row per engine.

        :raises ImportError: when pandas is missing.
        """
        return Table(self.rows, COLUMNS).to_pandas()


@entry_point
def compare(
    model: Model,
    *args: Any,
    engines: Mapping[str, Any],
    reference: str | None = None,
    held_out: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Loss = misclassified_or_squared,
    seed: int | None = 0,
    **kwargs: Any,
) -> Comparison:
    """Run every engine on the same data and say how far apart their posteriors are.

    :param model: a Pyro model; an engine that was fitted to other data is a row that says so.
    :param args: its data, as for ``MCMC.run``.
    :param engines: name -> engine: anything of this package, :class:`NUTSRun`, :class:`SVIRun`, or any object whose
        ``run(*args, **kwargs)`` gives an object with ``get_samples()``, a dict of draws by site.  What has no
        ``model`` is taken to be a posterior of the user's model.
    :param reference: whose posterior the others are measured against; default the last engine that is listed.
    :param held_out: the model's arguments with new data: the positional ones in a list, or named ones.
    :param loss: what the error on held-out data is; default wrong classes, or squared errors.
    :param seed: of the random directions and of replicated data.
    :return: a :class:`Comparison`; an engine that fails is a row that says why.
    :raises BadInput: for fewer than two engines, an unknown reference, or one that failed.
    """
    if not isinstance(engines, Mapping):
        raise BadInput(
            f"engines is a {type(engines).__name__}; expected a dict, such as {{'laplace': LaplaceEvidence(model), "
            "'nuts': NUTSRun(posterior='laplace')}."
        )
    if held_out is not None and not isinstance(held_out, list | tuple | Mapping):
        raise BadInput(
            f"held_out is a {type(held_out).__name__}; expected the model's arguments with new data: (X_new, t_new), "
            "or a dict of named ones."
        )
    if not callable(loss):
        raise BadInput(f"loss={loss!r}; expected a function of a Prediction, such as misclassified_or_squared.")
    seed = seed_of(seed)
    name = reference if reference is not None else next(reversed(list(engines)), "")
    if len(engines) < 2 or name not in engines:
        raise BadInput(
            f"engines {list(engines)}, reference {reference!r}; expected two engines or more, the reference among them."
        )
    done: dict[str, EngineRun] = {}
    for each, engine in engines.items():
        done[each] = run_engine(each, engine, model, (args, kwargs), done)
    if done[name].failure or done[name].num_draws < 2:
        raise BadInput(
            f"the reference '{name}' gave {done[name].num_draws} draws; expected at least 2. Pass another "
            f"as reference. {done[name].failure}"
        )
    joints, done = _of_the_same_data(model, (args, kwargs), done, name)
    done = _relabelled(done, name, joints)
    return _compared(done, name, _predicted(done, joints, held_out, loss, seed), seed)


Joints = dict[str, LogJoint]


def _of_the_same_data(
    model: Model, data: Data, done: dict[str, EngineRun], name: str
) -> tuple[Joints, dict[str, EngineRun]]:
    """The density of every run, and the runs; those of other data or of no readable density are marked.

    :raises BadInput: when that is the reference.
    """
    own, joints, marked = _joint(model, data), Joints(), dict(done)
    for n, each in done.items():
        joint = own if each.failure else _joint(each.model, data)
        if isinstance(joint, Exception):
            unread = f"its model cannot be read ({error_line(joint)}), so its data, labels and predictions are"
            marked[n] = each.noted(f"{unread} not compared.")
        elif not each.failure:
            joints[n] = joint
    hashes = {n: joint.data_hash(joint.initial_theta) for n, joint in joints.items()}
    wanted = own.data_hash(own.initial_theta) if isinstance(own, LogJoint) else next(iter(hashes.values()), "")
    for n in [n for n, value in hashes.items() if value != wanted]:
        message = f"BadInput: its model observes other data than the model compared: {list(joints[n].observed)}."
        marked[n], _ = replace(marked[n], draws={}, failure=message), joints.pop(n)
    if marked[name].failure:
        raise BadInput(f"the reference '{name}' cannot be one. {marked[name].failure} Pass another as reference.")
    return joints, marked


def _joint(model: Model, data: Data) -> LogJoint | Exception:
    try:
        return LogJoint(model, *data, maximise=())
    except Exception as error:  # whatever the model of anybody's engine may raise
        return error


def _relabelled(done: dict[str, EngineRun], name: str, joints: Joints) -> dict[str, EngineRun]:
    """All runs of a mixture under the reference's labels; others as they are."""
    if name not in joints or joints[name].num_states == 1:
        return done
    draws, owners, switches = matched(joints[name], done[name].draws)
    found = done | {name: replace(done[name], draws=draws, label_switches=switches)}
    for other in [n for n in joints if n != name]:
        try:
            draws, _, switches = matched(joints[other], done[other].draws, owners)
            found[other] = replace(done[other], draws=draws, label_switches=switches)
        except (KeyError, RuntimeError, ValueError) as error:
            found[other] = done[other].noted(f"its components could not be matched ({error_line(error)}).")
    return found


def _predicted(
    done: dict[str, EngineRun], joints: Joints, new: Sequence[Any] | Mapping[str, Any] | None, loss: Loss, seed: int
) -> dict[str, HeldOut]:
    """Every run on the held-out data; a run whose model cannot predict them gets a note."""
    found: dict[str, HeldOut] = {}
    for n, joint in joints.items() if new is not None else ():
        on = copy.copy(joint)
        if isinstance(new, Mapping):
            on.kwargs = on.kwargs | dict(new)
        else:
            on.args = tuple(new or ())
        try:
            found[n] = held_out(done[n], on, loss, seed)
        except Exception as error:  # whatever the model may raise on these arguments
            done[n] = done[n].noted(f"held-out data: {error_line(error)}")
            continue
        if bad := int(found[n].log_density.isnan().sum()):
            done[n] = done[n].noted(f"the log predictive density of {bad} of the held-out data is nan at some draws.")
    return found


def _compared(done: dict[str, EngineRun], name: str, predicted: dict[str, HeldOut], seed: int) -> Comparison:
    rows, sites = {}, {}
    for n, each in done.items():
        ess, r_hat = each.chain_numbers
        numbers = {
            "ess": ess,
            "r_hat": r_hat,
            "divergences": float(each.divergences) if each.num_draws else math.nan,
            "switches": float(each.label_switches) if each.num_draws else math.nan,
            "seconds": each.seconds,
            "seconds_per_ess": each.seconds / ess,
            **_predictive(predicted.get(n), predicted.get(name)),
        }
        a, b = each.draws, done[name].draws
        both, missing = sorted(set(a) & set(b)), sorted(set(a) ^ set(b))
        other = [s for s in both if a[s].shape[2:] != b[s].shape[2:]]
        fixed = [s for s in both if s not in other and not bool(varies(flattened(b[s])).any())]
        messages = [
            (missing, f"site(s) {missing} are not in both posteriors and not compared."),
            (other, f"site(s) {other} have another shape in the reference and are not compared."),
            (fixed, f"site(s) {fixed} do not vary in the reference and are not compared."),
        ]
        shared, notes = [s for s in both if s not in other + fixed], [text for names, text in messages if names]
        if each.num_draws >= 2 and shared and n != name:
            total = _distances(each, done[name], shared, seed)
            several = len(shared) > 1
            sites[n] = {s: _distances(each, done[name], [s], seed) if several else total for s in shared}
            numbers |= total
        done[n] = each.noted(*(notes if each.num_draws else ()))
        rows[n] = dict.fromkeys(COLUMNS, math.nan) | numbers
    return Comparison(done, name, rows, sites, predicted)


def flattened(draws: Tensor) -> Tensor:
    """``(C, T) + shape`` as ``(C * T, E)``."""
    flat = draws.double().flatten(0, 1)
    return flat.reshape(len(flat), -1)


def _predictive(each: HeldOut | None, reference: HeldOut | None) -> dict[str, float]:
    """Means, mean differences from the reference and, datum by datum, the standard errors of these."""
    if each is None:
        return {}
    found = {"density": float(each.log_density.mean()), "error": float(each.error.mean())}
    if reference is None:
        return found
    pairs = {
        ("held_out", "held_out_se"): (each.log_density, reference.log_density),
        ("error_gap", "error_se"): (each.error, reference.error),
    }
    for (gap, error), (a, b) in pairs.items():
        if a.shape == b.shape:
            standard_error = float((a - b).std()) / math.sqrt(len(a)) if len(a) > 1 else math.nan
            found |= {gap: float((a - b).mean()), error: standard_error}
    return found


def _distances(a: EngineRun, b: EngineRun, sites: list[str], seed: int) -> dict[str, float]:
    keep = [varies(flattened(b.draws[s])) for s in sites]
    x, y = (torch.cat([flattened(r.draws[s])[:, k] for s, k in zip(sites, keep, strict=True)], -1) for r in (a, b))
    generator = seeded(seed)
    directions = torch.randn(NUM_DIRECTIONS, x.shape[1], generator=generator, dtype=torch.float64).to(x)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    half, ratio = len(y) // 2, discrepancy.sd_ratio(x, y)
    return {
        "mean": float(discrepancy.mean_difference(x, y).abs().max()),
        "mean_se": math.sqrt(1.0 / a.chain_numbers[0] + 1.0 / b.chain_numbers[0]),
        "sd": float(ratio[ratio.log().abs().argmax()]),
        "quantile": float(discrepancy.quantile_error(x, y).max()),
        "wasserstein": float(discrepancy.sliced_wasserstein(x, y, directions)),
        "wasserstein_se": float(discrepancy.sliced_wasserstein_error(x, y, directions)),
        "noise": float(discrepancy.sliced_wasserstein(y[:half], y[half:], directions)) if half > 1 else math.nan,
    }
