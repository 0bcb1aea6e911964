"""Calibration counts what one ordinary pass sees, survives interruption, and refuses what cannot be counted."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from formats.errors import Interrupted, UsageError
from packer.calibrate.coverage import coverage_of
from packer.calibrate.job import Job, calibrate
from packer.calibrate.layerwise import groups_of
from packer.calibrate.model import open_for_pass, sampled_model
from packer.calibrate.sums import Collector, LayerSums, empty_sums
from packer.calibrate.texts import Sample, make_sample, parse_sources
from packer.progress import Progress
from packer.statistics.file import open_statistics
from packer.statistics.types import Provenance, SampleLabel
from runtime.models.observer import ExpertUse, Observer
from runtime.session import Options, open_session

DATA = Path(__file__).parents[2] / "data"
ROOT = Path(__file__).parents[3]
WINDOW = 24


def sample_of(vocabulary: int, windows: int = 7) -> Sample:
    """Random ids in two labels, the second with the last two windows."""
    rng = np.random.default_rng(5)
    ids = tuple(tuple(int(i) for i in rng.integers(0, vocabulary, WINDOW)) for _ in range(windows))
    names = (("first", windows - 2), ("second", 2))
    labels = tuple(SampleLabel(name=name, tokens=count * WINDOW, texts=()) for name, count in names)
    return Sample(labels, ids, (0,) * (windows - 2) + (1,) * 2)


def job_for(model: Path, sample: Sample, out: Path, closing: ExitStack, group: int | None = None) -> Job:
    stamp, config = sampled_model(model)
    weights, fitting = open_for_pass(model, config, WINDOW, Options(threads=2), closing)
    provenance = Provenance(model=stamp, labels=sample.labels, window=WINDOW, tool="test")
    return Job(weights, sample, provenance, out, group or fitting)


def counted(model: Path, sample: Sample, out: Path, group: int | None = None) -> bytes:
    with ExitStack() as closing:
        calibrate(job_for(model, sample, out, closing, group))
    return out.read_bytes()


class EveryLayer(Observer):
    """Sums of all layers of ordinary passes, window after window."""

    def __init__(self, sums: dict[int, LayerSums], label: int, half: int) -> None:
        self.sums, self.label, self.half = sums, label, half

    def collector(self, layer: int) -> Collector:
        return Collector(self.sums[layer], (0, WINDOW), (self.label,), (self.half,))

    def expert(self, layer: int, first: int, seen: ExpertUse) -> None:
        self.collector(layer).expert(layer, first, seen)

    def experts_input(self, layer: int, first: int, values: np.ndarray) -> None:
        self.collector(layer).experts_input(layer, first, values)


@pytest.mark.parametrize("name", ["k3-tiny", "kimi-linear-tiny"])
def test_the_sums_are_those_of_one_ordinary_pass(name: str, tmp_path: Path) -> None:
    model = DATA / name
    _, config = sampled_model(model)
    sample = sample_of(config.vocab_size)
    counted(model, sample, tmp_path / "s", group=3 * WINDOW)
    sums = {
        layer: empty_sums(2, config.experts, config.expert_input, config.expert_width) for layer in config.moe_layers
    }
    with open_session(model, Options(context=WINDOW, threads=1)) as session:
        for number, (window, label) in enumerate(zip(sample.windows, sample.label_of, strict=True)):
            session.reset()
            for _ in session.stream(window, observer=EveryLayer(sums, label, number % 2)):
                pass
    found = open_statistics(tmp_path / "s")
    assert found.layers == config.moe_layers
    for layer, expected in sums.items():
        have = found.layer(layer)
        assert (have.tokens == expected.tokens).all()
        pairs = {
            "gate": expected.gate,
            "saliency": expected.saliency,
            "halves": expected.halves,
            "input": expected.all_inputs,
            "activation": expected.activations.sum(axis=0),
            "expert_input": expected.inputs,
            "expert_activation": expected.activations,
        }
        for member, wanted in pairs.items():
            np.testing.assert_allclose(getattr(have, member), wanted, rtol=2e-5, err_msg=f"layer {layer} {member}")


def test_the_sums_depend_neither_on_groups_nor_on_threads(tmp_path: Path) -> None:
    sample = sample_of(500)
    whole = counted(DATA / "k3-tiny", sample, tmp_path / "a")
    again = counted(DATA / "k3-tiny", sample, tmp_path / "b")
    assert whole == again
    for group in (WINDOW, 3 * WINDOW):
        assert counted(DATA / "k3-tiny", sample, tmp_path / f"c{group}", group=group) == whole


class Stop(Exception):
    """The end of a run that is to go on."""


@pytest.mark.parametrize("where", [0, 0.5, 1])
@pytest.mark.parametrize("layer", range(7))
def test_an_interrupted_run_goes_on_with_the_same_result(layer: int, where: float, tmp_path: Path) -> None:
    sample = sample_of(500)
    undisturbed = counted(DATA / "k3-tiny", sample, tmp_path / "reference")

    def stop(progress: Progress) -> None:
        if progress.what == f"layer {layer}" and progress.done_bytes >= (layer + where) * sample.tokens:
            raise Stop

    with ExitStack() as closing, pytest.raises(Stop):
        calibrate(job_for(DATA / "k3-tiny", sample, tmp_path / "s", closing), progress=stop)
    assert not (tmp_path / "s").exists()
    seen: list[str] = []
    before: list[int] = []
    with ExitStack() as closing:
        again = job_for(DATA / "k3-tiny", sample, tmp_path / "s", closing)
        calibrate(again, progress=lambda p: seen.append(p.what), resumed=before.append)
    assert seen[0] == f"layer {layer}"  # nothing was done again
    assert before == ([layer] if layer else [])
    assert (tmp_path / "s").read_bytes() == undisturbed
    assert not (tmp_path / "s.work").exists()


@pytest.mark.parametrize("layer", [0, 3])
def test_an_interruption_says_whether_there_is_something_to_go_on_from(layer: int, tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.what == f"layer {layer}":
            raise KeyboardInterrupt

    expected = Interrupted if layer else KeyboardInterrupt
    message = "stopped before the statistics were complete: 3 of 7 layers done" if layer else None
    with ExitStack() as closing, pytest.raises(expected, match=message):
        calibrate(job_for(DATA / "k3-tiny", sample_of(500), tmp_path / "s", closing), progress=interrupt)


def test_a_group_tells_how_far_it_is(tmp_path: Path) -> None:
    """A group of a large model takes minutes: a report after each window's attention and after each expert."""
    seen: list[Progress] = []
    sample = sample_of(500)
    with ExitStack() as closing:
        job = job_for(DATA / "k3-tiny", sample, tmp_path / "s", closing)
        assert job.group >= sample.tokens  # all in one group
        calibrate(job, progress=seen.append)
    counts = [progress.done_bytes for progress in seen]
    assert counts == sorted(counts)
    assert counts[-1] == seen[-1].total_bytes == 7 * sample.tokens
    used = int((open_statistics(tmp_path / "s").layer(3).tokens.sum(axis=0) > 0).sum())
    within = [count for progress, count in zip(seen, counts, strict=True) if progress.what == "layer 3"]
    assert within[: len(sample.windows)] == [3 * sample.tokens] * len(sample.windows)
    assert len(within) == len(sample.windows) + used + 1
    assert len(set(within)) > used // 2


def test_unfinished_work_on_something_else_is_refused(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        raise Stop

    sample = sample_of(500)
    with ExitStack() as closing, pytest.raises(Stop):
        calibrate(job_for(DATA / "k3-tiny", sample, tmp_path / "s", closing), progress=stop)
    other = replace(sample, labels=(replace_name(sample.labels[0]), sample.labels[1]))
    with (
        ExitStack() as closing,
        pytest.raises(UsageError, match=r"something else lies here: labels\.0\.name was .*, is \"other\""),
    ):
        calibrate(job_for(DATA / "k3-tiny", other, tmp_path / "s", closing))


def replace_name(label: SampleLabel) -> SampleLabel:
    return SampleLabel(name="other", tokens=label.tokens, texts=label.texts)


def test_an_existing_result_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"mine")
    with ExitStack() as closing, pytest.raises(UsageError, match="there already"):
        calibrate(job_for(DATA / "k3-tiny", sample_of(500), tmp_path / "s", closing))
    assert (tmp_path / "s").read_bytes() == b"mine"


def test_a_folder_of_somebody_else_is_neither_used_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "s.work").mkdir()
    (tmp_path / "s.work" / "thesis.txt").write_text("precious")
    with ExitStack() as closing, pytest.raises(UsageError, match="holds something else"):
        calibrate(job_for(DATA / "k3-tiny", sample_of(500), tmp_path / "s", closing))
    assert (tmp_path / "s.work" / "thesis.txt").read_text() == "precious"


def test_other_weights_are_other_work(tmp_path: Path) -> None:
    """The same configuration and text, but a shard that was written anew."""

    def stop(progress: Progress) -> None:
        raise Stop

    model = tmp_path / "model"
    shutil.copytree(DATA / "k3-tiny", model)
    with ExitStack() as closing, pytest.raises(Stop):
        calibrate(job_for(model, sample_of(500), tmp_path / "s", closing), progress=stop)
    os.utime(model / "model-00001-of-000009.safetensors", ns=(1, 1))
    with ExitStack() as closing, pytest.raises(UsageError, match=r"something else lies here: weights was"):
        calibrate(job_for(model, sample_of(500), tmp_path / "s", closing))


def test_coverage_names_what_the_text_lacks(tmp_path: Path) -> None:
    counted(DATA / "k3-tiny", sample_of(500), tmp_path / "s")
    statistics = open_statistics(tmp_path / "s")
    first, second, both = coverage_of(statistics)
    assert (first.label, second.label, both.label) == ("first", "second", None)
    assert both.tokens == first.tokens + second.tokens == 7 * WINDOW
    never = sum(int((statistics.layer(layer).tokens[1] == 0).sum()) for layer in statistics.layers)
    assert second.never == never
    assert both.experts == 6 * 16


def test_groups_hold_whole_windows() -> None:
    groups = list(groups_of(sample_of(500), 3 * WINDOW + 1))
    assert [(group.first, group.stop) for group in groups] == [(0, 72), (72, 144), (144, 168)]
    assert (groups[1].labels, groups[1].halves) == ((0, 0, 1), (1, 0, 1))
    assert groups[1].starts == (0, 24, 48, 72)
    assert [len(group.windows) for group in groups_of(sample_of(500), 1)] == [1] * 7


def test_windows_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abcdefgh")
    (tmp_path / "b").write_text("ABC")
    sample = make_sample(
        {"x": [tmp_path / "a"], "y": [tmp_path / "b"]},
        encode=lambda text: [ord(char) for char in text],
        window=4,
        begin=1,
        where="--text",
    )
    assert sample.windows == ((1, 97, 98, 99), (1, 100, 101, 102), (1, 65, 66, 67))  # g and h fill no window
    assert sample.label_of == (0, 0, 1)
    assert [(label.name, label.tokens) for label in sample.labels] == [("x", 8), ("y", 4)]


@pytest.mark.parametrize(("text", "window"), [("", 4), ("abc", 5)])
def test_less_text_than_a_window_is_refused(text: str, window: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(UsageError, match=r"^--ids: label x has less text than one window") as refused:
        make_sample(
            {"x": [tmp_path / "a"]}, encode=lambda found: [0] * len(found), window=window, begin=None, where="--ids"
        )
    assert refused.value.hint == "give more text, or a smaller --window"


def test_sources_by_label() -> None:
    found = parse_sources(["a.txt", "code=x,prose=y,code=z"], where="--text")
    assert {name: [str(path) for path in paths] for name, paths in found.items()} == {
        "text": ["a.txt"],
        "code": ["x", "z"],
        "prose": ["y"],
    }
    for wrong in ("", "=x", "a=", "x,,y"):
        with pytest.raises(UsageError, match=r"^--ids: not a source of text"):
            parse_sources([wrong], where="--ids")


def test_the_command_goes_on_after_a_kill(tmp_path: Path) -> None:
    """SIGKILL while a layer is under way; the same command finishes, and says what was seen."""
    ids = tmp_path / "ids"
    ids.write_text(",".join(str(number * 37 % 500) for number in range(10 * WINDOW)))
    command = [
        *(sys.executable, "-c", _KILLED, "calibrate", str(DATA / "k3-tiny"), "--ids", f"a={ids}"),
        *("--window", str(WINDOW), "--out", str(tmp_path / "s"), "--json"),
    ]
    killed = subprocess.run([*command, "kill"], cwd=ROOT, capture_output=True, check=False)
    assert killed.returncode == -9
    assert (tmp_path / "s.work" / "done.json").exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["coverage"][0]["tokens"] == 10 * WINDOW
    assert document["blake3"] == open_statistics(tmp_path / "s").blake3


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_the_command_interrupted_continues(number: str, tmp_path: Path) -> None:
    """The hint is the command again, and that says what it goes on from."""
    ids = tmp_path / "ids"
    ids.write_text(",".join(str(number * 37 % 500) for number in range(10 * WINDOW)))
    arguments = [
        "calibrate",
        str(DATA / "k3-tiny"),
        "--ids",
        f"a={ids}",
        "--window",
        "24",
        "--out",
        str(tmp_path / "s"),
    ]
    command = [sys.executable, "-c", _KILLED, *arguments]
    stopped = subprocess.run([*command, number], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (stopped.returncode, stopped.stdout) == (130, "")
    assert f"hint: continue with: moepack {shlex.join(arguments)}\n" in stopped.stderr
    assert "continued" not in stopped.stderr
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "continued: 3 layers done before\n" in done.stderr


_KILLED = """
import os, signal, sys
if sys.argv[-1] in ("kill", "SIGINT", "SIGTERM"):
    word = sys.argv.pop()
    number = signal.SIGKILL if word == "kill" else signal.Signals[word]
    from packer.calibrate import job
    one_layer = job._one_layer
    def wrapped(*arguments):
        made = one_layer(*arguments)
        if arguments[2] == 3:
            os.kill(os.getpid(), number)
        return made
    job._one_layer = wrapped
from packer.cli import main
sys.exit(main(sys.argv[1:]))
"""
