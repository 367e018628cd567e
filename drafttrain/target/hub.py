"""Whether the Hugging Face Hub can be asked, found out by asking once."""

import os

PATIENCE_S = 5.0
"""Seconds to wait for a connection, and for its answer."""


def only_cached(where: str, revision: str | None) -> bool:
    """Whether the local cache is all that is to be looked at for a model: it is no local folder, and the Hub does not answer."""
    return not os.path.isdir(where) and not hub_answers(where, revision)


def hub_answers(model: str, revision: str | None) -> bool:
    """Whether the Hub says anything about a model, be it that there is none. huggingface_hub itself tries for half a minute before it gives up."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        get_hf_file_metadata(hf_hub_url(model, "config.json", revision=revision), timeout=PATIENCE_S)
    except HfHubHTTPError as error:
        return error.response.status_code < 500
    except HFValidationError:  # no such name can be; whoever loads it says so
        return True
    except Exception:  # the transport has its own exceptions for every way in which there is no network; offline mode has another
        return False
    return True
