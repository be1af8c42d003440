"""The tests that ``make quick`` leaves out: from the output of ``pytest --durations=0 -vv`` to ``longer_tests.txt``."""

import re
import sys
from collections import defaultdict
from pathlib import Path

LONGER = Path(__file__).with_name("longer_tests.txt")
MOST = 0.03  # seconds of a test; all that take less end within the minute that is promised
WHOLE = ("tests/cases", "tests/compare/test_comparison.py")  # cases of other people, and fits that a whole file shares
FITS = "tests/test_examples.py::test_example_is_so[infer."  # one of each engine: never left out
LINE = re.compile(r"^(\d+\.\d+)s (?:setup|call|teardown) +(.*)$")


def longer(text: str) -> list[str]:
    """Names of the tests that take longer, setup and teardown counted, or of the whole file where all of them do."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if found := LINE.match(line):
            seconds[found[2]] += float(found[1])
    slow = {name for name, total in seconds.items() if total > MOST and not name.startswith(FITS)}
    with_slow, with_fast = ({name.split("::")[0] for name in names} for names in (slow, {*seconds} - slow))
    whole = (*WHOLE, *(with_slow - with_fast))
    return sorted([*whole, *(name for name in slow if not name.startswith(whole))])


if __name__ == "__main__":
    LONGER.write_text("\n".join(longer(sys.stdin.read())) + "\n", encoding="utf-8")
