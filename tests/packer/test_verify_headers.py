"""The shortcut over many headers never passes a record in which the careful check finds something."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.container import open_container
from formats.layout import RECORD_HEADER_BYTES
from packer.verify.headers import BATCH, batches, check_headers, sound_records
from packer.verify.record_bytes import check_record, record_spans
from packer.verify.verify import verify
from tests.support.containers import Spec, all_codecs, build_container


@pytest.fixture(scope="module")
def every_codec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One record of each codec and scope."""
    return build_container(tmp_path_factory.mktemp("headers") / "all.moepack", all_codecs())


def _quiet(count: int) -> None:
    """Nobody is told."""


def test_records_as_they_are_written_are_sound(every_codec: Path) -> None:
    with open_container(every_codec) as container:
        assert sound_records(container, container.rows(1)) == [True] * 6
        assert check_headers(container, container.rows(1), step=_quiet) == [[]] * 6


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_no_changed_byte_of_a_header_passes_that_the_careful_check_finds(every_codec: Path, flip: int) -> None:
    found = 0
    with open_container(every_codec) as container, (every_codec / "experts/layer-00001.bank").open("r+b") as bank:
        for row in (container.rows(1)[0], container.rows(1)[2]):
            for at in range(row.offset, row.offset + RECORD_HEADER_BYTES):
                bank.seek(at)
                before = bank.read(1)
                for data in (bytes([before[0] ^ flip]), before):
                    bank.seek(at)
                    bank.write(data)
                    bank.flush()
                    if data != before:
                        sound = sound_records(container, [row])[0]
                        problems = check_record(container, row, deep=False, step=_quiet)
                        assert not (sound and problems), at - row.offset
                        assert bool(check_headers(container, [row], step=_quiet)[0]) == bool(problems)
                        found += bool(problems)
        assert sound_records(container, container.rows(1)) == [True] * 6
    assert found > 1000  # all but digests and scale exponents


def test_padding_is_looked_at(every_codec: Path) -> None:
    """Each gap of each record, first and last byte."""
    with open_container(every_codec) as container, (every_codec / "experts/layer-00001.bank").open("r+b") as bank:
        gaps = 0
        for row in container.rows(1):
            spans = [span for span in record_spans(container.header(1, row.expert)) if span.zero]
            gaps += len(spans)
            for at in {place for span in spans for place in (span.start, span.stop - 1)}:
                bank.seek(row.offset + at)
                bank.write(b"\1")
                bank.flush()
                (problems,) = check_headers(container, [row], step=_quiet)
                assert [problem.what for problem in problems] == [f"padding is not zero at byte {at} of the record"]
                bank.seek(row.offset + at)
                bank.write(b"\0")
                bank.flush()
    assert gaps > 6


def test_scale_exponents_are_left_to_the_careful_check(every_codec: Path) -> None:
    """A legal exponent is not the usual header, and yet no finding."""
    with open_container(every_codec) as container, (every_codec / "experts/layer-00001.bank").open("r+b") as bank:
        row = container.rows(1)[0]
        bank.seek(row.offset + 128 + 8)
        bank.write(b"\5")
        bank.flush()
        assert sound_records(container, [row]) == [False]
        assert check_headers(container, [row], step=_quiet) == [[]]
        bank.seek(row.offset + 128 + 8)
        bank.write(b"\0")


def test_batches_keep_the_order_and_the_layers_apart(tmp_path: Path) -> None:
    with open_container(build_container(tmp_path / "a.moepack", Spec())) as container:
        rows = [row for layer in (1, 2, 3) for row in container.rows(layer)]
        parts = list(batches(rows))
        assert [row for part in parts for row in part] == rows
        assert [len(part) for part in parts] == [4, 4, 3]
        many = list(batches(rows[:1] * (2 * BATCH + 1)))
        assert [len(part) for part in many] == [BATCH, BATCH, 1]


def test_a_bank_that_shrinks_while_it_is_verified_is_a_finding(every_codec: Path, tmp_path: Path) -> None:
    path = build_container(tmp_path / "b.moepack", all_codecs())
    with open_container(path) as container:
        row = container.rows(1)[-1]
        with (path / "experts/layer-00001.bank").open("r+b") as bank:
            bank.truncate(row.offset + 100)
        findings = check_headers(container, container.rows(1), step=_quiet)
    assert [bool(found) for found in findings] == [False] * 5 + [True]
    assert "file ends early" in findings[-1][0].what


def test_structure_reports_the_same_for_any_number_of_jobs(tmp_path: Path) -> None:
    path = build_container(tmp_path / "c.moepack", Spec())
    with (path / "experts/layer-00002.bank").open("r+b") as bank:
        bank.seek(16)
        bank.write(b"\7")
    one, four = (verify(path, level="structure", jobs=jobs).problems for jobs in (1, 4))
    assert one == four
    assert [problem.where for problem in one] == ["layer 2 expert 0"]
