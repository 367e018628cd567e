"""`plan` where the Hub does not answer: it is asked once, and what it gave before will do.

In processes of their own, because the client library reads its endpoint and cache folder when it is imported.
"""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from huggingface_hub import constants
from planning import line, planner

from drafttrain.target.hub import hub_answers
from drafttrain.target.refusals import reason

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789" * 4


class Hub(threading.Thread):
    """Hangs up on everybody, or says one line to everybody, and counts who asks for a file (the client library has questions of its own)."""

    def __init__(self, status: str | None = None):
        super().__init__(daemon=True)
        self.status, self.asked = status, 0
        self.server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self.server.getsockname()[1]}"

    def run(self):
        while True:
            try:
                caller = self.server.accept()[0]
            except OSError:  # it was closed
                return
            with caller:
                self.asked += caller.recv(1 << 16).startswith(b"HEAD ")
                if self.status is not None:
                    caller.sendall(f"HTTP/1.1 {self.status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.join()


def plan_of_a_hub_target(folder, target, capsys, hub, **env) -> list[str]:
    planner(folder, target, capsys)()
    command = [sys.executable, "-m", "drafttrain", "plan", "--config", f"{folder}/recipe.yaml", "--runs", str(folder)]
    inherited = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
    here = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [*command, "--target.path", "owner/name"],
        env=inherited | here | env,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    return done.stdout.splitlines()


UNKNOWN = "parameters and bytes: not known, because the target's config cannot be read: "


def test_without_a_network_it_says_so_in_a_sentence_after_one_try(tmp_path, target_folders, capsys):
    with Hub() as hub:
        lines = plan_of_a_hub_target(tmp_path, target_folders("llama"), capsys, hub)
    assert lines[-1] == (
        f"{UNKNOWN}the Hub cannot be reached and the model is not in the local cache; give a local folder or a .gguf file, or connect."
    )
    assert hub.asked == 1


def test_without_a_network_a_config_that_was_fetched_before_is_read(tmp_path, target_folders, capsys):
    kept = tmp_path / "home" / "hub" / "models--owner--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    (kept / "snapshots" / COMMIT).mkdir(parents=True)
    (kept / "snapshots" / COMMIT / "config.json").write_text((target_folders("llama") / "config.json").read_text())
    here = line(planner(tmp_path, target_folders("llama"), capsys)()[1], "parameters: ")
    with Hub() as hub:
        assert line(plan_of_a_hub_target(tmp_path, target_folders("llama"), capsys, hub), "parameters: ") == here
    assert hub.asked == 1


LOAD = """
import sys
from drafttrain.errors import UserError
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
try:
    load_target(TargetConfig(path="owner/name"), "cpu")
except UserError as error:
    print(error)
"""


def test_loading_asks_once_too(tmp_path):
    with Hub() as hub:
        env = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")}
        env |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
        done = subprocess.run([sys.executable, "-c", LOAD], env=env, cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.stdout.splitlines()[-1] == (
        "target owner/name could not be loaded: the Hub cannot be reached and the model is not in the local cache; give a local folder or a .gguf "
        "file, or connect."
    ), done.stderr[-2000:]
    assert hub.asked == 1


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            "We couldn't connect to 'http://127.0.0.1:40123' to load the files, and couldn't find them in the cached files.",
            "cannot be reached",
        ),
        (
            "We couldn't connect to 'http://127.0.0.1:401' to load the files, and couldn't find them in the cached files.",
            "cannot be reached",
        ),
        ("401 Client Error: Unauthorized for url: http://127.0.0.1:40123/owner/name", "no such model"),
        ("Client error '401 Unauthorized' for url 'http://127.0.0.1:40123/owner/name'", "no such model"),
    ],
)
def test_a_port_is_not_taken_for_a_refusal(said, sentence):
    assert sentence in reason(OSError(said))


def test_a_model_that_does_not_exist_is_not_taken_for_a_missing_network(tmp_path, target_folders, capsys):
    with Hub("404 Not Found\r\nX-Error-Code: RepoNotFound") as hub:
        lines = plan_of_a_hub_target(tmp_path, target_folders("llama"), capsys, hub)
    assert lines[-1].startswith(f"{UNKNOWN}there is no such model on the Hub")


@pytest.mark.parametrize(
    ("status", "answers"),
    [("200 OK", True), ("404 Not Found", True), ("401 Unauthorized", True), ("503 Service Unavailable", False), (None, False)],
)
def test_any_word_of_the_hub_is_an_answer_but_that_it_is_down(monkeypatch, status, answers):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with Hub(status) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        assert hub_answers("owner/name", None) == answers
        assert hub.asked == 1
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert not hub_answers("owner/name", None)
        assert hub.asked == 1 and hub_answers("no such name", None)
