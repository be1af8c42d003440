"""Default tables of R-INLA's examples, beside long chains that benchmarks/inla_nuts.py has stored."""

import json
from pathlib import Path

from benchmarks import inla_examples
from pyro_evidence import LaplaceEvidence, Stop

STORED = json.loads(inla_examples.STORED.read_text())


def test_chains_are_long_and_have_mixed() -> None:
    assert set(STORED) <= set(inla_examples.CASES)
    for stored in STORED.values():
        assert not stored["diverged"]
        for site in stored["sites"].values():
            assert site["n_eff"] > 4000 and site["r_hat"] < 1.01


def test_the_table_of_a_smooth_year_has_the_moments_of_long_chains(data_dir: Path) -> None:
    """Of 366 days; a thousand independent draws err by a tenth of a deviation in one of them."""
    model, args = inla_examples.tokyo()
    table = LaplaceEvidence(model, stop=Stop(progress=False)).run(*args).table()
    mean, sd, median = inla_examples.beside_nuts(table, STORED["tokyo"])
    assert mean < 0.05 and sd < 0.1 and median < 0.05
