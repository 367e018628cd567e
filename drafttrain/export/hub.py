"""Push an exported folder to the Hugging Face Hub, in one commit, on a branch and with a tag where these are asked for.

One commit, so that nobody ever downloads new weights with an old config. The push can be repeated: files that are there
already are skipped, so a push that died is simply run again. `preview` asks and lists without sending. The token is the user's cached login (or
an argument); it is never printed, and no message of ours contains it.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from drafttrain.errors import UserError

T = TypeVar("T")
RETRY_WAITS_S = (1.0, 4.0)
"""Waits between attempts when the Hub answers with a server error. The client library retries most calls by itself, but not
the creation of a repository and not the commit."""

NEEDED = ("config.json", "model.safetensors")
SKIPPED_SUFFIXES = (".tmp", ".lock")


def push(
    folder: str | Path,
    repo_id: str,
    private: bool = True,
    revision: str | None = None,
    tag: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> str:
    """Create the repository if it is missing, and upload every file of `folder` as one commit.

    `private` is for a new repository; one that exists already keeps its visibility, and is refused if it is public while a
    private one was asked for. `revision` is a branch, made where there is none; `tag` is given to the commit, and refused before anything is sent
    where there is one. `endpoint` replaces the Hub's address. Returns the address of the commit.
    Raises UserError: incomplete folder, bad name, no login, no permission, no such repository, no network, Hub down.
    """
    files, api = _files(Path(folder)), _opened(repo_id, endpoint, token)

    def send() -> str:
        there = _exists(api, repo_id, private, tag)
        return _push_once(api, files, repo_id, private, revision, tag, there)

    return _tried(send, f"Pushing to {repo_id}", api.endpoint)


def preview(
    folder: str | Path,
    repo_id: str,
    private: bool = True,
    revision: str | None = None,
    tag: str | None = None,
    endpoint: str | None = None,
    token: str | None = None,
) -> list[str]:
    """What `push` would send, a sentence and then a line for each file. Sends nothing. Raises UserError where the push would be refused before
    anything is sent. Without a login nothing is asked either, and the sentence says so."""
    from huggingface_hub import get_token

    files = _files(Path(folder))
    if token or get_token():
        api = _opened(repo_id, endpoint, token)
        there = _tried(lambda: _exists(api, repo_id, private, tag), f"Asking for {repo_id}", api.endpoint)
        what = "which exists" if there else f"made anew, {'private' if private else 'public'}"
    else:
        _check_name(repo_id)
        what = "not asked whether it exists, for no login is stored on this machine, and the push will need one"
    sizes = {name: path.stat().st_size for name, path in files.items()}
    named = "" if tag is None else f" and be tagged {tag}"
    total = f"{len(sizes)} files, {sum(sizes.values()):,} bytes"
    first = f"dry run, nothing is sent: {total} would go to {repo_id} ({what}), branch {revision or 'main'}, in one commit{named}"
    return [first, *(f"  {name}  {size:,} bytes" for name, size in sizes.items())]


GUESSES = (("eagle-", "eagle"), ("eagle3", "eagle3"), ("dflash", "dflash"), ("dspark", "dspark"))
"""What vLLM takes a lower-cased path for when it is not told the method: the first of these that it contains."""
CALLED = {"eagle": "EAGLE-1", "eagle3": "EAGLE-3", "dflash": "DFlash", "dspark": "DSpark"}


def name_warning(repo_id: str, method: str) -> str | None:
    """What vLLM would guess from the repository's name, if that is not `method`; None if the name is good."""
    part, guessed = next(((part, guessed) for part, guessed in GUESSES if part in repo_id.lower()), (None, None))
    wanted = next((part for part, guess in GUESSES if guess == method), None)
    if guessed == method or (guessed is None and wanted is None):  # methods without a word are known from config.json
        return None
    told = f'"method": "{method}"'
    if guessed is not None:
        return f"The name {repo_id} contains '{part}', which vLLM takes for {CALLED[guessed]} unless it is told {told}."
    return f"The name {repo_id} does not contain '{wanted}', so vLLM cannot guess the method: always pass {told}."


def explain(error: BaseException, doing: str, endpoint: str) -> UserError:
    """One sentence for an exception of the Hub's client library: what failed, and the way out."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    cause = _http_cause(error)
    if isinstance(cause, GatedRepoError):
        return UserError(
            f"{doing} failed: the repository is gated. Ask for access on its page, then log in with `hf auth login`."
        )
    if isinstance(cause, HfHubHTTPError) and cause.response is not None:
        status = cause.response.status_code
        if status == 401 and "Invalid credentials" in (cause.response.headers.get("X-Error-Message") or ""):
            return UserError(f"{doing} failed: the Hub does not accept the login (401). Run `hf auth login` with a valid token.")
        if status == 404 or isinstance(cause, RepositoryNotFoundError):
            return UserError(
                f"{doing} failed: the Hub knows no such repository, or this login may not see it ({status}). Check the name, and "
                "`hf auth whoami`."
            )
        if status == 401:
            return UserError(f"{doing} failed: the Hub does not accept the login (401). Run `hf auth login` with a valid token.")
        if status == 403:
            return UserError(
                f"{doing} failed: this login may not write there (403). Use a token with write permission, or a repository "
                "name in a namespace of yours (`hf auth whoami` lists them)."
            )
        said = (cause.response.headers.get("X-Error-Message") or cause.server_message or "no reason given").splitlines()[0]
        way_out = "Try again later." if status >= 500 else "Mend that and push again."
        return UserError(f"{doing} failed: the Hub answered {status} ({said.rstrip('.')}). {way_out}")
    if isinstance(error, OfflineModeIsEnabled):
        return UserError(f"{doing} failed: HF_HUB_OFFLINE is set. Unset it and push again.")
    if isinstance(error, HFValidationError):
        return UserError(f"{doing} failed: {str(error).splitlines()[0]}")
    if _network_error(error):
        return UserError(
            f"{doing} failed: {endpoint} cannot be reached ({type(error).__name__}). Check the network and push again."
        )
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return UserError(f"{doing} failed: {type(error).__name__}: {first}. The local folder is untouched; push again.")


def _opened(repo_id: str, endpoint: str | None, token: str | None) -> Any:
    """The client, logged in. UserError for a bad name, or without a login."""
    from huggingface_hub import HfApi, get_token

    _check_name(repo_id)
    token = token or get_token()
    if not token:
        raise UserError(
            f"Pushing to {repo_id} needs a login, but none is stored on this machine. Run `hf auth login` or set HF_TOKEN to a "
            "token that may write, then push again."
        )
    return HfApi(endpoint=endpoint, token=token)


def _tried(call: Callable[[], T], doing: str, endpoint: str) -> T:
    """The call's answer, asked again where the Hub has an error of its own. UserError for every failure."""
    for wait_s in (*RETRY_WAITS_S, None):
        try:
            return call()
        except UserError:
            raise
        except Exception as error:  # every way in which the client library fails ends in one sentence
            if wait_s is None or not _server_error(error):
                raise explain(error, doing, endpoint) from error
            time.sleep(wait_s)
    raise AssertionError("the last attempt returns or raises")


def _exists(api: Any, repo_id: str, private: bool, tag: str | None) -> bool:
    """Whether there is such a repository. UserError if it is public while a private one was asked for, or has the tag already."""
    if not api.repo_exists(repo_id):
        return False
    if private and not api.model_info(repo_id).private:
        raise UserError(
            f"{repo_id} exists and is public, but a private push was asked for. Set export.private to false to publish there, "
            "make the repository private on its page, or choose another name."
        )
    if tag is not None and tag in [ref.name for ref in api.list_repo_refs(repo_id).tags]:
        raise UserError(
            f"{repo_id} has a tag {tag} already, and whoever asked for it would get other weights. Set export.tag to another name, or delete it "
            "on the repository's page."
        )
    return True


def _push_once(
    api: Any, files: dict[str, Path], repo_id: str, private: bool, revision: str | None, tag: str | None, there: bool
) -> str:
    from huggingface_hub import CommitOperationAdd

    if not there:
        api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in files.items()]
    made = api.create_commit(repo_id, operations, commit_message="Drafter exported by drafttrain", revision=revision)
    if tag is not None:
        api.create_tag(repo_id, tag=tag, revision=made.oid)
    return made.commit_url


def _files(folder: Path) -> dict[str, Path]:
    """The files to upload, by name in the repository. Raises UserError if the folder is no finished export."""
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        raise UserError(f"{folder} is no finished export: {' and '.join(missing)} missing. Run `drafttrain export` first.")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in paths if not path.name.endswith(SKIPPED_SUFFIXES)}
    return {name: path for name, path in names.items() if not any(part.startswith(".") for part in name.split("/"))}


def _check_name(repo_id: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
        named = repo_id.count("/") == 1
    except HFValidationError:
        named = False
    if not named:
        raise UserError(
            f"export.push is {repo_id!r}, but a repository is named owner/name, with letters, digits, '-', '_' and '.' only."
        )


def _http_cause(error: BaseException | None) -> BaseException | None:
    """The Hub's answer behind an exception: uploads wrap it in a RuntimeError."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None and not isinstance(error, HfHubHTTPError):
        error = error.__cause__
    return error


def _server_error(error: BaseException) -> bool:
    from huggingface_hub.errors import HfHubHTTPError

    cause = _http_cause(error)
    return isinstance(cause, HfHubHTTPError) and cause.response is not None and cause.response.status_code >= 500


def _network_error(error: BaseException | None) -> bool:
    """True for a failed connection or a timeout: the client library's transport errors share the base of its HTTP errors."""
    from huggingface_hub.errors import HfHubHTTPError

    transport = HfHubHTTPError.__mro__[1]
    while error is not None:
        if isinstance(error, (transport, ConnectionError, TimeoutError)):
            return True
        error = error.__cause__
    return False
