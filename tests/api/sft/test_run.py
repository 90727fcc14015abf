"""``headway sft``: what is learned, what is left out, and going on from a checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from headway.api.python_settings import load_checked
from headway.api.sft.sft_run import SftReports, check, sft
from headway.config.checks import rules
from headway.config.layers import flatten, lies_in
from headway.config.loading import LoadedConfig, load
from headway.config.schema import Config
from headway.config.sections.model_section import MakeModelConfig
from headway.errors import ConfigError, DataError, UserError
from headway.models.made_model import make_model
from headway.models.pretrained import load_model
from headway.models.tokenizer import load_tokenizer
from headway.reports.run_directory import RunDirectory

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "1+2"},
    {"role": "assistant", "content": "look"},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sft") / "model"
    roles = ("<user>", "<assistant>", "<tool>")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    make_model(MakeModelConfig(special_tokens=roles, chat_template=TEMPLATE, intermediate_size=32, **small), 0, path)
    return path


def settings(model: Path, rows: list[dict[str, Any]], run: Path, *overrides: str) -> LoadedConfig:
    data = run.with_suffix(".jsonl")
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fixed = [f"model.path={model}", f"data.train={data}", f"run.dir={run}", "cluster.backend=inline"]
    small = ("cluster.device=cpu", "trainer.threads=1", "data.val_size=0", "reports.trackers=[]")
    return load(None, [*fixed, *small, *overrides])


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def sums(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(count)]


def test_the_loss_is_that_of_all_assistant_tokens_and_of_no_other(model: Path, tmp_path: Path) -> None:
    assert sft(settings(model, [{"messages": CHAT}, *sums(1)], tmp_path / "run", "sft.batch_size=2")) == 0
    tokenizer, lm = load_tokenizer(str(model)), load_model(str(model), dtype=torch.float32)
    nats, tokens = 0.0, 0
    for parts in (  # (text, whether it is learned)
        [("<user>1+2<assistant>", False), ("look<eos>", True), ("<tool>3<assistant>", False), ("3<eos>", True)],
        [("0+1=", False), ("1<eos>", True)],
    ):
        ids, learned = list[int](), list[bool]()
        for text, is_learned in parts:
            own = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids, learned = [*ids, *own], [*learned, *([is_learned] * len(own))]
        logits = lm(torch.tensor([ids])).logits[0, :-1]
        losses = cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        nats, tokens = nats + losses[torch.tensor(learned[1:])].sum().item(), tokens + sum(learned)
    [row] = rows_of(tmp_path / "run")
    assert row["sft/learned_tokens"] == tokens == 9
    assert row["sft/loss"] == pytest.approx(nats / tokens, rel=1e-5)


def test_it_learns_and_exports_what_it_has_learned(model: Path, tmp_path: Path) -> None:
    """Some 8 s: 18 optimizer steps, and the first trainer of a process imports FSDP."""
    run = tmp_path / "run"
    fast = ("sft.batch_size=4", "data.epochs=12", "sft.optim.lr=0.02", "sft.optim.lr_warmup_steps=0")
    assert sft(settings(model, sums(8), run, "data.val_size=2", "sft.val_freq=12", *fast)) == 0
    rows = rows_of(run)
    assert rows[-1]["sft/loss"] < rows[0]["sft/loss"] / 2
    assert [row["version"] for row in rows if "sft/val_loss" in row] == [12, 18]
    before, after = (load_model(str(path), dtype=torch.float32) for path in (model, run / "model"))
    assert not torch.equal(next(before.parameters()), next(after.parameters()))
    assert json.loads((run / "summary.json").read_text())["val_loss"] == rows[-1]["sft/val_loss"]


def test_a_run_that_was_stopped_goes_on_to_the_same_losses(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 6 s: a trainer is started three times."""
    often = ("sft.batch_size=2", "data.epochs=2", "sft.optim.lr=0.01", "sft.save_freq=2")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert sft(settings(model, sums(6), whole, *often)) == 0
    report = SftReports.row

    def stops(self: SftReports, row: dict[str, Any], total: int) -> None:
        report(self, row, total)
        if row["version"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SftReports, "row", stops)
    assert sft(settings(model, sums(6), stopped, *often)) == 130
    monkeypatch.undo()
    config = RunDirectory.existing_sft(stopped).config
    with pytest.raises(ConfigError, match=r"got sft\.batch_size=3, .*sft\.batch_size=2, "):
        sft(load(config, ["sft.batch_size=3"]), stopped)
    assert sft(load(config, ["sft.save_freq=5"]), stopped) == 0
    loaded = load(config)
    assert loaded.config.sft.save_freq == 5
    expected = [(row["version"], row["sft/loss"]) for row in rows_of(whole)]
    assert [(row["version"], row["sft/loss"]) for row in rows_of(stopped)] == expected
    with pytest.raises(UserError, match="run is complete, at step 6 of 6"):
        sft(loaded, stopped)
    with pytest.raises(UserError, match="a run of headway sft"):
        RunDirectory.existing(stopped)
    (tmp_path / "stopped.jsonl").write_text(json.dumps(sums(1)[0]))
    with pytest.raises(DataError, match=r"^--resume .*training rows .*data\.accept_changes=true"):
        sft(loaded, stopped)


def test_a_second_interrupt_leaves_at_once_and_says_so(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, run = SftReports.row, tmp_path / "run"

    def stops(self: SftReports, row: dict[str, Any], total: int) -> None:
        report(self, row, total)
        for _ in range(2):
            asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)

    monkeypatch.setattr(SftReports, "row", stops)
    assert sft(settings(model, sums(8), run, "sft.batch_size=2")) == 130
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"


def test_chats_and_tools_that_are_stored_as_text_are_read(model: Path, tmp_path: Path) -> None:
    as_text = [{"messages": json.dumps(CHAT)}, {"prompt": str(CHAT[:1]), "completion": "3"}]
    data = check(settings(model, as_text, tmp_path / "run").config)
    [[whole], [row]] = data.train.examples([0, 1])
    assert (int(whole.loss_mask.sum()), int(row.loss_mask.sum())) == (7, 2)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with pytest.raises(ConfigError, match="chat template does not show"):
        check(settings(model, [{"messages": CHAT, "tools": json.dumps(tools)}], tmp_path / "tools").config)


def test_rows_that_cannot_be_used_are_left_out_by_reason_up_to_a_limit(model: Path, tmp_path: Path) -> None:
    rows: list[Any] = [{"messages": CHAT[:1]}, {"question": "?"}, {"prompt": "1", "completion": "2" * 40}, *sums(2)]
    rows.append({"prompt": "1", "completion": "2\ud800"})
    limits = ("sft.max_length=20", "data.max_bad_rows=0.6")
    data = check(settings(model, rows, tmp_path / "run", *limits).config)
    assert (len(data.train), len(data.batch(0)), len(data.batch(0))) == (5, 2, 2)
    [counts] = data.train.left_out.counts.values()
    assert counts == {"conversation": 2, "too_long": 1, "tokenizer": 1}
    told = "4 training rows cannot be used and are left out (conversation 2, too_long 1, tokenizer 1): "
    assert (data.train.left_out.note() or "").startswith(told)
    assert "columns question: expected messages" in data.train.left_out.examples["conversation"]
    with pytest.raises(DataError, match=r"1 of 6 rows, more than data\.max_bad_rows=0\.01"):
        check(settings(model, rows, tmp_path / "other").config)
    with pytest.raises(DataError, match=r"first batch .*nothing to learn"):
        check(settings(model, rows[:1], tmp_path / "none", "data.max_bad_rows=1").config)


def test_it_notes_what_its_user_may_not_expect(model: Path, tmp_path: Path) -> None:
    def notes(*overrides: str) -> list[str]:
        data = check(settings(model, sums(8), tmp_path / "run", *overrides).config)
        return [note.split(":")[0] for note in data.notes]

    few, fine = "sft.optim.lr_warmup_steps=10", "sft.optim.lr_warmup_steps=0"
    plain = "prompts that are text are learned as they are; the tokenizer has a chat template"
    assert notes(few) == [few, plain]
    assert notes(fine, "data.chat_template=always") == []


def test_it_says_what_it_needs(model: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.val_size=2 .*of 2 rows"):
        check(settings(model, sums(2), tmp_path / "run", "data.val_size=2").config)
    with pytest.raises(DataError, match="no rows"):
        check(settings(model, sums(0), tmp_path / "run", "data.val_size=2").config)
    with pytest.raises(UserError, match="it holds no run"):
        RunDirectory.existing_sft(tmp_path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("model.path=null", r"model\.path: give the Hugging Face folder, .* of the model to fine-tune"),
        ("data.train=null", r"data\.train: give the conversations to learn from"),
        ("data.accept_changes=true", r"data\.accept_changes: it has no effect on a new run; it is for --resume RUN"),
        (
            "actor.optim.lr=1e-4",
            r"has no effect: headway sft does not read it, but sft\.optim; drop it",
        ),
        ("rollout.n=4", r"rollout\.n has no effect: headway sft does not read it; drop it"),
        ("reports.project=own", r"reports\.project has no effect: reports\.trackers does not name"),
        ("trainer.n_gpus_per_node=2", r"cluster\.backend=inline .*one training rank"),
    ],
)
def test_its_settings_are_checked_as_those_of_training_are(tmp_path: Path, given: str, message: str) -> None:
    recipe = tmp_path / "recipe.yaml"  # one that headway train reads, too
    recipe.write_text(
        "model: {path: model}\ndata: {train: a.jsonl, epochs: 1}\nactor: {optim: {lr: 1e-6}}\nrollout: {n: 8}\n"
        "cluster: {backend: inline}\nreports: {trackers: []}\n"
    )
    load_checked(recipe, ["sft.batch_size=2"], supervised=True)
    load_checked(recipe)
    keys = dict(flatten(Config().model_dump(mode="json")))
    assert all(
        any(lies_in(key, read) for key in keys) for read in rules()["sft"]["reads"] if read != "data.accept_changes"
    )
    with pytest.raises(ConfigError, match=message):
        load_checked(recipe, [given], supervised=True)
