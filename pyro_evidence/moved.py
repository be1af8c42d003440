"""Old paths of what has moved: they work for one release, each with a warning that names the new path."""

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

# Modules by their old path, below the package.
MODULES = {
    "ops": "numerics",
    "archive": "laplace.archive",
    "arguments": "settings",
    "axes_state": "relevance.axis_priors",
    "axis_priors": "relevance.axis_priors",
    "background": "program.distributions",
    "chains": "compare.chains",
    "checks": "program.checks",
    "committee": "compare.committee",
    "compare_evidence": "compare.evidence",
    "constants": "program.parameters",
    "contraction": "program.enumeration",
    "density": "structure.density",
    "eigen_state": "relevance.eigen_state",
    "evidence_check.estimate": "evidence_check.target",
    "evidence_check.swarm": "evidence_check.particles",
    "failed_run": "program.failed_run",
    "gaps": "program.distributions",
    "gaussian_latent": "structure.gaussian_process",
    "groups": "structure.groups",
    "guide": "laplace.guide",
    "held_out": "compare.held_out",
    "infer.batch": "laplace.type2_rows",
    "infer.batch_moves": "laplace.type2_rows",
    "infer.batch_start": "laplace.restarts",
    "infer.eigen_warnings": "relevance.eigen_state",
    "infer.fast_marginal": "relevance.fast_marginal",
    "infer.iterate": "iterate",
    "infer.mixture_deletion": "mixture.rounds",
    "infer.mixture_em": "mixture.rounds",
    "infer.mixture_generic": "infer.evidence_em",
    "infer.mixture_journal": "mixture.rounds",
    "infer.mixture_run": "mixture.fit",
    "infer.mixture_start": "mixture.fit",
    "infer.mixture_task": "mixture.fit",
    "infer.mppca_em": "mppca.rounds",
    "infer.mppca_task": "mppca.fit",
    "infer.noise": "relevance.noise",
    "infer.noisy_marginal": "relevance.noise",
    "infer.overlap_choice": "prbf.choice",
    "infer.overlap_rounds": "prbf.rounds",
    "infer.overlap_start": "prbf.start",
    "infer.overlap_task": "prbf.fit",
    "infer.restarts": "laplace.restarts",
    "infer.ridge": "infer.revm",
    "infer.settings": "settings",
    "infer.type2": "laplace.type2",
    "infer.variational": "relevance.variational",
    "interop": "compare.to_arviz",
    "labels": "compare.labels",
    "laplace_marginal": "laplace.marginal",
    "laplace_rows": "laplace.approximation_rows",
    "latent_prediction": "laplace.process_prediction",
    "learning_curve": "compare.learning_curve",
    "linear_newton": "relevance.mode",
    "mixture_fit": "mixture.posterior",
    "mixture_kernels": "mixture.kernels",
    "mixture_posterior": "mixture.posterior",
    "mixture_structure": "mixture.recognise",
    "models.background": "models.wrappers",
    "models.missing": "models.wrappers",
    "mppca_laplace": "mppca.laplace",
    "mppca_posterior": "mppca.posterior",
    "mppca_structure": "mppca.recognise",
    "network_density": "structure.network_density",
    "ops.basis": "models.basis",
    "ops.bridge": "evidence_check.bridge",
    "ops.coordinates": "numerics.coordinates",
    "ops.covariances": "models.covariances",
    "ops.curvature": "curvature.choices",
    "ops.derivatives": "numerics.derivatives",
    "ops.discrepancy": "compare.discrepancy",
    "ops.distance": "models.kernels",
    "ops.eigen_ard": "relevance.axis_evidence",
    "ops.ellipsoid": "evidence_check.thames",
    "ops.evidence": "numerics.evidence",
    "ops.gp_laplace": "curvature.gaussian_process_mode",
    "ops.importance": "numerics.importance",
    "ops.kernels": "models.kernels",
    "ops.l1": "relevance.mode",
    "ops.latent_precision": "curvature.gaussian_process",
    "ops.lbfgs": "numerics.lbfgs",
    "ops.linalg": "numerics.linalg",
    "ops.links": "program.links",
    "ops.matching": "compare.labels",
    "ops.mixture": "mixture.expectation",
    "ops.mixture_background": "mixture.density",
    "ops.mixture_density": "mixture.density",
    "ops.mixture_evidence": "mixture.evidence",
    "ops.mixture_mode": "mixture.mode",
    "ops.mixture_rows": "mixture.rows",
    "ops.mixture_slopes": "mixture.evidence",
    "ops.mixture_units": "mixture.data",
    "ops.mixture_updates": "mixture.updates",
    "ops.mppca": "mppca.expectation",
    "ops.mppca_curvature": "mppca.curvature",
    "ops.mppca_evidence": "mppca.evidence",
    "ops.mppca_missing": "mppca.missing",
    "ops.mppca_mode": "mppca.curvature",
    "ops.mppca_orbit": "mppca.orbit",
    "ops.mppca_rows": "mppca.expectation",
    "ops.mppca_start": "mppca.start",
    "ops.mppca_subspace": "mppca.posterior",
    "ops.mppca_updates": "mppca.updates",
    "ops.mppca_within": "mppca.updates",
    "ops.network": "structure.network_layers",
    "ops.network_kernels": "models.random_network",
    "ops.newton": "numerics.newton",
    "ops.parts": "structure.observed_parts",
    "ops.pool": "mixture.updates",
    "ops.prbf": "prbf.densities",
    "ops.prbf_ascent": "prbf.updates",
    "ops.prbf_updates": "prbf.updates",
    "ops.precision": "curvature.dense",
    "ops.predictive": "program.links",
    "ops.predictor": "numerics.linear_predictor",
    "ops.proposal": "evidence_check.target",
    "ops.psis": "numerics.importance",
    "ops.ranks": "compare.sbc",
    "ops.reduce": "numerics.log_sum_exp",
    "ops.rows": "numerics.batched",
    "ops.settings": "models.basis",
    "ops.spectrum": "relevance.axis_evidence",
    "ops.tempering": "evidence_check.particles",
    "ops.thermodynamic": "evidence_check.thermodynamic",
    "ops.trust": "numerics.trust_region",
    "parameters": "program.parameters",
    "plots_compare": "plots.comparison",
    "plots_mixture": "plots.mixture",
    "posterior": "laplace.posterior",
    "posterior_axes": "relevance.axes_posterior",
    "posterior_revm": "relevance.posteriors",
    "posterior_rvm": "relevance.posteriors",
    "prbf_posterior": "prbf.posterior",
    "predictors": "program.predictors",
    "probes": "structure.probes",
    "pruned": "structure.pruned",
    "quadratic": "relevance.quadratic",
    "reparametrised": "relevance.axis_priors",
    "report": "laplace.report",
    "runs": "compare.runs",
    "sbc": "compare.sbc",
    "simulate": "program.simulate",
    "sites": "program.sites",
    "streamed": "relevance.chunks",
    "compare.tables": "tables",
    "weights": "relevance.weights",
}

# Modules that have become folders of the same name: what the module held is now in one file of the folder.
FOLDERS = {
    "compare": "compare.comparison",
    "laplace": "laplace.approximation",
    "plots": "plots.posterior",
    "program": "program.log_joint",
    "structure": "structure.recognise",
}

# Single names that went elsewhere than the rest of their module, or have another name now.
NAMES: dict[str, str] = {
    "axes_state.OnAxesState": "relevance.axis_priors.SparseState",
    "axis_priors.LaplacePrior": "relevance.axis_priors.L1Prior",
    "eigen_state.EigenState": "relevance.eigen_state.REVMState",
    "eigen_state.Recipe": "relevance.eigen_state.REVMSettings",
    "evidence_check.swarm.Swarm": "evidence_check.particles.Particles",
    "evidence_check.swarm.moved": "evidence_check.particles.hmc_step",
    "evidence_check.swarm.wandered": "evidence_check.particles.after_moves",
    "infer.batch_start.warmed": "laplace.restarts.warm_up",
    "infer.class_conditional.optimised": "infer.class_conditional.fitted_class_prior",
    "infer.class_conditional.shares": "infer.class_conditional.empirical_class_prior",
    "infer.mixture_em.Batch": "mixture.rounds.MixtureRestarts",
    "infer.mixture_run.told": "mixture.fit.warn_unless_converged",
    "infer.mixture_task.Task": "mixture.fit.MixtureFit",
    "infer.mixture_task.reached": "mixture.fit.current_posterior",
    "infer.mppca_em.Batch": "mppca.rounds.MPPCARestarts",
    "infer.mppca_task.Task": "mppca.fit.MPPCAFit",
    "infer.overlap_choice.average": "prbf.choice.average_networks",
    "infer.overlap_rounds.keep": "prbf.rounds.keep_lost_kernels",
    "infer.overlap_start.Given": "prbf.start.StartFrom",
    "infer.overlap_start.Wide": "prbf.start.DataCovariance",
    "infer.overlap_task.Multiple": "prbf.fit.AlphaPerKernel",
    "infer.overlap_task.Task": "prbf.fit.PRBFFit",
    "infer.type2.Needed": "laplace.type2.PruningTried",
    "laplace.problem": "laplace.approximation.laplace_problem",
    "laplace.Slope": "laplace.hyperparameters.gradient.Slope",
    "laplace.slope": "laplace.hyperparameters.gradient.slope",
    "laplace_rows.Points": "laplace.approximation_rows.LaplaceRows",
    "laplace_rows.measured": "laplace.approximation_rows.laplace_rows",
    "laplace_rows.still_slopes": "laplace.approximation_rows.slopes_at_fixed_mode",
    "mixture.Guarded": "mixture.updates.BoundedInflation",
    "mixture.derived": "mixture.updates.corrected",
    "mixture.exact": "mixture.updates.stationary",
    "mixture.literal": "mixture.updates.as_published",
    "ops.curvature.Density": "numerics.newton.Density",
    "ops.latent_precision.Seen": "curvature.gaussian_process.ObservationMap",
    "ops.lbfgs.unwatched": "numerics.lbfgs.no_callback",
    "ops.mixture_background.Background": "program.distributions.Background",
    "ops.mixture_updates.Guarded": "mixture.updates.BoundedInflation",
    "ops.mixture_updates.derived": "mixture.updates.corrected",
    "ops.mixture_updates.exact": "mixture.updates.stationary",
    "ops.mixture_updates.literal": "mixture.updates.as_published",
    "ops.mppca_updates.as_it_is": "mppca.updates.unchanged",
    "ops.prbf_updates.literal": "prbf.updates.as_published",
    "ops.predictive.mackay": "program.links.moderated_output",
    "posterior_rvm.ColumnState": "relevance.posteriors.RVMState",
    "prbf.literal": "prbf.updates.as_published",
    "prbf_posterior.Held": "prbf.posterior.RejectedClass",
    "prbf_posterior.Loss": "prbf.posterior.LostKernel",
    "runs.Nuts": "compare.runs.NUTSRun",
    "runs.Run": "compare.runs.EngineRun",
    "runs.Svi": "compare.runs.SVIRun",
    "runs.run": "compare.runs.run_engine",
    "structure.Knows": "structure.recognise.HasKnownDensity",
}

# Names that were at the top.
TOP = {
    "AlphaChoice": "prbf.AlphaChoice",
    "Ascent": "prbf.Ascent",
    "Calibration": "compare.Calibration",
    "ClassConditional": "infer.ClassConditional",
    "Committee": "compare.Committee",
    "Comparison": "compare.Comparison",
    "EvidenceComparison": "compare.EvidenceComparison",
    "EvidenceEstimate": "evidence_check.EvidenceEstimate",
    "GaussianPrior": "relevance.GaussianPrior",
    "Given": "prbf.StartFrom",
    "GreedyDeletion": "mixture.GreedyDeletion",
    "GroupPrior": "relevance.GroupPrior",
    "Guarded": "mixture.BoundedInflation",
    "JaakkolaJordan": "relevance.JaakkolaJordan",
    "KMeans": "prbf.KMeans",
    "KernelPath": "prbf.KernelPath",
    "LaplacePrior": "relevance.L1Prior",
    "LatentPrediction": "laplace.LatentPrediction",
    "LearningCurve": "compare.LearningCurve",
    "LeastKL": "relevance.LeastKL",
    "LogJoint": "program.LogJoint",
    "MPPCAPosterior": "mppca.MPPCAPosterior",
    "Missing": "models.Missing",
    "MixturePosterior": "mixture.MixturePosterior",
    "Multiple": "prbf.AlphaPerKernel",
    "NetworkAverage": "prbf.NetworkAverage",
    "Nuts": "compare.NUTSRun",
    "PRBFPosterior": "prbf.PRBFPosterior",
    "REVMPosterior": "relevance.REVMPosterior",
    "RVMPosterior": "relevance.RVMPosterior",
    "RandomPoints": "prbf.RandomPoints",
    "Svi": "compare.SVIRun",
    "Unregularised": "mixture.Unregularised",
    "WeightDecay": "mixture.WeightDecay",
    "Wide": "prbf.DataCovariance",
    "add_kernels": "prbf.add_kernels",
    "arviz_groups": "compare.arviz_groups",
    "average": "prbf.average_networks",
    "base_centre": "relevance.base_centre",
    "choose_alpha": "prbf.choose_alpha",
    "derived": "mixture.corrected",
    "empirical_fisher": "relevance.quadratic.empirical_fisher",
    "error_rate": "prbf.error_rate",
    "exact": "mixture.stationary",
    "hermite": "program.links.hermite",
    "isotropic_evidence": "infer.isotropic_evidence",
    "keep": "prbf.keep_lost_kernels",
    "laplace_at_base": "relevance.laplace_at_base",
    "learning_curve": "compare.learning_curve",
    "linearised": "compare.linearised",
    "literal": "mixture.as_published",
    "log_loss": "prbf.log_loss",
    "mackay": "program.links.moderated_output",
    "marginalised": "models.marginalised",
    "optimised": "infer.fitted_class_prior",
    "score_centre": "relevance.score_centre",
    "shares": "infer.empirical_class_prior",
    "with_background": "models.with_background",
}

PACKAGE = __package__


def found(old: str, new: str) -> Any:
    """What lies at the path ``new``, after a warning that ``old`` is going away.

    :param old: path below the package, as the caller has it.
    :param new: path below the package of a module, or of a name in one.
    """
    warnings.warn(
        f"{PACKAGE}.{old} has moved and will go with the next release; use {PACKAGE}.{new}.",
        DeprecationWarning,
        stacklevel=3,
    )
    module, _, name = new.rpartition(".")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)


def attribute(old: str, new: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of the module once at ``old``, whose names lie in the module ``new``."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {PACKAGE}.{old} has no attribute {name}")
        path = NAMES.get(f"{old}.{name}", f"{new}.{name}")
        if path == f"{old}.{name}" or not _exists(path):
            raise AttributeError(f"module {PACKAGE}.{old} has no attribute {name}")
        return found(f"{old}.{name}", path)

    return get


def _exists(path: str) -> bool:
    module, _, name = path.rpartition(".")
    return hasattr(import_module(f"{PACKAGE}.{module}"), name)


def top(name: str) -> Any:
    """The ``__getattr__`` of the package itself."""
    if name not in TOP:
        raise AttributeError(f"module {PACKAGE} has no attribute {name}")
    return found(name, TOP[name])


def folder(name: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of the folder ``name``, once a module."""
    return attribute(name, FOLDERS.get(name, name))


def old_modules() -> dict[str, ModuleType]:
    """A stand-in for each module that has left its place, by its full old name; nothing is imported yet."""
    stand_ins = {}
    for old, new in MODULES.items():
        module = ModuleType(f"{PACKAGE}.{old}", f"Moved to {PACKAGE}.{new}.")
        module.__dict__["__getattr__"] = attribute(old, new)
        module.__dict__["__path__"] = []  # an import of something inside looks here
        stand_ins[module.__name__] = module
    return stand_ins


def install() -> None:
    """Make the old paths importable; no module of somebody else's is touched."""
    for name, module in old_modules().items():
        sys.modules.setdefault(name, module)
