"""The measures of the package's size, on small trees whose counts are known."""

import json
from pathlib import Path

import pytest

from benchmarks import metrics


def counted(folder: Path, **files: str) -> dict[str, metrics.Row]:
    """The rows of a package with these modules; of a name ``a_b`` the first is the folder, ``a_init`` its own file."""
    root = folder / "package"
    for name, text in files.items():
        path = root / (name.replace("_", "/").replace("init", "__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return metrics.counted(metrics.parsed(root))


SOURCE = '''"""What it is.

Over three lines."""

import math
from os import (
    path,
)

# a comment
SMALL = -1e-6  # with a comment behind


def f(x):
    """Twice x."""
    text = """no
    docstring"""
    return 2.0 * x, (lambda: 7)


class C:
    """Nothing."""

    def g(self):
        from os import sep

        async def h():
            pass

        return 0.5 + 3 + True
'''


def test_lines_are_those_of_code(tmp_path: Path) -> None:
    """SMALL; four of f; two heads in C, two of h, the last return."""
    assert counted(tmp_path, a=SOURCE)["lines"].value == 10


def test_functions_lambdas_and_modules(tmp_path: Path) -> None:
    found = counted(tmp_path, a=SOURCE, b_c="", b_init="")
    assert found["functions"].places == [f"package/a.py:{n}" for n in ("14 f", "24 g", "27 h")]
    assert found["lambdas"].value == 1
    assert found["modules"].value == 2


def test_numbers_are_those_that_say_something(tmp_path: Path) -> None:
    found = counted(tmp_path, a=SOURCE)
    assert [place.split()[-1] for place in found["numbers"].places] == ["1e-06", "7", "3"]


def test_thresholds_are_names_in_capitals(tmp_path: Path) -> None:
    text = (
        "import math\nA = 3.0\nB, C = -1, 'text'\nD = math.log(2.0) * A\nE = (1, 2)\nF: float = 2**9\ng = 4\nH = f(3)"
    )
    found = counted(tmp_path, a=text)
    assert [place.split()[1] for place in found["thresholds"].places] == list("ABDEF")


def used_once(folder: Path, **files: str) -> list[str]:
    return [place.split()[1].rstrip(",") for place in counted(folder, **files)["used_once"].places]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def _f(x):\n    return x\n\ny = _f(1)", ["_f"]),
        ("def _f(x):\n    return x\n\ny = _f(_f(1))", []),
        ("def _f(x):\n    return x", []),
        ("def _f(x):\n    return _f(x)", []),  # its own body is no use
        ("def f(x):\n    return x\n\ny = f(1)", []),
        ("def _f(x):\n    return x\n\ndef g(_f):\n    return _f(1)", []),  # another _f
        ("def _f(x):\n" + "    x += 1\n" * 5 + "\ny = _f(1)", []),  # a long one
        ('def _f(x):\n    """One.\n\n    Two.\n    """\n    return x\n\ny = _f(1)', ["_f"]),
    ],
)
def test_a_function_used_once(text: str, found: list[str], tmp_path: Path) -> None:
    assert used_once(tmp_path, a=text) == found


def test_uses_are_found_where_a_function_is_imported(tmp_path: Path) -> None:
    text = "def _f(x):\n    return x\n\ny = _f(1)"
    assert used_once(tmp_path, a=text, b="from package.a import _f as h\nh(1)") == []
    assert used_once(tmp_path, a=text, b="from package import a\na._f(1)") == []
    assert used_once(tmp_path, a=text, b="def _f(x):\n" + "    x += 1\n" * 5 + "\n_f(1)") == ["_f"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("class C:\n    def _m(self):\n        return 1\n    def n(self):\n        return self._m()", ["_m"]),
        ("class C:\n    def _m(self):\n        return 1\n    def n(self):\n        return self._m() + self._m()", []),
        (
            "class C:\n    def _m(self):\n        return 1\nclass D(C):\n    def n(self):\n        return super()._m()",
            ["_m"],
        ),
        (  # used above where it is defined
            "class C:\n    def n(self):\n        return self._m()\nclass D(C):\n    def _m(self):\n        return 1",
            ["_m"],
        ),
        (  # a hook: one name, two bodies
            "class C:\n    def n(self):\n        return self._m()\n    def _m(self):\n        return 1\n"
            "class D(C):\n    def _m(self):\n        return 2",
            [],
        ),
        (  # of another class
            "class C:\n    def _m(self):\n        return 1\nclass D:\n    def n(self):\n        return self._m()",
            [],
        ),
        ("class C:\n    def _m(self):\n        return 1\ndef f(c):\n    return c._m()", ["_m"]),
    ],
)
def test_a_method_used_once(text: str, found: list[str], tmp_path: Path) -> None:
    assert used_once(tmp_path, a=text) == found


def test_circles_count_sub_folders_functions_and_types(tmp_path: Path) -> None:
    checked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.a.b.one import f"
    found = counted(
        tmp_path,
        a_two=checked,
        a_b_one="def f():\n    import package.a.two",
        c_three="import package.c.four\nimport package.a.two",
        c_four="import package.c.three",
        d="from package import e",
        e="from package.d import x",
    )
    assert found["circles"].places == ["a - a/b", "d - e"]


def test_what_a_folder_exports_is_no_circle(tmp_path: Path) -> None:
    found = counted(tmp_path, a_init="from package.a.b.one import f", a_two="", a_b_one="import package.a.two")
    assert found["circles"].value == 0


def test_names_of_two_modules(tmp_path: Path) -> None:
    found = counted(
        tmp_path, a="def f(): pass\nclass C: pass\ndef _g(): pass", b="class f: pass\ndef _g(): pass\nC = 1"
    )
    assert found["duplicates"].places == ["f: package.a, package.b"]


def test_a_walk_counts_each_function_once(tmp_path: Path) -> None:
    root = tmp_path / "package"
    root.mkdir()
    (root / "a.py").write_text(
        "@staticmethod\ndef f():\n    '''Nothing.'''\n    def g():\n        return 1\n    return g()"
    )
    keys = [("package/a.py", 1), ("package/a.py", 4)]
    found = metrics.walked("fit", keys, metrics.parsed(root))
    assert [row.value for row in found.values()] == [1, 2, 5]


def test_the_table_says_what_was_and_what_is_asked() -> None:
    rows = {"lines": metrics.Row(29_000, []), "used_once": metrics.Row(300, []), "docs": metrics.Row(7, [])}
    table = metrics.table(rows, {"lines": 30_000, "used_once": 357}).splitlines()
    assert table[2:] == ["| lines | 29,000 | 30,000 | 25,000 |", "| used_once | 300 | 357 | 71 |", "| docs | 7 |  |  |"]


def test_the_figures_of_before_are_kept_for_all_that_is_asked() -> None:
    before = json.loads(metrics.BEFORE.read_text(encoding="utf-8"))
    assert set(metrics.ASKED) <= set(before)
    assert all(metrics.asked_for(name, before) <= before[name] for name in metrics.ASKED)
