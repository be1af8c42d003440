"""What the pages quote from messages is what the package says, and no kind of message is missing."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import nodes

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/when_not_to_trust.md"
HOLE = "\0"  # where a message has a number or a name put in


@cache
def sources() -> list[ast.AST]:
    paths = sorted((ROOT / "pyro_evidence").rglob("*.py"))
    return [node for path in paths for node in nodes(path)]


def text(node: ast.AST) -> str:
    """A string as the source spells it, with holes."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values)
    if isinstance(node, ast.BinOp):
        return text(node.left) + text(node.right)
    return HOLE


@cache
def all_texts() -> str:
    return "\n".join(text(node) for node in sources() if isinstance(node, ast.Constant | ast.JoinedStr))


@cache
def quoted() -> list[str]:
    """The messages in the first columns of the tables of symptoms."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    first = [line.split("|")[1] for line in lines if line.startswith("| ") and "---" not in line]
    return [m for cell in first for m in re.findall(r"`([^`]+)`", cell)]


@cache
def longest_piece(message: str) -> str:
    """The longest part of a quoted message that is free of numbers and lists."""
    return max(re.split(r"[\d.]+|\[\.\.\.\]", message), key=len).strip()


def spoken(*endings: str) -> list[tuple[str, str]]:
    """The name of the class or function, and the message, of every call that ends like this."""
    found = []
    for node in sources():
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in endings:
                found.append((name, text(node.args[0])))
    return found


def own_errors() -> list[str]:
    tree = ast.parse((ROOT / "pyro_evidence/errors.py").read_text(encoding="utf-8"))
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def covered(message: str) -> bool:
    return any(longest_piece(q) in message for q in quoted() if len(longest_piece(q)) > 6)


@pytest.mark.parametrize("message", quoted())
def test_messages_on_the_page_exist(message: str) -> None:
    assert longest_piece(message) in all_texts() or longest_piece(message) in own_errors() or message == "mean_se"


@pytest.mark.parametrize("name", [*own_errors(), "ImportError", "FileNotFoundError"])
def test_every_error_has_its_place(name: str) -> None:
    assert name in PAGE.read_text(encoding="utf-8")


def test_no_other_error_is_raised() -> None:
    raised = {ast.unparse(n.exc).split("(")[0] for n in sources() if isinstance(n, ast.Raise) and n.exc}
    private = {n.name for n in sources() if isinstance(n, ast.ClassDef)} - set(own_errors())  # caught inside
    known = {
        *own_errors(),
        "ImportError",
        "FileNotFoundError",
        "NotImplementedError",
        "TypeError",
        "ArithmeticError",
        "AttributeError",  # of a module that has no such name
        "OSError",  # of what is no regular file; becomes NotWritten
        "LinAlgError",  # of a covariance, as torch has it
        "RuntimeError",  # of an exchange with other ranks, as torch has it; becomes BadInput
        "ValueError",  # of a damaged file, becomes BadInput
        "SystemExit",  # of a process that only imports a script
        *private,
    }
    classes = {name for name in raised if re.fullmatch(r"[A-Z]\w*", name)}
    assert classes <= known


def test_only_readers_of_files_and_of_priors_raise_value_errors() -> None:
    files = [p for p in (ROOT / "pyro_evidence").rglob("*.py") if "raise ValueError(" in p.read_text(encoding="utf-8")]
    assert {p.name for p in files} <= {"files.py", "archive.py", "checkpoint.py", "codec.py", "priors.py", "chunks.py"}


def test_every_warning_has_its_row() -> None:
    warnings = [said for _, said in spoken("warn") if said.strip(HOLE + " ,.:")]
    assert warnings
    assert [said for said in warnings if len(said.replace(HOLE, "")) > 20 and not covered(said)] == []


def test_every_reason_to_stop_early_has_its_row() -> None:
    from pyro_evidence import Status

    page = PAGE.read_text(encoding="utf-8")
    fine = {Status.CONVERGED, Status.BY_HAND}
    assert [s.value for s in Status if s not in fine and s.value.split(":")[0] not in page] == []


def doubts() -> list[str]:
    """The error messages that estimators of the evidence return: pairs of a condition and a text."""
    found = []
    for path in sorted((ROOT / "pyro_evidence/evidence_check").glob("*.py")):
        for node in nodes(path):
            if (
                isinstance(node, ast.Tuple)
                and len(node.elts) == 2
                and isinstance(node.elts[1], ast.JoinedStr | ast.Constant)
            ):
                message = text(node.elts[1])
                found += [message] if len(message) > 40 else []
    return found


def test_every_doubt_of_an_estimator_has_its_row() -> None:
    assert len(doubts()) > 8
    assert [message for message in doubts() if not covered(message)] == []


ADVICE = re.compile(
    r"(?i)expect|pass |use |give |write |call |drop |put |run |load |raise |define |fit |see |need|"
    r"look|truncate|maximise|nest|set the|leave|name each|divide|say which|pip install|must |may do|if nan means"
)


def test_every_message_says_what_was_expected_or_what_to_do() -> None:
    messages = [said for _, said in spoken(*own_errors(), "ImportError", "FileNotFoundError") if len(said) > 20]
    assert len(messages) > 250
    assert [said for said in messages if not ADVICE.search(said)] == []


SEVERE = (
    "UnsupportedModel",
    "NotAMode",
    "ImproperPosterior",
    "NotPositiveDefinite",
    "ImportError",
    "FileNotFoundError",
)


def test_most_messages_of_every_kind_have_a_row_of_their_own() -> None:
    """Not all: a new message may wait for its row, but the page must not fall behind by more than a tenth."""
    messages = [said for _, said in spoken(*SEVERE) if len(said.replace(HOLE, "")) > 10]
    missing = [said for said in messages if not covered(said)]
    assert len(missing) <= len(messages) // 10, missing


@pytest.mark.parametrize("page", ["which_engine", "when_not_to_trust", "coming_from"])
def test_names_on_the_pages_exist(page: str) -> None:
    import pyro_evidence

    prose = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    others = {"Predictive", "to_pandas", "float", "run", "len", "avg_predictions"}
    terms = {"s", "surv", "t2", "gp", "us", "diag", "cs", "ar1"}
    families = {"Censored", "ZeroTruncated", "CoxPartialLikelihood"}
    called = set(re.findall(r"`(\w+)\(", prose)) - others - terms - families
    inits = [p.parent.relative_to(ROOT).parts for p in (ROOT / "pyro_evidence").rglob("__init__.py")]
    folders = [importlib.import_module(".".join(parts)) for parts in inits]
    public = {name for folder in folders for name in getattr(folder, "__all__", ())}
    assert called <= public | set(dir(pyro_evidence.LaplacePosterior))


def test_models_are_made_as_the_page_says() -> None:
    prose = (ROOT / "docs/which_engine.md").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"```python\n(.*?)```", prose, flags=re.DOTALL) if "import" in b)
    made: dict[str, object] = {}
    exec(compile(block, "which_engine.md", "exec"), made)
    assert callable(made["model"]) and block.count("model = ") == 8
