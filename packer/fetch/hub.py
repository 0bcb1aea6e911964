"""The Hub by way of huggingface_hub: what a repository holds, where its files are, and with which credentials.

The library knows endpoints, tokens and the offline switch, and is imported here alone, when it is needed. It does not
carry bodies: a download that is killed starts over with it, and it compares lengths only.
"""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from formats.errors import EnvironmentProblem, Interrupted, UsageError
from formats.starting import start
from packer.fetch.listing import Listing, RemoteFile, check_repository_name, checked_listing, is_commit
from packer.fetch.retry import Limits, Patience, Trouble, retry_after
from packer.version import VERSION

DEFAULT_REVISION = "main"
LISTING_SECONDS = 60.0  # for a read of the answer
LISTING_TOTAL_SECONDS = 300.0  # for one attempt in all

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Access(Protocol):
    """How to get at files of a listing: what ``transfer`` needs to know of a hub."""

    def url(self, listing: Listing, path: str) -> str:
        """Where a file is, at the listing's commit."""

    def headers(self) -> Mapping[str, str]:
        """What to send along; names in lower case."""


@dataclass(frozen=True)
class Hub:
    """An endpoint and the credentials for it."""

    endpoint: str
    _headers: Mapping[str, str] = field(repr=False)  # holds the token

    def url(self, listing: Listing, path: str) -> str:
        """Where a file is, at the listing's commit."""
        return f"{self.endpoint}/{listing.repository}/resolve/{listing.commit}/{quote(path)}"

    def headers(self) -> Mapping[str, str]:
        """User agent, and authorization if there is a token."""
        return self._headers


def offline_problem(where: str) -> EnvironmentProblem:
    """The refusal of what would need the network."""
    return EnvironmentProblem(
        "offline mode is on (HF_HUB_OFFLINE), and this needs the network",
        where=where,
        hint="unset HF_HUB_OFFLINE, or use a folder that is complete",
    )


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    return bool(_library("huggingface_hub.constants").HF_HUB_OFFLINE)


def open_hub(endpoint: str | None = None) -> Hub:
    """The Hub as the environment has it (HF_ENDPOINT, HF_TOKEN or a stored login), or another ``endpoint``.

    Raises:
        EnvironmentProblem: huggingface_hub is not there or too old, or the offline switch is set.
    """
    constants, utils = _library("huggingface_hub.constants"), _library("huggingface_hub.utils")
    if is_offline():
        raise offline_problem(str(constants.ENDPOINT))
    address = (endpoint or str(constants.ENDPOINT)).rstrip("/")
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise UsageError(
            "endpoint is not an address", where="HF_ENDPOINT", expected="https://HOST", found=parts.hostname or ""
        )
    built = utils.build_hf_headers(library_name="moepack", library_version=VERSION)
    return Hub(address, {str(name).lower(): str(value) for name, value in built.items()})


def list_repository(
    hub: Hub,
    repository: str,
    *,
    revision: str | None = None,
    limits: Limits | None = None,
    stop: threading.Event | None = None,
    rng: random.Random | None = None,
    tell: Callable[[str], None] | None = None,
) -> Listing:
    """Resolve a revision to a commit, and list all files of it. ``tell`` is told of every pause before another try.

    Raises:
        UsageError: no such repository or revision, as far as these credentials can see.
        FormatError: names, lengths or digests that cannot be used.
        EnvironmentProblem: no answer within the budget, or none that can be understood.
        Interrupted: ``stop`` was set.
    """
    check_repository_name(repository)
    limits, stop = limits or Limits(), stop or threading.Event()
    where = f"{urlsplit(hub.endpoint).hostname}: {repository}"
    wanted = DEFAULT_REVISION if revision is None else revision
    patience = Patience(limits, where, rng or random.Random(), tell)
    while True:
        try:
            info = _in_time(lambda: _ask(hub, repository, wanted, where), stop)
            break
        except Trouble as trouble:
            if stop.wait(patience.failed(trouble, 0)):
                raise Interrupted("stopped") from None
    if not isinstance(info.sha, str) or not is_commit(info.sha) or info.siblings is None:
        raise EnvironmentProblem("server names no commit or no files", where=where, found=repr(info.sha)[:80])
    if is_commit(wanted) and info.sha != wanted:
        raise EnvironmentProblem(
            "server answers with another commit than it was asked for", where=where, expected=wanted, found=info.sha
        )
    files = [_remote_file(sibling) for sibling in info.siblings]
    return checked_listing(hub.endpoint, repository, wanted, info.sha, files)


def _remote_file(sibling: Any) -> RemoteFile:
    if sibling.lfs is None:
        return RemoteFile(sibling.rfilename, sibling.size, None, sibling.blob_id)
    return RemoteFile(sibling.rfilename, sibling.lfs.size, sibling.lfs.sha256, None)  # its blob is only the pointer


def _ask(hub: Hub, repository: str, revision: str, where: str) -> Any:
    """One attempt; whatever the library and the network may raise gets its meaning here."""
    library, errors = _library("huggingface_hub"), _library("huggingface_hub.errors")
    try:
        api = library.HfApi(endpoint=hub.endpoint, library_name="moepack", library_version=VERSION)
        return api.model_info(repository, revision=revision, files_metadata=True, timeout=LISTING_SECONDS)
    except errors.OfflineModeIsEnabled:
        raise offline_problem(where) from None
    except errors.HFValidationError:
        raise UsageError("not the name of a repository", where=repr(repository), expected="OWNER/NAME") from None
    except errors.GatedRepoError:
        raise EnvironmentProblem(
            "repository is gated", where=where, hint="ask for access on its page, then `hf auth login` or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError("repository has no such revision", where=where, found=repr(revision)[:80]) from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            "no such repository, or these credentials may not see it",
            where=where,
            hint="check the name; for a private repository `hf auth login` or set HF_TOKEN",
        ) from None
    except errors.HfHubHTTPError as error:
        response = error.response
        status = None if response is None else response.status_code
        if status is None or status in _PASSING:
            wait = None if response is None else retry_after(response.headers.get("retry-after"))
            raise Trouble(f"listing: status {status}", retry_after=wait) from None
        hint = "check HF_ENDPOINT and the repository's name" if status == 404 else None
        raise EnvironmentProblem(f"listing failed with status {status}", where=where, hint=hint) from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # not JSON, or other members than promised
        raise EnvironmentProblem(
            f"answer is not that of a Hub: {type(error).__name__}: {str(error)[:120]}",
            where=where,
            hint="a login page or a proxy may stand in the way; check HF_ENDPOINT",
        ) from None
    except Exception as error:  # which HTTP library it uses, and so what that raises, changes with its version
        raise Trouble(f"listing: {type(error).__name__}: {str(error)[:120]}") from None


def _in_time(action: Callable[[], Any], stop: threading.Event) -> Any:
    """``action`` on a thread of its own, so that a signal or a server that never ends need not be waited for."""
    outcome: list[Any] = []
    failure: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(action())
        except BaseException as error:  # handed over, not swallowed
            failure.append(error)
        finally:
            done.set()

    start(threading.Thread(target=run, name="fetch-listing", daemon=True))
    waited = 0.0
    while not done.wait(0.1):
        waited += 0.1
        if stop.is_set():
            raise Interrupted("stopped")
        if waited > LISTING_TOTAL_SECONDS:
            raise Trouble(f"listing: no end in {LISTING_TOTAL_SECONDS:.0f} s")
    if failure:
        raise failure[0]
    return outcome[0]


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EnvironmentProblem(
            f"cannot import {name}: {error}", where="huggingface_hub", hint="pip install 'huggingface_hub>=1.0,<3'"
        ) from None
