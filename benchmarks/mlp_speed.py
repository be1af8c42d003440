"""How fast: networks under the evidence, against laplace-torch and against NUTS, as ratios of CPU time in one process.

    python benchmarks/mlp_speed.py [--epochs 200] [--nuts 500] [--depth 7]

laplace-torch's rows need that package (0.3), with torchmetrics, backpack, curvlinops and asdfghjkl, and are left out
where it is missing.  Its ``marglik_training`` alternates one epoch of Adam with ten Adam steps on the hyperparameters;
the evidence is that of the full Gauss-Newton matrix, as here.  What is done is kept in ``.benchmarks/mlp_speed.json``.
"""

import argparse
import contextlib
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pyro
import torch
from pyro.infer import MCMC, NUTS
from pyro.ops.integrator import potential_grad
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from timing import timed
from torch import Tensor
from tqdm.auto import tqdm

from pyro_evidence import LaplaceEvidence, LaplacePosterior, NotConverged, Stop, gauss_newton
from pyro_evidence.compare import linearised
from pyro_evidence.models.mlp import MLP

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
CACHE = Path(".benchmarks/mlp_speed.json")


def data(num: int, num_inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(num, num_inputs, generator=generator)
    y = torch.sin(2.0 * X[:, 0]) + (X[:, 1] * X[:, 2] if num_inputs > 2 else 0.5 * torch.cos(3.0 * X[:, 0]))
    return X, y / y.std() + 0.3 * torch.randn(num, generator=generator)


def ours(X: Tensor, t: Tensor, num_hidden: int) -> dict[str, Any]:
    """Seconds of the start (30 of MacKay's rounds and a mode), of each step of type II after it, and the evidences."""
    engine = LaplaceEvidence(MLP(X.shape[1], num_hidden), curvature=gauss_newton, stop=Stop(progress=False))
    seconds, losses = [], []
    for _ in tqdm(range(6), desc="LaplaceEvidence"):
        took, loss = timed(lambda: engine.step(X, t))
        seconds.append(took)
        losses.append(-loss)
    return {"seconds": seconds, "evidence": losses}


def theirs(X: Tensor, t: Tensor, num_hidden: int, num_epochs: int) -> dict[str, Any]:
    """Seconds and log evidence of laplace-torch's training with the full Gauss-Newton matrix."""
    laplace = import_module("laplace")
    curvature = import_module("laplace.curvature")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(X.shape[1], num_hidden), torch.nn.Tanh(), torch.nn.Linear(num_hidden, 1)]
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, t[:, None]), batch_size=len(X))
    settings = {"hessian_structure": "full", "prior_structure": "layerwise", "likelihood": "regression"}
    seconds, (_, _, path, _) = timed(
        lambda: laplace.marglik_training(
            torch.nn.Sequential(*layers),
            loader,
            backend=curvature.BackPackGGN,
            n_epochs=num_epochs,
            optimizer_kwargs={"lr": 1e-2},
            **settings,
        )
    )
    return {"seconds": seconds, "evidence": [-float(m) for m in path[9::10]]}


def small_fit() -> tuple[float, LaplaceEvidence, Tensor, Tensor]:
    """Seconds of our fit of the small network, the engine, and the data."""
    X, t = data(150, 1)
    engine = LaplaceEvidence(MLP(1, 50), curvature=gauss_newton, stop=Stop(num_steps=30, progress=False))

    def fit() -> None:
        with contextlib.suppress(NotConverged):
            engine.run(X, t)

    return timed(fit)[0], engine, X, t


def default_nuts(num: int = 12) -> dict[str, Any]:
    """Seconds per iteration of NUTS as Pyro has it by default, over its first few, and of our fit."""
    seconds, engine, X, t = small_fit()
    pyro.set_rng_seed(0)
    mcmc = MCMC(NUTS(engine.posterior.model), num_samples=1, warmup_steps=num - 1, initial_params=engine.posterior.mode)
    return {"seconds": seconds, "iteration": timed(lambda: mcmc.run(X, t))[0] / num, "iterations": num}


def against_nuts(num_draws: int, depth: int) -> dict[str, Any]:
    """The same model, hyperparameters put in, sampled from the mode, its potential compiled, its trees cut short."""
    seconds, engine, X, t = small_fit()
    posterior = engine.posterior
    pyro.set_rng_seed(0)
    kernel = NUTS(posterior.model, jit_compile=True, ignore_jit_warnings=True, max_tree_depth=depth)
    mcmc = MCMC(kernel, num_samples=num_draws, warmup_steps=num_draws, initial_params=posterior.mode)
    nuts_seconds, _ = timed(lambda: mcmc.run(X, t))
    net, noise = engine.model, 1.0 / posterior.hyperparameters["beta"]
    others = net.predictor(X, mcmc.get_samples())[..., 0]
    sd = (others.var(0) + noise).sqrt()
    drawn = net.predictor(X, posterior.get_samples(1000, seed=0))[..., 0]
    tangent, variance = (x[:, 0] for x in linearised(posterior, X))
    effective = effective_sample_size(others.unsqueeze(0))
    return {
        "seconds": seconds,
        "nuts": nuts_seconds,
        "draws": num_draws,
        "depth": depth,
        "gap drawn": float(((drawn.mean(0) - others.mean(0)).abs() / sd).max()),
        "gap": float(((tangent - others.mean(0)).abs() / sd).max()),
        "gap rms": float(((tangent - others.mean(0)) / sd).square().mean().sqrt()),
        "sd ratio": [float(x) for x in torch.aminmax((variance + noise).sqrt() / sd)],
        "error": float((others.std(0) / effective.sqrt() / sd).max()),
        "effective": float(effective.min()),
        "split": float(split_gelman_rubin(others.unsqueeze(0)).max()),
        "status": posterior.status,
        "gradient": [gradient_seconds(posterior, X, t, jit_compile=jit) for jit in (False, True)],
    }


def gradient_seconds(posterior: LaplacePosterior, X: Tensor, t: Tensor, *, jit_compile: bool) -> float:
    """Of one gradient of NUTS's potential at the mode."""
    kernel = NUTS(posterior.model, jit_compile=jit_compile, ignore_jit_warnings=True)
    kernel.initial_params = posterior.mode
    kernel.setup(1, X, t)
    repeats = [
        timed(lambda: [potential_grad(kernel.potential_fn, posterior.mode) for _ in range(50)]) for _ in range(4)
    ]
    return min(seconds for seconds, _ in repeats[1:]) / 50


def kept(key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Numbers by key, on disk."""
    known = json.loads(CACHE.read_text()) if CACHE.exists() else {}
    if key not in known:
        known[key] = compute()
        CACHE.parent.mkdir(exist_ok=True)
        CACHE.write_text(json.dumps(known))
    found: dict[str, Any] = known[key]
    return found


def report(mine: dict[str, Any], other: dict[str, Any] | None) -> str:
    iteration = min(mine["seconds"][1:])
    lines = [
        "## MLP 8-50-1, N = 768, CPU seconds, one thread\n",
        f"start {mine['seconds'][0]:.1f}, log evidence {mine['evidence'][0]:.1f}; then per iteration of the "
        f"hyperparameters {iteration:.2f} at least, log evidence {mine['evidence'][-1]:.1f} after five.",
    ]
    if other is None:
        return "\n".join([*lines, "laplace-torch is not installed."])
    reached = next((i + 1 for i, e in enumerate(other["evidence"]) if e >= mine["evidence"][0]), None)
    per_epoch = other["seconds"] / len(other["evidence"])
    best = max(other["evidence"])
    lines.append(
        f"laplace-torch: {per_epoch:.2f} per epoch, best log evidence {best:.1f} in {len(other['evidence'])} epochs"
        f" ({other['seconds']:.1f}); it reaches our start's evidence "
        + (f"in epoch {reached} ({reached * per_epoch:.1f})." if reached else "in none of them.")
    )
    longest, middle = max(mine["seconds"][1:]), median(mine["seconds"][1:])
    lines.append(
        f"One iteration of the hyperparameters / its training: {iteration / other['seconds']:.3f} at best, "
        f"{middle / other['seconds']:.3f} median, "
        f"{longest / other['seconds']:.3f} at worst (target 0.33); the worst are those that try "
        f"to do without a group of weights."
    )
    whole = sum(mine["seconds"])
    lines.append(f"Our whole fit so far / its training: {whole / other['seconds']:.2f}.")
    return "\n".join(lines)


def nuts_report(found: dict[str, Any]) -> str:
    draws, ratio = found["draws"], found["nuts"] / found["seconds"]
    (narrow, wide), (plain, compiled) = found["sd ratio"], found["gradient"]
    return (
        f"\n## MLP 1-50-1, N = 150\n\nLaplaceEvidence {found['seconds']:.1f} s ({found['status']}), NUTS {draws} + "
        f"{draws} {found['nuts']:.0f} s: {ratio:.0f} times (target 50). Distance of the predictive means in NUTS's "
        f"predictive standard deviations: {found['gap']:.2f} at most, {found['gap rms']:.2f} root mean square (target "
        f"0.2), by the network linearised at the mode; {found['gap drawn']:.2f} at most by draws of the weights. Our "
        f"predictive standard deviation is {narrow:.2f} to {wide:.2f} times NUTS's. NUTS's own Monte-Carlo error is "
        f"{found['error']:.2f} at most (effective samples {found['effective']:.0f} at least, split R-hat "
        f"{found['split']:.2f} at most). NUTS's potential is compiled by jit: {1e3 * compiled:.2g} ms per gradient "
        f"instead of {1e3 * plain:.2g} ms as NUTS has it by default; its trees are at most {found['depth']} deep (10 "
        f"by default): both make NUTS faster here than a user has it."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--nuts", type=int, default=500, help="draws, and as many warmup steps; 0 leaves it out")
    parser.add_argument("--depth", type=int, default=7, help="of NUTS's trees at most; its own default is 10")
    args = parser.parse_args()
    X, t = data(768, 8)
    mine = kept("ours", lambda: ours(X, t, 50))
    print(report(mine, None) if args.epochs == 0 else "", flush=True)
    try:
        other = kept(f"laplace-torch {args.epochs}", lambda: theirs(X, t, 50, args.epochs)) if args.epochs else None
    except ImportError:
        other = None
    print(report(mine, other), flush=True)
    if args.nuts:
        found = kept(f"nuts {args.nuts} depth {args.depth}", lambda: against_nuts(args.nuts, args.depth))
        print(nuts_report(found))
        plain = kept("nuts default", default_nuts)
        whole = 1000.0 * plain["iteration"]
        print(
            f"\nNUTS as Pyro has it by default: {plain['iteration']:.2f} s per iteration, mean of the first "
            f"{plain['iterations']}; 500 + 500 of them would take {whole:.0f} s, {whole / plain['seconds']:.0f} times "
            f"our {plain['seconds']:.1f} s (an extrapolation)."
        )


if __name__ == "__main__":
    main()
