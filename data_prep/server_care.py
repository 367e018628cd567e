"""What is known of the servers, and how one is found fit for work."""

import time
from collections import deque
from dataclasses import dataclass, field

from data_prep.engines import OpenAIServer
from data_prep.server_http import GLANCE, Http, Refused
from data_prep.server_reply import Again
from drafttrain.errors import UserError

FIRST_REST = 1.0
"""Seconds that a failing server is left alone; doubles until it answers."""
LONGEST_WAIT = 60.0
WINDOW = 50
"""So many of the last prompts are remembered."""


@dataclass
class Server:
    url: str
    well: bool = False
    """Its list of models was read, and it did not fail several times in a row since."""
    rests_until: float = 0.0
    failures: int = 0
    """In a row."""
    rests: int = 0
    """In a row."""
    rested_at: float = 0.0
    last_error: str = "nothing asked yet"

    def healthy(self) -> None:
        self.failures = self.rests = 0

    def rest(self) -> None:
        """Leaves it alone for a while that doubles each time."""
        now = time.monotonic()
        self.well, self.failures, self.rested_at = False, 0, now
        self.rests_until = now + min(LONGEST_WAIT, FIRST_REST * 2**self.rests)
        self.rests += 1


@dataclass
class Care:
    """What is known of the servers; outlives the single call."""

    servers: list[Server]
    model: str | None
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Whether each of the last prompts was given up."""
    ever_answered: bool = False
    given_up: int = 0

    def errors(self) -> str:
        return "; ".join(f"{server.url}: {server.last_error}" for server in self.servers)


async def examine(http: Http, server: Server, care: Care, config: OpenAIServer) -> None:
    """Decides the model's name if nobody has. UserError if this server does not have it."""
    try:
        reply = await http.ask(server.url, "GET", "/v1/models", min(GLANCE, config.timeout))
    except Refused as refused:
        if refused.status == 404 and care.model is not None:
            return  # a gateway without a list
        raise
    rows = reply.get("data") if isinstance(reply, dict) else None
    names = (
        [row["id"] for row in rows if isinstance(row, dict) and isinstance(row.get("id"), str)] if isinstance(rows, list) else []
    )
    if not names:
        raise Again("no list of models")
    if care.model is None:
        care.model = names[0]
    if care.model not in names:
        raise UserError(
            f"{server.url} serves {', '.join(names[:5])}, but not {care.model}"
            f"{'' if config.model else ', which another of OpenAIServer.urls serves'}; all must serve the recipe's target "
            "under one name (OpenAIServer.model)."
        )
