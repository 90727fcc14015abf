"""Opening folders that are broken in some way, and writing folders that never are."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config

from headway.config.schema import Config
from headway.config.sections.model_section import MakeModelConfig
from headway.errors import ModelError
from headway.models.dtypes import compute_dtype
from headway.models.made_model import make_model
from headway.models.pretrained import export, load_model, replaced_when_complete
from headway.models.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = MakeModelConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, vocabulary="abc",
    )  # fmt: skip
    make_model(config, 0, tmp_path / "model")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


@pytest.mark.parametrize(
    ("asked", "device", "expected"),
    [
        ("auto", "cpu", "float32"),
        ("auto", "cuda", "bfloat16"),
        ("auto", "cuda:1", "bfloat16"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_auto_is_half_precision_on_gpus_alone(asked: str, device: str, expected: str) -> None:
    config = Config(model={"dtype": asked})  # type: ignore[arg-type]
    assert compute_dtype(config, device) == expected


def test_a_model_opens_in_the_dtype_that_was_asked_for(folder: Path) -> None:
    model = load_model(str(folder), dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", "./nowhere", "~/no/such/folder", "nowhere"):
        with pytest.raises(ModelError, match="no such folder"):
            load_model(path, dtype=torch.float32)
        with pytest.raises(ModelError, match="no such folder"):
            load_tokenizer(path)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match="is a file"):
        load_model(folder / "config.json", dtype=torch.float32)


def test_a_folder_without_a_config_is_an_error(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(folder, dtype=torch.float32)


def test_a_config_that_is_not_json_is_an_error(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read the model's configuration"):
        load_model(folder, dtype=torch.float32)


def test_missing_weights_are_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot load the weights"):
        load_model(folder, dtype=torch.float32)


def test_weights_that_are_cut_off_are_an_error(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot load the weights"):
        load_model(folder, dtype=torch.float32)


def test_weights_that_lack_a_tensor_are_an_error_and_not_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.norm\.weight"):
        load_model(folder, dtype=torch.float32)


def test_weights_of_another_shape_are_an_error(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="cannot load the weights"):
        load_model(folder, dtype=torch.float32)


def test_an_encoder_decoder_is_not_a_causal_model(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"'t5' model .*causal language model"):
        load_model(tmp_path, dtype=torch.float32)


def test_a_folder_without_a_tokenizer_is_an_error(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        load_tokenizer(folder)


def test_a_tokenizer_without_an_end_is_an_error(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        load_tokenizer(folder)


def test_nothing_is_said_of_a_prompt_above_the_limit_of_the_model(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' warning came between the lines of a run, of a prompt that is left out and counted anyway."""
    edit(folder / "tokenizer_config.json", model_max_length=2)
    logger = logging.getLogger("transformers")  # it hands nothing on to the root's handlers
    logger.addHandler(caplog.handler)
    try:
        tokenizer = load_tokenizer(folder)
        assert len(tokenizer("abc").input_ids) == 3 > tokenizer.model_max_length
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []
    tokenizer.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/tokenizer_config.json").read_text())["model_max_length"] == 2


def test_a_tokenizer_without_padding_pads_with_its_end(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(folder).pad_token_id == 1


def test_export_replaces_a_folder_and_leaves_nothing_else(folder: Path) -> None:
    model, tokenizer = load_model(folder, dtype=torch.float32), load_tokenizer(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    weights = dict(model.named_parameters())
    (folder / "leftover").touch()
    export(model, tokenizer, folder)
    assert not (folder / "leftover").exists()
    assert [p.name for p in folder.parent.iterdir()] == ["model"]
    reopened = load_model(folder, dtype=torch.float32)
    for name, parameter in reopened.named_parameters():
        assert torch.equal(parameter, weights[name])


def test_a_write_that_fails_leaves_the_old_folder(folder: Path) -> None:
    before = (folder / "config.json").read_text()

    def write() -> None:
        with replaced_when_complete(folder) as temporary:
            (temporary / "config.json").write_text("{}")
            raise OSError("disk full")

    with pytest.raises(OSError, match="full"):
        write()
    assert (folder / "config.json").read_text() == before
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_opening_and_writing_draw_no_progress_bars(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("transformers").setLevel(logging.WARNING)
    model = load_model(folder, dtype=torch.float32)
    export(model, load_tokenizer(folder), folder)
    assert "it/s" not in capfd.readouterr().err
