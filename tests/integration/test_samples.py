"""What a whole run shows of itself, as a user asks for it, against the model that it began with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from headway.models.pretrained import load_model
from tests.integration.support import events, run_here


def shown(run_dir: Path, *arguments: str) -> Any:
    done = run_here("show", str(run_dir), *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_show_tells_of_a_real_group_what_its_first_step_computed(undisturbed: Path) -> None:
    """The run's first step is of version 0: of the model that it began with, here in float64."""
    first = [line["group"] for line in shown(undisturbed) if line["version"] == 0]
    assert first
    model = load_model(str(undisturbed.parent / "model"), dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(undisturbed.parent / "model")
    rewarded = {event["number"]: event["rewards"] for event in events(undisturbed, "group.rewarded")}
    for number in first:
        group = shown(undisturbed, str(number))
        assert [e["reward"] for e in group["episodes"]] == pytest.approx(rewarded[number], rel=1e-4, abs=1e-9)
        deviation = np.std(rewarded[number], ddof=1)
        for episode, reward in zip(group["episodes"], rewarded[number], strict=True):
            (row,) = episode["rows"]
            context = tokenizer(row["context"] or group["prompt"], return_tensors="pt").input_ids
            ids = torch.tensor([[*context[0].tolist(), *row["ids"]]])
            logp = model(ids).logits[0, context.shape[1] - 1 : -1].log_softmax(-1)
            expected = logp[range(len(row["ids"])), row["ids"]].detach().numpy()
            np.testing.assert_allclose(row["logprobs"], expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(row["behaviour"], expected, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(row["entropy"], -(logp.exp() * logp).sum(-1).detach(), rtol=1e-4, atol=1e-4)
            advantage = (reward - np.mean(rewarded[number])) / (deviation + 1e-6)
            np.testing.assert_allclose(row["columns"]["advantages"], advantage, rtol=1e-3, atol=1e-3)
            said = [piece for piece in row["pieces"] if piece != "<eos>"]
            assert "".join(said) == episode["text"]
            assert (row["versions"], row["mask"]) == ([0] * len(row["ids"]), [1] * len(row["ids"]))


def test_show_prints_a_real_run(undisturbed: Path) -> None:
    number = str(shown(undisturbed)[0]["group"])
    for arguments in ([], [number], [number, "--tokens"], ["--validation"]):
        done = run_here("show", str(undisturbed), *arguments)
        assert done.exit_code == 0, done.output
    problem = str(shown(undisturbed, "--validation")[0]["problem"])
    assert len({one["validation"] for one in shown(undisturbed, problem, "--validation")}) == 5
