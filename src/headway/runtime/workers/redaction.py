"""Secrets and user code: environment variables of its processes, and removal of secrets from texts.

The texts are error messages, and the log of the workers' output.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from headway.runtime.logs import first_line

PASSED = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "DISPLAY", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
    *("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "DOCKER_HOST"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "JAVA_HOME", "NODE_PATH", "GOPATH", "NLTK_DATA", "PLAYWRIGHT_BROWSERS_PATH"),
    *("TOKENIZERS_PARALLELISM", "MPLBACKEND", "MALLOC_ARENA_MAX"),
}
PROXIES = {"HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"}
"""Variables that are passed on, in upper or lower case."""
PREFIXES = (
    *("LC_", "XDG_", "LD_", "SSL_CERT_", "PYTHON", "UV_", "PIP_", "NPM_CONFIG_", "HF_", "TRANSFORMERS_", "HEADWAY_"),
    *("CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "RAYON_"),
)
"""Prefixes of variables that are passed on."""
SECRET = re.compile(
    r"(?:^|_)(?:API|ACCESS)?(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|CREDENTIAL)S?(?:_|\d|$)", re.IGNORECASE
)
"""Pattern for the name of a variable that holds a secret."""
SHORTEST_SECRET = 6
"""Minimum number of characters of a value that counts as a secret because of its variable's name."""


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` that user code gets without naming them: paths, language, proxies,
    certificates, libraries' settings. Variables with names of secrets are left out.
    """
    return {
        name: value
        for name, value in environment.items()
        if not SECRET.search(name) and (name in PASSED or name.upper() in PROXIES or name.startswith(PREFIXES))
    }


def secrets_of(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the values that no log may show: those of variables with names of secrets, and passwords in addresses."""
    for name, value in environment.items():
        if SECRET.search(name) and len(value) >= SHORTEST_SECRET:
            yield value
        elif "://" in value and "@" in value:
            try:
                password = urlsplit(value).password
            except ValueError:
                continue
            if password:
                yield password


MASK = "***"
SHORTEST = 3
"""Minimum number of characters of a hidden value: shorter ones are not secrets, and occur everywhere."""
CHUNK = 1 << 16
PIPE = 1 << 20
MOST_BYTES = 128 << 20
"""Maximum number of bytes of a log that are kept."""


class Redaction:
    """Removal of secret values from texts, also in their JSON and Python spellings."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        spelled = {one for value in values for one in (value, json.dumps(value)[1:-1], repr(value)[1:-1])}
        # The longest first: one value may be a part of another.
        self._values = sorted((one for one in spelled if len(one) >= SHORTEST), key=len, reverse=True)
        self._encoded = [one.encode("utf-8", "surrogateescape") for one in self._values]

    def of(self, text: str) -> str:
        """Return ``text`` with each value replaced by ``***``."""
        for value in self._values:
            text = text.replace(value, MASK)
        return text

    def of_bytes(self, data: bytes) -> bytes:
        """Return ``data`` with each value replaced by ``***``."""
        for value in self._encoded:
            data = data.replace(value, MASK.encode())
        return data

    def begins_in(self, data: bytes) -> int:
        """Return the position in ``data`` from which the rest may be the beginning of a value; its length if none."""
        longest = max(map(len, self._encoded), default=1) - 1
        for begin in range(max(0, len(data) - longest), len(data)):
            if any(value.startswith(data[begin:]) for value in self._encoded):
                return begin
        return len(data)


class RedactedLog:
    """A pipe, read on the running event loop, whose contents go to a file without the secrets in them.

    A pipe, and not Python's streams: C code and child processes of user code print, too. About the last `MOST_BYTES` of
    the file are kept, the older half of them in another file beside it.
    """

    def __init__(
        self, path: Path | None, redaction: Redaction, most_bytes: int = MOST_BYTES, *, begins: str = ""
    ) -> None:
        """Append to the file ``path``, or write to this process's stderr if None. ``begins``: first line of a file."""
        self._path, self._redaction, self._half = path, redaction, most_bytes // 2
        self._size = self._dropped = 0
        self._target = self._opened()
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        with suppress(OSError):  # so that a process that prints rarely need not wait for this one
            fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, PIPE)
        self._held = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._pass_on)
        if path is not None and begins:
            self._write(redaction.of(first_line(path, begins)).encode())

    def close(self) -> None:
        """Write what has arrived, and close the pipe."""
        # The last output of a process that died is in the pipe: it says why.
        while self._pass_on():
            pass
        # Held back as the beginning of a secret, of which no more came.
        self._write(self._redaction.of_bytes(self._held))
        self._loop.remove_reader(self._reader)
        os.close(self._reader)
        os.close(self.writer)
        os.close(self._target)

    def _opened(self) -> int:
        if self._path is None:
            try:
                return os.dup(2)
            except OSError:  # this process's stderr is closed
                return os.open(os.devnull, os.O_WRONLY)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        target = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(target).st_size
        return target

    def _begin_anew(self, path: Path) -> None:
        """Rename the file, in place of the one renamed before, and begin a new one."""
        older = path.with_name(f"{path.name}.1")
        with suppress(FileNotFoundError):
            self._dropped += older.stat().st_size
        path.replace(older)
        os.close(self._target)
        self._target = self._opened()
        told = f"headway: what was printed before is in {older.name}; {self._dropped} bytes before that were dropped\n"
        os.write(self._target, told.encode())

    def _pass_on(self) -> bool:
        """Write one chunk, except an end that may be half a secret. Returns False if nothing had arrived."""
        try:
            data = os.read(self._reader, CHUNK)
        except BlockingIOError:
            return False
        # Joined: a secret may arrive in two reads.
        data = self._redaction.of_bytes(self._held + data)
        whole = self._redaction.begins_in(data)
        self._held = data[whole:]
        self._write(data[:whole])
        return True

    def _write(self, data: bytes) -> None:
        with suppress(OSError):  # a full disk costs the log, but no job
            if self._path is not None and self._size > 0 and self._size + len(data) > self._half:
                self._begin_anew(self._path)
            self._size += len(data)
            while data:
                data = data[os.write(self._target, data) :]
