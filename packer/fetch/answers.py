"""What an answer of a server means for one file: its bytes from a certain place, try again, or give up and why.

The order matters: first whether the server talks about our file at all, then whether its bytes are readable, and last
whether they are the ones asked for. What is refused for good raises an error of ``formats.errors``; what may pass
raises :class:`~packer.fetch.retry.Trouble`.
"""

from __future__ import annotations

import re
from typing import NoReturn

from formats.errors import EnvironmentProblem, FormatError, IntegrityError
from formats.shard import impostor
from packer.fetch.client import Answer
from packer.fetch.listing import Listing, RemoteFile
from packer.fetch.retry import Trouble, retry_after

HEAD_BYTES = 1024  # enough to tell what else a body may be

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)")
_POINTER = b"version https://git-lfs.github.com/spec/"
_TOKEN_HINT = "log in with `hf auth login` or set HF_TOKEN; a gated repository must be asked for on its page"


def body_start(answer: Answer, listing: Listing, file: RemoteFile, *, offset: int, etag: str | None) -> int:
    """Where in ``file`` the body of ``answer`` begins: at ``offset``, or at 0 if the server sends all of it.

    Args:
        answer: to a request for the bytes from ``offset`` on.
        listing, file: what was asked for.
        offset: 0 if no range was asked for.
        etag: that of the object from which the first ``offset`` bytes came, if it is known.

    Raises:
        Trouble: try again.
        IntegrityError: the server announces another object than the listing does.
        FormatError: a Git LFS pointer stands in the place of the file.
        EnvironmentProblem: not permitted, gone, compressed, or a page instead of the file.
    """
    _check_announced(answer, listing, file)
    if answer.status == 416 and offset:
        raise Trouble(f"{answer.host}: has no bytes from {offset} on", restart=True)
    if answer.status not in (200, 206):
        _refuse(answer, file)
    coding = answer.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", ""):
        raise EnvironmentProblem(
            "server compresses although it was asked not to, so that ranges and digests would not hold",
            where=f"{answer.host}: {file.path}",
            expected="identity",
            found=coding[:40],
            hint="a proxy on the way may do that; set HF_ENDPOINT to another mirror, or go around the proxy",
        )
    if answer.status == 206:
        return _ranged_start(answer, file, offset, etag)
    length = answer.headers.get("content-length")
    if length is not None and length != str(file.bytes):
        _not_the_file(answer, file, f"{length[:20]} bytes")
    if answer.headers.get("content-type", "").lower().startswith("text/html") and not _is_page(file):
        _not_the_file(answer, file, "text/html")
    return 0


def strong_etag(answer: Answer) -> str | None:
    """The entity tag under which a range may be asked for later; weak ones do not promise equal bytes."""
    etag = answer.headers.get("etag", "").strip()
    return etag if re.fullmatch(r'"[\x21\x23-\x7e]{1,255}"', etag) else None


def refuse_head(head: bytes, file: RemoteFile, *, host: str) -> None:
    """Raise if a shard's first bytes show a page or a pointer, rather than after gigabytes of it.

    Raises:
        FormatError: a Git LFS pointer.
        EnvironmentProblem: a page.
    """
    if not file.path.endswith(".safetensors"):
        return
    if head.startswith(_POINTER):
        raise _pointer(head, file)
    # A sound shard can begin with the bytes of any magic, but not have a brace in the ninth place as well.
    page = impostor(head) if head[8:9] != b"{" else None
    if page is not None and "HTML" in page:
        raise _page(page, file, host)


def _check_announced(answer: Answer, listing: Listing, file: RemoteFile) -> None:
    """Whatever commit, length or digest a server names on the way must be ours."""
    for hop in answer.hops:
        commit = hop.headers.get("x-repo-commit")
        if commit is not None and commit.strip().lower() != listing.commit:
            raise EnvironmentProblem(
                "server answers with another commit than it was asked for",
                where=f"{answer.host}: {file.path}",
                expected=listing.commit,
                found=commit[:64],
                hint="a mirror may be out of order; set HF_ENDPOINT to another one",
            )
        linked = hop.headers.get("x-linked-etag", "").strip().removeprefix("W/").strip('"').lower()
        if file.sha256 is not None and re.fullmatch(r"[0-9a-f]{64}", linked) and linked != file.sha256:
            raise IntegrityError(
                "server announces another object than the listing", where=file.path, expected=file.digest, found=linked
            )
        size = hop.headers.get("x-linked-size", "").strip()
        if size.isdigit() and size != str(file.bytes):
            raise IntegrityError(
                "server announces another length than the listing",
                where=file.path,
                expected=file.bytes,
                found=size[:20],
            )


def _ranged_start(answer: Answer, file: RemoteFile, offset: int, etag: str | None) -> int:
    match = _RANGE.fullmatch(answer.headers.get("content-range", "").strip())
    if match is None:
        raise Trouble(f"{answer.host}: part of a file without saying which")
    first, last, total = int(match[1]), int(match[2]), match[3]
    if first != offset or last < first:
        raise Trouble(f"{answer.host}: sends bytes {first}-{last}, asked for those from {offset} on")
    if total not in ("*", str(file.bytes)) or last >= file.bytes:
        _not_the_file(answer, file, f"{total} bytes")
    now = strong_etag(answer)
    if etag is not None and now is not None and now != etag:
        raise Trouble(f"{answer.host}: the object has another etag than when its first bytes came", restart=True)
    return first


def _refuse(answer: Answer, file: RemoteFile) -> NoReturn:
    status = answer.status
    if status in _PASSING or (answer.foreign and status in (401, 403)):  # a signed address expires: ask for a new one
        raise Trouble(
            f"{answer.host}: status {status}", retry_after=retry_after(answer.headers.get("retry-after", None))
        )
    what, hint = {
        401: ("not permitted: no or no valid credentials (status 401)", _TOKEN_HINT),
        403: ("not permitted (status 403)", _TOKEN_HINT),
        404: ("server does not have a file of the listing (status 404)", "set HF_ENDPOINT to another mirror"),
        410: ("server no longer has a file of the listing (status 410)", "set HF_ENDPOINT to another mirror"),
    }.get(status, (f"unexpected status {status}", ""))
    raise EnvironmentProblem(what, where=f"{answer.host}: {file.path}", hint=hint or None)


def _not_the_file(answer: Answer, file: RemoteFile, found: str) -> NoReturn:
    """Say what came in the place of the file, from its first kilobyte."""
    head = b""
    while len(head) < HEAD_BYTES and (piece := answer.read(HEAD_BYTES - len(head))):
        head += piece
    if head.startswith(_POINTER):
        raise _pointer(head, file)
    what = impostor(head)
    if what is not None and "HTML" in what:
        raise _page(what, file, answer.host)
    raise Trouble(f"{answer.host}: sends another body ({what or found}) than the file's {file.bytes} bytes")


def _page(what: str, file: RemoteFile, host: str) -> EnvironmentProblem:
    return EnvironmentProblem(
        "server sends a page instead of the file",
        where=f"{host}: {file.path}",
        expected=f"{file.bytes} bytes",
        found=what,
        hint="a login page or a proxy stands in the way; " + _TOKEN_HINT,
    )


def _pointer(head: bytes, file: RemoteFile) -> FormatError:
    return FormatError(
        "a Git LFS pointer stands here, and the object that it points to is absent",
        where=file.path,
        expected="the file itself",
        found=impostor(head),
        hint="the repository was uploaded without its large files, or a mirror lacks them",
    )


def _is_page(file: RemoteFile) -> bool:
    return file.path.lower().endswith((".html", ".htm", ".xhtml"))
