"""What benchmarks/galaxies.py tells of its fits."""

from benchmarks import galaxies


def test_the_report_counts_components_and_takes_each_seeds_best_fit() -> None:
    found = {(1, 0): (-9.0, 1), (1, 1): (-5.0, 1), (2, 0): (-4.0, 2), (2, 1): (-6.0, 1)}
    report = galaxies.report(found, range(1, 3), range(2)).splitlines()
    assert report[2] == "| 1 | 1: 2 | -7.00 | -9.00 | -5.00 |"
    assert report[3] == "| 2 | 2: 1, 1: 1 | -5.00 | -6.00 | -4.00 |"
    assert report[-1].endswith("of 2 seeds: 2: 1, 1: 1")
