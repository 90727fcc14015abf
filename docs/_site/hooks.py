"""What mkdocs does not do by itself for the site of Headway.

A link of a page may lead to a file or a folder that is no page: ``../recipes/demo.yaml``, ``algorithms``. It works on a
forge, and here each such target gets a page that shows it. The reference of Python has a page for each module of `API`,
made of its docstrings. Pages that the navigation of ``mkdocs.yml`` does not name stand at the end of `REST`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(((?:\.\./)*[\w./-]+)(#[\w-]+)?\)")
API = {
    "headway.api": "Runs from Python",
    "headway.data.interfaces": "Protocols",
    "headway.algorithms.registry": "Algorithms of your own",
    "headway.algorithms.advantages": "Advantages",
    "headway.algorithms.losses": "Losses",
    "headway.algorithms.corrections": "Corrections",
    "headway.algorithms.aggregation": "Aggregation",
    "headway.algorithms.kl": "KL estimators",
    "headway.agents.interface.program_chat": "Turns of a program",
    "headway.agents.rewards.score_request": "Requests of rewards",
    "headway.data.tasks": "Tasks",
    "headway.engines.weights.protocols": "Transports",
    "headway.errors": "Errors",
}
"""Module → title of its page. A package shows what its `__all__` names, or its modules where it has none."""
REST = "Subjects"
PAGES = [name for name in API if list((ROOT / "src").glob("/".join(name.split(".")) + "*"))]
"""Those that are there."""
SHIM = "assets/iframe-worker.js"
"""Searches pages that are opened from a folder, where browsers start no workers. The theme would fetch it."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".md": "markdown", ".toml": "toml", ".jsonl": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation with the pages that it does not name one by one."""
    nav = {title: entries for section in config.nav or [] for title, entries in section.items()}
    named = {page for entries in nav.values() for page in ([entries] if isinstance(entries, str) else entries)}
    pages = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
    for page in pages:
        if page not in named:
            nav["Algorithms" if page.startswith("algorithms/") else REST].append(page)
    nav["Python"] = [{API[name]: f"api/{name}.md"} for name in PAGES]
    config.nav = [{title: entries} for title, entries in nav.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that stand for what pages link to and what is no page, and those of the Python reference."""
    files.append(File.generated(config, SHIM, abs_src_path=str(ROOT / "docs/_site/iframe-worker.js")))
    for name in PAGES:
        files.append(File.generated(config, f"api/{name}.md", content=_reference(name)))
    for page in list(files.documentation_pages()):
        for target in _outside(page.src_uri, page.content_string):
            if (uri := _uri(target)) not in files.src_uris:
                content = _shown(target)
                files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links to such files turned to their pages."""

    def turned(match: re.Match[str]) -> str:
        target = _target(page.file.src_uri, match[1])
        if target is None:
            return match[0]
        return f"]({posixpath.relpath(_uri(target), posixpath.dirname(page.file.src_uri))}{match[2] or ''})"

    return markdown if page.file.src_uri.startswith("files/") else LINK.sub(turned, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """The finished page, which fetches nothing."""
    here = posixpath.dirname(page.file.dest_uri)
    return output.replace("https://unpkg.com/iframe-worker/shim", posixpath.relpath(SHIM, here))


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    """The page for addresses that are not there, likewise."""
    return output.replace("https://unpkg.com/iframe-worker/shim", f"/{SHIM}")


def _reference(name: str) -> str:
    package = ROOT / "src" / name.replace(".", "/") / "__init__.py"
    modules = package.is_file() and "__all__" not in package.read_text(encoding="utf-8")
    return f"# {API[name]}\n\n::: {name}\n    options:\n      show_submodules: {str(modules).lower()}\n"


def _outside(uri: str, text: str) -> list[Path]:
    return [target for match in LINK.finditer(text) if (target := _target(uri, match[1])) is not None]


def _target(uri: str, link: str) -> Path | None:
    """What a link of the page ``uri`` names in the checkout, where that is there and no page or picture of docs/."""
    target = Path(posixpath.normpath(ROOT / "docs" / posixpath.dirname(uri) / link))
    ours = target.is_relative_to(ROOT / "docs") and target.is_file()
    return target if target.exists() and target.is_relative_to(ROOT) and not ours else None


def _uri(target: Path) -> str:
    return f"files/{target.relative_to(ROOT).as_posix()}.md"


def _shown(target: Path) -> str:
    name = target.relative_to(ROOT).as_posix()
    head = f"---\ntitle: {name}\nsearch:\n  exclude: true\n---\n\n"
    if target.suffix == ".md":
        return head + re.sub(r"\]\([^)\s]*\)", "]", target.read_text(encoding="utf-8"))
    if target.is_file():
        text = target.read_text(encoding="utf-8")
        return f"{head}# {name}\n\n````{LANGUAGES.get(target.suffix, 'text')}\n{text}````\n"
    inside = sorted(path for path in target.iterdir() if not path.name.startswith((".", "__")))
    return f"{head}# {name}\n\n" + "\n".join(f"- {_entry(path, target)}" for path in inside)


def _entry(path: Path, folder: Path) -> str:
    docs = ROOT / "docs"
    if path.suffix != ".md" or not path.is_relative_to(docs):
        return f"`{path.name}`"
    here = posixpath.dirname(_uri(folder))
    return f"[{path.stem}]({posixpath.relpath(path.relative_to(docs).as_posix(), here)})"
