"""The form of user code is recognised by what it has, and what has none is told what each form has."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from headway.agents.adapters.mcp_servers import CLOSE_TIMEOUT_S, McpServerSpec
from headway.agents.adapters.program_loader import ProgramSpec
from headway.errors import UserCodeError

METHODS = {
    "reset": "def reset(self, **row): ...",
    "seeded": "def reset(self, seed=None): ...",
    "step": "def step(self, action): ...",
    "tool step": "def step(self, action: str) -> str: 'a tool'",
    "init": "def init(self, prompt): ...",
    "get_reward": "def get_reward(self): ...",
    "look": "def look(self) -> str:\n            '''Look.'''",
    "nothing": "x = 1",
}


def a_class(*methods: str, bases: str = "", head: str = "") -> str:
    body = "\n        ".join(METHODS[method] for method in methods)
    return f"\n    {head}\n    class Game({bases}):\n        {body}\n"


@pytest.mark.parametrize(
    ("methods", "form"),
    [
        (("reset", "look"), "TRL"),
        (("reset", "get_reward"), "TRL"),
        (("reset", "tool step"), "TRL"),
        (("seeded", "step", "get_reward"), "TRL"),
        (("seeded", "step"), "Gymnasium and GEM"),
        (("reset", "step"), "Gymnasium and GEM"),
        (("seeded", "tool step"), "Gymnasium and GEM"),
        (("init", "step"), "SkyRL-gym"),
        (("init", "step", "seeded"), "SkyRL-gym"),
    ],
)
def test_an_environment_is_recognised_by_its_methods(environment, methods, form):
    program = environment(a_class(*methods)).load()
    assert type(program).__name__ == {"TRL": "TrlProgram", "SkyRL-gym": "SkyrlProgram"}.get(form, "GymProgram")


def test_a_class_of_gymnasiums_is_an_environment_of_its_form_whatever_else_it_has(environment):
    base = "Base = type('Env', (), {'__module__': 'gymnasium.core'})"
    program = environment(a_class("seeded", "step", "get_reward", bases="Base", head=base)).load()
    assert type(program).__name__ == "GymProgram"


def test_an_environment_of_no_form_is_told_what_each_form_has_and_what_it_has(environment):
    with pytest.raises(UserCodeError) as refused:
        environment(a_class("step", "get_reward")).load()
    assert str(refused.value) == (
        "environment game.py:Game: Game has none of the forms of an environment: TRL's, reset(**row) and get_reward() "
        "or methods that are tools; Gymnasium's and GEM's, reset(seed) and step(action); SkyRL-gym's, init(prompt) and "
        "step(action). It has get_reward(), step()"
    )
    with pytest.raises(UserCodeError, match=r"It has no public methods$"):
        environment(a_class("nothing"), file="other.py").load()


def test_an_environment_with_a_reset_alone_needs_tools(environment, tools):
    spec = environment(a_class("reset"))
    with pytest.raises(UserCodeError, match=r"It has reset\(\)$"):
        spec.load()
    more = tools('def look() -> int:\n    """Look."""\n    return 1', "look")
    ProgramSpec(environment=spec.environment, tools=more.tools).load()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("agent", r"async function; name it in agent\.program"),
        ("Agent", r"it has run\(\), .*agent\.program"),
        (
            "game",
            r"it is <.*Game.*>, .*its class",
        ),
        ("nobody", "has no 'nobody'"),
        ("nothing", r"NoneType has none"),
    ],
)
def test_what_is_no_environment_is_refused_with_what_to_do(environment, name, message):
    more = """
    async def agent(row, chat): ...
    class Agent:
        async def run(self, row, chat): ...
    game = Game()
    def nothing(): ...
    """
    with pytest.raises(UserCodeError, match=message):
        environment(a_class("reset", "look") + more, name).load()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            ProgramSpec(tools=("a.py:f",), program="b.py:b"),
            "agent.tools beside program b.py:b",
        ),
        (ProgramSpec(environment="nowhere.py:A"), "nowhere.py:A: .*no file "),
    ],
)
def test_specs_that_contradict_themselves_are_refused(spec, message):
    with pytest.raises(UserCodeError, match=message):
        spec.load()


def test_a_load_may_wait_for_each_server_and_its_end():
    servers = (McpServerSpec("near", timeout_s=5.0), McpServerSpec("far", timeout_s=60.0))
    assert ProgramSpec(mcp=servers).waits_s == 2 * (5.0 + 60.0) + 4 * CLOSE_TIMEOUT_S
    assert ProgramSpec(environment="ws://far", params={"timeout_s": 7.0}).waits_s == 7.0
    assert ProgramSpec(environment="game.py:Game").waits_s == 0.0


def test_a_spec_pickles_and_is_found_from_another_folder(environment, tmp_path, monkeypatch):
    environment(a_class("seeded", "step"))
    monkeypatch.chdir(tmp_path)
    spec = ProgramSpec(environment="game.py:Game", tools=("game.py:f",), params={"x": 1}).resolved()
    assert spec == pickle.loads(pickle.dumps(spec))
    assert spec.environment == f"{tmp_path}/game.py:Game"
    assert spec.tools == (f"{tmp_path}/game.py:f",)
    assert spec.shown == "environment game.py:Game"


def test_a_process_for_user_code_imports_neither_torch_nor_numpy():
    code = (
        "import sys; import headway.agents.adapters.program_loader; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'ray', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_a_process_for_tools_imports_no_torch(tmp_path):
    (tmp_path / "tools.py").write_text(
        'def f(a: list[int]) -> int:\n    """Do.\n\n    Args:\n        a: a\n    """\n    return 0\n'
    )
    code = (
        "import sys; from headway.agents.adapters.program_loader import load_tools; "
        f"load_tools(['{tmp_path}/tools.py:f']); "
        "print('transformers' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "True False\n"
