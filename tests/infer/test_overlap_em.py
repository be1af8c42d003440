"""The engine of the PRBF: what it returns, what it refuses, what it never does."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyro
import pytest
import torch
from torch import Tensor

from pyro_evidence import BadInput, NotConverged, OverlapEM, Start, Stop, datasets
from pyro_evidence.models.prbf import Diagonal, Full, Kernels, Separate, Spherical, prbf
from pyro_evidence.prbf import (
    AlphaPerKernel,
    Ascent,
    DataCovariance,
    KMeans,
    PRBFPosterior,
    StartFrom,
    keep_dead_kernels,
)
from pyro_evidence.prbf.densities import Point, evaluate
from pyro_evidence.prbf.updates import Update, em, exact_m_step, prbf2001_update
from tests.models_for_tests.prbf_cases import three_classes
from tests.oracles import prbf as naive

SHORT = Stop(tolerance=0.0, num_steps=20)
KINDS = [Spherical(), Diagonal(), Full()]
each_kind = pytest.mark.parametrize("kernels", KINDS, ids=lambda kernels: type(kernels).__name__)
each_update = pytest.mark.parametrize(
    "updates", [em, prbf2001_update, exact_m_step, Ascent()], ids=["plain", "literal", "exact", "ascent"]
)


def fitted(alpha: float = 20.0, **settings: object) -> PRBFPosterior:
    X, y = three_classes()
    settings = {"stop": SHORT} | settings
    return OverlapEM(prbf(5, 3), alpha=AlphaPerKernel(alpha), **settings).run(X, y)  # type: ignore[arg-type]


@each_update
def test_alpha_zero_is_plain_em_bit_for_bit(updates: Update) -> None:
    a, b = fitted(0.0, update=updates), fitted(0.0, update=em)
    assert a.objectives == b.objectives and torch.equal(a.loc, b.loc) and torch.equal(a.mixing, b.mixing)


def test_multiples_are_those_of_the_source() -> None:
    assert AlphaPerKernel(20.0)(614, 2, 14) == pytest.approx(20 * 614 / 28)
    X, y = three_classes()
    a = OverlapEM(prbf(5, 3), alpha=20.0 * len(X) / 15, stop=SHORT).run(X, y)
    assert torch.equal(a.loc, fitted().loc)


def test_the_default_never_lowers_its_objective() -> None:
    path = fitted(stop=Stop(tolerance=0.0, num_steps=60)).objectives
    assert all(b >= a for a, b in pairwise(path))


def test_probabilities_and_densities_belong_together() -> None:
    X, y = three_classes()
    posterior = fitted()
    joint = posterior.log_density(X) + posterior.class_prior.log()
    torch.testing.assert_close(posterior.predict_proba(X), joint.softmax(-1))
    torch.testing.assert_close(posterior.predict_proba(X).sum(-1), torch.ones(len(X)))
    torch.testing.assert_close(posterior.log_prob(X), joint.logsumexp(-1))
    torch.testing.assert_close(posterior.log_density(X).gather(-1, y[:, None]).sum(), posterior.log_likelihood)
    resp = posterior.responsibilities(X, y)
    torch.testing.assert_close(torch.stack([resp[y == k].sum(0) for k in range(3)]), posterior.counts)
    torch.testing.assert_close(posterior.purity.sum(-1), torch.ones(5))
    penalty = posterior.alpha * posterior.overlap.sum()
    assert posterior.objectives[-1] == pytest.approx(float(posterior.log_likelihood - penalty))
    assert set(posterior.labels(X).tolist()) <= {0, 1, 2}


def test_responsibilities_without_labels_average_over_classes() -> None:
    X, _ = three_classes()
    posterior = fitted()
    proba = posterior.predict_proba(X)
    each = torch.stack([posterior.responsibilities(X, torch.full((len(X),), k)) for k in range(3)])
    torch.testing.assert_close(posterior.responsibilities(X), torch.einsum("nk,knm->nm", proba, each))


def test_results_do_not_depend_on_the_origin_and_follow_the_unit() -> None:
    X, y = three_classes()
    a = fitted()
    b = OverlapEM(prbf(5, 3), stop=SHORT).run(1e3 * X + 1e6, y)
    torch.testing.assert_close(b.loc, 1e3 * a.loc + 1e6, rtol=1e-9, atol=1e-6)
    assert b.log_likelihood == pytest.approx(float(a.log_likelihood) - 3 * len(X) * math.log(1e3), abs=1e-5)


def test_float32_data_and_labels_of_any_kind() -> None:
    X, y = three_classes()
    a = OverlapEM(prbf(5, 3), stop=SHORT).run(X.float(), y.double())
    b = OverlapEM(prbf(5, 3), stop=SHORT).run(X.float(), y.tolist())
    assert torch.equal(a.loc, b.loc) and a.loc.dtype == torch.float64
    assert a.predict_proba(X.float()).shape == (len(X), 3)


def test_nothing_outside_is_changed() -> None:
    before = torch.get_rng_state()
    fitted(initial=KMeans())
    assert torch.equal(before, torch.get_rng_state()) and not list(pyro.get_param_store().keys())


def test_restarts_keep_the_best() -> None:
    posterior = fitted(start=Start(restarts=4, seed=1))
    assert posterior.restarts.shape == (4,)
    assert posterior.objectives[-1] == float(posterior.restarts.max())
    one = fitted(start=Start(restarts=1, seed=1))
    torch.testing.assert_close(one.restarts[0], posterior.restarts[0])


def test_kmeans_begins_in_a_fixed_point_of_lloyd() -> None:
    X, y = three_classes(apart=6.0)
    engine = OverlapEM(prbf(3, 3), start=Start(restarts=5), initial=KMeans())
    net = engine._begin(X, y).point.net
    loc = net.loc + X.mean(0)
    for b in range(5):
        nearest = torch.cdist(X, loc[b]).argmin(-1)
        for j in range(3):
            torch.testing.assert_close(loc[b, j], X[nearest == j].mean(0))


def test_a_wide_start_has_the_centres_of_another_and_the_spread_of_all_data() -> None:
    X, y = three_classes()
    narrow, wide = (
        OverlapEM(prbf(4, 3), start=Start(restarts=2), initial=s)._begin(X, y).point.net
        for s in (KMeans(), DataCovariance(KMeans()))
    )
    assert torch.equal(wide.loc, narrow.loc) and torch.equal(wide.mixing, narrow.mixing)
    torch.testing.assert_close(wide.covariance, X.var(0, correction=0).mean().expand(2, 4, 1))
    assert bool((narrow.covariance < wide.covariance).all())


def test_without_a_floor_singular_data_fail_with_a_letter_and_others_do_not() -> None:
    X, y = three_classes()
    engine = OverlapEM(prbf(5, 3, kernels=Full(0.0)), update=prbf2001_update, stop=SHORT)
    assert not engine.run(X, y).floored.any()
    start = StartFrom(X[:5], torch.eye(3).expand(5, 3, 3))
    flat = torch.cat([X[:, :2], X[:, :1]], -1)
    engine = OverlapEM(prbf(5, 3, kernels=Full(0.0)), update=prbf2001_update, initial=start, stop=SHORT)
    message = "a step failed: this is the last good state"
    with (
        pytest.warns(match="became singular; pass a larger floor"),
        pytest.raises(NotConverged, match=message) as error,
    ):
        engine.run(flat, y)
    assert isinstance(error.value.posterior, PRBFPosterior) and error.value.posterior.status == message


def test_given_starts_are_used_as_they_are() -> None:
    X, y = three_classes()
    loc = torch.arange(15.0).reshape(5, 3)
    net = OverlapEM(prbf(5, 3), initial=StartFrom(loc))._begin(X, y).point.net
    torch.testing.assert_close(net.loc[0] + X.mean(0), loc)
    torch.testing.assert_close(net.covariance, X.var(0, correction=0).mean().expand(1, 5, 1))
    with pytest.raises(BadInput, match=r"loc=.*shape \(4, 3\); expected \(5, 3\)"):
        OverlapEM(prbf(5, 3), initial=StartFrom(loc[:4])).run(X, y)


def test_step_goes_the_way_of_run() -> None:
    X, y = three_classes()
    engine = OverlapEM(prbf(5, 3), stop=Stop(tolerance=0.0, num_steps=6))
    whole = engine.run(X, y)
    losses = [engine.step(X, y) for _ in range(6)]
    assert losses == [-v for v in whole.objectives[1:]]
    assert torch.equal(engine.posterior.loc, whole.loc)
    assert engine.posterior.status.startswith("stepped by hand")


def test_rejections_say_who_when() -> None:
    posterior = fitted(20.0, update=prbf2001_update, stop=Stop(tolerance=0.0, num_steps=60))
    gone = {(r.kernel, r.label) for r in posterior.rejections}
    assert gone == {(j, k) for k, j in (posterior.mixing <= 1e-8).nonzero().tolist()} and gone
    assert all(1 <= r.step <= 60 for r in posterior.rejections)
    assert [r.step for r in posterior.rejections] == sorted(r.step for r in posterior.rejections)


def test_a_class_that_every_kernel_rejects_is_reported_with_its_rounds() -> None:
    """Rounds and classes are those in which the published eq. 29, index by index, leaves no positive numerator."""
    X, y = three_classes()
    start = StartFrom(X[:2])
    engine = OverlapEM(prbf(2, 3), alpha=AlphaPerKernel(60.0), update=prbf2001_update, initial=start, stop=SHORT)
    with pytest.warns(match=r"class 2 would have vanished: .* round 3, and in \d+ rounds until 20; .* smaller one"):
        posterior = engine.run(X, y)
    net, lag = (torch.full((3, 2), 0.5), X[:2], X.var(0, correction=0).mean().expand(2)), torch.zeros(3, 2)
    steps = []
    for step in range(1, 21):
        net, lag, numerators = naive.published_round(X, y, net, posterior.alpha, lag)
        steps += [step] if bool((numerators[2] <= 0).all()) else []
    assert posterior.held == ((2, steps[0], steps[-1], len(steps)),)
    torch.testing.assert_close(posterior.mixing, net[0], rtol=1e-7, atol=1e-7)
    assert not OverlapEM(prbf(1, 3), alpha=AlphaPerKernel(60.0), update=prbf2001_update, stop=SHORT).run(X, y).held


@pytest.mark.parametrize("updates", [em, exact_m_step, Ascent()])
def test_updates_without_a_clamp_hold_no_class(updates: Update) -> None:
    assert fitted(60.0, update=updates).held == ()


def test_rows_without_label_help() -> None:
    """Two labels of each class: the rest of the data show where the classes lie."""
    X, y = three_classes(300, apart=4.0)
    hidden = torch.full_like(y, -1)
    for k in range(3):
        hidden[(y == k).nonzero()[:2, 0]] = k
    start = StartFrom(torch.stack([X[hidden == k].mean(0) for k in range(3)]))
    posterior = OverlapEM(prbf(3, 3), alpha=5.0, initial=start, stop=Stop(tolerance=0.0, num_steps=100)).run(X, hidden)
    assert float((posterior.labels(X) == y).double().mean()) > 0.95
    shares = torch.bincount(y) / len(y)
    torch.testing.assert_close(posterior.class_prior, shares, rtol=0, atol=0.06)


@each_kind
@each_update
def test_constant_and_repeated_inputs_leave_numbers(kernels: Kernels, updates: Update) -> None:
    X, y = three_classes()
    X = torch.cat([X, torch.full((len(X), 1), 7.0), X[:, :1].round()], -1)
    X[:30] = X[0]
    posterior = OverlapEM(prbf(6, 3, kernels=kernels), update=updates, stop=SHORT).run(X, y)
    assert all(map(math.isfinite, posterior.objectives))
    assert bool(posterior.predict_proba(X).isfinite().all())


def test_kernels_on_the_floor_are_reported() -> None:
    X, y = three_classes()
    X[:30] = X[0]
    start = StartFrom(torch.cat([X[:1], X[40:44]]))
    posterior = OverlapEM(prbf(5, 3), initial=start, alpha=0.0, stop=SHORT).run(X, y)
    assert posterior.floored.tolist() == [True, False, False, False, False]
    assert float(posterior.covariance[0, 0, 0]) == pytest.approx(1e-6 * float(X.var(0, correction=0).mean()))


def without_mixing(point: Point, lost: Tensor, step: int) -> Point:
    """A rule of one's own: lost kernels get mixing 0 for good."""
    mixing = torch.where(lost.unsqueeze(1), 0.0, point.net.mixing)
    net = replace(point.net, mixing=mixing / mixing.sum(-1, keepdim=True))
    return evaluate(point.data, net, point.alpha, point.lag)


@pytest.mark.parametrize("lost", [keep_dead_kernels, without_mixing])
def test_a_kernel_that_loses_its_data_is_reported(lost: object) -> None:
    X, y = three_classes()
    loc = torch.cat([X[:4], torch.full((1, 3), 200.0)])
    start = StartFrom(loc)
    posterior = OverlapEM(prbf(5, 3), alpha=0.0, initial=start, lost=lost, stop=SHORT).run(X, y)  # type: ignore[arg-type]
    mass = float(posterior.counts[:, 4].sum())
    assert posterior.losses[0] == (4, 1)
    assert all(map(math.isfinite, posterior.objectives))
    assert mass < 1e-3 and posterior.num_kernels == 4


@pytest.mark.filterwarnings("ignore:class 2 would have vanished")
@each_update
def test_a_class_with_fewer_points_than_kernels(updates: Update) -> None:
    X, y = three_classes()
    few = torch.cat([(y != 2).nonzero()[:, 0], (y == 2).nonzero()[:2, 0]])
    posterior = OverlapEM(prbf(5, 3), update=updates, stop=SHORT).run(X[few], y[few])
    assert all(map(math.isfinite, posterior.objectives)) and posterior.counts[2].sum() == pytest.approx(2.0)


def blank(X: Tensor) -> Tensor:
    X = X.clone()
    X[3, 1] = math.nan
    return X


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda X, y: (blank(X), y), r"X\[3, 1\] is nan"),
        (lambda X, y: (X, torch.where(y == 1, 0, y)), r"label \[1\]"),
        (lambda X, y: (X[:4], y[:4].clone().copy_(torch.tensor([0, 1, 2, 0]))), r"5 kernels have only 4 data"),
        (lambda X, y: (X.long(), y), r"expected floats"),
        (lambda X, y: (torch.ones_like(X), y), r"are the same"),
        (lambda X, y: (X, y + 1), r"from 0 to 2"),
        (lambda X, y: (X, None), r"label \[0, 1, 2\]"),
    ],
)
def test_bad_data_are_refused(change: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        OverlapEM(prbf(5, 3)).run(*change(*three_classes()))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (lambda X: StartFrom(X[:5].tolist()), r"loc=.*is a list; expected a tensor of shape \(5, 3\)"),
        (lambda X: StartFrom(blank(X)[:5]), r"loc=.*not finite"),
        (lambda X: StartFrom(X[:5], -torch.ones(5, 1)), r"covariance=.*not positive"),
        (lambda X: StartFrom(X[:5], torch.ones(5, 3)), r"covariance=.*\(5, 3\); expected \(5, 1\)"),
        (lambda X: StartFrom(X[:5], None, torch.tensor([[1.5, -0.5, 0, 0, 0]] * 3)), r"mixing=.*at least 0"),
        (lambda X: StartFrom(X[:5], None, torch.full((3, 5), 0.3)), r"mixing=.*adding up to 1"),
        (lambda X: StartFrom(1e200 * X[:5]), r"eq. 22 is (nan|-inf) at start 0"),
    ],
)
def test_starts_that_cannot_be_meant(start: object, message: str) -> None:
    X, y = three_classes()
    with pytest.raises(BadInput, match=message):
        OverlapEM(prbf(5, 3), initial=start(X)).run(X, y)  # type: ignore[operator]


@pytest.mark.parametrize("alpha", [-1.0, math.nan, math.inf, "20", True, None, AlphaPerKernel(-2.0)])
def test_bad_alpha_is_refused_at_once(alpha: object) -> None:
    with pytest.raises(BadInput, match=r"alpha="):
        OverlapEM(prbf(5, 3), alpha=alpha)  # type: ignore[arg-type]


def test_a_class_needs_data_for_kernels_of_its_own() -> None:
    X, y = three_classes()
    few = torch.cat([(y != 2).nonzero()[:, 0], (y == 2).nonzero()[:1, 0]])
    with pytest.raises(BadInput, match="2 kernels have only 1 data"):
        OverlapEM(prbf(4, 3, sharing=Separate((1, 1, 2)))).run(X[few], y[few])


@pytest.mark.parametrize("updates", [prbf2001_update, Ascent()])
def test_an_alpha_beyond_all_data_names_the_class_that_would_vanish(updates: Update) -> None:
    X, y = three_classes(apart=0.3)
    with pytest.raises(BadInput, match=r"alpha=1e\+09 is so large that class \d would vanish"):
        OverlapEM(prbf(2, 3), alpha=1e9, update=updates).run(X, y)


def test_not_converged_is_loud_and_keeps_the_posterior() -> None:
    X, y = three_classes()
    with pytest.raises(NotConverged, match="ran out of steps") as error:
        OverlapEM(prbf(5, 3), stop=Stop(num_steps=2)).run(X, y)
    kept = error.value.posterior
    with pytest.warns(UserWarning, match="OverlapEM: ran out of steps"):
        quiet = OverlapEM(prbf(5, 3), stop=Stop(num_steps=2, throw=False)).run(X, y)
    assert isinstance(kept, PRBFPosterior) and torch.equal(kept.loc, quiet.loc)


def test_model_must_be_one_of_these_and_data_go_to_run() -> None:
    with pytest.raises(BadInput, match=r"Tensor; expected models.prbf.prbf"):
        OverlapEM(torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"nothing is fitted yet"):
        _ = OverlapEM(prbf(2)).posterior
    with pytest.raises(BadInput, match=r"2 columns; the network was fitted to 3"):
        fitted().predict(torch.zeros(4, 2))


def test_summary_has_a_line_for_each_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    posterior = fitted()
    posterior.summary()
    assert len(capsys.readouterr().out.splitlines()) == 2 + 5
    assert posterior.diagnostics()["num_kernels"] == 5


@each_kind
def test_a_saved_posterior_is_the_same(tmp_path: Path, kernels: Kernels) -> None:
    X, y = three_classes()
    model = prbf(5, 3, kernels=kernels)
    with pytest.warns(match="class 2 would have vanished"):
        posterior = OverlapEM(model, update=prbf2001_update, alpha=AlphaPerKernel(60.0), stop=SHORT).run(X, y)
    assert posterior.held and posterior.rejections
    posterior.save(tmp_path / "file")
    loaded = PRBFPosterior.load(tmp_path / "file", prbf(5, 3, kernels=kernels))
    assert torch.equal(loaded.log_proba(X), posterior.log_proba(X))
    rows = {"covariance_gain": 0.0, "notes": []}  # of which a file holds none
    assert loaded.diagnostics() == posterior.diagnostics() | rows
    with pytest.raises(BadInput, match=r"num_kernels=5.*num_kernels=6"):
        PRBFPosterior.load(tmp_path / "file", prbf(6, 3, kernels=kernels))
    (tmp_path / "other").write_text("nothing")
    with pytest.raises(BadInput, match="cannot be read"):
        PRBFPosterior.load(tmp_path / "other", model)


@each_kind
def test_hard_real_data_never_give_nan(data_dir: Path, kernels: Kernels) -> None:
    """Ionosphere's constant column and Pima's zeros."""
    for name in ("ionosphere", "pima"):
        data = datasets.csv(name)
        for updates in (prbf2001_update, Ascent(warm_up=3)):
            posterior = OverlapEM(prbf(6, kernels=kernels), update=updates, stop=Stop(tolerance=0.0, num_steps=8)).run(
                data.X, data.t
            )
            assert all(map(math.isfinite, posterior.objectives))
            assert bool(posterior.predict_proba(data.X).isfinite().all())


def test_a_class_whose_numerators_are_all_negative_stays_and_is_named(data_dir: Path) -> None:
    """Six kernels on six classes at c = 20."""
    data = datasets.csv("satimage_train")
    assert data.t is not None
    y = data.t.unique(return_inverse=True)[1]
    X = data.X[::3]
    engine = OverlapEM(prbf(6, 6), update=prbf2001_update, initial=KMeans(), stop=Stop(tolerance=0.0, num_steps=30))
    with pytest.warns(match=r"class \d would have vanished"):
        posterior = engine.run(X, y[::3])
    assert {held.label for held in posterior.held} <= set(range(6))
    assert all(map(math.isfinite, posterior.objectives))
    torch.testing.assert_close(posterior.mixing.sum(-1), torch.ones(6))


@pytest.mark.slow
@each_kind
@pytest.mark.parametrize("name", ["pima", "ionosphere", "phoneme", "satimage_train", "ripley_train"])
def test_the_default_never_falls_on_real_data(data_dir: Path, name: str, kernels: Kernels) -> None:
    """Fifteen settings of data and kernels, four starts each."""
    data = datasets.csv(name)
    assert data.t is not None
    some = slice(None, None, max(1, len(data.X) // 1000))
    X, y = data.X[some], data.t.unique(return_inverse=True)[1][some]
    X = X / torch.where(X.std(0) > 0, X.std(0), 1.0)
    model = prbf(8, int(y.max()) + 1, kernels=kernels)
    stop = Stop(tolerance=0.0, num_steps=40)
    for seed in range(4):
        posterior = OverlapEM(model, start=Start(seed=seed), stop=stop).run(X, y)
        path = posterior.objectives
        assert all(b >= a for a, b in pairwise(path)) and path[-1] > path[0]


def test_an_engine_with_another_setting_keeps_the_others() -> None:
    def stays(point: Point, lost: Tensor, step: int) -> Point:
        return point

    settings = {"update": em, "start": Start(restarts=4, seed=2), "initial": KMeans(), "lost": stays, "stop": Stop()}
    engine = OverlapEM(prbf(2), alpha=3.0, **settings)
    other = replace(engine, alpha=1.0)
    assert other.alpha == 1.0 and other.model is engine.model
    assert all(getattr(other, name) is value for name, value in settings.items())
