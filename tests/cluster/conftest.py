from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.config.sections.model_section import MakeModelConfig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder of some ten thousand parameters."""
    from headway.models.made_model import make_model

    path: Path = tmp_path_factory.mktemp("tiny") / "model"
    make_model(
        MakeModelConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=64,
        ),
        0,
        path,
    )
    return str(path)


@pytest.fixture(scope="module")
def workers_can_import_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Worker processes find the package and the tests' own roles where this process does."""
    with pytest.MonkeyPatch.context() as patch:
        root = request.config.rootpath
        patch.setenv("PYTHONPATH", os.pathsep.join([str(root / "src"), str(root)]))
        yield
