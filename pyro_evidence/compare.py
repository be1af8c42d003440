"""Several engines on one model and the same data: how far apart, how fast, and what they predict."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pyro_evidence.errors import BadInput
from pyro_evidence.labels import matched, num_components
from pyro_evidence.ops import discrepancy
from pyro_evidence.program import LogJoint, Model
from pyro_evidence.runs import Draws, Run, run
from pyro_evidence.simulate import pointwise_rows

NUM_DIRECTIONS = 50

COLUMNS: dict[str, str] = {
    "mean": "largest |difference of means|, in sds of the reference",
    "sd": "ratio of sds furthest from 1",
    "quantile": "largest quantile error, in sds of the reference",
    "wasserstein": "sliced Wasserstein distance, in sds of the reference",
    "noise": "the same distance between two halves of the reference: what agreement looks like",
    "held_out": "mean log predictive density of held-out data minus the reference's, nats per datum",
    "held_out_se": "paired standard error of that difference",
    "ess": "smallest effective sample size",
    "r_hat": "largest split R-hat",
    "divergences": "divergent transitions",
    "switches": "label switches within chains",
    "seconds": "wall clock",
}


@dataclass(frozen=True)
class Comparison:
    """Runs of several engines and their distances to one of them.

    :ivar runs: by name, in the order given; draws of mixtures under one labelling.
    :ivar reference: name of the run that all are compared with.
    :ivar rows: by name, the numbers that :data:`COLUMNS` explains; nan where there is none.
    :ivar sites: by name and site, the largest standardised mean difference and the furthest sd ratio.
    """

    runs: dict[str, Run]
    reference: str
    rows: dict[str, dict[str, float]]
    sites: dict[str, dict[str, tuple[float, float]]]

    @property
    def notes(self) -> list[str]:
        """What cannot be said in numbers: rows that could not run, sites that are missing, divergences."""
        found = [f"{n}: did not run. {r.failure}" for n, r in self.runs.items() if r.failure]
        found += [
            f"{n}: {r.divergences} divergent transitions; its draws are biased."
            for n, r in self.runs.items()
            if r.divergences
        ]
        return found + [f"{n}: {note}" for n, r in self.runs.items() for note in r.notes]

    def _cells(self) -> list[list[str]]:
        used = [c for c in COLUMNS if any(not math.isnan(row[c]) for row in self.rows.values())]
        head = ["engine", *used]
        body = [[self._name(n), *(_short(row[c]) for c in used)] for n, row in self.rows.items()]
        return [head, *body]

    def _name(self, name: str) -> str:
        return f"{name} (reference)" if name == self.reference else name

    def __str__(self) -> str:
        cells = self._cells()
        widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
        lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([*lines, *self.notes])

    def to_markdown(self) -> str:
        """The table for a README or an issue."""
        head, *body = self._cells()
        lines = [head, ["---"] * len(head), *body]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n".join([table, *(f"- {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        head, *body = self._cells()
        titles = "".join(f'<th title="{html.escape(COLUMNS.get(c, ""))}">{html.escape(c)}</th>' for c in head)
        rows = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table><tr>{titles}</tr>{rows}</table>{notes}"

    def to_pandas(self) -> Any:
        """The numbers as a ``pandas.DataFrame``, one row per engine.

        :raises ImportError: when pandas is missing.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("to_pandas() needs pandas: pip install pandas.") from error
        return pandas.DataFrame.from_dict(self.rows, orient="index")


def compare(
    model: Model,
    *args: Any,
    engines: Mapping[str, Any],
    reference: str | None = None,
    held_out: Sequence[Any] | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> Comparison:
    """Run every engine on the same data and say how far apart their posteriors are.

    :param model: a Pyro model; an engine that needs other data cannot be compared.
    :param args: its data, as for ``MCMC.run``.
    :param engines: name -> engine: anything of this package, :class:`Nuts`, :class:`Svi`, or any object whose
        ``run(*args, **kwargs)`` gives an object with ``get_samples()`` and ``model``.
    :param reference: whose posterior the others are measured against; default the last engine that is listed.
    :param held_out: the model's positional arguments with new data.
    :param seed: of the random directions.
    :return: a :class:`Comparison`; an engine that fails is a row that says why.
    :raises BadInput: for fewer than two engines, an unknown reference, or one that failed.
    """
    name = reference if reference is not None else next(reversed(list(engines)), "")
    if len(engines) < 2 or name not in engines:
        raise BadInput(
            f"engines {list(engines)}, reference {reference!r}; expected two engines or more, the reference among them."
        )
    done: dict[str, Run] = {}
    for each, engine in engines.items():
        done[each] = run(each, engine, model, (args, kwargs), done)
    if done[name].failure or done[name].num_draws < 2:
        raise BadInput(
            f"the reference '{name}' gave {done[name].num_draws} draws; expected at least 2. {done[name].failure}"
        )
    return _compared(_relabelled(done, name, (args, kwargs)), name, (held_out, kwargs), seed)


def _relabelled(done: dict[str, Run], name: str, data: tuple[tuple[Any, ...], dict[str, Any]]) -> dict[str, Run]:
    """All runs of a mixture under the reference's labels; others as they are."""
    joint = _joint(done[name], data)
    if num_components(joint) == 1:
        return done
    draws, owners, switches = matched(joint, done[name].draws)
    found = {name: replace(done[name], draws=draws, label_switches=switches)}
    for other, each in done.items():
        if other != name and each.num_draws:
            draws, _, switches = matched(_joint(each, data), each.draws, owners)
            found[other] = replace(each, draws=draws, label_switches=switches)
    return {n: found.get(n, each) for n, each in done.items()}


def _joint(of: Run, data: tuple[Sequence[Any], dict[str, Any]]) -> LogJoint:
    args, kwargs = data
    return LogJoint(of.model, tuple(args), kwargs, hyper=())


def _compared(done: dict[str, Run], name: str, held_out: tuple[Any, dict[str, Any]], seed: int) -> Comparison:
    densities = {n: _log_predictive(r, held_out) for n, r in done.items()} if held_out[0] is not None else {}
    rows, sites = {}, {}
    for n, each in done.items():
        numbers = _numbers(each, densities.get(n), densities.get(name))
        shared = sorted(set(each.draws) & set(done[name].draws))
        missing = sorted(set(each.draws) ^ set(done[name].draws))
        if each.num_draws >= 2 and shared and n != name:
            numbers |= _distances(each.draws, done[name].draws, shared, seed)
            sites[n] = {s: _site(each.draws[s], done[name].draws[s]) for s in shared}
        if missing and each.num_draws:
            done[n] = replace(
                each, notes=(*each.notes, f"site(s) {missing} are not in both posteriors and not compared.")
            )
        rows[n] = dict.fromkeys(COLUMNS, math.nan) | numbers
    return Comparison(done, name, rows, sites)


def _numbers(each: Run, density: Tensor | None, reference: Tensor | None) -> dict[str, float]:
    ess, r_hat = each.chain_numbers()
    found = {"ess": ess, "r_hat": r_hat, "seconds": each.seconds, "divergences": float(each.divergences)}
    found["switches"] = float(each.label_switches) if each.num_draws else math.nan
    if density is not None and reference is not None and density.shape == reference.shape:
        difference = density - reference
        found["held_out"] = float(difference.mean())
        found["held_out_se"] = float(difference.std()) / math.sqrt(len(difference))
    return found


def _distances(a: Draws, b: Draws, sites: list[str], seed: int) -> dict[str, float]:
    x, y = _flat(a, sites), _flat(b, sites)
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(NUM_DIRECTIONS, x.shape[1], generator=generator, dtype=torch.float64).to(x)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    return {
        "mean": float(discrepancy.mean_difference(x, y).abs().max()),
        "sd": _furthest(discrepancy.sd_ratio(x, y)),
        "quantile": float(discrepancy.quantile_error(x, y).max()),
        "wasserstein": float(discrepancy.sliced_wasserstein(x, y, directions)),
        "noise": float(discrepancy.sliced_wasserstein(y[: len(y) // 2], y[len(y) // 2 :], directions)),
    }


def _flat(draws: Draws, sites: list[str]) -> Tensor:
    return torch.cat(
        [
            draws[s].double().flatten(0, 1).flatten(1) if draws[s].dim() > 2 else draws[s].double().reshape(-1, 1)
            for s in sites
        ],
        -1,
    )


def _site(a: Tensor, b: Tensor) -> tuple[float, float]:
    x, y = _flat({"": a}, [""]), _flat({"": b}, [""])
    return float(discrepancy.mean_difference(x, y).abs().max()), _furthest(discrepancy.sd_ratio(x, y))


def _furthest(ratio: Tensor) -> float:
    return float(ratio[ratio.log().abs().argmax()])


def _log_predictive(each: Run, held_out: tuple[Sequence[Any], dict[str, Any]]) -> Tensor | None:
    """Log posterior predictive density of each held-out datum, nats, ``(N,)``; None without draws."""
    if not each.num_draws:
        return None
    joint = _joint(each, held_out)
    parts = [p.transform.inv(each.draws[p.name].flatten(0, 1)) for p in joint.latents]
    u = torch.cat([v.reshape(len(v), -1) for v in parts], -1)
    found = pointwise_rows(joint, u, joint.initial_theta)
    rows = torch.cat([v.reshape(len(u), -1) for v in found.values()], -1).double()
    return rows.logsumexp(0) - math.log(len(rows))


def _short(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}"
