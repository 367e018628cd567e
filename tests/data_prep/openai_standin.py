"""A small stand-in for a vLLM or SGLang server, in a thread: models, completions and chat completions, with faults to be planted.

`with OpenAIStandin(tokenizer, words(tokenizer)) as server:` gives `server.url`. `server.plant("500", "drop")` spoils the next
requests in this order, `server.share` a random share of all. Every body asked is kept in `server.asked`, the seeds of the whole
replies in `server.told`.
"""

import json
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Answer = Callable[[list[int], dict], list[int]]
FAULTS = ("429", "500", "503", "drop", "cut", "json", "none", "two", "time-out")
"""What may happen to a request that would succeed the next time."""
WORDS = "the quick brown fox jumps over lazy dog what is two plus and why four name three rivers that flow north"


class OpenAIStandin:
    def __init__(self, tokenizer, answer: Answer, model: str = "tiny", key: str | None = None, token_ids: bool = True):
        self.tokenizer, self.answer, self.models, self.key, self.token_ids = tokenizer, answer, [model], key, token_ids
        self.asked: list[dict] = []
        self.told: list[int] = []
        self.planted: deque[str] = deque()
        self.share, self.random = 0.0, random.Random(0)
        self.cursed: Callable[[dict], str | None] = lambda body: None
        self.spoil: Callable[[dict], dict] = lambda reply: reply
        self.happened: Counter[str] = Counter()
        self.hang, self.retry_after = 30.0, "0"
        self.now = self.most = 0
        self.lock = threading.RLock()
        self.closing = threading.Event()

    def plant(self, *faults: str) -> None:
        self.planted.extend(faults)

    def __enter__(self) -> "OpenAIStandin":
        self.open(0)
        return self

    def open(self, port: int) -> None:
        self.closing.clear()
        self.server = _Server(("127.0.0.1", port), type("Handler", (_Handler,), {"standin": self}))
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()

    def __exit__(self, *_) -> None:
        self.close()

    def fault(self, body: dict) -> str | None:
        with self.lock:
            self.asked.append(body)
            found = self.cursed(body)
            if found is None and self.planted:
                found = self.planted.popleft()
            if found is None and self.random.random() < self.share:
                found = self.random.choice(FAULTS)
            if found is not None:
                self.happened[found] += 1
            return found

    def reply(self, path: str, body: dict) -> dict:
        """As vLLM writes it."""
        chat = path == "/v1/chat/completions"
        with self.lock:  # one tokenizer and one model for all threads
            prompt = body["prompt"] if not chat else self.render(body)
            ids = self.answer(prompt, body)
            stopped = bool(ids) and ids[-1] in body["stop_token_ids"]
            text = self.tokenizer.decode(ids[:-1] if stopped else ids, skip_special_tokens=body.get("skip_special_tokens", True))
        choice: dict = {"index": 0, "finish_reason": "stop" if stopped else "length", "stop_reason": None}
        choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        reply = {"choices": [choice], "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}}
        if self.token_ids and body.get("return_token_ids"):
            choice["token_ids"] = ids
            (reply if chat else choice)["prompt_token_ids"] = prompt
        return self.spoil(reply)

    def render(self, body: dict) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            body["messages"],
            tools=body.get("tools"),
            tokenize=False,
            add_generation_prompt=True,
            **body.get("chat_template_kwargs", {}),
        )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has gone is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    standin: OpenAIStandin
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        if self._known():
            self._send(200, {"data": [{"id": model} for model in self.standin.models]})

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        data = self.rfile.read(length)
        if len(data) < length:  # the client was killed
            self.close_connection = True
            return
        body = json.loads(data)
        if not self._known():
            return
        if body["model"] not in self.standin.models:
            return self._send(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        with self.standin.lock:
            self.standin.now += 1
            self.standin.most = max(self.standin.most, self.standin.now)
        try:
            self._serve(body)
        finally:
            with self.standin.lock:
                self.standin.now -= 1

    def _serve(self, body: dict) -> None:
        fault = self.standin.fault(body)
        if fault is not None and fault.isdigit():
            headers = {"Retry-After": self.standin.retry_after} if fault == "429" else {}
            return self._send(
                int(fault), {"error": {"message": f"planted {fault}; your key is {self.headers['Authorization']}"}}, headers
            )
        if fault == "drop":
            self.close_connection = True
            return
        if fault == "time-out":
            self.standin.closing.wait(self.standin.hang)
            self.close_connection = True
            return
        reply = self.standin.reply(self.path, body)
        if fault in ("none", "two"):
            reply["choices"] *= {"none": 0, "two": 2}[fault]
        data = json.dumps(reply).encode()
        if fault == "json":
            data = data[:-7]
        if fault == "cut":
            self.close_connection = True
        self._write(200, data[: len(data) // 2] if fault == "cut" else data, len(data), {})
        if fault is None:
            with self.standin.lock:
                self.standin.told.append(body["seed"])

    def _known(self) -> bool:
        if self.standin.closing.is_set():  # a connection that was kept alive
            self.close_connection = True
            return False
        if self.standin.key is None or self.headers.get("Authorization") == f"Bearer {self.standin.key}":
            return True
        self._send(401, {"error": {"message": f"Incorrect API key provided: {self.headers.get('Authorization')}"}})
        return False

    def _send(self, status: int, body: dict, headers: dict | None = None) -> None:
        data = json.dumps(body).encode()
        self._write(status, data, len(data), headers or {})

    def _write(self, status: int, data: bytes, length: int, headers: dict) -> None:
        try:
            self.send_response(status)
            for key, value in ({"Content-Length": str(length)} | headers).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)
            self.wfile.flush()
        except OSError:
            self.close_connection = True  # the client has given up


def words(tokenizer, slow: float = 0.0) -> Answer:
    """Answers by the seed and the prompt alone: 2 to 9 words and the end of turn."""

    def answer(ids: list[int], body: dict) -> list[int]:
        if slow:
            time.sleep(slow)
        stream = random.Random(f"{body['seed']}:{body['temperature']}:{ids}")
        text = " ".join(stream.choice(WORDS.split()) for _ in range(stream.randint(2, 9)))
        said = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return said[: body.get("max_tokens") or body["max_completion_tokens"]]

    return answer


def main(target: str, prompts: str, folder: str, urls: list[str]) -> None:
    """Prepare data from servers, without the target's weights: to be killed from outside."""
    from data_prep import server, server_care
    from data_prep.config import PrepareConfig
    from data_prep.engines import OpenAIServer
    from data_prep.pipeline import prepare
    from data_prep.sources import JsonlPrompts
    from drafttrain.target.config import TargetConfig
    from drafttrain.target.load import load_speaker

    server.FIRST_WAIT = server_care.FIRST_REST = 0.05
    config = PrepareConfig(
        [JsonlPrompts(prompts)],
        engine=OpenAIServer(urls, concurrency=16, timeout=1.0),
        held_out=20,
        near_duplicate=1.0,
        max_tokens=40,
        max_prompt=80,
        held_out_max_tokens=40,
        chunk=100,
    )
    speaker = load_speaker(TargetConfig(path=target))
    prepare(config, speaker, Path(folder), taps=None, draft_vocab=None, say=lambda text: print(text, flush=True))  # type: ignore[arg-type]


if __name__ == "__main__":  # python openai_standin.py TARGET PROMPTS FOLDER URL...
    main(*sys.argv[1:4], sys.argv[4:])
