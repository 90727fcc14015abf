"""The choices of a first recipe, each with its reason.

    facts ─▶ lengths ─▶ devices and mesh, by memory ─▶ batch ─▶ learning rate, length of the run ─▶ `Choice`s

The user's settings are kept, and all others follow from them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from headway.api.init.data_summary import PROGRAMS, DataFacts
from headway.api.init.device_layout import Choice, Choices, choose_devices, within_memory
from headway.api.init.model_summary import SMALL, Machine, ModelFacts
from headway.config import recipe_text
from headway.config.layers import flatten, lies_in, nest
from headway.config.presets import preset
from headway.config.sections.agent_section import AgentConfig
from headway.errors import ConfigError

LEAST_ANSWER = 16
"""Minimum number of tokens that an answer has room for."""
ANSWERS = {"math": 1024, "code": 2048, "choice": 512, "own": 1024}
"""Kind of reward → tokens of an answer with its reasoning, for a model that is not small."""
TURN, TOLD = 256, 128
"""Maximum tokens of each turn before the last one, and of the environment's or tool's reply to it."""
THOUGHTS = 8192
"""Tokens of an answer of a model that thinks before it answers."""
RATES = ((300_000_000, 1e-6), (50_000_000, 5e-6), (5_000_000, 5e-5), (0, 2e-4))
"""Pairs of a minimum number of parameters and a learning rate; the first that fits counts."""
LENGTHS = ("data.max_prompt_length", "data.max_response_length")
TRIGGER = "async_training.trigger_parameter_sync_step"
GROUP = 8
STEPS_ON_GPUS, STEPS_ON_CPU = 200, 100
"""Optimizer steps of a first run."""
WARMUP = 10
"""Optimizer steps of warm-up, a tenth of the run at most."""
MOST_PASSES = 15
HELD_OUT = 128


def choose(
    model: ModelFacts, data: DataFacts, machine: Machine, given: Mapping[str, Any], *, name: str
) -> list[Choice]:
    """Return the choices for a run called ``name``. ``given``: the user's settings by dotted key.

    Raises:
        ConfigError: the model and its answers do not fit on these devices; the message says what would.
    """
    prompt, response = _lengths(model, data, machine, given)
    while True:
        made = Choices(given)
        try:
            mode, data_ranks = choose_devices(made, model, machine, prompt[0] + response[0])
            made.add("run.name", name)
            made.add("model.path", model.path, _describe(model))
            _data(made, data, prompt, response)
            _reward(made, data, machine)
            _batch(made, model, data, machine, mode, data_ranks)
            made.add("trainer.save_freq", 10, "versions between two checkpoints; two are kept")
            return within_memory(made.finished(), model, machine)
        except ConfigError:
            if "data.max_response_length" in given or response[0] < 2 * ANSWERS["own"]:
                raise
            half = _up(response[0] // 2)
            response = (half, f"longer answers do not fit on these devices; {response[0]} would be room to reason")


# ------------------------------------------------------------------------------------------ lengths


def _lengths(
    model: ModelFacts, data: DataFacts, machine: Machine, given: Mapping[str, Any]
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Return the maximum number of tokens of prompts and of answers, each with the reason."""
    prompts, positions = data.prompts, model.positions
    how = "" if data.measured else ", guessed by characters as there is no tokenizer"
    longest = prompts.longest <= max(512, 3 * prompts.p99 // 2)
    most = _up(prompts.longest if longest else prompts.p99)
    response, why = _wanted(model, data, machine)
    if any(lies_in(key, *PROGRAMS) for key in given):
        turns = int(given.get("agent.max_turns", AgentConfig.model_fields["max_turns"].default))
        turn, last = min(TURN, response), response
        response = last + (turns - 1) * (turn + TOLD)
        why = f"{turns} turns: {turn} tokens and {TOLD} told after each, and {last} for the last one"
    response = int(given.get("data.max_response_length", _up(response)))
    if positions is not None:
        limit = positions - (response if "data.max_response_length" in given else min(positions // 4, response))
        most = min(most, limit) if limit > 0 else most
    most = int(given.get("data.max_prompt_length", most))
    left_out = sum(tokens > most for tokens in data.tokens) / len(data.tokens)
    told = f"median {prompts.median}, 99% {prompts.p99}, longest {prompts.longest} tokens{how}"
    if left_out > 0.5:
        raise ConfigError(
            f"{data.given}: data.max_prompt_length={most} leaves out {left_out:.0%} of the prompts ({told}), and "
            f"{model.path} has {positions} positions for prompt and answer. Raise it, or give shorter prompts, or a "
            "model with more positions"
        )
    few = "few are left out" if prompts.longest > most else "none is left out"
    reason = f"{told}; {f'{left_out:.1%} are left out' if left_out else few}"
    if positions is not None and most + response > positions and "data.max_response_length" not in given:
        response, why = positions - most, f"what the model's {positions} positions leave"
        if response < 1:
            raise ConfigError(
                f"data.max_prompt_length={most} leaves no room for an answer in the {positions} positions of "
                f"{model.path}; lower it"
            )
    return (most, reason), (response, why)


def _wanted(model: ModelFacts, data: DataFacts, machine: Machine) -> tuple[int, str]:
    """Return the number of tokens that an answer should have room for, and the reason."""
    answers, kind = data.answers, data.reward.kind
    twice = 2 * answers.p99 if answers is not None else 0
    told = (
        f"ground truths have {answers.longest} tokens at most" if answers is not None else "there are no ground truths"
    )
    if model.shape.parameters < SMALL and answers is not None:
        return max(LEAST_ANSWER, twice), f"{told}, and so small a model answers at once"
    if machine.on_cpu and kind != "text":
        return max(ANSWERS["choice"], twice), "CPUs take long for longer answers; raise it if many are cut off"
    if model.thinks and kind != "text":
        return max(THOUGHTS, twice), "the chat template has a place for thoughts, which take most of it"
    if kind == "text":
        return max(LEAST_ANSWER, twice), f"{told}, and an answer is just that"
    usual = ANSWERS[kind]
    return max(usual, twice), (
        f"twice the longest ground truths ({told})" if twice > usual else "room to reason; raise it if many are cut off"
    )


def _up(number: int) -> int:
    """Round up to a number that is easily read."""
    step = 8 if number <= 64 else 32 if number <= 512 else 128
    return -(-number // step) * step


# ------------------------------------------------------------------------------------------ sections


def _describe(model: ModelFacts) -> str:
    chats = "a chat template" if model.chats else "no chat template: a base model"
    positions = f", {model.positions} positions" if model.positions is not None else ""
    return f"{model.family}, {model.size} parameters{positions}, {chats}"


def _data(made: Choices, data: DataFacts, prompt: tuple[int, str], response: tuple[int, str]) -> None:
    for key, value in data.settings.items():
        if key in LENGTHS:
            continue
        reason = {
            "data.prompt_key": _prompts(data),
            "data.answer_key": "unit tests" if data.reward.kind == "code" else "the ground truth",
        }.get(key, f"{data.rows} rows" if key in ("data.train", "data.train.dataset") else "")
        if value == data.settings.get("data.prompt_key", "prompt") and key == "data.answer_key":
            reason = "there is no ground truth, and the reward needs none"
        made.add(key, value, reason)
    if data.template == "always":
        made.add("data.chat_template", "always", "prompts are text, and the model was trained on chats")
    if data.is_task:
        made.add("data.task.val_size", HELD_OUT, "held-out problems")
    elif not _has_val(data) and "data.val_size" not in data.settings:
        made.add("data.val_size", held_out(data), "rows held out; or val: a file of its own")
    made.add("data.max_prompt_length", *prompt)
    made.add("data.max_response_length", *response)


def _prompts(data: DataFacts) -> str:
    if data.answers_within:
        return "chat messages; what the assistant says in the last is the ground truth"
    return "chat messages" if data.chats else "text"


def held_out(data: DataFacts) -> int:
    """Return the number of validation rows: by default at most a tenth, 0 if there are validation data."""
    if data.is_task or _has_val(data):
        return 0
    return int(data.settings.get("data.val_size", min(HELD_OUT, data.rows // 10 or min(1, data.rows - 1))))


def _has_val(data: DataFacts) -> bool:
    return any(lies_in(key, "data.val") for key in data.settings)


def _reward(made: Choices, data: DataFacts, machine: Machine) -> None:
    made.add("reward.function", data.reward.function, data.reward.reason)
    for name, value in data.reward.params.items():
        made.add(f"reward.params.{name}", value)
    workers = min(8, machine.cores // 4)
    if workers > 1:
        made.add("reward.workers", workers, f"processes; there are {machine.cores} cores")


def _batch(made: Choices, model: ModelFacts, data: DataFacts, machine: Machine, mode: str, data_ranks: int) -> None:
    """Choose the groups of an optimizer step and of the run, and the settings that follow from their numbers."""
    given = made.given
    trigger = int(given.get(TRIGGER, preset(mode)[TRIGGER]))
    rows = max(1, data.rows - held_out(data))
    usual = 16 if machine.on_cpu else 32
    mini, why = max(usual, data_ranks), ""
    if mini * trigger > rows:
        mini, why = max(1, rows // trigger), f", all that {rows} {'row' if rows == 1 else 'rows'} allow"
    elif mini > usual:
        why = f"; a group for each of {mini} ranks"
    if mini < data_ranks:
        why += f"; {data_ranks} ranks are more than have use for that"
    mini = int(given.get("actor.ppo_mini_batch_size", mini))
    version = mini * trigger * int(given.get("async_training.require_batches", 1))
    most = STEPS_ON_CPU if machine.on_cpu else STEPS_ON_GPUS
    versions = min(most // trigger, MOST_PASSES * rows // version)
    if "rollout.total_rollout_steps" in given:
        versions = int(given["rollout.total_rollout_steps"]) // version
    elif "data.epochs" in given:
        versions = int(float(given["data.epochs"]) * rows) // version
    total = max(1, versions) * version
    steps = total // mini
    n = made.add("rollout.n", GROUP, "answers to each prompt, compared with each other")
    if "data.epochs" not in given:
        run = f"groups of the run: {steps} optimizer steps, {total / rows:.2g} passes over the data"
        made.add("rollout.total_rollout_steps", total, run)
    if data.is_task or _has_val(data) or held_out(data):
        made.add("rollout.test_freq", 5, "versions between two validations")
    of_version = "one such step is" if trigger == 1 else f"{trigger} such steps are"
    step = f"groups of an optimizer step: {mini * int(n)} answers; {of_version} a version{why}"
    made.add("actor.ppo_mini_batch_size", mini, step)
    rate = next(rate for least, rate in RATES if model.shape.parameters >= least)
    made.add("actor.optim.lr", rate, f"usual for {model.size} parameters")
    if warmup := min(WARMUP, steps // 10):
        made.add("actor.optim.lr_warmup_steps", warmup, "optimizer steps")


WIDTH = 110
COMMENTS_FROM = 34
"""Column where comments begin, unless the value before them is longer."""
SECTIONS = ("mode", "run", "model", "data", "reward", "rollout", "actor", "algorithm", "trainer", "cluster")


def render(choices: Sequence[Choice], header: Sequence[str]) -> str:
    """Return the text of a recipe with ``choices`` and their reasons, under the lines of ``header``.

    Lines that begin with spaces are commands, and are not wrapped.
    """
    reasons = {choice.key: choice.reason for choice in choices}
    order = {name: place for place, name in enumerate(SECTIONS)}
    placed = sorted(choices, key=lambda choice: order.get(choice.key.partition(".")[0], len(order)))
    lines = [f"# {part}" for line in header for part in ([line] if line[:1] == " " else _wrapped(line, WIDTH - 2))]

    def commented(key: str, line: str, indent: str) -> list[str]:
        reason = reasons.get(key, "")
        with_reason = f"{line.ljust(COMMENTS_FROM - 2)}  # {reason}" if reason else line
        if len(with_reason) <= WIDTH:
            return [with_reason]
        return [*(f"{indent}# {part}" for part in _wrapped(reason, WIDTH - len(indent) - 2)), line]

    # Nested and flattened: keys of one section come together.
    grouped = dict(flatten(nest({choice.key: choice.value for choice in placed})))
    return "".join(f"{line}\n" for line in [*lines, *recipe_text.sections(grouped, commented)])


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
