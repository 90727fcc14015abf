"""Checks of what trackers need, before a run starts: packages, a login, a free port."""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Collection

from headway.config.schema import Config
from headway.errors import ConfigError
from headway.reports.trackers.tracker_tools import PACKAGES

ASK_S = 20.0
"""Seconds for W&B to say whether it has a login."""
ASK = "import sys, wandb; sys.exit(0 if wandb.login(verify=False) else 3)"
NO_LOGIN = ("offline", "dryrun", "disabled")
"""Values of ``WANDB_MODE`` with which W&B needs no login."""


def check_trackers(config: Config, among: Collection[str] = tuple(PACKAGES)) -> None:
    """Check that the trackers of ``reports.trackers`` that are ``among`` these names can work here.

    Raises:
        ConfigError: a package is missing, W&B has no login, or the port for Prometheus is taken.
    """
    check_packages(config, among)
    chosen = [name for name in config.reports.trackers if name in among]
    if "wandb" in chosen and not _wandb_may_log():
        raise ConfigError(
            "reports.trackers names wandb, and W&B has no login here; run wandb login, set WANDB_API_KEY, or set "
            "WANDB_MODE=offline to keep the run on this machine"
        )
    if "prometheus" in chosen:
        _check_port(config.reports.prometheus_host, config.reports.prometheus_port)


def check_packages(config: Config, among: Collection[str] = tuple(PACKAGES)) -> None:
    """Raise `ConfigError` where a package of a tracker that is ``among`` these names is missing."""
    chosen = [name for name in config.reports.trackers if name in PACKAGES and name in among]
    if missing := [name for name in chosen if not _is_installed(PACKAGES[name])]:
        packages = ", ".join(PACKAGES[name] for name in missing)
        is_not, it = ("is not", "it") if len(missing) == 1 else ("are not", "them")
        raise ConfigError(
            f"reports.trackers names {', '.join(missing)}, and {packages} {is_not} installed here; install {it} "
            f"with pip install 'headway[{','.join(missing)}]', or take {it} out of reports.trackers"
        )


def _is_installed(package: str) -> bool:
    """Tell whether ``package`` can be imported. A mere folder is none: W&B makes a ``wandb`` where it runs."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def _wandb_may_log() -> bool:
    """Tell whether W&B needs no login, or has one, which it is asked in a process.

    Where it does not answer the run begins, and the tracker tells what is wrong.
    """
    if os.environ.get("WANDB_MODE") in NO_LOGIN or os.environ.get("WANDB_API_KEY"):
        return True
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK], stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode == 0


def _check_port(host: str, port: int) -> None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((host, port))
    except OSError as cause:
        if isinstance(cause, socket.gaierror) or cause.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"reports.prometheus_host={host}: it is no address of this machine ({cause.strerror or cause}); give "
                "127.0.0.1, for this machine alone, or 0.0.0.0, for others too"
            ) from cause
        raise ConfigError(
            f"reports.prometheus_port={port}: nothing can listen there on {host} ({cause.strerror or cause}); another "
            "run may; give another port, or 0 for a free one"
        ) from cause
