"""What a fetched folder proves about itself when it is planned or packed: repository, commit, digests of its shards."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from formats.checkpoint import Checkpoint
from formats.errors import FormatError, IntegrityError, UsageError
from packer.fetch.listing import RemoteFile
from packer.fetch.local import compare
from packer.fetch.receipt import Receipt, incomplete_files, read_receipt, untouched


@dataclass(frozen=True)
class Provenance:
    """Where a checkpoint comes from, as far as that is known.

    Attributes:
        repository, commit: to be stored in the container.
        sha256: by name of shard, what its bytes must hash to; empty if nobody said it.
    """

    repository: str | None
    commit: str | None
    sha256: Mapping[str, str]


def provenance_of(checkpoint: Checkpoint, *, repository: str | None = None, commit: str | None = None) -> Provenance:
    """The provenance of ``checkpoint``: from the receipt of its folder, else as it is given.

    Small files are compared with their digests unless they are untouched since; shards are not read here: whoever
    reads them anyway compares them with ``sha256``.

    Args:
        checkpoint: open.
        repository, commit: what the user says; it must not contradict the receipt.

    Raises:
        UsageError: the user says something else than the receipt.
        FormatError: the receipt is damaged, or small files of the commit are absent.
        IntegrityError: a small file is not that of the commit.
    """
    receipt = read_receipt(checkpoint.directory)
    if receipt is None:
        return Provenance(repository, commit, MappingProxyType({}))
    listing = receipt.listing
    for name, said, known in (("repository", repository, listing.repository), ("commit", commit, listing.commit)):
        if said is not None and said != known:
            raise UsageError(
                f"{name} contradicts what the folder was fetched from",
                where=checkpoint.directory,
                expected=known,
                found=said,
                hint=f"leave --{name} out",
            )
    shards = frozenset(checkpoint.weight_map.values())
    _check_small_files(checkpoint, receipt, shards)
    digests = {name: digest for name, digest in receipt.expected_sha256.items() if name in shards}
    return Provenance(listing.repository, listing.commit, MappingProxyType(digests))


def _check_small_files(checkpoint: Checkpoint, receipt: Receipt, shards: frozenset[str]) -> None:
    directory = checkpoint.directory
    absent = [path for path in incomplete_files(directory, receipt) if path not in shards]
    source = f"moepack fetch {receipt.listing.repository} --revision {receipt.listing.commit} --to {directory}"
    if absent:
        raise FormatError(
            f"{len(absent)} small files of the commit are absent or cut short",
            where=directory,
            found=", ".join(absent[:10]),
            hint=f"continue with: {source}",
        )
    for entry in receipt.wanted:
        if entry.path in shards or entry.state == "released" or untouched(directory, entry):
            continue
        file = RemoteFile(entry.path, entry.bytes, entry.lfs_sha256, entry.git_oid)
        found = compare(directory, file, stop=threading.Event(), report=lambda count: None)
        if isinstance(found, str):
            raise IntegrityError(
                f"file is not the one of commit {receipt.listing.commit}: it {found}",
                where=entry.path,
                hint=f"bring it back with: {source} --rehash; or remove the folder's receipt, and with it the claim"
                " to come from that commit",
            )
