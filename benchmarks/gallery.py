"""``python -m benchmarks.gallery``: the pictures of pages in docs/gallery.md, taken by a browser without a window.

    headway train, plan, compare, report ─▶ build/gallery/NAME.html ─▶ chromium ─▶ docs/images/NAME.png

What a picture shows is made first, where it is not there yet: a run of the demo for ``timeline``, two of
`benchmarks.reading_runs` for ``compare``. ``plan`` needs nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import reading_runs
from benchmarks.runner import call, parser, train

OUT, IMAGES = Path("build/gallery"), Path("docs/images")
DEMO = OUT / "demo"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PICTURES = {
    "timeline": (("report", str(DEMO), "--html"), 1330),
    "plan": (("plan", "recipes/plan/long-tail.yaml", "--budget", "25", "--html"), 760),
    "compare": (("compare", "build/reading/good", "build/reading/stale", "--html"), 900),
}
"""Name → command that writes the page, but for its path, and how many pixels of it are shown."""


def main(arguments: Sequence[str] | None = None) -> None:
    only = {"choices": list(PICTURES), "help": "this picture alone"}
    chosen = parser("gallery", "Pictures of pages, made.", only=only).parse_args(arguments)
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"no browser: one of {', '.join(BROWSERS)} takes the pictures; install chromium")
    OUT.mkdir(parents=True, exist_ok=True)
    for name, (command, height) in PICTURES.items():
        if chosen.only in (None, name):
            if name == "timeline" and not (DEMO / "summary.json").is_file():
                train(DEMO)
            if name == "compare":
                reading_runs.main(["--only", "stale"])
            page = (OUT / f"{name}.html").resolve()
            call(sys.executable, "-m", "headway", *command, str(page))
            take(browser, page, height, IMAGES / f"{name}.png")
            print(f"{IMAGES / f'{name}.png'}: {' '.join(['headway', *command, str(page)])}")


def take(browser: str, page: Path, height: int, picture: Path) -> None:
    """Write ``picture``, a PNG of the first ``height`` pixels of ``page`` at a width of 1280."""
    flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=4000"]
    size, target = f"--window-size=1280,{height}", f"--screenshot={picture.resolve()}"
    subprocess.run([browser, *flags, size, target, page.as_uri()], check=True, timeout=120, capture_output=True)


if __name__ == "__main__":
    main()
