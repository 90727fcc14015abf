from __future__ import annotations

from pathlib import Path

import pytest

from headway.config.schema import MakeModelConfig


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's folder of some ten thousand parameters."""
    from headway.models.make import make_model

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
