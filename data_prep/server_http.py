"""One question to a server, and what its status is worth: JSON, another try, or the end of the run."""

import asyncio
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from data_prep.engines import OpenAIServer
from data_prep.server_reply import Again
from drafttrain.errors import UserError

GLANCE = 10.0
"""Most seconds for connecting, and for a list of models."""
TRANSIENT = {408, 409, 425, 429}


class Refused(UserError):
    """A status that no further try changes."""

    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status = status


class Http:
    """A client with the servers' key; an async context."""

    def __init__(self, config: OpenAIServer, key: str):
        self.config, self.key = config, key
        connections = len(config.urls) * (config.concurrency + 1)
        self.client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(config.timeout, connect=min(GLANCE, config.timeout), pool=None),
            # Servers close idle connections after some 5 s; letting go earlier avoids writing into a closing one.
            limits=httpx2.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=3.0),
        )

    async def __aenter__(self) -> "Http":
        await self.client.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self.client.__aexit__(*exc)

    async def ask(self, url: str, method: str, path: str, seconds: float, body: Any = None) -> Any:
        """The JSON of a reply. Again: it may come out better next time. UserError: it will not."""
        try:
            async with asyncio.timeout(seconds):
                response = await self.client.request(method, url + path, json=body)
        except (TimeoutError, httpx2.TimeoutException):
            raise Again("time-out") from None
        except httpx2.ConnectError:
            raise Again("cannot be reached") from None
        except httpx2.RequestError as error:
            raise Again(f"connection lost ({type(error).__name__})") from None
        status = response.status_code
        if status in TRANSIENT or status >= 500:
            raise Again(f"HTTP {status}", retry_after(response.headers.get("Retry-After")))
        if status != 200:
            raise self._refusal(url, status, response.text, path)
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise Again("malformed JSON") from None

    def _refusal(self, url: str, status: int, text: str, path: str) -> Refused:
        lines = [line.strip() for line in text.replace(self.key or "\0", "***").splitlines() if line.strip()][:3]
        hint = {
            401: f"put the server's key into the environment variable {self.config.api_key_env}",
            403: f"put a key that may do this into the environment variable {self.config.api_key_env}",
            404: "check OpenAIServer.urls, model and api",
        }.get(status, "check OpenAIServer and the lengths in prepare against what it serves")
        return Refused(
            status, f"{url}{path} refused a request (HTTP {status}: {' '.join(lines)[:300] or 'no reason given'}); {hint}."
        )


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header, a number or a date; None if there is none that can be read."""
    if value is None:
        return None
    try:
        return max(float(value), 0.0)
    except ValueError:
        pass
    try:
        return max((parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None
