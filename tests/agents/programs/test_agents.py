"""Agents: Python of several forms and commands, what they are given, and what becomes of what they return."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from headway.agents.adapters.program_loader import ProgramSpec
from headway.agents.adapters.user_programs import tail_of
from headway.agents.adapters.verl_forms import VerlLoop
from headway.agents.interface.program_messages import Access, EpisodeEnd, EpisodeStart, TurnAnswer, TurnRequest, said
from headway.errors import ProgramFailed, UserCodeError

WITH_OPENAI = pytest.mark.skipif(
    find_spec("openai") is None, reason="an agent's HTTP client is that of OpenAI's package"
)

ACCESS = Access("http://127.0.0.1:9/v1", "hw-key", tokenizer="runs/guess/model")
AGENTS = """
import functools

async def given(row, base_url, api_key):
    assert row["prompt"] == row["messages"] == [{"role": "user", "content": "begin"}]
    return float((row["answer"], base_url, api_key) == (5, "http://127.0.0.1:9/v1", "hw-key"))

def plainly(data, base_url, bonus=1):
    return bonus

async def makes_ids(row, model, tokenizer):
    return float((model, tokenizer) == ("policy", "runs/guess/model"))

class AReaL:
    def __init__(self, scale=1.0):
        self.scale = scale
    async def run(self, data, **kwargs):
        assert sorted(kwargs) == ["api_key", "base_url", "http_client"]
        assert kwargs["http_client"] is not None and not kwargs["http_client"].is_closed
        return {f"chatcmpl-0-{TAG}": 0.5 * self.scale, f"resp-2-{TAG}": self.scale}

async def closes(row, http_client, seen):
    seen.append(http_client)
    if len(seen) == 1:
        await http_client.aclose()
    return float(http_client.is_closed)

def blocks(row, http_client, seen):
    seen.append(http_client)
    return float(http_client.is_closed)

async def by_unknown_ids(row, api_key):
    return {"answer": 1.0}

async def by_ids_of_another_episode(row, api_key):
    return {"chatcmpl-0-0123456789abcdef": 1.0}

async def nothing(row):
    return None

async def wrong(row):
    return "good"

async def without_row():
    return 1.0

async def needs_more(row, api_key, sandbox):
    return 1.0

async def yields(row):
    yield 1.0

class Yields:
    def run(self, data, **kwargs):
        yield 1.0

class Called:
    async def __call__(self, row):
        yield 1.0

called = functools.partial(Called())
"""


def start(**settings: Any) -> EpisodeStart:
    given = {"access": ACCESS, "sampling": {"temperature": 1.0}, "most_tokens": 99, **settings}
    return EpisodeStart("episode (0, 7, 0, 1)", [said("user", "begin")], {"answer": 5}, 17, **given)


async def nobody(request: TurnRequest) -> TurnAnswer:
    raise AssertionError("an agent asks over HTTP")


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "agents.py").write_text(AGENTS.replace("{TAG}", ACCESS.tag).replace('f"', '"'))
    return f"{tmp_path}/agents.py"


def end_of(spec: ProgramSpec, **settings: Any) -> EpisodeEnd:
    """The end of one episode, on a loop, or, for what blocks, without one."""
    program = spec.load()
    if program.is_async:
        return asyncio.run(program.serve(start(**settings), nobody))
    serving = program.serve(start(**settings), nobody)
    try:
        serving.send(None)
    except StopIteration as stopped:
        end: EpisodeEnd = stopped.value
        return end
    raise AssertionError("it waited for a loop")


@pytest.mark.parametrize(
    ("name", "params", "is_async", "reward", "answer_rewards"),
    [
        ("given", {}, True, 1.0, None),
        ("plainly", {"bonus": 3}, False, 3.0, None),
        ("makes_ids", {}, True, 1.0, None),
        pytest.param("AReaL", {"scale": 2.0}, True, None, {0: 1.0, 2: 2.0}, marks=WITH_OPENAI),
        ("nothing", {}, True, None, None),
    ],
)
def test_an_agent_gets_what_it_has_parameters_for(
    file: str, name: str, params: dict[str, Any], is_async: bool, reward: float | None, answer_rewards: Any
) -> None:
    spec = ProgramSpec(agent=f"{file}:{name}", params=params)
    described = spec.load().describe()
    assert described.is_async == is_async
    end = end_of(spec)
    assert (end.reward, end.answer_rewards, end.turn_rewards) == (reward, answer_rewards, ())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("without_row", "it takes no row of the data; an agent is async def run(row, base_url, api_key)"),
        (
            "needs_more",
            "there is nothing for its parameter 'sandbox': behind the row, arguments are given by name",
        ),
        ("yields", "it yields, and so returns no reward"),
        ("Yields", "it yields, and so returns no reward"),
        ("called", "it yields, and so returns no reward"),
    ],
)
def test_what_is_no_agent_is_refused_before_a_run(file: str, name: str, said: str) -> None:
    with pytest.raises(UserCodeError) as refused:
        ProgramSpec(agent=f"{file}:{name}").load()
    assert said in str(refused.value)


@WITH_OPENAI
def test_an_agent_may_close_its_http_client_which_is_its_own_and_ends_with_the_episode(file: str) -> None:
    for name, closed in (("closes", [1.0, 0.0]), ("blocks", [0.0, 0.0])):
        clients: list[Any] = []
        spec = ProgramSpec(agent=f"{file}:{name}", params={"seen": clients})
        assert [end_of(spec).reward for _ in range(2)] == closed
        assert all(client.is_closed for client in clients)
        assert clients[0] is not clients[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("by_unknown_ids", "a reward for 'answer', which is the id of no answer"),
        ("by_ids_of_another_episode", "which is the id of no answer in this episode"),
        ("wrong", "returned 'good', expected a number"),
    ],
)
def test_a_reward_that_is_none_fails_the_episode(file: str, name: str, said: str) -> None:
    with pytest.raises(ProgramFailed) as failed:
        end_of(ProgramSpec(agent=f"{file}:{name}"))
    assert said in str(failed.value)


def command(code: str, directory: Path) -> ProgramSpec:
    return ProgramSpec(command=("python", "-c", code), directory=str(directory))


def test_a_command_reads_the_row_and_its_last_line_is_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)  # `python` is the one of this environment all the same
    code = (
        f"import json, os, sys; assert sys.prefix == {sys.prefix!r}; "
        "row = json.load(sys.stdin); print('working', row['answer']); "
        "print(json.dumps({'reward': row['answer'] / 10, 'url': os.environ['OPENAI_BASE_URL']})); "
        "assert os.environ['ANTHROPIC_BASE_URL'] + '/v1' == os.environ['OPENAI_BASE_URL']; "
        "assert os.environ['OPENAI_API_KEY'] == 'hw-key'; open('here', 'w').close()"
    )
    assert end_of(command(code, tmp_path)).reward == 0.5
    assert (tmp_path / "here").exists()


@pytest.mark.parametrize("mark", ["\u2028", "\x85"])
def test_only_a_newline_ends_a_line_of_a_command(tmp_path: Path, mark: str) -> None:
    line = json.dumps({"said": f"a{mark}b", "reward": 0.5}, ensure_ascii=False)
    code = f"import sys; sys.stdout.buffer.write(({line!r} + '\\n\\n').encode())"
    assert end_of(command(code, tmp_path)).reward == 0.5


async def test_of_what_a_command_prints_the_end_is_kept() -> None:
    stream = asyncio.StreamReader()
    stream.feed_data(b"x" * 2**21 + b"\n0.5\n")
    stream.feed_eof()
    kept = await tail_of(stream)
    assert (len(kept), kept[-6:]) == (2**20, b"x\n0.5\n")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('done')", "it printed 'done' as its last line; expected a number"),
        ("import sys; print('no key', file=sys.stderr); sys.exit(3)", "ended with status 3: no key"),
        ('print(\'{"reward": "high"}\')', "the reward in its last line is 'high'"),
        ("print('x' * 3_000_000); print('NaN')", "expected a finite number"),
    ],
)
def test_a_command_that_fails_or_gives_no_reward_fails_its_episode(tmp_path: Path, code: str, said: str) -> None:
    with pytest.raises(ProgramFailed) as failed:
        end_of(command(code, tmp_path))
    assert said in str(failed.value)


def test_a_command_that_is_not_there_is_refused_before_a_run() -> None:
    with pytest.raises(UserCodeError, match="no program 'no-such-agent'"):
        ProgramSpec(command=("no-such-agent",)).load()


def test_what_a_command_starts_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('{\"reward\": %d}' % p.pid)"
    )
    left = int(end_of(command(code, tmp_path)).reward or 0)
    stat = Path(f"/proc/{left}/stat")
    for _ in range(1000):  # it was killed; its end is the kernel's, in its own time
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.01)
    raise AssertionError("it goes on")


LOOPS = """
from types import SimpleNamespace as Output

class Loop:
    def __init__(self, trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config, **kwargs):
        self.server_manager = server_manager
        rollout = trainer_config.config.actor_rollout_ref.rollout
        self.lengths = rollout.prompt_length, rollout.response_length, rollout.max_model_len

    async def run(self, sampling_params, **row):
        assert row["raw_prompt"] == [{"role": "user", "content": "begin"}] and self.lengths == (30, 69, 99)
        assert sampling_params == {"temperature": 1.0}
        ids, sampled, mask = [1, 2], [], []
        for _ in range(2):
            said = await self.server_manager.generate("id", prompt_ids=ids + sampled, sampling_params=sampling_params)
            sampled += [*said.token_ids, 9]
            mask += [1] * len(said.token_ids) + [0]
        return Output(prompt_ids=ids, response_ids=sampled, response_mask=mask, reward_score=0.25,
                      num_turns=2, metrics={"tool_calls": 2}, extra_fields={})

class Lies(Loop):
    async def run(self, sampling_params, **row):
        await self.server_manager.generate("id", prompt_ids=[1], sampling_params={})
        return Output(prompt_ids=[1], response_ids=[3, 8], response_mask=[1, 1], reward_score=1.0)

class Ends(Loop):
    async def run(self, sampling_params, **row):
        ends = {"stop_token_ids": list(range(self.lengths[1]))}
        await self.server_manager.generate("id", prompt_ids=[1], sampling_params=ends)

class Nothing(Loop):
    async def run(self, sampling_params, **row):
        return None

class Stands:
    def __init__(self):
        pass

    async def run(self, sampling_params, **row):
        said = await self.server_manager.generate("id", prompt_ids=[1], sampling_params={})
        return Output(prompt_ids=[1], response_ids=said.token_ids, response_mask=[1, 1], reward_score=1,
                      metrics={"told": 1, "mean": float("nan"), "most": float("inf")})

stands = Stands()

class Plain(Loop):
    def run(self, sampling_params, **row):
        return None
"""


async def continued(request: TurnRequest) -> TurnAnswer:
    assert request.token_ids is not None
    n = len(request.token_ids)
    return TurnAnswer("", "", said("assistant", ""), token_ids=(3, n), logprobs=(-0.5, -1.0))


def test_an_agent_loop_of_verls_form_runs_without_verl(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    program = ProgramSpec(program=f"{tmp_path}/loops.py:Loop", prompt_length=30).load()
    assert isinstance(program, VerlLoop)
    end = asyncio.run(program.serve(start(access=None), continued))
    assert (end.reward, dict(end.metrics)) == (0.25, {"tool_calls": 2.0})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Lies", "response_mask is 1 at token 1 of response_ids (8), which was not sampled"),
        ("Nothing", "returned None"),
        ("Ends", "there are 200 tokens that end an answer (stop_token_ids); give at most 128"),
    ],
)
def test_an_agent_loop_that_says_or_asks_for_what_cannot_be_fails_its_episode(
    tmp_path: Path, name: str, said: str
) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    program = ProgramSpec(program=f"{tmp_path}/loops.py:{name}").load()
    with pytest.raises(ProgramFailed) as failed:
        asyncio.run(program.serve(start(access=None, most_tokens=200), continued))
    assert said in str(failed.value)


def test_an_agent_loop_that_blocks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    with pytest.raises(UserCodeError, match=r"run\(\) is a plain function"):
        ProgramSpec(program=f"{tmp_path}/loops.py:Plain").load()


def test_a_class_that_stands_alone_is_an_agent_loop_and_an_object_is_none(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOPS)
    program = ProgramSpec(program=f"{tmp_path}/loops.py:Stands").load()
    end = asyncio.run(program.serve(start(access=None), continued))
    assert (end.reward, dict(end.metrics)) == (1.0, {"told": 1.0})  # no mean that is none
    with pytest.raises(UserCodeError, match=r"loops\.py:stands: it is an object.* its class"):
        ProgramSpec(program=f"{tmp_path}/loops.py:stands").load()
