"""DFlash as vLLM (0.26.0, 0.33.0) and SGLang (0.5.23) read it: the layers of backbone.py, in the layout 1+N.

Neither engine has the other layout for DFlash, and vLLM 0.26 does not look at the flag: a folder with `sample_from_anchor` true would be drafted
from one slot too late (0.33 stops).
"""

from drafttrain.drafters.dflash import DFlash, DFlashNet
from drafttrain.export.block_format import BlockFormat
from drafttrain.export.format import Engine


class DFlashFormat(BlockFormat):
    """One folder for both engines."""

    name = "dflash"
    title = "DFlash drafter"
    word = "DFlash"
    method = "dflash"
    architecture = "DFlashDraftModel"
    engines: tuple[Engine, ...] = (Engine("vllm", "0.26 and later", "dflash"), Engine("sglang", "0.5.23", "DFLASH"))
    drafter, net = DFlash, DFlashNet


class DFlashForVllm(DFlashFormat):
    """What only vLLM can do: a reduced vocabulary, a window, embeddings that the target changes."""

    name = "dflash-vllm"
    engines = (Engine("vllm", "0.26 and later", "dflash"),)
    vllm_alone = True
