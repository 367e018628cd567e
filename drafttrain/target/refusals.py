"""Why a target cannot be had, in one sentence."""

import re
from textwrap import shorten


def reason(error: Exception) -> str:
    """One sentence for the ways in which loading goes wrong."""
    text, name = " ".join(str(error).split()), type(error).__name__
    missing = name == "RepositoryNotFoundError" or "Repository Not Found" in text
    if name == "GatedRepoError" or ("gated" in text.lower() and not missing):
        return "it is a gated model; ask for access on its Hub page and log in with `hf auth login` on this machine."
    if (
        re.search(r"\b401 (?=Client|Unauthorized)", text)  # the digits alone may be a port's
        or "Repository Not Found" in text
        or "is not a valid model identifier" in text
        or "is not a local folder" in text
    ):
        return "there is no such model on the Hub (or it is private and you are not logged in); check target.path, or run `hf auth login`."
    if (
        "couldn't connect" in text.lower()
        or "offline" in text.lower()
        or name in ("ConnectError", "ConnectionError", "LocalEntryNotFoundError")
    ):
        return (
            "the Hub cannot be reached and the model is not in the local cache; give a local folder or a .gguf file, or connect."
        )
    if (
        "Unrecognized configuration class" in text
        or "GGUF model with architecture" in text
        or "does not recognize this architecture" in text
    ):
        return f"it is not a causal language model that transformers can load ({shorten(text, 160, placeholder=' ...')}); give a causal LM."
    if "object has no attribute 'to_dict'" in text or "has no `quant_method`" in text:  # transformers reads an entry of any kind
        return (
            "quantization_config in its config.json is no object with a quant_method, which would say how its weights are quantised; fetch that file "
            "again, or remove the entry if they are plain."
        )
    if "quantiz" in text.lower() or "accelerate" in text or isinstance(error, ImportError):
        return f"its weights are quantised in a way that needs something this machine lacks ({shorten(text, 160, placeholder=' ...')}); install that, or use unquantised weights."
    if "trust_remote_code" in text:
        return "it needs its own modelling code; set target.trust_remote_code to true if you trust its authors."
    return f"{name}: {shorten(text, 240, placeholder=' ...')}"
