"""Examples of BUGS in the plain table: JAGS's means within a fifth of a deviation, its deviations within 15 %."""

import pytest

from pyro_evidence import LaplaceEvidence, Stop
from tests.cases.expect import refusal, says
from tests.gallery.programs.bugs import EXAMPLES, STORED, data_of

pytestmark = pytest.mark.slow  # two minutes together; run by ARGS="-m slow tests/gallery"

QUICK = ("dugongs", "dyes", "leuk", "seeds", "stacks", "stacks_dexp", "surgical")  # the others: benchmarks/bugs.py


@pytest.mark.parametrize("name", QUICK)
def test_an_example_of_bugs(name: str) -> None:
    example = EXAMPLES[name]
    fit = LaplaceEvidence(example.model, stop=Stop(progress=False))
    if example.refused:
        says(refusal(lambda: fit.run(data_of(example.data))), example.refused)
        return
    found = example.quantities(fit.run(data_of(example.data)).get_samples(4000, seed=1))
    assert found.keys() == STORED[name]["jags"].keys() and STORED[name]["effective"] >= 400
    for quantity, (mean, sd) in STORED[name]["jags"].items():
        assert abs(float(found[quantity].mean()) - mean) < 0.2 * sd, quantity
        assert abs(float(found[quantity].std()) / sd - 1.0) < 0.15, quantity
