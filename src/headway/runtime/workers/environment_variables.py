"""Environment variables that processes with user code get, and those of this process that are secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

PASSED = {
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "DISPLAY", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
    *("CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO", "DOCKER_HOST"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "JAVA_HOME", "NODE_PATH", "GOPATH", "NLTK_DATA", "PLAYWRIGHT_BROWSERS_PATH"),
    *("TOKENIZERS_PARALLELISM", "MPLBACKEND", "MALLOC_ARENA_MAX"),
}
PROXIES = {"HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "ALL_PROXY", "NO_PROXY"}
"""Variables that are passed on in either case."""
PREFIXES = (
    *("LC_", "XDG_", "LD_", "SSL_CERT_", "PYTHON", "UV_", "PIP_", "NPM_CONFIG_", "HF_", "TRANSFORMERS_", "HEADWAY_"),
    *("CUDA_", "NVIDIA_", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "RAYON_"),
)
"""Beginnings of names that are passed on."""
SECRET = re.compile(
    r"(?:^|_)(?:API|ACCESS)?(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASS|CREDENTIAL)S?(?:_|\d|$)", re.IGNORECASE
)
"""A name of a variable that holds a secret."""
SHORTEST_SECRET = 6
"""Fewest characters of a value that counts as a secret because of its variable's name."""


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``environment`` that user code gets without being named: paths, language, proxies,
    certificates, libraries' settings. None whose name is one of a secret.
    """
    return {
        name: value
        for name, value in environment.items()
        if not SECRET.search(name) and (name in PASSED or name.upper() in PROXIES or name.startswith(PREFIXES))
    }


def secrets_of(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the values of ``environment`` that no log may show: those of secrets' names, and passwords in addresses."""
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
