"""The site is built without a warning; every link leads somewhere, nothing is fetched, and the search finds pages."""

from __future__ import annotations

import json
import os
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.blocks import DOCS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("site")]
MKDOCS = ROOT / ".venv-site" / "bin" / "mkdocs"


class Links(HTMLParser):
    """What a page names: the targets of its links, what it loads, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {key: value for key, value in attrs if value}
        self.anchors |= {named[key] for key in ("id", "name") if key in named}
        if tag == "a" and "href" in named:
            self.links.append(named["href"])
        elif tag in ("script", "img", "iframe") and "src" in named:
            self.loaded.append(named["src"])
        elif tag == "link" and named.get("rel") != "canonical" and "href" in named:
            self.loaded.append(named["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: 10 s on a quiet machine."""
    if not MKDOCS.exists():
        pytest.skip("make site-env builds the environment with mkdocs")
    folder = tmp_path_factory.mktemp("site")
    ended = subprocess.run(
        [MKDOCS, "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    return {page: Links(page.read_text(encoding="utf-8")) for page in sorted(site.rglob("*.html"))}


def test_every_link_and_anchor_is_there(site: Path, pages: dict[Path, Links]) -> None:
    """Builds the site first, which takes 10 s, and reads some hundred pages."""
    dead = []
    for page, names in pages.items():
        if page.name == "404.html":
            continue  # its links are those of a site that lies at the root of a server
        for link in names.links + names.loaded:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in anchors):
                dead.append(f"{page.relative_to(site)}: {link}")
    assert dead == []


def test_nothing_is_fetched_when_a_page_is_read(pages: dict[Path, Links]) -> None:
    assert [link for names in pages.values() for link in names.loaded if urlsplit(link).netloc] == []


def test_every_page_is_in_the_site_and_in_the_search(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    expected = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in DOCS.rglob("*.md")}
    expected = {name.replace("README.html", "index.html") for name in expected}
    assert expected - {name or "index.html" for name in found} == set()


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("headway.data.interfaces", "headway.data.interfaces.rollout.RolloutEngine.submit"),
        ("headway.algorithms.losses", "headway.algorithms.losses.LossInputs"),
        ("headway.errors", "headway.errors.ConfigError"),
    ],
)
def test_the_reference_of_python_has_what_is_public(pages: dict[Path, Links], site: Path, page: str, name: str) -> None:
    anchors = pages[site / "api" / f"{page}.html"].anchors
    assert name in anchors, sorted(anchors)[:40]
