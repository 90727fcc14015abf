"""Profiles of runs that go on, as a user takes them."""

from __future__ import annotations

import gzip
import json
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headway.api.profile_window import ask
from headway.errors import UserError
from headway.reports.report import report
from headway.reports.run_directory import RunDirectory
from tests.integration.support import events, finish, run_here, start_long_run, train


class Asking:
    """A thread that asks a run for a profile of one version, again and again until it goes on."""

    def __init__(self, run_dir: Path) -> None:
        self._run = RunDirectory(run_dir)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        """Ask once the run trains: what was there before is forgotten by it."""
        while not self._over.wait(0.02):
            if self._run.events.exists() and '"run.started"' in self._run.events.read_text(encoding="utf-8"):
                with suppress(UserError):
                    ask(self._run, 1, 30.0)
                return


def ops(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Spans of a trace, by the names of their threads. A thread that ended before the profile did may have no name."""
    found = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in found if event["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = {}
    for event in found:
        if event.get("cat") == "cpu_op":
            spans.setdefault(names.get(event["tid"], "").partition(" ")[0], []).append(event)
    return spans


def test_a_profile_has_the_trainers_products_and_the_engines_steps_and_changes_nothing_else(
    recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Makes a whole run: what was trained is compared to the bit with another one."""
    with Asking(tmp_path / "run"):
        train(recipe, tmp_path / "run", "cluster.backend=inline")
    (taken,) = events(tmp_path / "run", "profile.taken")
    assert (taken["files"], taken["reason"], taken["versions"]) == (["actor-0_rollout-0.json.gz"], None, 1)

    spans = ops(tmp_path / "run" / taken["folder"] / taken["files"][0])
    first = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])["time"]
    (step,) = (busy["span"] for busy in events(tmp_path / "run", "trainer.busy")
               if busy["what"] == "step" and busy["version"] == taken["version"])  # fmt: skip
    within = [span for span in spans["actor-0_0"] if step[0] <= first + span["ts"] / 1e6 <= step[1]]
    assert "aten::mm" in {span["name"] for span in within}
    assert {"aten::mm", "aten::bmm", "aten::addmm", "aten::linear"} & {
        span["name"] for span in spans["headway-decode-rollout-0"]
    }

    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "run" / "model" / file).read_bytes() == (undisturbed / "model" / file).read_bytes()
    metrics = [[step["metrics"]["grad_norm"] for step in events(run, "optimizer.stepped")]
               for run in (tmp_path / "run", undisturbed)]  # fmt: skip
    assert metrics[0] == metrics[1]
    assert not (tmp_path / "run" / "profile.json").exists()

    written = report(tmp_path / "run")
    place = f"actor-0_rollout-0.json.gz in {taken['folder']}"
    assert place in written.trace.read_text() and place in written.html.read_text()


@pytest.mark.slow
def test_on_ray_each_process_has_a_trace_of_its_own_on_the_runs_clock(recipe: Path, tmp_path: Path) -> None:
    """Makes a whole run of several processes."""
    process = start_long_run(recipe, tmp_path / "run")
    done = run_here("ctl", str(tmp_path / "run"), "profile", "--versions", "2")
    assert done.exit_code == 0, done.output
    while not events(tmp_path / "run", "profile.taken"):  # the test's own limit ends it
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    finish(process)
    (taken,) = events(tmp_path / "run", "profile.taken")
    assert taken["files"] == ["actor-0.json.gz", "rollout-0.json.gz"]
    first = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])["time"]
    for name, thread in (("actor-0", "actor-0_0"), ("rollout-0", "headway-decode-rollout-0")):
        spans = ops(tmp_path / "run" / taken["folder"] / f"{name}.json.gz")[thread]
        assert len(spans) > 100
        times = [first + span["ts"] / 1e6 for span in spans]
        assert taken["span"][0] - 0.5 <= min(times) <= max(times) <= taken["span"][1] + 5
