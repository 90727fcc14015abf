"""``make wheelhouse``: what an image that has torch lacks for ``cluster.backend=inline``, as wheels.

    pyproject.toml: dependencies ─▶ pip download, pinned by constraints.txt ─▶ what the wheels require ─▶ …

The wheels are for Linux on x86-64 and for the Python version that is asked for, whichever runs this. A package is left
out where the image has it anyway, or where the inline path does not import it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OUT = Path("build/wheelhouse")
LIMIT_MB = 55.0
"""Megabytes (10⁶ bytes) that all wheels may have together."""
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (28, 27, 24, 17, 12, 5)))
IN_THE_IMAGE = frozenset(
    {
        "torch",
        *("filelock", "fsspec", "jinja2", "mpmath", "networkx", "setuptools", "sympy"),
        *("huggingface-hub", "numpy", "packaging", "pyyaml", "regex", "safetensors", "tokenizers", "tqdm"),
    }
)
"""torch, and what any transformers beside it requires. transformers itself travels: images have older ones."""
NOT_IMPORTED: Mapping[str, str] = {
    "ray": "cluster.backend=ray only",
    "pyarrow": "Parquet files only",
    "reasoning-gym": "tasks of reasoning_gym only",
    **dict.fromkeys(
        ("grpcio", "markdown", "pillow", "tensorboard-data-server", "werkzeug"), "TensorBoard's server only"
    ),
}
"""Packages that the inline path never imports, and who does."""


class WheelhouseError(Exception):
    """Why there is no wheelhouse, in one message."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wheelhouse", description=__doc__)
    parser.add_argument("--python-version", required=True, help="of the image's Python, such as 3.12")
    chosen = parser.parse_args(arguments)
    if not re.fullmatch(r"3\.\d+", chosen.python_version):
        parser.error(f"--python-version: got {chosen.python_version!r}, expected one such as 3.12")
    try:
        wheels = collect(chosen.python_version, OUT)
        print(summary(wheels, OUT, chosen.python_version))
    except WheelhouseError as error:
        sys.exit(f"wheelhouse: {error}")


def collect(python_version: str, folder: Path) -> list[Path]:
    """Fill ``folder``, which is emptied first. Raises `WheelhouseError`."""
    pins = read_pins(Path("constraints.txt"))
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    there: set[str] = set()
    missing = wanted(project["dependencies"], python_version)
    while missing:
        download([pins.get(name) or _not_pinned(name) for name in sorted(missing)], python_version, folder)
        there |= missing
        required = [line for wheel in folder.glob("*.whl") for line in requirements(wheel)]
        missing = wanted(required, python_version) - there
    return sorted(folder.glob("*.whl"))


def read_pins(constraints: Path) -> dict[str, str]:
    """Name → ``name==version``."""
    lines = constraints.read_text(encoding="utf-8").splitlines()
    pins = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return {canonicalize_name(Requirement(pin).name): pin for pin in pins}


def wanted(required: Iterable[str], python_version: str) -> set[str]:
    """Names of ``required`` that hold for this Python on Linux and have to be brought along."""
    environment = {
        "extra": "",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "python_full_version": f"{python_version}.0",
        "python_version": python_version,
        "sys_platform": "linux",
    }
    parsed = [Requirement(line) for line in required]
    names = {canonicalize_name(r.name) for r in parsed if r.marker is None or r.marker.evaluate(environment)}
    return {str(name) for name in names} - IN_THE_IMAGE - NOT_IMPORTED.keys()


def requirements(wheel: Path) -> list[str]:
    """What ``wheel`` says that it requires."""
    with zipfile.ZipFile(wheel) as opened:
        (metadata,) = [name for name in opened.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        return HeaderParser().parsestr(opened.read(metadata).decode()).get_all("Requires-Dist") or []


def download(pins: Sequence[str], python_version: str, folder: Path) -> None:
    """Let pip bring one wheel of each, without what it requires. Raises `WheelhouseError`."""
    platforms = [flag for platform in PLATFORMS for flag in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python_version, "--implementation", "cp", *platforms, "--dest", str(folder), *pins]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelhouseError(
            f"pip found no wheel for Python {python_version} of one of {', '.join(pins)}:\n{done.stderr.strip()}"
        )


def summary(wheels: Sequence[Path], folder: Path, python_version: str) -> str:
    """What was collected and how to use it. Raises `WheelhouseError` where it is too large."""
    sizes = {wheel.name: wheel.stat().st_size / 1e6 for wheel in wheels}
    total = sum(sizes.values())
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    listed = ", ".join(f"{name} {sizes[name]:.1f} MB" for name in largest)
    if total > LIMIT_MB:
        raise WheelhouseError(f"{total:.1f} MB, more than {LIMIT_MB:g} MB; the largest: {listed}")
    return f"""\
{len(sizes)} wheels for Python {python_version}, {total:.1f} MB (at most {LIMIT_MB:g}), in {folder}
the largest: {listed}

With torch 2.11 or later, in this folder, without a network:
    python -m pip install --no-index --no-deps --target /tmp/site {folder}/*.whl
    export PYTHONPATH=/tmp/site:src
    python -m benchmarks.gpu
    python -m headway train recipes/demo.yaml cluster.backend=inline

Not in it: {", ".join(f"{name} ({why})" for name, why in NOT_IMPORTED.items() if not why.startswith("TensorBoard"))}"""


def _not_pinned(name: str) -> str:
    raise WheelhouseError(f"{name} is required and constraints.txt does not pin it; add it there")


if __name__ == "__main__":
    main()
