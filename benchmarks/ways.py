"""``python -m benchmarks.ways``: the files and functions that a group, a weight tensor and a tool-calling turn pass.

Each way is traced in a run in one process. A function of Headway is on a way where its arguments or its result have
something of it: a seed, or a data class, tuple, list or mapping that holds one at most three levels down. Each function
counts once, however often it is called, and only where a function of another file calls it.

- group: a run of one group of two answers, less its two validations, whose problems go a way of their own; seeds are
  the prompt, the answers' ids, their tokens and their rows.
- tensor: an update to one replica, from the optimizer's step on; seeds are tensors, buffers and the tensor's name.
- turn: one call of a tool by a program in a process of its own, whose functions count, too; a scripted engine stands in
  for the replica. Seeds are the turn's request and answer, the call of the policy and the call of the tool.

Shapes are the data classes that hold a seed: those that were seen before the first token was sampled are the request's.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from benchmarks.runner import parser

ROOT = Path(__file__).resolve().parent.parent
HOUSE = str(ROOT / "src" / "headway") + "/"
DEPTH = 3
NAME = "model.norm.weight"
RECIPE = """
mode: on_policy
model: {path: FOLDER/model}
data: {task: {name: sort, size: 16, val_size: 8}, max_prompt_length: 32, max_response_length: 6}
reward: {function: exact_match}
rollout: {n: 2, total_rollout_steps: 1, test_freq: -1, threads: 1}
actor: {ppo_mini_batch_size: 1, ppo_max_token_len_per_gpu: 256}
trainer: {threads: 1}
cluster: {backend: inline}
"""
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16, "intermediate_size": 64}
TOOL = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.ways import Way, is_of_a_turn
Way(is_of_a_turn, {log!r}).install()

def add(a: int, b: int) -> int:
    '''Add.

    Args:
        a: a number
        b: another
    '''
    return a + b
"""
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


class Way:
    """The functions that get or give something of one way, and the data classes in which it travels."""

    def __init__(self, is_seed: Callable[[object], bool], log: str | None = None) -> None:
        """``log``: a file that gets a line for each function, for a process that is ended from outside."""
        self._is_seed, self._log = is_seed, log
        self.functions: dict[str, None] = {}
        self.requests: set[str] = set()
        self.results: set[str] = set()
        self._sampled = False

    def install(self) -> None:
        """Look at the calls of this thread, and of those that start from here on."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def _on_event(self, frame: FrameType, event: str, value: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(HOUSE):
            return
        values = [value]
        if event == "call":
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
            values = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
        where = f"{code.co_filename.removeprefix(HOUSE)}:{code.co_qualname}"
        found = [self._holds(value, DEPTH) for value in values if value is not None]  # all of them, for their shapes
        crosses = frame.f_back is None or frame.f_back.f_code.co_filename != code.co_filename
        if any(found) and crosses and "<" not in code.co_name and where not in self.functions:
            self.functions[where] = None
            if self._log is not None:
                with Path(self._log).open("a") as file:
                    file.write(where + "\n")

    def _holds(self, value: object, depth: int) -> bool:
        kind = type(value)
        name = kind.__name__
        data = kind.__module__.startswith("headway.") and (is_dataclass(kind) or hasattr(kind, "_fields"))
        held = self._is_seed(value)
        if depth and not held:
            held = bool(
                sum(self._holds(one, depth - 1) for one in _inside(value, data))
            )  # all of them, for their shapes
        if held and data:
            self._sampled |= name in ("SampledTokens", "Completion")
            if name not in self.requests:
                (self.results if self._sampled else self.requests).add(name)
        return held


def _inside(value: object, data: bool) -> Sequence[object]:
    """Return what ``value`` holds; ``data``: it is of a data class of Headway's."""
    if is_dataclass(value) and data:
        return [getattr(value, one.name, None) for one in fields(value)]
    if isinstance(value, Mapping):
        return list(value.values())[:8] + list(value)[:8]
    return value[:8] if isinstance(value, tuple | list) else ()


@contextlib.contextmanager
def traced(is_seed: Callable[[object], bool]) -> Iterator[Way]:
    """Look at the calls of the block."""
    way = Way(is_seed)
    way.install()
    try:
        yield way
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


class TrainedGroup:
    """Seeds of groups that are trained: not those of held-out problems, which validations before and after answer."""

    def __init__(self, held_out: Collection[int] = ()) -> None:
        """``held_out``: numbers of the rows that validations have."""
        self._held_out = held_out
        self._prompts: set[bytes] = set()
        self._asked = False
        """An answer was asked for. Before that, tokens are a validation's, which ends first."""

    def __call__(self, value: Any) -> bool:
        match type(value).__name__:
            case "Prompt":
                if value.row in self._held_out:
                    return False
                self._prompts.add(value.token_ids.tobytes())
                return True
            case "TrajectoryId":
                self._asked |= value.row not in self._held_out
                return value.row not in self._held_out
            case "SampledTokens":
                return self._asked
            case "RowTokens":
                return self._asked and value.prompt_ids.tobytes() in self._prompts
        return False


def is_of_a_turn(value: object) -> bool:
    if isinstance(value, bytes | bytearray | memoryview):
        return any(name in bytes(value) for name in (b"TurnRequest", b"TurnAnswer"))
    return type(value).__name__ in ("TurnRequest", "TurnAnswer", "ToolCall", "GenerateRequest", "Completion")


def prepared(folder: Path) -> Path:
    """Write the recipe, and the model that it names, into ``folder``."""
    from headway.config.sections.model_section import MakeModelConfig
    from headway.models.made_model import make_model

    make_model(MakeModelConfig(**SMALL), 0, folder / "model")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(folder)))
    return recipe


def train(recipe: Path) -> None:
    """Train one group in this process."""
    from headway.cli import cli

    cli(["train", str(recipe), f"run.dir={recipe.parent / 'run'}"], standalone_mode=False)


def group(folder: Path) -> Way:
    """Trace a run of one group, without the validations before and after it."""
    from headway.config.loading import load
    from headway.data.rows import read_rows

    recipe = prepared(folder)
    rows = read_rows(load(recipe).config)
    with traced(TrainedGroup(frozenset(rows.val_rows))) as way:
        train(recipe)
    return way


def tensor(folder: Path) -> Way:
    """Trace an update of the weights, from the step to the end of the update."""
    import torch

    def is_seed(value: object) -> bool:
        nonlocal under_way
        if type(value).__name__ in ("OptimizerStepped", "UpdateFinished"):
            under_way = type(value).__name__ == "OptimizerStepped"
        return under_way and (isinstance(value, torch.Tensor) or (isinstance(value, str) and value == NAME))

    under_way = False
    recipe = prepared(folder)
    with traced(is_seed) as way:
        train(recipe)
    return way


def turn(folder: Path) -> Way:
    """Trace a turn in which the policy calls a tool, and the tool."""
    from benchmarks.episodes import SleepingEngine, chats
    from headway.agents.adapters.program_loader import ProgramSpec
    from headway.agents.episodes.episode_limits import EpisodeLimits
    from headway.agents.episodes.episode_worker import local_episode_worker
    from headway.agents.episodes.program_episode import Hosting
    from headway.agents.interface.program_messages import said
    from headway.data.interfaces.episode_groups import Group
    from headway.data.interfaces.rollout import SamplingParams
    from headway.data.types import Prompt
    from headway.runtime.workers.worker_pool import WorkerPool

    log = folder / "turn.txt"
    (folder / "tools.py").write_text(TOOL.format(root=str(ROOT), log=str(log)))

    async def play() -> None:
        made, answer = chats(TEMPLATE, CALL)
        limits = EpisodeLimits(max_length=100_000, max_turns=1)
        spec = ProgramSpec(tools=(f"{folder}/tools.py:add",)).resolved()
        runners = WorkerPool("runner", spec, processes=1, at_once=None, stall_s=60.0, log_path=folder / "log")
        hosting = Hosting(runners, made.new_episode, limits, stop_ids=tuple(made.renderer.end_ids))
        engine = SleepingEngine(lambda call: 0.0, answer)
        prompt = Prompt(0, 0, 0, "", "", np.zeros(1, np.int32), messages=[said("user", "add")])
        async with local_episode_worker(engine, hosting=hosting) as worker:
            async for _ in worker.generate([Group(0, prompt, 1, SamplingParams(1000))]):
                pass

    with traced(is_of_a_turn) as way:
        asyncio.run(play())
    way.functions |= dict.fromkeys(log.read_text().splitlines())
    return way


WAYS = {"group": group, "tensor": tensor, "turn": turn}


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each way, and with ``--functions`` its functions and shapes."""
    options = {"only": {"choices": WAYS, "action": "append"}, "functions": False}
    given = parser("ways", __doc__.partition("\n")[0], **options).parse_args(arguments)
    for name in given.only or WAYS:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            way = WAYS[name](Path(folder))
        files = {function.partition(":")[0] for function in way.functions}
        shapes = f"{len(way.requests)} + {len(way.results)} shapes"
        print(f"{name:<8} {len(files):>3} files  {len(way.functions):>3} calls  {shapes}")
        if given.functions:
            print(*way.functions, f"requests: {way.requests}", f"results: {way.results}", sep="\n")


if __name__ == "__main__":
    main()
