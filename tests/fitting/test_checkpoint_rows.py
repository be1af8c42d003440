"""Long fits to rows in chunks that are cut short go on to the same end; and fits that may not have much memory."""

import resource
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_evidence import RVM, BadInput, EvidenceEM, LaplaceEvidence, Start
from pyro_evidence.data import Slices
from pyro_evidence.data.chunks import digest_of_chunks
from pyro_evidence.mixture import fit as mixture_fit
from pyro_evidence.models.basis import Linear, Polynomial
from pyro_evidence.models.classifier import classifier
from pyro_evidence.models.mixture import gaussian_mixture
from pyro_evidence.models.mppca import mppca
from pyro_evidence.models.regression import Learned, regression
from tests.fitting.test_checkpoint import MANY, ROOT, STOP, data, killed_at, labels, with_stop


def heaps(num: int = 240) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    centres = 8.0 * torch.randn(4, 3, generator=generator)
    return (centres[torch.arange(num) % 4] + torch.randn(num, 3, generator=generator),)


ONE = Learned(torch.tensor(1.0))
FITS: dict[str, tuple[Any, Any]] = {
    "mixture, sampled and split": (lambda: EvidenceEM(gaussian_mixture(2), start=Start(restarts=2), stop=MANY), heaps),
    "planes": (lambda: EvidenceEM(mppca(3, 1), start=Start(restarts=2), stop=MANY), heaps),
    "LaplaceEvidence": (lambda: LaplaceEvidence(classifier(Linear(), alpha=ONE), stop=STOP), labels),
    "RVM": (lambda: RVM(regression(Polynomial(2), beta=ONE), noise="beta", stop=MANY), data),
}


@pytest.fixture(autouse=True)
def small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_fit, "SAMPLE", 120)
    monkeypatch.setattr(mixture_fit, "SAMPLE_EACH", 1)


def run(engine: Any, args: tuple[Tensor, ...], size: int = 120) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*ran out of steps")
        return engine.run_chunks(Slices(*args, size=size))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "planes" else n for n in FITS])
@pytest.mark.parametrize("number", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_a_killed_fit_goes_on_to_the_same_end_however_the_rows_are_cut(name: str, number: int, tmp_path: Path) -> None:
    make, args = FITS[name]
    expected = run(make(), args())
    if not killed_at(make(), args(), tmp_path / "file", number, run):
        assert killed_at(make(), args(), tmp_path / "file", 1, run)
    found = run(make().resume(tmp_path / "file"), args())
    torch.testing.assert_close(found.log_evidence, expected.log_evidence, rtol=1e-12, atol=0.0)
    assert found.log_evidences == expected.log_evidences
    again = run(make().resume(tmp_path / "file"), args(), size=77)
    torch.testing.assert_close(again.log_evidence, expected.log_evidence, rtol=1e-10, atol=0.0)


def test_other_rows_are_refused(tmp_path: Path) -> None:
    make, args = FITS["RVM"]
    assert killed_at(make(), args(), tmp_path / "file", 1, run)
    X, t = args()
    with pytest.raises(BadInput, match="is of a fit to other data"):
        run(make().resume(tmp_path / "file"), (X, 1.0 - t))


def test_a_full_disk_costs_the_checkpoint_and_not_the_fit(tmp_path: Path) -> None:
    """By a limit on the size of files, which the kernel keeps."""
    make, args = FITS["RVM"]
    expected = run(make(), args())
    engine = with_stop(make(), checkpoint=tmp_path / "file", checkpoint_interval=0.0)
    assert killed_at(make(), args(), tmp_path / "file", 1, run)
    before = (tmp_path / "file").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
        with pytest.warns(UserWarning, match=r"no checkpoint: .*could not be written"):
            found = run(engine, args())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert torch.equal(found.log_evidence, expected.log_evidence)
    assert (tmp_path / "file").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


LIMITED = textwrap.dedent(
    """
    import resource, sys, torch
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    from pyro_evidence import EvidenceEM, Start, Stop
    from pyro_evidence.models.mixture import FullNoise, gaussian_mixture

    class Made:
        def __init__(self, num):
            self.num = num

        def __iter__(self):
            centres = 6.0 * torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
            for number in range(self.num):
                generator = torch.Generator().manual_seed(number)
                which = torch.randint(3, (5000,), generator=generator)
                yield (centres[which] + torch.randn(5000, 16, generator=generator),)

    def fitted(chunks):
        stop = Stop(progress=False, throw=False, num_steps=20)
        return EvidenceEM(gaussian_mixture(3, noise=FullNoise()), start=Start(restarts=1), stop=stop).run_chunks(chunks)

    fitted(Made(4))
    held = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmPeak")).split()[1])
    resource.setrlimit(resource.RLIMIT_AS, (held + int(sys.argv[1]), resource.RLIM_INFINITY))
    print(fitted(Made(40)).num_components)
    """
)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs limits of Linux")
def test_ten_times_the_rows_need_no_more_memory() -> None:
    """200,000 rows x 16, whose products alone are 244 MiB, in 48 MiB more than 20,000 of them took."""
    found = subprocess.run(
        [sys.executable, "-c", LIMITED, str(48 * 2**20)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert found.stdout.strip() == "3", found.stderr[-500:]


def test_arguments_without_rows_tell_data_apart_however_the_rows_are_cut() -> None:
    X, five = torch.arange(12.0).reshape(6, 2), torch.arange(5.0)
    many, few = ([(part, 0.5, "a", five) for part in X.split(size)] for size in (2, 3))
    assert digest_of_chunks([many], {}) == digest_of_chunks([few], {})
    for other in ((0.25, "a", five), (0.5, "b", five), (0.5, "a", -five), (0.5, "a")):
        assert digest_of_chunks([[(part, *other) for part in X.split(2)]], {}) != digest_of_chunks([many], {})
