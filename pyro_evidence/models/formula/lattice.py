"""The formulas within a formula: every choice of its fixed terms that keeps the margins of interactions."""

from itertools import product

from pyro_evidence.errors import BadInput
from pyro_evidence.models.formula.design import Frame, fixed_terms
from pyro_evidence.models.formula.terms import parsed, with_fixed

MOST_TERMS = 16  # whose choices are gone through
MOST = 2**12  # formulas, a fit for each


def formulas_within(formula: str, frame: Frame) -> tuple[tuple[str, ...], dict[str, tuple[bool, ...]]]:
    """Terms of the fixed part that a formula may lack, and each formula with which of them it has.

    An interaction comes with all terms whose columns are among its own (Nelder, 1977).  Constant, offsets, groups,
    smooths, and formulas of other parameters stay.

    :param formula: ``^`` is ``**``: ``(a + b + c)^2`` has all interactions of two.
    :raises BadInput: for a formula that cannot be used, or has too many terms.

    >>> import pandas
    >>> frame = pandas.DataFrame({"y": [1.0, 2.0, 4.0], "a": [0.0, 1.0, 2.0], "b": [1.0, 0.0, 1.0]})
    >>> list(formulas_within("y ~ a * b", frame)[1])
    ['y ~ 1', 'y ~ 1 + b', 'y ~ 1 + a', 'y ~ 1 + a + b', 'y ~ 1 + a + b + a:b']
    """
    text = formula.replace("^", "**") if isinstance(formula, str) else formula
    always, terms = fixed_terms(parsed(text)[""].fixed, frame)
    if not 0 < len(terms) <= MOST_TERMS:
        raise BadInput(
            f"{formula!r} has {len(terms)} fixed terms to choose from; expected 1 to {MOST_TERMS}. Of many columns a "
            "structure site of its own, Bernoulli with infer={'branching': True}, is searched."
        )
    parts = [set(term.split(":")) for term in terms]
    margins = [[i for i, part in enumerate(parts) if part < whole] for whole in parts]
    found = {}
    for keep in product((False, True), repeat=len(terms)):
        if not all(keep[i] for t, on in enumerate(keep) if on for i in margins[t]):
            continue
        own = [term for term, on in zip(terms, keep, strict=True) if on]
        found[with_fixed(text, " + ".join([*always, *own]))] = keep
        if len(found) > MOST:
            raise BadInput(f"{formula!r} has more than {MOST:,} formulas within; expected fewer, a fit for each.")
    return terms, found
