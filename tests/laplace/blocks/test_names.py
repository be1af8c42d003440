"""What blocks are called: by their first coordinate, in the words of the model."""

import torch

from pyro_evidence.laplace.evidence_error import element_names
from pyro_evidence.program.log_joint import LogJoint
from tests.evidence_check.test_many import centred, counts


def test_elements_have_the_names_of_their_sites() -> None:
    joint = LogJoint(centred, counts(), {})
    level = joint.latents.slices["level"].start
    effect = joint.latents.slices["a"].start
    assert element_names(joint, torch.tensor([effect + 7, level, effect])) == ("a[7]", "level", "a[0]")
