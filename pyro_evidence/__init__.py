"""Hyperparameters, a posterior and a log evidence for Pyro models: change the engine, keep the model."""

from typing import TYPE_CHECKING

from pyro_evidence.lazy_import import import_on_demand

if TYPE_CHECKING:  # at run time each is imported when it is first asked for
    from pyro_evidence.compare.committee import committee as committee
    from pyro_evidence.compare.comparison import compare as compare
    from pyro_evidence.compare.evidence import compare_evidence as compare_evidence
    from pyro_evidence.compare.explore import explore as explore
    from pyro_evidence.compare.many import FitTable as FitTable
    from pyro_evidence.compare.many import bootstrap as bootstrap
    from pyro_evidence.compare.many import leave_one_group_out as leave_one_group_out
    from pyro_evidence.compare.many import run_many as run_many
    from pyro_evidence.compare.savage_dickey import savage_dickey as savage_dickey
    from pyro_evidence.compare.sbc import sbc as sbc
    from pyro_evidence.compare.to_arviz import to_datatree as to_datatree
    from pyro_evidence.compare.to_arviz import to_inference_data as to_inference_data
    from pyro_evidence.errors import BadInput as BadInput
    from pyro_evidence.errors import ImproperPosterior as ImproperPosterior
    from pyro_evidence.errors import NotAMode as NotAMode
    from pyro_evidence.errors import NotConverged as NotConverged
    from pyro_evidence.errors import NotPositiveDefinite as NotPositiveDefinite
    from pyro_evidence.errors import TooLarge as TooLarge
    from pyro_evidence.errors import UnsupportedModel as UnsupportedModel
    from pyro_evidence.evidence_check import bridge_sampling as bridge_sampling
    from pyro_evidence.evidence_check import find_modes as find_modes
    from pyro_evidence.evidence_check import importance_sampling as importance_sampling
    from pyro_evidence.evidence_check import tempered_smc as tempered_smc
    from pyro_evidence.evidence_check import thermodynamic_integration as thermodynamic_integration
    from pyro_evidence.evidence_check.thames import thames as thames
    from pyro_evidence.fitting.iterate import Status as Status
    from pyro_evidence.fitting.iterate import Stop as Stop
    from pyro_evidence.infer.class_conditional import class_conditional as class_conditional
    from pyro_evidence.infer.evidence_em import EvidenceEM as EvidenceEM
    from pyro_evidence.infer.laplace_evidence import LaplaceEvidence as LaplaceEvidence
    from pyro_evidence.infer.laplace_kernel import LaplaceKernel as LaplaceKernel
    from pyro_evidence.infer.laplace_marginal import LaplaceMarginal as LaplaceMarginal
    from pyro_evidence.infer.laplace_nuts import LaplaceNUTS as LaplaceNUTS
    from pyro_evidence.infer.overlap_em import OverlapEM as OverlapEM
    from pyro_evidence.infer.revm import REVM as REVM
    from pyro_evidence.infer.rvm import RVM as RVM
    from pyro_evidence.infer.rvm import VRVM as VRVM
    from pyro_evidence.posterior.laplace import LaplacePosterior as LaplacePosterior
    from pyro_evidence.posterior.multimodal import ImportancePosterior as ImportancePosterior
    from pyro_evidence.posterior.multimodal import MultimodalPosterior as MultimodalPosterior
    from pyro_evidence.posterior.nested import NestedPosterior as NestedPosterior
    from pyro_evidence.posterior.process import predict_latent as predict_latent
    from pyro_evidence.posterior.structures import StructurePosterior as StructurePosterior
    from pyro_evidence.precision.choices import block_diagonal as block_diagonal
    from pyro_evidence.precision.choices import damped as damped
    from pyro_evidence.precision.choices import diagonal as diagonal
    from pyro_evidence.precision.choices import exact_hessian as exact_hessian
    from pyro_evidence.precision.choices import gauss_newton as gauss_newton
    from pyro_evidence.settings import Start as Start

__version__ = "0.1.0"

import_on_demand(__name__)
