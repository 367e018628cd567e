"""A target by its Hub id, against the stand-in: a private one loads with the user's login, a refusal is one sentence.

In a process of its own, because the client library reads its endpoint and cache folder when it is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafttrain.export.hub import push

from .hub_standin import HubStandin, Repo

LOAD = """
import json, os, sys
from drafttrain.errors import UserError
from drafttrain.target.config import TargetConfig
from drafttrain.target.load import load_target
from transformers import AutoConfig

answers = {}
for name, path, token in json.load(sys.stdin):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        target = load_target(TargetConfig(path=path), "cpu")
        config = AutoConfig.from_pretrained(path)
        answers[name] = [target.identity.revision, float(target.embedding_weight.sum()), config.hidden_size]
    except UserError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(target_folders, tmp_path_factory):
    from huggingface_hub import constants

    folder = target_folders("llama")
    with pytest.MonkeyPatch.context() as patch, HubStandin({"hf_mine": ["me"], "hf_other": ["other"]}) as hub:
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        push(folder, "me/tiny-target", endpoint=hub.endpoint, token="hf_mine")
        private = hub.repos["me/tiny-target"]
        hub.repos["me/gated"] = Repo(private=False, gated=True, files=private.files, large=private.large)
        asked = [
            ("mine", "me/tiny-target", "hf_mine"),
            ("gated, no login", "me/gated", None),
            ("gated, no access", "me/gated", "hf_other"),
            ("private of another", "me/tiny-target2", "hf_other"),
            ("missing", "me/nothing", "hf_mine"),
        ]
        hub.repos["me/tiny-target2"] = Repo(private=True, files=private.files, large=private.large)
        env = os.environ | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path_factory.mktemp("home")),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        }
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
            env.pop(name, None)
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(
            [sys.executable, "-c", LOAD], input=json.dumps(asked), env=env, cwd=root, text=True, capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1]) | {"commit": private.commits[-1], "log": done.stdout + done.stderr}


def test_a_private_target_loads_with_the_users_login(answers, tiny_llama):
    _, total, hidden = answers["mine"]
    assert total == pytest.approx(float(tiny_llama.embedding_weight.sum())) and hidden == tiny_llama.hidden


def test_the_hub_commit_is_the_identity_of_a_hub_target(answers):
    """Otherwise stores, checkpoints and exports cannot refuse another revision of the same model."""
    assert answers["mine"][0] == answers["commit"]


@pytest.mark.parametrize("name", ["gated, no login", "gated, no access"])
def test_a_gated_target_says_so_and_how_to_get_in(answers, name):
    assert "gated" in answers[name] and "hf auth login" in answers[name] and "\n" not in answers[name]


@pytest.mark.parametrize("name", ["private of another", "missing"])
def test_a_target_that_cannot_be_seen_is_one_sentence(answers, name):
    assert "no such model on the Hub" in answers[name] and "hf auth login" in answers[name] and "\n" not in answers[name]


def test_no_token_is_printed(answers):
    assert "hf_mine" not in answers["log"] and "hf_other" not in answers["log"]
