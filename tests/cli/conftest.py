"""Models and runs that ``headway eval`` is tried with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headway.config.loading import dump, load
from headway.config.sections.model_section import MakeModelConfig
from headway.models.made_model import make_model
from tests.cli.evaluations import RUN


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model over characters, which answers with something for every prompt."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_model(
        MakeModelConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=16,
            intermediate_size=64,
            max_position_embeddings=1024,
            vocabulary="0123456789abcdefghijklmnopqrstuvwxyz:=,|+-*() .?",
        ),
        0,
        folder,
    )
    return folder


@pytest.fixture
def run_dir(tiny: Path, tmp_path: Path) -> Path:
    (tmp_path / "recipe.yaml").write_text(RUN)
    directory = tmp_path / "run"
    shutil.copytree(tiny, directory / "model")
    (directory / "config.yaml").write_text(dump(load(tmp_path / "recipe.yaml").config))
    return directory
