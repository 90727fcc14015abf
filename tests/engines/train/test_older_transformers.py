"""Releases of transformers that vLLM takes, and that divide models in other ways or not at all."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.config.sections.learning import ParallelConfig
from headway.engines.train.fsdp.sharded_module import _divide
from headway.errors import ModelError
from tests.engines.train.families import FAMILIES


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"ep": 2}])
def test_a_mesh_that_divides_models_is_refused_and_any_other_is_not(
    sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.config.sections.learning.version", lambda package: {"transformers": "5.19.0"}[package])
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(FAMILIES["qwen3-moe"]())
    mesh: Any = SimpleNamespace(parallel=ParallelConfig.model_validate({"cp": 2, "replicate": 2}))
    assert _divide(lm, "model", mesh) == []
    mesh.parallel = ParallelConfig.model_validate(sizes)
    with pytest.raises(ModelError, match=r"transformers 5\.19\.0 .*5\.23 or later"):
        _divide(lm, "model", mesh)
