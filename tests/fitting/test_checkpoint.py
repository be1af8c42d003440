"""A fit that was cut short goes on from its last good state to the end that it would have come to."""

import dataclasses
import importlib
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import RVM, VRVM, BadInput, EvidenceEM, LaplaceEvidence, OverlapEM, Start, Stop, files
from pyro_evidence.errors import NotWritten
from pyro_evidence.fitting import checkpoint
from pyro_evidence.fitting.checkpoint import Recorder
from pyro_evidence.fitting.codec import KINDS, deserialised, places, require_same, serialised
from pyro_evidence.models.basis import Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.gp import gp_classifier
from pyro_evidence.models.kernels import RBF
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.prbf import prbf
from pyro_evidence.models.regression import Learned, regression
from pyro_evidence.precision.choices import diagonal
from pyro_evidence.relevance import fast_marginal
from tests.models_for_tests.engine_models import logistic_ard
from tests.models_for_tests.grouped_models import groups, intercepts

ROOT = Path(__file__).parents[2]
STOP = Stop(progress=False, throw=False)
MANY = replace(STOP, num_steps=2000, tolerance=1e-6, gradient_tolerance=1e-2)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(60, 4, generator=generator, dtype=torch.float64)
    return X, X[:, 0] - X[:, 1] + 0.3 * torch.randn(60, generator=generator, dtype=torch.float64)


def labels() -> tuple[Tensor, Tensor]:
    X, t = data()
    return X, (t > 0.3 * X[:, 2]).double()


def heaps() -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.cat([torch.randn(60, 3, generator=generator, dtype=torch.float64) + 3 * k for k in range(3)]),)


def own_precisions() -> LaplaceEvidence:
    return LaplaceEvidence(classifier(Polynomial(1), alpha=Learned(torch.ones(4))), stop=STOP)


def process() -> Any:
    return gp_classifier(RBF(Learned(1.0), Learned(1.0)))


FITS: dict[str, tuple[Any, Any]] = {
    "LaplaceEvidence": (own_precisions, labels),
    "LaplaceEvidence, process": (lambda: LaplaceEvidence(process(), stop=STOP), labels),
    "LaplaceEvidence, independent": (lambda: LaplaceEvidence(logistic_ard, curvature=diagonal, stop=STOP), labels),
    "LaplaceEvidence, nodes": (lambda: LaplaceEvidence(intercepts, nodes=5, stop=STOP), lambda: groups(20, 4)),
    "LaplaceEvidence, restarts": (
        lambda: LaplaceEvidence(gaussian_mixture(3), start=Start(restarts=2, tour=0), stop=STOP),
        heaps,
    ),
    "RVM": (lambda: RVM(classifier(Polynomial(2)), stop=MANY), labels),
    "RVM, noise": (lambda: RVM(regression(Polynomial(2)), noise="beta", stop=MANY), data),
    "VRVM": (lambda: VRVM(classifier(Polynomial(1)), stop=MANY), labels),
    "EvidenceEM": (lambda: EvidenceEM(gaussian_mixture(5), stop=MANY), heaps),
    "EvidenceEM, planes": (lambda: EvidenceEM(mppca(4, 2), stop=MANY), heaps),
    "OverlapEM": (
        lambda: OverlapEM(prbf(4, 2), stop=replace(MANY, num_steps=30, tolerance=0.0)),
        lambda: (labels()[0], labels()[1].long()),
    ),
}


class Killed(BaseException):
    """In place of a signal."""


def with_stop(engine: Any, **settings: Any) -> Any:
    engine.stop = replace(engine.stop, **settings)
    return engine


def run(engine: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ran out of steps")
        return engine.run(*args)


def run_whole(engine: Any, args: tuple[Any, ...]) -> Any:
    return run(engine, *args)


def killed_at(engine: Any, args: tuple[Any, ...], path: Path, number: int, run: Any = run_whole) -> bool:
    """Whether a run that writes after each step was killed after so many writings."""
    count, write = 0, Recorder.write

    def counting(self: Recorder, *state: Any) -> None:
        nonlocal count
        write(self, *state)
        count += 1
        if count == number:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "write", counting)
        try:
            run(with_stop(engine, checkpoint=path, checkpoint_interval=0.0), args)
        except Killed:
            return True
    return False


def numbers(posterior: Any) -> list[Any]:
    found = [posterior.objectives] if hasattr(posterior, "objectives") else [posterior.log_evidences]
    return [
        *found,
        getattr(posterior, "paths", ()),
        getattr(posterior, "log_evidence", torch.zeros(())),
        posterior.status,
    ]


@cache
def unbroken(name: str) -> list[Any]:
    """The numbers of a fit that nothing stops; made once for all the places where it is killed."""
    make, args = FITS[name]
    return numbers(run(make(), *args()))


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize(
    "number", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(25, marks=pytest.mark.slow)]
)
def test_a_killed_fit_goes_on_to_the_same_end(name, number, tmp_path: Path) -> None:
    make, args = FITS[name]
    expected = unbroken(name)
    if not killed_at(make(), args(), tmp_path / "file", number):
        number = 2
        assert killed_at(make(), args(), tmp_path / "file", number)
    assert len(files.read(tmp_path / "file")["loops"]) >= 1
    found = numbers(run(make().resume(tmp_path / "file"), *args()))
    torch.testing.assert_close(found[:-1], expected[:-1], rtol=1e-12, atol=1e-12)
    assert found[-1] == expected[-1]


def test_a_killed_fit_that_is_resumed_may_be_killed_again(tmp_path: Path) -> None:
    make, args = FITS["EvidenceEM"]
    expected = unbroken("EvidenceEM")
    assert killed_at(make(), args(), tmp_path / "file", 5)
    for _ in range(4):
        assert killed_at(make().resume(tmp_path / "file"), args(), tmp_path / "file", 9)
    torch.testing.assert_close(
        numbers(run(make().resume(tmp_path / "file"), *args()))[:3], expected[:3], rtol=0, atol=0
    )


def test_a_resumed_fit_repeats_its_last_step_alone(tmp_path: Path) -> None:
    make, args = FITS["RVM"]
    assert killed_at(make(), args(), tmp_path / "file", 6)
    engine, steps = make().resume(tmp_path / "file"), 0
    step = fast_marginal.step

    def counting(state: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RVM, "_step", staticmethod(counting))
        posterior = run(engine, *args())
    assert steps == len(posterior.log_evidences) - 1 - 6 + 1


def test_an_interrupt_is_written_down(tmp_path: Path) -> None:
    make, args = FITS["RVM"]
    engine, expected = make(), run(make(), *args())
    step, count = fast_marginal.step, 0

    def interrupted(state: Any) -> Any:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return step(state)

    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="interrupted"):
        patch.setattr(RVM, "_step", staticmethod(interrupted))
        with_stop(engine, checkpoint=tmp_path / "file").run(*args())
    again = run(make().resume(tmp_path / "file"), *args())
    assert again.log_evidences == expected.log_evidences


def test_other_data_another_model_and_another_engine_are_refused(tmp_path: Path) -> None:
    path, (X, t) = tmp_path / "file", labels()
    assert killed_at(own_precisions(), (X, t), path, 2)
    with pytest.raises(BadInput, match="is of a fit to other data: values, shapes or dtypes"):
        own_precisions().resume(path).run(X, 1.0 - t)
    with pytest.raises(BadInput, match="is of a fit to other data"):
        own_precisions().resume(path).run(X.float(), t)
    with pytest.raises(BadInput, match=r"LaplaceEvidence began at .* of another model or of other settings"):
        LaplaceEvidence(classifier(Polynomial(2)), stop=STOP).resume(path).run(X, t)
    with pytest.raises(BadInput, match=r"holds a LaplaceEvidence; expected a checkpoint of RVM"):
        RVM(classifier(Polynomial(1))).resume(path)
    with pytest.raises(FileNotFoundError):
        own_precisions().resume(tmp_path / "nowhere")
    own_precisions().run(X, t).save(tmp_path / "posterior")
    with pytest.raises(BadInput, match=r"posterior holds a pyro_evidence laplace posterior 1; expected a checkpoint"):
        own_precisions().resume(tmp_path / "posterior")


def test_a_file_that_cannot_be_written_is_said_before_the_fit_and_a_full_disk_during_it(tmp_path: Path) -> None:
    X, t = labels()
    with pytest.raises(NotWritten, match="could not be written"):
        with_stop(own_precisions(), checkpoint=tmp_path / "no" / "file").run(X, t)
    expected = own_precisions().run(X, t)

    def full(content: Any, path: Path) -> None:
        raise NotWritten("the disk is full.")

    engine = with_stop(own_precisions(), checkpoint=tmp_path / "file", checkpoint_interval=0.0)
    older = {"format": checkpoint.FORMAT, "an": "older one"}
    files.write(older, tmp_path / "file")
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.warns(UserWarning, match=r"no checkpoint: the disk is full\. The fit"),
    ):
        patch.setattr(files, "write", full)
        found = engine.run(X, t)
    assert torch.equal(found.log_evidence, expected.log_evidence)
    assert files.read(tmp_path / "file") == older


@pytest.mark.parametrize(
    "settings", [{"checkpoint": 3}, {"checkpoint_interval": "a"}, {"num_steps": "a"}, {"tolerance": None}]
)
def test_settings_that_are_none_are_refused(settings) -> None:
    with pytest.raises(BadInput, match=f"{next(iter(settings))}.*; expected"):
        Stop(**settings)


# What stands in the file


def test_values_come_back_from_their_places() -> None:
    shared = torch.arange(3.0)
    start = (MANY, {"a": shared, "b": [own_precisions]})
    later = {"x": [shared, torch.ones(2), 1.5, None], "f": own_precisions, "s": replace(MANY, num_steps=7)}
    stored = serialised(later, places(start))
    again = deserialised(stored, start)
    assert again["x"][0] is shared and again["f"] is own_precisions and again["s"] == later["s"]
    assert again["x"][1].tolist() == [1.0, 1.0] and again["x"][2:] == [1.5, None]


def test_parts_of_an_array_come_back() -> None:
    assert deserialised(serialised((slice(2, 5), slice(None)), {}), None) == (slice(2, 5), slice(None))


@pytest.mark.parametrize("value", [lambda: 0, STOP.__call__, Killed, Stop, torch.nn.Tanh(), {1, 2}, Path("a")])
def test_what_is_not_known_and_not_in_the_table_is_refused(value: Any) -> None:
    with pytest.raises(BadInput, match="that came up on the way, which no checkpoint can hold"):
        serialised([value], {})


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_names_classes_that_have_fields_or_members(kind: str) -> None:
    module, name = KINDS[kind].split(":")
    found = getattr(importlib.import_module(f"pyro_evidence.{module}"), name)
    assert isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, Enum))
    assert f"{found.__module__}:{found.__qualname__}" == f"pyro_evidence.{KINDS[kind]}"


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        ({"kind": "os.system", "inside": []}, "it holds a 'os.system', which is no state of a fit"),
        ({"kind": "iterate:Stop", "inside": []}, "it holds a 'iterate:Stop', which is no state of a fit"),
        ({"kind": "Recorder", "inside": [["path", "a"]]}, "it holds a 'Recorder', which is no state of a fit"),
        ({"kind": "Dense", "inside": []}, r"a Dense in it lacks fields \['tril'\] and has unknown ones \[\]"),
        ({"kind": "Dense", "inside": [["tril", 1], ["variance", 2]]}, r"lacks fields \[\] and .* ones \['variance'\]"),
        ({"kind": "Dense", "essence": [1]}, "inside"),
        ({"kind": "Status", "member": "__class__"}, "__class__"),
        ({"kind": ["Dense"]}, "unhashable"),
        ({"set": [[0, 1]]}, "set"),
        ({"list": [], "tuple": []}, "too many values"),
        ({"same": [99]}, "99"),
    ],
)
def test_a_forged_state_is_refused(stored: Any, reason: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError), match=reason):
        deserialised({"tuple": [[0, stored]]}, (1, 2))


def other_entry(value: Any) -> dict[str, Any]:
    return {"x": torch.ones(3), "n": 2, "value": value}


@pytest.mark.parametrize(
    "value", [torch.tensor([1.0, torch.nan, torch.inf]), torch.arange(3), 1.0, math.nan, "a", None]
)
def test_a_state_is_that_of_its_last_step_up_to_rounding(value: Any) -> None:
    require_same(other_entry(value), other_entry(value), 1e-6)
    close = value * (1.0 + 1e-7) if isinstance(value, float) else value
    require_same(other_entry(close), other_entry(value), 1e-6)
    for other in (torch.tensor([1.1, torch.nan, torch.inf]), torch.tensor([1.0, 2.0, torch.inf]), 1.1, 3, "b", [value]):
        with pytest.raises(ValueError, match=re.escape("at ['value'] is not what its last step leads to")):
            require_same(other_entry(other), other_entry(value), 1e-6)
    with pytest.raises(ValueError, match="is not what its last step leads to"):
        require_same(other_entry(value) | {"more": 1}, other_entry(value), 1e-6)


def forged(path: Path, change: Callable[[dict[Any, Any]], Any]) -> None:
    """The last state in a file replaced."""
    content = dict(files.read(path))
    *loops, last = content["loops"]
    (_, state), *rest = last["progress"]["tuple"]
    last = dict(last) | {"progress": {"tuple": [[0, change(dict(state))], *rest]}}
    files.write(content | {"loops": [*loops, last]}, path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda state: state | {"inside": [[n, {"kind": "_compiled", "inside": []}] for n, _ in state["inside"]]},
            "it holds a '_compiled', which is no state of a fit",
        ),
        (
            lambda state: state | {"inside": [[n, {"module": "os", "name": "system"}] for n, _ in state["inside"]]},
            "too many values",
        ),
        (lambda state: state | {"inside": state["inside"][1:]}, "lacks fields ['failed']"),
        (
            lambda state: {"kind": "Status", "member": "STUCK"},
            "what it holds at [0] is not what its last step leads to",
        ),
    ],
)
def test_a_fit_does_not_go_on_from_a_forged_file(change: Any, reason: str, tmp_path: Path) -> None:
    make, args = FITS["EvidenceEM"]
    assert killed_at(make(), args(), tmp_path / "file", 9)
    forged(tmp_path / "file", change)
    with pytest.raises(BadInput, match=f"cannot be read as a checkpoint .*{re.escape(reason)}.*Stop.checkpoint=path"):
        run(make().resume(tmp_path / "file"), *args())


@pytest.mark.parametrize("change", [lambda history: history.pop(0), lambda history: history[0].__setitem__(1, 0.25)])
def test_objectives_that_begin_elsewhere_than_their_loop_are_refused(change, tmp_path: Path) -> None:
    make, args = FITS["RVM"]
    killed_at(make(), args(), tmp_path / "file", 4)
    content = files.read(tmp_path / "file")
    change(content["loops"][-1]["progress"]["tuple"][1][1]["tuple"])
    files.write(content, tmp_path / "file")
    with pytest.raises(BadInput, match="is not what its last step leads to"):
        run(make().resume(tmp_path / "file"), *args())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda loop: loop["progress"]["tuple"][2].__setitem__(1, "a"), "its status"),
        (lambda loop: loop["progress"]["tuple"][2].__setitem__(1, {"kind": "Status", "member": "STUCK"}), "its status"),
        (lambda loop: loop.update(done=True), "its status"),
        (lambda loop: loop["progress"]["tuple"][1][1]["tuple"].pop(2), "4 objectives, and 5 by its count"),
        (lambda loop: loop.update(count=4), "5 objectives, and 4 by its count"),
    ],
)
def test_a_loop_that_goes_on_has_no_status_and_all_its_objectives(change: Any, reason: str, tmp_path: Path) -> None:
    make, args = FITS["EvidenceEM"]
    assert killed_at(make(), args(), tmp_path / "file", 4)
    content = files.read(tmp_path / "file")
    change(content["loops"][-1])
    files.write(content, tmp_path / "file")
    with pytest.raises(BadInput, match=f"cannot be read as a checkpoint .*{reason}"):
        run(make().resume(tmp_path / "file"), *args())


def test_a_checkpoint_of_an_older_release_is_named(tmp_path: Path) -> None:
    files.write({"format": "pyro_evidence checkpoint 1", "engine": "RVM"}, tmp_path / "file")
    with pytest.raises(BadInput, match="holds a pyro_evidence checkpoint 1; expected a checkpoint of RVM"):
        RVM(classifier(Polynomial(1))).resume(tmp_path / "file")


# Processes that are killed, and that may not have much memory

FIT = textwrap.dedent(
    """
    import sys, torch
    from pyro_evidence import EvidenceEM, Stop
    from pyro_evidence.models.mixture import gaussian_mixture
    torch.set_default_dtype(torch.float64)
    Y = torch.load(sys.argv[1])
    stop = Stop(num_steps=400, tolerance=0.0, progress=False, checkpoint=sys.argv[2], checkpoint_interval=0.01)
    EvidenceEM(gaussian_mixture(8), stop=stop).run(Y)
    """
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs signals")
def test_kill_nine_loses_nothing(tmp_path: Path) -> None:
    (Y,) = heaps()
    torch.save(Y, tmp_path / "data")
    path = tmp_path / "file"
    process = subprocess.Popen([sys.executable, "-c", FIT, str(tmp_path / "data"), str(path)], cwd=ROOT)
    try:
        for _ in range(1200):
            time.sleep(0.05)
            if path.exists() and files.read(path)["loops"]:
                break
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    stop = Stop(num_steps=400, tolerance=0.0, progress=False)
    found = EvidenceEM(gaussian_mixture(8), stop=stop).resume(path).run(Y)
    expected = EvidenceEM(gaussian_mixture(8), stop=stop).run(Y)
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-12, atol=1e-12)
    assert found.log_evidences == expected.log_evidences
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.endswith(".part")) == ["data", "file"]


def test_a_run_within_a_run_belongs_to_the_outer_one(tmp_path: Path) -> None:
    outer = Recorder(tmp_path / "file", 0.0, {})
    with checkpoint.recording(outer):
        run(with_stop(FITS["RVM"][0](), checkpoint=tmp_path / "inner"), *labels())
    assert outer.count == 1 and not (tmp_path / "inner").exists()
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_whole_numbers_of_any_size_are_told_from_others(dtype: torch.dtype) -> None:
    here, there = torch.tensor([1, 2]).to(dtype), torch.tensor([1, 3]).to(dtype)
    assert checkpoint.digest([here], {}) == checkpoint.digest([here.clone()], {}) != checkpoint.digest([there], {})
    assert checkpoint.digest([here], {}) != checkpoint.digest([torch.tensor([1, 2])], {})
