"""Pushing to the Hub, against a local stand-in of its HTTP interface (hub_standin.py): good pushes and every refusal."""

import hashlib
import socket

import pytest

from drafttrain.errors import UserError
from drafttrain.export import hub as hub_module
from drafttrain.export.config import ExportConfig
from drafttrain.export.hub import name_warning, preview, push

from .hub_standin import HubStandin, Repo

TOKEN = "hf_goodtoken"
README = "---\ntags:\n- eagle3\n---\n# Card\n"


@pytest.fixture(autouse=True)
def quiet_client(monkeypatch, tmp_path):
    """No cached login of the machine, no Xet (its protocol is a binary library's own), no long waits."""
    import huggingface_hub
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(hub_module, "RETRY_WAITS_S", (0.0, 0.0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@pytest.fixture
def hub():
    with HubStandin({TOKEN: ["me", "team"], "hf_othertoken": ["other"]}) as standin:
        yield standin


@pytest.fixture
def folder(tmp_path):
    """A finished export as push sees it: files of several kinds, and leftovers that must stay here."""
    made = tmp_path / "export"
    (made / "plots").mkdir(parents=True)
    (made / "config.json").write_text("{}")
    (made / "README.md").write_text(README)
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 500)
    (made / "plots" / "tau.png").write_bytes(b"\x89PNG")
    (made / "model.safetensors.tmp").write_bytes(b"half")
    (made / ".lock").write_bytes(b"")
    return made


def message(folder, hub, repo="me/tiny-eagle3", **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        push(folder, repo, endpoint=hub.endpoint, **({"token": TOKEN} | kwargs))
    assert "hf_" not in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_push_uploads_every_file_byte_for_byte_in_one_commit(folder, hub, capfd):
    url = push(folder, "me/tiny-eagle3", endpoint=hub.endpoint, token=TOKEN)
    repo = hub.repos["me/tiny-eagle3"]
    assert repo.private and len(repo.commits) == 2 and url.endswith(repo.commits[-1])
    wanted = ["config.json", "README.md", "model.safetensors", "plots/tau.png"]
    assert repo.files == {name: (folder / name).read_bytes() for name in wanted}
    assert repo.large == {"model.safetensors"}
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() in hub.store
    assert TOKEN not in "".join(capfd.readouterr())


def test_pushing_again_uploads_only_what_changed(folder, hub):
    push(folder, "team/tiny-eagle3", private=False, endpoint=hub.endpoint, token=TOKEN)
    assert not hub.repos["team/tiny-eagle3"].private
    hub.requests.clear()
    (folder / "README.md").write_text(README + "tau 2.5\n")
    push(folder, "team/tiny-eagle3", private=False, endpoint=hub.endpoint, token=TOKEN)
    assert not [request for request in hub.requests if request.startswith("PUT")]
    assert hub.repos["team/tiny-eagle3"].files["README.md"].endswith(b"tau 2.5\n")
    commits = len(hub.repos["team/tiny-eagle3"].commits)
    push(folder, "team/tiny-eagle3", private=False, endpoint=hub.endpoint, token=TOKEN)
    assert len(hub.repos["team/tiny-eagle3"].commits) == commits


def test_a_branch_and_a_tag(folder, hub):
    """Main stays as it was, the branch is made once, and each tag stays with its commit."""
    push(folder, "me/tiny-eagle3", endpoint=hub.endpoint, token=TOKEN)
    repo = hub.repos["me/tiny-eagle3"]
    before = dict(repo.files)
    (folder / "model.safetensors").write_bytes(b"other weights" * 99)
    url = push(folder, "me/tiny-eagle3", revision="step-400", tag="v1", endpoint=hub.endpoint, token=TOKEN)
    assert repo.files == before and repo.branches["step-400"]["model.safetensors"] == b"other weights" * 99
    assert repo.tags == {"v1": repo.commits[-1]} and url.endswith(repo.commits[-1])
    (folder / "README.md").write_text(README + "tau 2.5\n")
    push(folder, "me/tiny-eagle3", revision="step-400", tag="v2", endpoint=hub.endpoint, token=TOKEN)
    assert list(repo.tags) == ["v1", "v2"] and repo.tags["v1"] != repo.tags["v2"] and repo.files == before


def test_a_tag_that_is_there_is_refused_before_anything_is_sent(folder, hub):
    push(folder, "me/tiny-eagle3", tag="v1", endpoint=hub.endpoint, token=TOKEN)
    (folder / "model.safetensors").write_bytes(b"other weights")
    hub.requests.clear()
    assert "has a tag v1 already" in message(folder, hub, tag="v1")
    assert not [request for request in hub.requests if not request.startswith("GET")]


def test_a_push_that_dies_between_its_commit_and_its_tag_is_simply_run_again(folder, hub):
    hub.fail("POST", "/tag/", 500, times=3)
    assert "answered 500" in message(folder, hub, tag="v1")
    repo = hub.repos["me/tiny-eagle3"]
    commits = list(repo.commits)
    push(folder, "me/tiny-eagle3", tag="v1", endpoint=hub.endpoint, token=TOKEN)
    assert repo.commits == commits and repo.tags == {"v1": commits[-1]}


@pytest.mark.parametrize("there", [False, True])
def test_a_dry_run_lists_what_would_go_and_sends_nothing(folder, hub, there):
    if there:
        hub.repos["me/tiny-eagle3"] = Repo(private=True)
    first, *files = preview(folder, "me/tiny-eagle3", revision="next", tag="v1", endpoint=hub.endpoint, token=TOKEN)
    where = "which exists" if there else "made anew, private"
    sent = {"README.md": 40, "config.json": 2, "model.safetensors": 128_000, "plots/tau.png": 4}
    sent = {name: (folder / name).stat().st_size for name in sent}
    assert first == (
        f"dry run, nothing is sent: 4 files, {sum(sent.values()):,} bytes would go to me/tiny-eagle3 ({where}), branch next, in one commit and be tagged v1"
    )
    assert sorted(files) == sorted(f"  {name}  {size:,} bytes" for name, size in sent.items())
    assert not [request for request in hub.requests if not request.startswith("GET")] and not hub.store
    push(folder, "me/tiny-eagle3", revision="next", tag="v1", endpoint=hub.endpoint, token=TOKEN)
    assert set(hub.repos["me/tiny-eagle3"].branches["next"]) == set(sent)  # what was listed is what goes


def test_a_dry_run_is_refused_as_the_push_would_be(folder, hub):
    hub.repos["me/tiny-eagle3"] = Repo(private=False)
    for kwargs, words in (
        ({}, "is public"),
        ({"token": "hf_expired"}, "does not accept the login"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            preview(folder, "me/tiny-eagle3", endpoint=hub.endpoint, **({"token": TOKEN} | kwargs))
        assert "hf_" not in str(caught.value)


def test_a_dry_run_needs_no_login_and_then_asks_nobody(folder, hub):
    first, *files = preview(folder, "me/tiny-eagle3", endpoint=hub.endpoint, token=None)
    assert "would go to me/tiny-eagle3 (not asked whether it exists, for no login is stored" in first and len(files) == 4
    assert not hub.requests
    with pytest.raises(UserError, match="a repository is named owner/name"):
        preview(folder, "me/tiny/eagle3", endpoint=hub.endpoint, token=None)


def test_a_push_that_dies_in_the_middle_goes_on_where_it_was(folder, hub):
    """Of two large files one has arrived: it is not sent again, and there is one commit, with both."""
    (folder / "second.safetensors").write_bytes(bytes(range(256)) * 300)
    parts = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("model.safetensors", "second.safetensors")
    }
    hub.fail("PUT", parts["second.safetensors"], 500, times=99)
    assert "answered 500" in message(folder, hub) and not hub.repos["me/tiny-eagle3"].files
    assert parts["model.safetensors"] in hub.store and parts["second.safetensors"] not in hub.store
    hub.faults.clear()
    hub.requests.clear()
    push(folder, "me/tiny-eagle3", endpoint=hub.endpoint, token=TOKEN)
    assert [request for request in hub.requests if request.startswith("PUT")] == [f"PUT /store/{parts['second.safetensors']}"]
    repo = hub.repos["me/tiny-eagle3"]
    assert len(repo.commits) == 2 and {*parts} <= set(repo.files)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"push": "me/x", "tag": "v 1"}, "export.tag is 'v 1'"),
        ({"push": "me/x", "revision": "-x"}, "export.revision is '-x'"),
        ({"tag": "v1"}, "export.tag is about a push, but export.push names no repository"),
        ({"dry_run": True}, "export.dry_run is about a push"),
    ],
)
def test_a_tag_or_a_branch_without_sense(values, words):
    with pytest.raises(UserError, match=words):
        ExportConfig(**values)


def test_a_private_push_into_a_public_repository_is_refused_before_anything_is_sent(folder, hub):
    hub.repos["me/tiny-eagle3"] = Repo(private=False)
    assert "is public" in message(folder, hub)
    assert not hub.store and not hub.repos["me/tiny-eagle3"].files


@pytest.mark.parametrize("part", ["/repos/create", "/preupload/", "/objects/batch", "/store/", "/commit/"])
@pytest.mark.parametrize("status", [500, 503])
def test_a_passing_server_error_at_any_step_is_retried(folder, hub, part, status):
    hub.fail("PUT" if part == "/store/" else "POST", part, status, times=2)
    push(folder, "me/tiny-eagle3", endpoint=hub.endpoint, token=TOKEN)
    assert hub.repos["me/tiny-eagle3"].files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert all(fault[3] == 0 for fault in hub.faults)


def test_a_lasting_server_error_is_one_sentence_and_commits_nothing(folder, hub):
    hub.fail("POST", "/commit/", 500, times=99)
    assert "answered 500 (planted fault)" in message(folder, hub)
    assert not hub.repos["me/tiny-eagle3"].files


def test_no_login(folder, hub):
    assert "needs a login" in message(folder, hub, token=None)
    assert not hub.requests


def test_the_cached_login_is_used(folder, hub, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: TOKEN)
    push(folder, "me/tiny-eagle3", endpoint=hub.endpoint)
    assert "me/tiny-eagle3" in hub.repos


def test_a_login_that_the_hub_does_not_know(folder, hub):
    assert "does not accept the login (401)" in message(folder, hub, token="hf_expired")


def test_a_namespace_of_somebody_else(folder, hub):
    assert "may not write there (403)" in message(folder, hub, repo="stranger/tiny-eagle3")


def test_a_public_repository_of_somebody_else(folder, hub):
    hub.repos["other/tiny-eagle3"] = Repo(private=False)
    assert "may not write there (403)" in message(folder, hub, repo="other/tiny-eagle3", private=False)


def test_a_repository_that_vanishes_between_the_steps(folder, hub):
    hub.fail("POST", "/preupload/", 404)
    assert "no such repository" in message(folder, hub)


def test_bytes_that_arrive_damaged_are_not_committed(folder, hub, monkeypatch):
    import huggingface_hub.lfs as lfs

    monkeypatch.setattr(lfs, "http_backoff", lambda method, url, **kwargs: _damaged(method, url, kwargs))
    text = message(folder, hub)
    assert "400" in text and "BadDigest" in text
    assert not hub.repos["me/tiny-eagle3"].files


def _damaged(method, url, kwargs):
    from huggingface_hub.utils import http_backoff

    if method == "PUT":
        kwargs["data"] = b"x" + kwargs["data"].read()[1:]
    return http_backoff(method, url, **kwargs)


def test_no_network(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UserError, match="cannot be reached"):
        push(folder, "me/tiny-eagle3", endpoint=endpoint, token=TOKEN)


@pytest.mark.parametrize("repo", ["a/b/c", "me/with space", "me/-eagle3-", "eagle3"])
def test_a_bad_name(folder, hub, repo):
    assert "named owner/name" in message(folder, hub, repo=repo)


def test_an_unfinished_folder(folder, hub):
    (folder / "model.safetensors").unlink()
    assert "model.safetensors missing" in message(folder, hub)


def test_what_vllm_reads_from_a_name():
    """vLLM looks for `eagle-` first, then `eagle3`, in the lower-cased path."""
    assert name_warning("me/SmolLM2-EAGLE3", "eagle3") is None
    assert "does not contain 'eagle3'" in name_warning("me/SmolLM2-drafter", "eagle3")
    assert "EAGLE-1" in name_warning("me/eagle-3-smollm2", "eagle3")
    assert "EAGLE-1" in name_warning("me/eagle-smollm2-eagle3", "eagle3")


def test_each_method_has_its_own_word():
    assert name_warning("me/eagle-smollm2", "eagle") is None
    assert "does not contain 'eagle-'" in name_warning("me/smollm2-hass", "eagle")
    assert "EAGLE-3" in name_warning("me/smollm2-eagle3", "eagle")
    assert name_warning("me/smollm2-heads", "medusa") is None  # config.json says it
    assert "EAGLE-1" in name_warning("me/not-eagle-but-medusa", "medusa")
