"""The pages in a real browser: what is seen at two widths and in two schemes, keyboard, and how smooth a large run is.

``PICTURES=folder`` keeps the pictures.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.events import RunResumed, RunStarted
from headway.reports.comparison import compared, read_runs, write_page
from headway.reports.report import report
from headway.reports.run_directory import RunDirectory, RunLock
from headway.reports.watch.follower import Follower
from headway.reports.watch.watch_server import WatchServer
from tests.integration.support import end_started, finish, make_job, start, wait_for
from tests.reports.browser import CHROMIUM, Page, browser
from tests.reports.stories import sample, story, validated, written
from tests.reports.test_watch import append, boundary, events_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
SIZES = [(1280, 900), (420, 860)]
SMOOTH_MS = 50
"""Longest time between two frames that is no stutter."""
SLACK = 3
"""Times that limit that tests allow for one frame in twenty: their machine does other things, and has no graphics."""
TRIES = 10
"""The smoothest of them counts: what else the machine does at one moment is not the page's."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 500 versions and more than 2,000 groups, with samples of a tenth of them."""
    samples: list[dict[str, Any]] = [sample(number, number // 4, tokens=120) for number in range(0, 2000, 10)]
    samples += [validated(version, problem) for version in range(0, 500, 25) for problem in (1, 2)]
    return written(tmp_path_factory.mktemp("large") / "run", story(versions=500, per_version=4, n=2), samples)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return written(
        tmp_path / "run",
        story(versions=12),
        [sample(number, number // 4, rows=1 + number % 2) for number in range(0, 40, 3)],
    )


def picture(page: Page, name: str) -> None:
    if "PICTURES" in os.environ:
        page.picture(Path(os.environ["PICTURES"], f"{name}.png"))


def open_group(page: Page) -> None:
    """Show the newest trained group with text, chosen by keyboard."""
    page.ask("document.querySelector('#filters input[type=checkbox]').click()")
    page.ask("document.querySelector('#filters select').value = 'trained'")
    page.ask("document.querySelector('#filters select').dispatchEvent(new Event('change'))")
    page.frame()
    page.ask("document.getElementById('list').focus()")
    page.press("ArrowDown", "Enter")
    page.wait("document.querySelector('.tokens span')")


class Watched:
    """A run's live page, served as ``headway watch`` serves it."""

    def __init__(self, run: Path) -> None:
        self.follower = Follower(RunDirectory(run))
        self.server = WatchServer(self.follower, run.name)
        self.follower.start()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __enter__(self) -> str:
        return self.server.url

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.follower.close()


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_of_a_report_is_cut(page: Page, small: Path, width: int, height: int, dark: bool) -> None:
    html = report(small).html
    page.problems.clear()
    page.look(width, height, dark=dark)
    page.open(html.as_uri())
    open_group(page)
    page.frame()
    assert page.cut() == []
    assert page.problems == []
    picture(page, f"report-{width}-{'dark' if dark else 'light'}")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_nothing_of_a_comparison_is_cut(page: Page, tmp_path: Path, width: int, height: int) -> None:
    runs = [
        written(
            tmp_path / f"run{i}",
            story(versions=6 + 4 * i),
            config={
                "mode": f"mode{i}",
                "rollout": {"n": 8 + i},
                "data": {"train_files": f"/a/long/path/to/the/data/{i}"},
            },
        )
        for i in range(4)
    ]
    write_page(compared(read_runs(runs)), tmp_path / "compare.html")
    page.problems.clear()
    page.look(width, height)
    page.open((tmp_path / "compare.html").as_uri())
    page.frame()
    assert page.ask("document.querySelectorAll('.panel').length") >= 8
    assert page.cut() == []
    over = "[...document.querySelectorAll('.wide')].map((box) => box.scrollWidth - box.clientWidth)"
    assert page.ask(over) == [0, 0]
    assert page.problems == []
    picture(page, f"compare-{width}")


def test_one_cursor_reads_all_charts_by_mouse_and_by_keyboard(page: Page, small: Path) -> None:
    html = report(small).html
    page.look(1280, 900)
    page.open(html.as_uri())
    page.frame()
    values = "[...document.querySelectorAll('.panel')].map((panel) => panel.querySelector('.key b').textContent)"
    last = page.ask(values)
    box = page.ask("JSON.parse(JSON.stringify(document.querySelector('.panel canvas').getBoundingClientRect()))")
    x, y = box["x"] + 45, box["y"] + 40
    page.point(x, y)
    assert page.ask("document.getElementById('readout').textContent").startswith("version ")
    there = page.ask(values)
    assert sum(a != b for a, b in zip(last, there, strict=True)) > 4
    page.ask("document.getElementById('charts').focus()")
    page.press("Home")
    assert page.ask("document.getElementById('readout').textContent") == "version 0"
    page.press("ArrowRight", "ArrowRight")
    assert page.ask("document.getElementById('readout').textContent") == "version 2"
    page.press("Escape")
    assert page.ask("document.getElementById('readout').textContent") == ""
    assert page.ask(values) == last
    page.ask("document.querySelector('[data-axis=seconds]').click()")
    page.press("End")
    page.ask("document.getElementById('charts').focus()")
    page.press("End")
    assert "since the start" in page.ask("document.getElementById('readout').textContent")


def test_tokens_are_told_one_by_one_by_keyboard_in_every_colour(page: Page, small: Path) -> None:
    html = report(small).html
    page.look(1280, 900)
    page.open(html.as_uri())
    open_group(page)
    colours = page.ask("[...document.querySelectorAll('.colours button')].map((button) => button.textContent)")
    assert colours == ["version", "log-prob", "gap", "advantage", "mask", "entropy"]
    painted = []
    for place in range(len(colours)):
        page.ask(f"document.querySelectorAll('.colours button')[{place}].click()")
        spans = "[...document.querySelectorAll('.tokens span')]"
        painted.append(page.ask(f"{spans}.map((span) => span.style.background).join('|')"))
    assert len(set(painted)) == len(colours)
    page.ask("document.querySelector('.tokens').focus()")
    page.press("ArrowRight", "ArrowRight")
    said = page.ask("document.getElementById('said').textContent")
    assert said.startswith('" us", token 2 of 40')
    assert "gap" in said and "entropy" in said and "advantages 0.7" in said
    assert "17 + 25? <b>Think</b>" in page.ask("document.querySelector('#sample details').textContent")


def test_tokens_that_nobody_sampled_have_no_gap_and_a_healthy_one_has_no_colour(page: Page, tmp_path: Path) -> None:
    """Quick parts cannot tell: it is the page's script that colours tokens and tells of them."""
    one = sample(3, 0, episodes=1)
    one["fate"], one["reason"] = "dropped", "nonfinite"
    (row,) = one["episodes"][0]["rows"]
    row["versions"] = [-1 if i == 1 else 0 for i in range(40)]
    row["mask"] = [int(i != 1) for i in range(40)]
    row["behaviour"] = [0.0 if i == 1 else -1.0 for i in range(40)]
    row["logprobs"] = [-3.2 if i == 1 else -1.3 if i == 2 else -1.0001 for i in range(40)]
    html = report(written(tmp_path / "run", story(versions=3), [one])).html
    page.problems.clear()
    page.look(1280, 900)
    page.open(html.as_uri())
    page.ask("document.querySelector('#filters input[type=checkbox]').click()")
    page.frame()
    page.ask("document.getElementById('list').focus()")
    page.press("ArrowDown", "Enter")
    page.wait("document.querySelector('.tokens span')")
    assert "nothing was trained on them" in page.ask("document.getElementById('sample').textContent")
    page.ask("[...document.querySelectorAll('.colours button')].find((one) => one.textContent === 'gap').click()")
    painted = page.ask("[...document.querySelectorAll('.tokens span')].map((span) => span.style.background !== '')")
    assert [i for i, on in enumerate(painted) if on] == [2]
    page.ask("document.querySelector('.tokens').focus()")
    page.press("ArrowRight", "ArrowRight")
    said = page.ask("document.getElementById('said').textContent")
    assert "token 2 of 40, not trained on" in said and "gap" not in said and "engine" not in said
    page.press("ArrowRight")
    assert "gap -0.3" in page.ask("document.getElementById('said').textContent")
    assert page.problems == []


def test_groups_are_filtered_by_fate_reward_length_and_source(page: Page, small: Path) -> None:
    html = report(small).html
    page.look(1280, 900)
    page.open(html.as_uri())

    def counted() -> int:
        page.frame()
        return int(page.ask("document.getElementById('counted').textContent").split()[0].replace(",", ""))

    def set_to(place: int, value: str) -> None:
        field = f"document.querySelectorAll('#filters select, #filters input[type=number]')[{place}]"
        page.ask(f"{field}.value = '{value}'")
        page.ask(f"['change', 'input'].map((name) => {field}.dispatchEvent(new Event(name)))")

    everything = counted()
    set_to(0, "filtered")
    filtered = counted()
    set_to(0, "trained")
    assert counted() + filtered == everything
    set_to(1, "addition")
    some = counted()
    assert 0 < some < everything - filtered
    set_to(2, "0.9")
    assert 0 < counted() < some
    set_to(4, "61")
    assert counted() == 0


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_live_page_of_500_versions_and_2000_groups_does_not_stutter(
    page: Page, large: Path, width: int, height: int
) -> None:
    """It takes a while to make and to read 30,000 events, and to scroll through all of them."""
    with Watched(large) as url:
        page.problems.clear()
        page.look(width, height, dark=width == 420)
        page.open(url)
        page.wait(
            "document.getElementById('counted').textContent.startsWith('2,') && document.querySelector('#figures div')"
        )
        page.frame()
        assert page.ask("document.querySelectorAll('#spacer .line').length") < 60
        assert page.ask(KEEPS_ITS_ELEMENT)
        figures = {name: smoothest(page, name) for name in ("list", "charts")}
        print(f"milliseconds between frames, median, 95th percentile and longest, at {width}: {figures}")
        assert all(map(is_smooth, figures.values()))
        open_group(page)
        assert page.cut() == []
        assert page.problems == []
        picture(page, f"watch-{width}")


def smoothest(page: Page, name: str) -> list[int]:
    """The best of some tries to move what has this name: other work on the machine makes some of them slow."""
    best = page.ask(FRAMES % (name, name))
    for _ in range(TRIES - 1):
        if is_smooth(best):
            break
        best = min(best, page.ask(FRAMES % (name, name)))
    return list(best)


def is_smooth(figures: Sequence[int]) -> bool:
    median, most, _ = figures
    return median < SMOOTH_MS and most < SLACK * SMOOTH_MS


KEEPS_ITS_ELEMENT = """new Promise((done) => {
  const list = document.getElementById("list"), line = document.getElementById("line-9"), said = line.textContent;
  list.scrollTop += 7 * 28;
  const same = () => document.getElementById("line-9") === line && line.textContent === said;
  const look = () => done(list.scrollTop > 0 && same());
  requestAnimationFrame(() => requestAnimationFrame(look));
})"""
FRAMES = """new Promise((done) => {
  const target = document.getElementById("%s"), between = [];
  target.focus();
  let last = null;
  const frame = (now) => {
    if (last !== null) between.push(now - last);
    last = now;
    if ("%s" === "list") target.scrollTop += 400;
    else target.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
    if (between.length < 90) requestAnimationFrame(frame);
    else { between.sort((a, b) => a - b); done([45, 85, 89].map((place) => Math.round(between[place]))); }
  };
  requestAnimationFrame(frame);
})"""
"""Moves something with each frame; milliseconds between two frames: the median, the 95th percentile, the longest."""


def test_one_live_page_too_many_says_that_others_are_open(
    page: Page, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.reports.watch.watch_server.MOST_STREAMS", 0)
    with Watched(small) as url:
        page.open(url)
        page.wait("document.getElementById('status').textContent.includes('pages of this run are open')")
        page.ask("new Promise((done) => setTimeout(done, 300))")
        assert "not connected" not in page.ask("document.getElementById('status').textContent")


def test_a_live_page_follows_a_run_through_a_kill_and_a_resume(page: Page, tmp_path: Path) -> None:
    """The page waits for the server's looks at the files."""
    whole = story(versions=8)
    begun = events_until(3, whole)
    run = written(tmp_path / "run", begun, [sample(2, 0)])
    status = "document.getElementById('status').textContent"
    trained = "[...document.querySelectorAll('#ledger .account .trained')][0].textContent.trim()"
    card = "[...document.querySelectorAll('#figures div')].find((one) => one.textContent.startsWith('groups trained'))"
    lock = RunLock(run / "run.lock")
    lock.take()
    (run / "events.jsonl").touch()
    with Watched(run) as url:
        page.problems.clear()
        page.look(1280, 900)
        page.open(url)
        page.wait(f"{status}.startsWith('running: version 3, 12 of 32') && {trained} === '12 trained'")
        append(run, whole[len(begun) : whole.index(boundary(6, whole)) + 1])
        page.wait(f"{trained} === '24 trained'")
        assert page.ask(f"{card}.querySelector('dd').firstChild.textContent") == "24"
        with (run / "samples.jsonl").open("a") as samples:
            samples.write("{nonsense}\n")
        page.wait("document.getElementById('counted').textContent.endsWith('samples.jsonl, which are left out: 1')")
        lock.release()
        page.wait(f"{status}.startsWith('killed')")
        picture(page, "watch-killed")
        lock.take()
        page.wait(f"{status} === 'starting again'")
        restarted = [event for event in whole if isinstance(event, RunStarted)]
        append(run, [RunResumed(time=boundary(4, whole).time, version=4, times=1), *restarted])
        page.wait(f"{status}.startsWith('running') && {trained} === '16 trained'")
        append(run, whole[whole.index(boundary(4, whole)) + 1 :])
        lock.release()
        page.wait(f"{status} === 'completed' && {trained} === '32 trained'")
        assert page.problems == []


def test_a_live_page_follows_a_training_process_that_is_killed_and_resumed(page: Page, tmp_path: Path) -> None:
    """Two trainings and the command are processes of their own, whose imports take seconds."""
    run, status = tmp_path / "run", "document.getElementById('status').textContent"
    trained = "Number([...document.querySelectorAll('#ledger .account .trained')][0].textContent.split(' ')[0])"
    recipe = make_job(tmp_path)
    options = ("cluster.backend=inline", "trainer.save_freq=1", "rollout.test_freq=-1", f"run.dir={run}")
    try:
        training = start("-m", "headway", "train", str(recipe), *options, "rollout.total_rollout_steps=65536")
        wait_for('"kind": "version.reached", ', training, run, times=2)
        watching = start("-m", "headway", "watch", str(run))
        assert watching.stdout is not None
        page.call("Page.navigate", url="about:blank")  # the page of another test asks for its server
        url = watching.stdout.readline().strip()
        page.problems.clear()
        page.look(1280, 900)
        page.open(url)
        page.wait(f"{status}.startsWith('running: version') && {trained} > 4")
        training.kill()
        training.communicate()
        page.wait(f"{status}.startsWith('killed')")
        before = page.ask(trained)
        picture(page, "watch-process-killed")
        resumed = start("-m", "headway", "train", "--resume", str(run))
        page.wait(f"{status}.startsWith('starting again')")
        page.wait(f"{status}.startsWith('running: version') && {trained} > {before}")
        resumed.send_signal(signal.SIGINT)
        finish(resumed)
        page.wait(f"{status} === 'interrupted'")
        assert page.problems == []
        watching.send_signal(signal.SIGINT)
        code, output = finish(watching)
        assert code == 0, output
    finally:
        end_started()
