"""What the formats of the speculators library (0.9.0) have in common: a drafter's layers in one dictionary, and for whom it drafts in another.

The library's own loader reads them, and vLLM, which finds the target in them. SGLang does not. config.json says in the library's words what the
engines' says in theirs (speculators_eagle.py, speculators_blocks.py); layer ids are i + 1 in both readers, which count the stream after so many layers.

vLLM makes one flat config of `transformer_layer_config` and of the fields that it knows for a kind, and forgets all others. So what its classes look
for besides stands among the layer's fields, where nobody else minds it.

The library loads the target's head by the target's name, as it stands in the target's files.
"""

from typing import Any

import torch

from drafttrain.errors import UserError
from drafttrain.export.format import dtype_words
from drafttrain.target.target import Target

VERSION = "0.9.0"
READERS = f"{VERSION}, and vLLM 0.26 and later in its own way"
READERS_033 = f"{VERSION}, and vLLM 0.33 and later in its own way"
KIND = "speculators_model_type"
"""The field of config.json that names the kind of drafter."""


def frame(architecture: str, kind: str, drafts: int, target: Target, called: str, dtype: torch.dtype) -> dict[str, Any]:
    """What every drafter says: how many tokens it proposes, and for whom. Raises UserError if the library could not load the target."""
    if called.startswith("package:") or called.endswith(".gguf"):
        raise UserError(
            f"export.format is speculators, which loads the target {called} from its Hub id or its folder, and this is neither; set "
            "export.base_model to the id of the same model on the Hub."
        )
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": [architecture],
        KIND: kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": called, "architectures": [type(target.model).__name__]},
        },
        **dtype_words(dtype),
    }
