"""Answers from servers with OpenAI's HTTP interface: many at once, from several servers, through their failures.

Every server has as many workers as requests that it may have at once; all take from one list, so a fast server does more and a
dead one's share goes to the others. Only what may succeed next time is tried again: no connection, time-outs, 408, 409, 425, 429,
5xx, replies cut off or malformed. A prompt that fails on every try is yielded as `failed` and never lost; a server that fails
several times in a row rests, is looked after by a nurse that asks for its list of models, and then takes up work again.

Workers stop taking prompts while answers wait to be fetched, so memory holds a bounded number of them.
"""

import asyncio
import contextlib
import os
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep import server_care
from data_prep.engines import OpenAIServer
from data_prep.server_care import Care, Server, examine
from data_prep.server_http import Http
from data_prep.server_reply import PATHS, Again, Interpreter, failure
from drafttrain.errors import UserError
from drafttrain.target.load import Speaker
from drafttrain.target.target import Target
from drafttrain.types import Request, Rollout

FIRST_WAIT = 0.5
"""Seconds before a prompt's second try; doubles with every further one."""
OTHERS_FIRST = 5.0
"""Further seconds before a prompt goes again to the server that it failed at, where there are others."""
IN_A_ROW = 3
"""Failures in a row after which a server rests."""
START = 30.0
"""Seconds that servers may take to be there at all."""
ENOUGH, TOO_MANY = 20, 0.5
"""Of at least so many of the last prompts, this share may be given up before the run stops."""


@dataclass
class _Job:
    request: Request
    tries: int = 0
    due: float = 0.0
    failed_at: Server | None = None


class ServerEngine:
    """One who speaks for the target through servers; a `data_prep.sources.Ask`.

    Answers depend on each request's key and the recipe's seed as far as the server honours `seed`; servers that batch do not repeat
    themselves bit for bit.
    """

    def __init__(self, config: OpenAIServer, target: Target | Speaker, seed: int, say: Callable[[str], None] = print):
        self.config, self.say = config, say
        self.key = os.environ.get(config.api_key_env, "").strip()
        if not (self.key.isascii() and self.key.isprintable()):
            raise UserError(
                f"the environment variable {config.api_key_env} does not hold a key: it has characters that no header may."
            )
        self.interpreter = Interpreter(config, target, seed)
        self.care = Care([Server(url) for url in config.bases], config.model)

    def __call__(
        self, requests: Sequence[Request], temperature: float, top_p: float, taps: tuple[int, ...] | None
    ) -> Iterator[Rollout]:
        """Rollouts in order of completion, one for every request; those that nobody answered carry `failed`.

        UserError: features are wanted; the servers refuse (a wrong key, name or request), do not serve the recipe's target, all fall
        silent, or fail for more than half of the last prompts.
        """
        if taps is not None:
            raise UserError("a server gives no features, but data.features is stored; set data.features to online.")
        if self.config.api == "chat" and any(request.messages is None for request in requests):
            raise UserError(
                "OpenAIServer.api is chat, but there are prompts that are no chat (SelfPrompts has the target write into an open user "
                "turn); set api to completions, or use prompts from a file."
            )
        return self._fetch(requests, temperature, top_p)

    def _fetch(self, requests: Sequence[Request], temperature: float, top_p: float) -> Iterator[Rollout]:
        exchange = _Exchange(self, requests, temperature, top_p)
        if requests:
            exchange.start()
        try:
            for _ in requests:
                got = exchange.answers.get()
                if isinstance(got, BaseException):
                    raise got
                yield got
        finally:
            exchange.stop()

    def report(self) -> None:
        """Says once what a reader of the data should know about how it was made."""
        seen = self.interpreter.seen.values()
        answers, retokenised = sum(each.answers for each in seen), sum(each.retokenised for each in seen)
        if retokenised:
            self.say(
                f"{retokenised:,} of {answers:,} answers came without token ids and were tokenised from their text, which the target may "
                "have said in other tokens; serve with vLLM from 0.10.2 or a recent SGLang for exact ones."
            )
        if self.care.given_up:
            self.say(f"{self.care.given_up:,} requests got no answer in {self.config.attempts} tries.")


class _Exchange:
    """One call: its requests, workers and nurses on an event loop in a thread of its own."""

    def __init__(self, engine: ServerEngine, requests: Sequence[Request], temperature: float, top_p: float):
        self.config, self.interpreter, self.care, self.say = engine.config, engine.interpreter, engine.care, engine.say
        self.temperature, self.top_p = temperature, top_p
        self.fresh = deque(requests)
        self.again: list[_Job] = []
        self.left = len(requests)
        self.answers: queue.SimpleQueue[Rollout | BaseException] = queue.SimpleQueue()
        self.room = 2 * len(self.care.servers) * self.config.concurrency
        self.thread = threading.Thread(target=self._run, name="servers", daemon=True)
        self.running = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.last_sign = time.monotonic()
        self.key = engine.key

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Ends the thread, whatever is still on its way."""
        if self.thread.ident is None:
            return
        self.running.wait()
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self.loop.call_soon_threadsafe(self._end, None)
        self.thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self.answers.put(error)
        finally:
            self.running.set()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self.loop.create_future()
        self.news = asyncio.Event()
        self.running.set()
        async with Http(self.config, self.key) as self.http:
            servers = self.care.servers
            each = min(self.config.concurrency, self.left)
            work = [self._nurse(server) for server in servers] + [self._worker(s) for _ in range(each) for s in servers]
            tasks = [asyncio.create_task(self._guard(one)) for one in work]
            try:
                await self.over
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _guard(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception | None) -> None:
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)

    # ---- taking work ----

    async def _worker(self, server: Server) -> None:
        while not self.over.done():
            now = time.monotonic()
            if self.answers.qsize() >= self.room:
                await asyncio.sleep(0.05)
            elif not server.well:
                await self._wait(None)
            elif server.rests_until > now:
                await self._wait(server.rests_until - now)
            elif (job := self._take(server, now)) is not None:
                await self._try(job, server)
            else:
                await self._wait(min((self._due(job, server) - now for job in self.again), default=None))

    def _take(self, server: Server, now: float) -> _Job | None:
        """A prompt whose next try is due, else a new one; None if there is none now."""
        for number, job in enumerate(self.again):
            if self._due(job, server) <= now:
                return self.again.pop(number)
        return _Job(self.fresh.popleft()) if self.fresh else None

    def _due(self, job: _Job, server: Server) -> float:
        """When this server may try again: later where it failed, to let another one go first."""
        others = any(other.well and other is not server for other in self.care.servers)
        return job.due + (OTHERS_FIRST if others and job.failed_at is server else 0.0)

    async def _wait(self, seconds: float | None) -> None:
        """Until something changed that a waiting worker should look at, or so many seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.news.wait(), seconds)

    def _tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    # ---- one try ----

    async def _try(self, job: _Job, server: Server) -> None:
        job.tries += 1
        begun = time.monotonic()
        assert self.care.model is not None  # a server is well only after its list of models was read
        body = self.interpreter.body(job.request, self.care.model, self.temperature, self.top_p)
        try:
            reply = await self.http.ask(server.url, "POST", PATHS[self.config.api], self.config.timeout, body)
            rollout = self.interpreter.rollout(job.request, reply, server.url)
        except Again as again:
            self._failed(job, server, again, begun)
        else:
            server.healthy()
            self._sign_of_life()
            self._done(rollout)

    def _failed(self, job: _Job, server: Server, again: Again, begun: float) -> None:
        now = time.monotonic()
        server.last_error = str(again)
        if again.wait is not None:
            server.rests_until = max(server.rests_until, now + min(again.wait, self.config.timeout))
        elif server.well and begun >= server.rested_at:  # what was sent before a rest says nothing about after it
            server.failures += 1
            if server.failures >= IN_A_ROW:
                server.rest()
                self.say(
                    f"{server.url} failed {IN_A_ROW} times in a row ({again}); it rests for {server.rests_until - now:.0f} s"
                )
        if job.tries >= self.config.attempts:
            self._done(failure(job.request, f"no answer from a server in {job.tries} tries ({again})"))
        else:
            job.failed_at, job.due = server, now + _backoff(job.tries)
            self.again.append(job)
        self._tell()

    def _done(self, rollout: Rollout) -> None:
        care = self.care
        care.recent.append(rollout.failed is not None)
        care.given_up += rollout.failed is not None
        self.answers.put(rollout)
        self.left -= 1
        if self.left == 0:
            self._end(None)
        elif len(care.recent) >= ENOUGH and sum(care.recent) > TOO_MANY * len(care.recent):
            raise UserError(
                f"{sum(care.recent)} of the last {len(care.recent)} prompts got no usable answer ({care.errors()}). Finished shards are "
                "kept: mend the servers and run data_prep again."
            )

    # ---- looking after servers ----

    async def _nurse(self, server: Server) -> None:
        """Brings a server (back) to work as soon as it lists its models."""
        while not self.over.done():
            if server.well:
                await self._wait(None)
                continue
            await asyncio.sleep(max(server.rests_until - time.monotonic(), 0.0))
            first = server.rested_at == 0
            try:
                await examine(self.http, server, self.care, self.config)
            except Again as again:
                server.last_error = str(again)
                server.rest()
                if first:
                    self.say(f"waiting for {server.url}, up to {self._patience():.0f} s if no server can be asked: {again}")
                self._require_somebody()
            else:
                server.well = True
                self._sign_of_life()
                self._tell()

    def _sign_of_life(self) -> None:
        self.care.ever_answered = True
        self.last_sign = time.monotonic()

    def _patience(self) -> float:
        """Seconds for which no server at all may answer."""
        return self.config.timeout if self.care.ever_answered else min(START, self.config.timeout)

    def _require_somebody(self) -> None:
        patience = self._patience()
        if not any(server.well for server in self.care.servers) and time.monotonic() - self.last_sign > patience:
            raise UserError(
                f"no server could be asked for {patience:.0f} s ({self.care.errors()}). Check OpenAIServer.urls and the servers, then run "
                "data_prep again: finished shards are kept."
            )


def _backoff(tries: int) -> float:
    """Seconds until the next try, scattered so that many that failed together do not come back together."""
    return min(server_care.LONGEST_WAIT, FIRST_WAIT * 2 ** (tries - 1)) * random.uniform(0.5, 1.5)
