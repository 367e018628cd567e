"""Who speaks for the target while data is prepared: this process, or servers elsewhere. Loads nothing heavy."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import inf
from typing import Any
from urllib.parse import urlsplit

from data_prep.sources import require
from drafttrain.errors import UserError

APIS = ("completions", "chat")


class Engine(ABC):
    """One who answers prompts in the target's name."""

    @abstractmethod
    def decides(self) -> dict[str, Any]:
        """Options that decide what the data is; the others may change between restarts."""


@dataclass(frozen=True)
class LocalEngine(Engine):
    """This process decodes, `prepare.slots` chats at once."""

    def decides(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class OpenAIServer(Engine):
    """Servers with OpenAI's HTTP interface (vLLM, SGLang) that serve the recipe's target. They give no features: data.features online."""

    urls: list[str]
    """Where the servers are, such as http://node1:8000 (with or without /v1). All serve the same model and share the work."""
    model: str | None = None
    """The name they serve the target under; null = the first that the first server to answer lists."""
    api: str = "completions"
    """completions: token ids of the prompt are sent (exact). chat: messages are sent and the server renders them."""
    concurrency: int = 64
    """Requests that one server has at once. A shard ends with its longest answer: let prepare.chunk be several times all servers' sum."""
    timeout: float = 600.0
    """Seconds to wait for one answer, and for servers that have all fallen silent to come back."""
    attempts: int = 6
    """Tries, on any server, before a prompt is given up and counted as dropped."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the servers' key; unset = no key."""

    def __post_init__(self) -> None:
        require(
            bool(self.urls), "OpenAIServer.urls", self.urls, "a list with at least one address, such as http://localhost:8000"
        )
        for url in self.urls:
            try:
                parts = urlsplit(url)
                good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:  # brackets that do not close, a port that is no number
                good = False
            require(good, "An item of OpenAIServer.urls", url, "http://... or https://...")
            if parts.username or parts.password:
                raise UserError(
                    "OpenAIServer.urls holds a user name or a password; put a key into the environment variable that "
                    "OpenAIServer.api_key_env names."
                )
        require(len(set(self.bases)) == len(self.urls), "OpenAIServer.urls", self.urls, "a list of different servers")
        require(self.api in APIS, "OpenAIServer.api", self.api, " or ".join(APIS))
        for name in ("concurrency", "attempts"):
            require(getattr(self, name) >= 1, f"OpenAIServer.{name}", getattr(self, name), "at least 1")
        require(0 < self.timeout < inf, "OpenAIServer.timeout", self.timeout, "above 0 seconds")
        require(bool(self.api_key_env), "OpenAIServer.api_key_env", repr(self.api_key_env), "the name of an environment variable")

    @property
    def bases(self) -> list[str]:
        """The addresses without /v1 at their end."""
        return [url.rstrip("/").removesuffix("/v1") for url in self.urls]

    def decides(self) -> dict[str, Any]:
        return {"model": self.model, "api": self.api}
