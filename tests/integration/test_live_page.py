"""The live page of a run that is really killed and resumed, in a real browser that never loads it again."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.reports import human
from tests.integration.support import START_S, events, finish, make_job, start, summary, wait_for
from tests.integration.test_resume import REACHED
from tests.reports.browser import CHROMIUM, Page, browser
from tests.reports.test_in_a_browser import open_group, picture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
PER_VERSION = 16
SAVED = 5
"""Number of versions between two checkpoints."""
STATUS = "document.getElementById('status').textContent"
RECORDED = """
  window.seen = [];
  const look = () => seen.push([
    document.getElementById('status').textContent,
    Number(document.querySelector('#ledger .account .trained')?.textContent.trim().split(' ')[0].replace(',', '') ?? 0),
    Number(document.getElementById('counted').textContent.split(' ')[0].replace(',', '')),
  ]);
  new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
"""
"""Keeps what the page has shown so far, which a page that was loaded again would lose: the status, how many groups were
trained by the ledger, how many lines are listed.
"""


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as opened:
        yield opened


def watched(run: Path) -> tuple[subprocess.Popen[str], str]:
    """``headway watch`` of a run, and the page's address."""
    process = start("-m", "headway", "watch", str(run))
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    assert address.startswith("http://127.0.0.1:"), finish(process)
    return process, address


def listed(page: Page, fate: str) -> int:
    """Number of groups of one fate that the page lists."""
    select = "document.querySelector('#filters select')"
    page.ask(f"{select}.value = '{fate}'")
    page.ask(f"{select}.dispatchEvent(new Event('change'))")
    page.frame()
    return int(page.ask("document.getElementById('counted').textContent").split()[0].replace(",", ""))


def figures(page: Page) -> dict[str, str]:
    """The figures at the top of the page by name, each with the remark beside it."""
    pairs = "[...document.querySelectorAll('#figures div')].map((one) => [...one.children].map((it) => it.textContent))"
    return dict(page.ask(pairs))


def test_a_page_goes_on_with_a_run_that_is_killed_and_resumed(page: Page, tmp_path: Path) -> None:
    """Three processes, whose imports take seconds, and a browser."""
    run = tmp_path / "run"
    process = start(
        "-m", "headway", "train", str(make_job(tmp_path)), "mode=async_partial", "cluster.backend=inline",
        f"trainer.save_freq={SAVED}", "rollout.test_freq=4", "rollout.total_rollout_steps=65536", "reports.samples=4",
        f"run.dir={run}",
    )  # fmt: skip
    wait_for(REACHED, process, run)
    watching, address = watched(run)
    page.look(1280, 900)
    page.open(address)
    listed(page, "trained")
    page.ask(RECORDED)
    page.wait(f"{STATUS}.startsWith('running: version')")
    wait_for(REACHED, process, run, times=SAVED + 3)

    process.kill()
    process.communicate()
    page.wait(f"{STATUS}.startsWith('killed')")
    boundary = max(event["version"] for event in events(run, "checkpoint.saved"))
    page.wait(f"seen.at(-1)[1] === {sum(one['fate'] == 'trained' for one in events(run, 'group.settled'))}")
    picture(page, "killed")
    before = page.ask("seen.length")
    abandoned = page.ask("seen.at(-1)[1]")
    assert abandoned > PER_VERSION * boundary, "nothing is undone"

    total = PER_VERSION * (boundary + 6)
    process = start("-m", "headway", "train", "--resume", str(run), f"rollout.total_rollout_steps={total}")
    page.wait(f"{STATUS}.startsWith('starting again')", START_S)
    picture(page, "starting-again")
    page.wait(f"{STATUS}.startsWith('running: version')", START_S)
    code, output = finish(process)
    assert code == 0, output
    page.wait(f"{STATUS} === 'completed'")

    told = summary(run)
    assert (told["status"], told["resumed"], told["balanced"]) == ("completed", 1, True)
    since = page.ask("seen")[before:]
    at_work = [place for place, (status, *_) in enumerate(since) if status.startswith("running")]
    for status, *_ in since[: at_work[0]]:
        assert status.startswith(("killed", "starting again", "reading")), "it passes for a run that trains"
    trained = [count for _, count, _ in since[at_work[0] :]]
    assert PER_VERSION * boundary <= trained[0] < total
    assert trained == sorted(trained)
    assert trained[-1] == total
    assert min(lines for *_, lines in since) <= PER_VERSION * boundary, (
        "lines of groups that were undone are still listed"
    )

    page.wait(f"document.getElementById('figures').textContent.includes('{total} of ')")
    shown = figures(page)
    assert (shown["versions"], told["version"]) == (str(told["version"]), boundary + 6)
    assert shown["groups trained"] == f"{total} of {told['groups']['admitted']} admitted"
    assert shown["wall time"] == human.duration(told["wall_s"])
    assert page.ask("document.getElementById('sentence').textContent") == told["bottleneck"]
    assert page.ask("document.querySelector('#ledger .good').textContent") == "✓ each has one fate"
    for fate, count in told["groups"].items():
        if fate != "admitted":
            assert (fate, listed(page, fate)) == (fate, count)
    page.ask("document.getElementById('charts').focus()")
    page.press("Home")
    versions = []
    for _ in range(told["version"] + 1):
        versions.append(page.ask("document.getElementById('readout').textContent"))
        page.press("ArrowRight")
    assert versions[:-1] == [f"version {version}" for version in range(told["version"])]
    open_group(page)
    assert page.problems == []
    picture(page, "completed")

    watching.send_signal(signal.SIGINT)
    assert finish(watching)[0] == 0
