"""Rows shared out among processes: one fit, the same on every rank, whatever the shares; and what is refused on all."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyro_evidence import BadInput, EvidenceEM, LaplaceEvidence, Start, Stop
from pyro_evidence.data.distributed import shards
from pyro_evidence.data.ranks import COMMUNICATOR, Communicator, require_same_settings
from pyro_evidence.mixture import fit
from pyro_evidence.models.basis import Linear
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from tests.mixture.test_number import clusters

FORKED = """
import json, os, sys, torch, warnings
import pyro_evidence.infer.evidence_em, pyro_evidence.infer.laplace_evidence
warnings.simplefilter("ignore")
for rank in range(int(os.environ["WORLD_SIZE"])):  # what is imported is imported once
    if not os.fork():
        os.environ["RANK"], sys.stdout = str(rank), open(f"{rank}.json", "w")
        break
else:
    while True:
        try:
            os.wait()
        except ChildProcessError:
            sys.exit()
"""
SCRIPT = """
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
from pyro_evidence import EvidenceEM, Start, Stop, BadInput
from pyro_evidence.data.distributed import shards
from pyro_evidence.mixture import fit
from pyro_evidence.models.mixture import gaussian_mixture
fit.SAMPLE, fit.SAMPLE_EACH = 300, 1
generator = torch.Generator().manual_seed(0)
centres = 8.0 * torch.randn(4, 3, generator=generator)  # those of clusters(900, 4, 3)
Y = centres[torch.arange(900) % 4] + torch.randn(900, 3, generator=generator)
cut, what = json.loads(sys.argv[1]), sys.argv[2]
axis = int(what or 1) if what.isdigit() else 1
with shards(restarts=axis) as ranks:
    mine = Y.split(cut)[ranks.rank].clone()
    if what == "nan" and ranks.rank == 1:
        mine[3, 2] = torch.nan
    if what == "columns" and ranks.rank == 1:
        mine = mine[:, :2]
    engine = EvidenceEM(gaussian_mixture(2), start=Start(restarts=2), stop=Stop(progress=False, throw=False))
    try:
        found = engine.run(mine)
        print(json.dumps([float(found.log_evidence), found.num_components, found.mode["w"].flatten().tolist()]))
    except BadInput as error:
        print(json.dumps(str(error)))
"""


def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_ranks(path: Path, script: str, size: int, *arguments: str) -> list[str]:
    """What each rank says."""
    (path / "fit.py").write_text(FORKED + script)
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port()), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
    own["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(path / "fit.py"), *arguments]
    subprocess.run(command, env=os.environ | own, cwd=path, check=True, timeout=600)
    return [(path / f"{rank}.json").read_text() for rank in range(size)]


def run(path: Path, cut: list[int], what: str = "", each: int = 1) -> list[Any]:
    """What each rank says.

    :param each: ranks that have the same rows.
    """
    return [json.loads(said) for said in run_ranks(path, SCRIPT, each * len(cut), json.dumps(cut), what)]


def test_shares_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks of which one has nothing, and one process: the same to 1e-11, and alike on every rank."""
    monkeypatch.setattr(fit, "SAMPLE", 300)
    monkeypatch.setattr(fit, "SAMPLE_EACH", 1)
    engine = EvidenceEM(gaussian_mixture(2), start=Start(restarts=2), stop=Stop(progress=False, throw=False))
    alone = engine.run(clusters(900, 4, 3))
    said = run(tmp_path, [100, 0, 800])
    assert all(x == said[0] for x in said)
    assert said[0][0] == pytest.approx(float(alone.log_evidence), rel=1e-11)
    assert said[0][1] == 4 and said[0][2] == pytest.approx(alone.mode["w"].flatten().tolist(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "each"), [([900], 2), ([0, 900], 2), ([200, 300, 0, 400], 1)], ids=str)
def test_restarts_are_a_second_axis_and_four_ranks_are_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: list[int], each: int
) -> None:
    monkeypatch.setattr(fit, "SAMPLE", 300)
    monkeypatch.setattr(fit, "SAMPLE_EACH", 1)
    engine = EvidenceEM(gaussian_mixture(2), start=Start(restarts=2), stop=Stop(progress=False, throw=False))
    alone = engine.run(clusters(900, 4, 3))
    said = run(tmp_path, cut, str(each), each)
    assert all(x == said[0] for x in said)
    assert said[0][0] == pytest.approx(float(alone.log_evidence), rel=1e-11) and said[0][1] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "message"),
    [("nan", r"rank 1: BadInput: chunk 0: Y.* 1 nan \(first at \[3, 2\]\)"), ("columns", "ranks have different")],
)
def test_every_rank_hears_what_is_wrong_on_one(tmp_path: Path, what: str, message: str) -> None:
    said = run(tmp_path, [450, 450], what)
    assert all(message in text for text in said)


def test_without_processes_there_is_a_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(BadInput, match="torchrun --nproc-per-node=2"), shards():
        pass


def test_named_arguments_of_a_rank_are_put_in_the_order_of_the_model() -> None:
    X = torch.linspace(-1.0, 1.0, 12).double().unsqueeze(-1)
    t = (X[:, 0] > 0.1).double()
    engine = LaplaceEvidence(classifier(Linear()), stop=Stop(progress=False))
    token = COMMUNICATOR.set(Communicator())  # which is not the one that stands for none
    try:
        shared = engine.run(t=t, X=X).log_evidence
    finally:
        COMMUNICATOR.reset(token)
    assert float(shared) == pytest.approx(float(engine.run(X, t).log_evidence), rel=1e-9)


class Listening(Communicator):
    """One process that notes what it would compare with others."""

    def __init__(self) -> None:
        object.__setattr__(self, "said", [])

    def check_equal(self, what: str, here: str) -> None:
        vars(self)["said"].append((what, here))


def scaled(by: Any) -> Callable[[float], float]:
    def model(x: float) -> float:
        return by * x

    return model


def said_by(rank: int, name: str) -> Callable[[float], float]:
    def model(x: float) -> float:
        return x if rank < 0 or not name else 2.0 * x

    return model


def added(to: float) -> Callable[[float], float]:
    def model(x: float) -> float:
        return to + x

    return model


def compared(model: Any, stop: Stop) -> list[tuple[str, str]]:
    found = Listening()
    require_same_settings(LaplaceEvidence(model, stop=stop), found)
    return [(what, text.replace("added", "scaled")) for what, text in vars(found)["said"]]


def test_what_ranks_compare_is_code_and_settings() -> None:
    """Real numbers of closures too; not whole ones and words, which may be a rank's own, nor whether it shows a bar."""
    first = compared(scaled(1.0), Stop())
    assert first == compared(scaled(1.0), Stop(progress=False))
    assert compared(said_by(0, "a"), Stop()) == compared(said_by(1, "b"), Stop())
    for one, other in ((1.0, 2.0), (torch.ones(2), torch.zeros(2)), (scaled(1.0), scaled(2.0))):
        assert compared(scaled(one), Stop()) != compared(scaled(other), Stop())
    other_code, other_stop = compared(added(1.0), Stop()), compared(scaled(1.0), Stop(num_steps=7))
    assert [what for (what, _), here in zip(first, other_code, strict=True) if here not in first] == ["models"]
    assert next(here for here in other_stop if here not in first)[1].startswith("stop=Stop(")
