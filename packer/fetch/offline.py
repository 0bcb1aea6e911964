"""A folder without its repository: with the offline switch set, the recorded listing must do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packer.fetch.hub import Access, is_offline, offline_problem
from packer.fetch.listing import Listing
from packer.fetch.receipt import read_receipt


@dataclass(frozen=True)
class _Nowhere:
    """Access to nothing: what is asked of it would need the network."""

    def url(self, listing: Listing, path: str) -> str:
        """Refuse."""
        raise offline_problem(f"{listing.repository}: {path}")

    def headers(self) -> Mapping[str, str]:
        """None."""
        return {}


def listing_offline(repository: str, revision: str | None, directory: Path) -> tuple[Access, Listing] | None:
    """With the offline switch set, the listing that the receipt of ``directory`` recorded; None without the switch.

    Raises:
        EnvironmentProblem: the switch is set, and nothing is recorded of this repository and revision.
        FormatError: the receipt is damaged.
    """
    if not is_offline():
        return None
    receipt = read_receipt(directory) if directory.is_dir() else None
    if receipt is not None and receipt.listing.repository == repository:
        listing = receipt.listing
        if revision in (None, listing.revision, listing.commit):
            return _Nowhere(), listing
    raise offline_problem(repository)
