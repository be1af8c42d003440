"""The table of a formula's model by kind: fixed effects, effects of groups, standard deviations and the like."""

from typing import Any

from pyro_evidence.display import Table
from pyro_evidence.errors import BadInput
from pyro_evidence.structure.names import as_written


def _site(label: str) -> str:
    """The site that a row of the table is of."""
    return label.partition("[")[0].partition(":")[0]


def of_formula(posterior: Any) -> Any:
    """The model that a formula made.

    :raises BadInput: for another one.
    """
    model = as_written(posterior._joint.model)
    if not hasattr(model, "formula"):
        raise BadInput(
            "the sites of this model are not known as fixed effects and effects of groups; expected a model that "
            "pyro_evidence.models.formula.mixed has made. table() has the rows of any model."
        )
    return model


def effects_of(posterior: Any, *, fixed: bool) -> Table:
    """The rows of a table that are fixed effects, of formulas for parameters too; or no effects, fixed or of groups."""
    dims, every = of_formula(posterior).dims, posterior.table()
    coefficients = {site for site, along in dims.items() if along[0].startswith("coefficient")}
    effects = coefficients | {site for site in dims if site.startswith("u_")}
    chosen = {n: r for n, r in every.rows.items() if (_site(n) in coefficients if fixed else _site(n) not in effects)}
    return Table(chosen, every.columns, digits=every.digits)


def group_effects(posterior: Any, group: str) -> Table:
    """The effects of each level of a grouping: value and standard deviation of each coefficient.

    :raises BadInput: for a name that no grouping has.
    """
    model = of_formula(posterior)
    sites = [site for site, along in model.dims.items() if along[0] == group]
    if not sites:
        known = sorted({along[0] for site, along in model.dims.items() if site.startswith("u_")})
        raise BadInput(f"effects({group!r}): expected one of {known}, the groupings of {model.formula!r}.")
    rows: dict[str, dict[str, float]] = {}
    for label, row in posterior.table().rows.items():
        if _site(label) not in sites:
            continue
        inside = label.partition("[")[2].removesuffix("]")
        several = len(model.dims[_site(label)]) > 1
        level, _, coefficient = inside.rpartition(", ") if several else (inside, "", "Intercept")
        rows.setdefault(level, {}).update({coefficient: row["value"], f"{coefficient}, sd": row["sd"]})
    columns = {column: "" for row in rows.values() for column in row}
    return Table(rows, columns, corner=group, digits=4)
