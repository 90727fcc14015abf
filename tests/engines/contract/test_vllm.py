"""vLLM behind its adapter keeps the contract of `RolloutEngine`: where vLLM is installed (``make test-vllm``)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.engines.contract.harness_vllm import VllmHarness
from tests.engines.contract.suite import Contract

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")


@pytest.mark.timeout(300)
class TestVllm(Contract):
    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def started(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        cls.harness = VllmHarness(tmp_path_factory.mktemp("vllm"))
        yield
        asyncio.run(cls.harness.close())
