"""Inputs that are wrong, one for each row of docs/errors.md, and how a folder of good ones is spoiled for each."""

from __future__ import annotations

import gzip
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headway.api.checks import preflight

RECIPE = """\
mode: on_policy
model: {path: model}
data: {train: train.jsonl, val_size: 2, max_prompt_length: 16, max_response_length: 8}
reward: {function: exact_match}
rollout: {n: 2, total_rollout_steps: 4, max_concurrent: 4, threads: 1}
actor: {ppo_mini_batch_size: 2}
trainer: {threads: 1}
cluster: {backend: inline, device: cpu}
reports: {live: off, trackers: []}
run: {dir: run}
"""
ROWS = "".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(6))
CHATS = '{"prompt": [{"role": "user", "content": "1="}], "answer": "1"}\n' * 6
CORRECTED = ("async_training.use_rollout_log_probs=false", "algorithm.rollout_correction.name=truncate")
ELSEWHERE = ("rollout.name=vllm", "cluster.address=localhost:6379")
"""Another machine, where vLLM may be, to serve what the native engine does not."""
SCORE = "def score(response, answer):\n"
PROGRAM = "async def run(row, chat): ...\n"
AGENT = "async def run(row, base_url, api_key): ...\n"

Prepare = Callable[[Path], object]
"""Does something wrong in the folder in which the command will run."""


@dataclass(frozen=True)
class Case:
    arguments: tuple[str, ...] = ()
    """What is typed after ``headway train recipe.yaml``, unless `command` is given."""
    prepare: Prepare = lambda folder: None
    command: tuple[str, ...] = ("train", "recipe.yaml")
    dry: bool = True
    """Whether ``--dry-run`` finds it, too: without torch, in an instant."""


def setting(*arguments: str, dry: bool = True) -> Case:
    return Case(arguments, dry=dry)


def recipe(text: str) -> Case:
    return written("recipe.yaml", text)


def written(name: str, content: str | bytes, *arguments: str, dry: bool = True) -> Case:
    def prepare(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return Case(arguments, prepare, dry=dry)


def data(content: str | bytes, *arguments: str, dry: bool = True) -> Case:
    return written("train.jsonl", content, *arguments, dry=dry)


def reward(code: str, *arguments: str, dry: bool = True) -> Case:
    return written("reward.py", code, "reward.function=reward.py:score", *arguments, dry=dry)


def agent(code: str, *arguments: str, dry: bool = True) -> Case:
    return written("agent.py", code, *arguments, dry=dry)


def own_task(made: str) -> Case:
    """``task.py:make`` does what ``made`` says."""

    def prepare(folder: Path) -> None:
        (folder / "task.py").write_text(
            "class Task:\n"
            "    def __init__(self, problem): self.problem = problem\n"
            "    def score(self, response, answer, extra): return 1.0\n"
            f"def make(params, seed, problems): {made}\n"
        )
        data = "task: {name: task.py:make, size: 4, val_size: 2}"
        (folder / "recipe.yaml").write_text(RECIPE.replace("train: train.jsonl, val_size: 2", data))

    return Case(prepare=prepare)


def removed(name: str) -> Case:
    return Case(prepare=lambda folder: (folder / name).unlink())


def model_says(dry: bool = True, **values: object) -> Case:
    """``config.json`` with other values."""

    def prepare(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return Case(prepare=prepare, dry=dry)


def doing(prepare: Prepare, *arguments: str, dry: bool = True) -> Case:
    return Case(arguments, prepare, dry=dry)


def cut_weights(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def shard_of_two(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    names = list(load_file(weights))
    weights.rename(folder / "model" / "a.safetensors")
    places = {name: "ab"[k % 2] + ".safetensors" for k, name in enumerate(names)}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def shard_cut_short(folder: Path) -> None:
    shard_of_two(folder)
    whole = (folder / "model" / "a.safetensors").read_bytes()
    (folder / "model" / "b.safetensors").write_bytes(whole[: len(whole) // 2])


def mesh(devices: str, parallel: str, *arguments: str, dry: bool = True, **model: object) -> Case:
    """A mesh on ``devices``, nodes × devices of each, of the model with other values."""
    nodes, per_node = devices.split("x")
    sizes = (f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={per_node}", f"actor.parallel={{{parallel}}}")
    return Case(("cluster.backend=ray", *sizes, *arguments), model_says(**model).prepare, dry=dry)


def replica(size: int, devices: int, *arguments: str, name: str = "vllm", **model: object) -> Case:
    """Replicas of ``size`` devices, of which one machine has so many, of the model with other values."""
    sizes = (f"rollout.n_gpus_per_node={devices}", f"rollout.tensor_model_parallel_size={size}")
    where = ("cluster.backend=ray", "cluster.address=localhost:6379", f"rollout.name={name}")
    return Case((*where, *sizes, *arguments), model_says(**model).prepare)


def adapter(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()
    (folder / "model" / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')


def model_without_end(folder: Path) -> None:
    file = folder / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": None}))


def smaller_embedding(folder: Path) -> None:
    model_says(vocab_size=10).prepare(folder)
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:10].clone()
    save_file(weights, file, metadata={"format": "pt"})


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Case:
    def prepare(folder: Path) -> None:
        file = folder / "model" / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return Case(prepare=prepare, dry=False)


def held_out_without_a_column(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"prompt": "1=", "answer": "1", "level": 2}\n' * 6)
    (folder / "val.jsonl").write_text(ROWS)
    (folder / "reward.py").write_text("def score(response, level): return 1.0\n")
    text = RECIPE.replace("val_size: 2", "val: val.jsonl").replace("exact_match", "reward.py:score")
    (folder / "recipe.yaml").write_text(text)


def held_out_without_answers(folder: Path) -> None:
    (folder / "val.jsonl").write_text('{"prompt": "1=", "answer": null}\n' * 3)
    (folder / "recipe.yaml").write_text(RECIPE.replace("val_size: 2", "val: val.jsonl"))


def model_with_a_template_and_a_tool(folder: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
    path = folder / "model" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    (folder / "agent.py").write_text(
        'def act(a: int) -> int:\n    """Acts.\n\n    Args:\n        a: how often\n    """\n    return a\n'
    )


def without_programs(folder: Path) -> None:
    os.environ["PATH"] = str(folder / "nowhere")


def server(folder: Path) -> None:
    """A server of MCP's by hand, which lists the tools that its arguments name; ``{}`` is one without a schema."""
    preflight.LOAD_TIMEOUT_S = 0.0  # of the user's code: how long a server may take is said by its own limits
    os.environ["PATH"] = os.defpath  # `python` is the one of this environment all the same
    (folder / "server.py").write_text(
        "import json, sys\n"
        "import xxhash  # of this environment alone\n"
        "tools = [{'name': name, 'inputSchema': {'type': 'object'}} for name in sys.argv[1:]]\n"
        "tools = [{'name': 'act'} if tool['name'] == '{}' else tool for tool in tools]\n"
        "greeting = {'protocolVersion': '2025-06-18', 'capabilities': {'tools': {}}}\n"
        "greeting['serverInfo'] = {'name': 'table', 'version': '1'}\n"
        "answers = {'initialize': greeting, 'tools/list': {'tools': tools}}\n"
        "for line in sys.stdin if tools else []:\n"
        "    asked = json.loads(line)\n"
        "    answer = answers.get(asked['method'])\n"
        "    said = {'error': {'code': -32601, 'message': 'no'}} if answer is None else {'result': answer}\n"
        "    if 'id' in asked:\n"
        "        print(json.dumps({'jsonrpc': '2.0', 'id': asked['id'], **said}), flush=True)\n"
        "sys.stdin.read()\n"
    )


def serving(*tools: str) -> Case:
    command = ", ".join(["python", "server.py", *map(repr, tools)])
    return doing(server, f"agent.mcp.table={{command: [{command}], timeout_s: {5 if tools else 0.3}}}")


def closed_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


CASES = {
    # the command and its file
    "no CONFIG": Case(command=("train",)),
    "CONFIG does not exist": Case(command=("train", "nowhere.yaml")),
    "CONFIG is a directory": Case(command=("train", "model")),
    "a device for a file": Case(command=("train", "/dev/zero")),
    "settings before CONFIG": Case(command=("train", "rollout.n=4", "recipe.yaml")),
    "an unknown command": Case(command=("trian", "recipe.yaml"), dry=False),
    "an unknown option": Case(command=("train", "recipe.yaml", "--dryrun")),
    "a setting with dashes": Case(command=("train", "recipe.yaml", "--lr", "1e-3")),
    "a second file": Case(("other.yaml",)),
    "--resume of what is no run": Case(command=("train", "--resume", "model")),
    "YAML that is not a mapping": recipe("- a\n- b\n"),
    "YAML that does not parse": recipe("a: [1\n"),
    "a key twice": recipe(RECIPE + "mode: overlapped\n"),
    "a number with a leading zero": recipe(RECIPE + "run.name: 040\n"),
    "a key twice, once with dots": recipe(RECIPE + "rollout.n: 4\n"),
    "a setting and a key in it": setting("model.make=null", "model.make.head_dim=8"),
    "not UTF-8": written("recipe.yaml", b"run: {name: \xe9}\n"),
    "nesting without an end": recipe("a: " + "[" * 1000),
    "defaults that do not exist": recipe("defaults: [base.yaml]\n" + RECIPE),
    "defaults in a circle": recipe("defaults: [recipe.yaml]\n" + RECIPE),
    # settings
    "a.b without a value": setting("rollout.n"),
    "two equals signs": setting("rollout.n==8"),
    "a value that does not parse": setting("rollout.n=[8"),
    "a number with a colon": setting("rollout.n=4:30"),
    "a value with a colon": setting("reward.function=reward.py:"),
    "an unknown section": setting("rollouts.n=4"),
    "an unknown key": setting("rollout.m=4"),
    "an unknown key at the top": setting("modes=on_policy"),
    "another system's key": setting("actor.learning_rate=1e-3"),
    "an unknown key in a list": setting("data.train=[{path: train.jsonl, wieght: 2}]"),
    "text for a number": setting("run.seed=abc"),
    "a fraction for a whole number": setting("run.seed=1.5"),
    "below the range": setting("run.seed=-1"),
    "beyond the range": setting("run.seed=99999999999999999999"),
    "no number": setting("rollout.temperature=nan"),
    "nothing": setting("rollout.n="),
    "a value for a section": setting("data=5"),
    "a section for a value": setting("rollout.n.x=1"),
    "an unknown choice": setting("cluster.backend=slurm"),
    "an unknown mode": setting("mode=nonsense"),
    "an unknown reference": setting("rollout.n=${nope}"),
    "one answer per prompt with grpo": setting("rollout.n=1"),
    "greedy training": setting("rollout.temperature=0"),
    "an empty stop string": setting("rollout.stop=['']"),
    "two lengths": setting("data.epochs=2"),
    "no length": setting("rollout.total_rollout_steps=null"),
    "no room for an answer": setting("data.max_response_length=0"),
    "a setting without effect": setting("async_training.max_lag=3"),
    "a model and one to make": setting("model.make={}"),
    "data and a task": setting("data.task.name=sort", "data.val_size=128"),
    "patience that ends too early": setting("reward.timeout_s=1000"),
    "a transport that is not there": setting("param_update.transport=broadcast"),
    "two training ranks in one process": setting("trainer.n_gpus_per_node=2"),
    "devices that do not divide": setting(
        "cluster.backend=ray", "trainer.n_gpus_per_node=4", "trainer.use_nodes_ratios=[0.3, 0, 0, 0.5]"
    ),
    "an unknown algorithm": setting("algorithm.adv_estimator=grop", dry=False),
    "a loss of one's own that cannot be called": written(
        "own.py", "def loss(logprobs): return 1\n", "algorithm.policy_loss.loss_mode=own.py:loss", dry=False
    ),
    "an estimator of one's own that cannot be called": written(
        "own.py", "def estimate(): return 1\n", "algorithm.adv_estimator=own.py:estimate", dry=False
    ),
    # model
    "no such folder": setting("model.path=models/small/nowhere"),
    "a name that the hub does not have": setting("model.path=nobody/nothing", dry=False),
    "a file": setting("model.path=train.jsonl"),
    "an empty path": setting("model.path=''"),
    "no config.json": removed("model/config.json"),
    "config.json that is not JSON": written("model/config.json", "{"),
    "config.json of another kind": written("model/config.json", "[]"),
    "an unknown kind of model": model_says(dry=False, model_type="frobnicator"),
    "not a language model": model_says(dry=False, model_type="vit"),
    "an encoder": model_says(dry=False, model_type="bert"),
    "logits that are made in another way": model_says(
        model_type="modernbert-decoder", bos_token_id=1, layer_types=["full_attention"], rope_parameters=None
    ),
    "a quantised model": model_says(quantization_config={"quant_method": "gptq", "bits": 4}),
    "code of the model's own": model_says(
        dry=False, model_type="mine", auto_map={"AutoConfig": "configuration_mine.Mine"}
    ),
    "an adapter": doing(adapter),
    "no weights": removed("model/model.safetensors"),
    "an empty file of weights": written("model/model.safetensors", ""),
    "weights cut short": doing(cut_weights),
    "a shard is missing": doing(shard_of_two),
    "a shard that is cut short": doing(shard_cut_short),
    "a pointer of Git LFS": written("model/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid x\n"),
    "no tokenizer": removed("model/tokenizer.json"),
    "tokenizer.json that is not JSON": written("model/tokenizer.json", b"\x00\xff"),
    "no token that ends": doing(model_without_end, dry=False),
    "more tokens than the model has": doing(smaller_embedding, dry=False),
    "lengths beyond the positions": setting("data.max_response_length=400"),
    "a bias for no token": setting("rollout.logit_bias={48: 1.0}", *CORRECTED, dry=False),
    "no memory for an answer": setting("rollout.kv_cache_gib=1e-7", dry=False),
    "weights of another model": model_says(dry=False, hidden_size=32),
    "a value that no model has": model_says(dry=False, hidden_act="frob"),
    "no layers": model_says(dry=False, num_hidden_layers=0, layer_types=[]),
    "weights that the model does not have": weights(lambda there: there | {"extra": torch.zeros(2)}),
    "weights that the file lacks": model_says(dry=False, tie_word_embeddings=False),
    "weights of integers": weights(lambda there: there | {"model.norm.weight": there["model.norm.weight"].int()}),
    "an output layer that is tied and is not": weights(
        lambda there: there | {"lm_head.weight": there["model.embed_tokens.weight"] + 1}
    ),
    # mesh
    "a mesh in one process": setting("actor.parallel={cp: 2, ep: 2}"),
    "tp that does not divide the ranks": mesh("1x3", "tp: 2"),
    "an inner mesh larger than a machine": mesh("2x2", "tp: 2, cp: 2"),
    "ranks of a reference that tp does not divide": mesh("1x2", "tp: 2", "ref.nnodes=1", "actor.use_kl_loss=true"),
    "ep that does not divide the ranks of a copy": mesh("1x4", "replicate: 2, ep: 4"),
    "ep that is no multiple of tp": mesh("1x6", "tp: 2, ep: 3"),
    "cp over padded rows": mesh("1x2", "cp: 2", "model.packing=padded"),
    "tp that does not divide the heads": mesh("1x4", "tp: 2, cp: 2"),
    "tp that does not divide the heads of keys": mesh("1x2", "tp: 2", num_key_value_heads=1),
    "tp that does not divide the heads of a model to make": mesh("1x3", "tp: 3", "model={path: null, make: {}}"),
    "ep of a model without experts": mesh("1x2", "ep: 2"),
    "ep that does not divide the experts": mesh("1x2", "ep: 2", model_type="qwen3_moe", num_experts=3),
    "ranks that would hold no expert": mesh("1x4", "", model_type="qwen3_moe", num_experts=2),
    "tp of a family without a plan": mesh("1x2", "tp: 2", model_type="gpt2"),
    "ep of a family without a plan": mesh("1x2", "ep: 2", model_type="jetmoe", num_local_experts=4),
    "cp of a model whose attention is its own": mesh("1x2", "cp: 2", *ELSEWHERE, model_type="bloom"),
    "a replica of several devices without vLLM": replica(2, 2, name="native"),
    "a replica larger than a machine": replica(4, 2),
    "a replica of several of the trainer's devices": replica(2, 1, "mode=colocate_sync"),
    "vLLM told to take devices": setting("rollout.name=vllm", "rollout.engine_kwargs={tensor_parallel_size: 2}"),
    "a replica that does not divide the heads": replica(4, 4, num_attention_heads=6),
    "a replica that does not divide the heads of keys": replica(4, 4, num_attention_heads=12, num_key_value_heads=3),
    # data
    "no such data file": setting("data.train=nowhere.jsonl"),
    "a directory": setting("data.train=model"),
    "another kind of file": written("train.txt", "prompt,answer\n", "data.train=train.txt"),
    "a CSV row with too many fields": written("train.csv", "prompt,answer\n1,2,3\n", "data.train=train.csv"),
    "a compressed file": doing(
        lambda folder: (folder / "train.jsonl").write_bytes(gzip.compress(ROWS.encode())),
    ),
    "Parquet that is none": written("train.parquet", b"PAR1", "data.train=train.parquet"),
    "no rows": data(""),
    "a line that is not JSON": data(ROWS + '{"prompt": "1=",\n'),
    "a line that is no object": data(ROWS + "17\n"),
    "one JSON array": data("[" + ",".join(ROWS.splitlines()) + "]"),
    "Latin-1": data(ROWS.encode() + '{"prompt": "é", "answer": "1"}\n'.encode("latin-1")),
    "no prompt column": data('{"question": "1=", "answer": "1"}\n'),
    "no answer column": data('{"prompt": "1="}\n'),
    "no such value inside a column": data(
        '{"prompt": "1=", "reward_model": {"style": "rule", "ground_truth": "1"}}\n', "data.answer_key=reward_model.gt"
    ),
    "a prompt of null": data(ROWS + '{"prompt": null, "answer": "1"}\n'),
    "a message without content": data('{"prompt": [{"role": "user"}], "answer": "1"}\n'),
    "a message with a number": data('{"prompt": [{"role": "user", "content": 5}], "answer": "1"}\n'),
    "messages without a chat template": data(CHATS),
    "an empty prompt": data(ROWS + '{"prompt": "", "answer": "1"}\n', "data.val_size=0"),
    "a prompt that the tokenizer cannot read": data(ROWS + '{"prompt": "Ä", "answer": "1"}\n', "data.val_size=0"),
    "all prompts too long": setting("data.max_prompt_length=1"),
    "data.accept_changes for a new run": setting("data.accept_changes=true"),
    "answers that are lists": data('{"prompt": "1=", "answer": ["1", "one"]}\n' * 6),
    "all answers null": data('{"prompt": "1=", "answer": null}\n' * 6),
    "more held-out rows than rows": setting("data.val_size=10"),
    "an unknown task": recipe(RECIPE.replace("train: train.jsonl, val_size: 2", "task: {name: srt}")),
    "all answers of data.val null": doing(held_out_without_answers),
    "a task of one's own that raises": own_task("return params['size']"),
    "a task of one's own that is none": own_task("pass"),
    "a problem of one's own that raises": own_task("return Task(lambda index: 1 / 0)"),
    "a problem of one's own that ends the process": own_task("return Task(lambda index: __import__('sys').exit(0))"),
    "a problem of one's own that is none": own_task("return Task(lambda index: '1=')"),
    # reward
    "an unknown reward": setting("reward.function=exact"),
    "no such reward file": setting("reward.function=nowhere.py:score"),
    "a file that does not parse": reward("def score(response, answer)\n"),
    "a file that does not import": reward("import nothing_like_this\n"),
    "a file that ends the process": reward("import os; os._exit(3)\n"),
    "no such function": reward("def scores(response): return 1.0\n"),
    "not a function": reward("score = 5\n"),
    "no arguments": reward("def score(): return 1.0\n"),
    "arguments without names": reward("def score(*texts): return 1.0\n"),
    "a column that no row has": reward("def score(response, level): return 1.0\n"),
    "a column that some rows lack": doing(held_out_without_a_column),
    "a parameter that it does not take": reward(SCORE + " return 1.0\n", "reward.params={scale: 2}"),
    "tags that are no list": setting("reward.function=format", "reward.params={tags: 5}"),
    "a group that is no name": setting("reward.function=regex", "reward.params={pattern: '(a)', group: [1]}"),
    "unit tests that are none": setting("reward.function=code"),
    "a share of tests that is no truth value": data(
        '{"prompt": "1=", "answer": "assert f(1)"}\n' * 6, "reward.function=code", "reward.params={partial: 3}"
    ),
    # programs
    "a tool without types": agent("def act(a):\n    'Acts.'\n", "agent.tools=[agent.py:act]"),
    "a tool without a docstring": agent("def act(a: int) -> int: return a\n", "agent.tools=[agent.py:act]"),
    "two tools of one name": agent(
        "def act() -> int:\n    'Acts.'\n    return 1\n", "agent.tools=[agent.py:act, agent.py:act]"
    ),
    "tools that give no reward": agent(
        "def act() -> int:\n    'Acts.'\n    return 1\n", "agent.tools=[agent.py:act]", "reward.function=program"
    ),
    "a tool that is neither a file's nor built in": setting("agent.tools=[pyton]"),
    "no sandbox on this machine": doing(without_programs, "agent.tools=[python]"),
    "an unknown sandbox": setting("agent.tools=[python]", "sandbox=docker"),
    "a sandbox without a use": setting("sandbox=process_limits"),
    "a server of tools that is not there": setting("agent.mcp.search.command=[no-such-server]"),
    "a server of tools that ends": setting("agent.mcp.search.command=['false']"),
    "a server of tools in two places": setting("agent.mcp.search={command: [x], url: http://h}"),
    "a server of tools that is late": serving(),
    "a server of tools that is away": setting("agent.mcp.search.url='http://127.0.0.1:PORT/mcp'"),
    "a server of tools that breaks the protocol": serving("{}"),
    "a tool without a name": serving(""),
    "a tool that a server has twice": serving("act", "act"),
    "a tool of two servers": doing(
        server, "agent.mcp={one: {command: [python, server.py, act]}, two: {command: [python, server.py, act]}}"
    ),
    "a server of an environment that is away": setting("agent.environment=ws://127.0.0.1:PORT"),
    "tools that the template does not show": Case(("agent.tools=[agent.py:act]",), model_with_a_template_and_a_tool),
    "a program and no chat template": agent(PROGRAM, "agent.program=agent.py:run"),
    "an environment of no known form": agent(
        "class Game:\n    def play(self): ...\n", "agent.environment=agent.py:Game"
    ),
    "an environment that lacks a method": agent(
        "class Game:\n    def reset(self, seed=None): ...\n", "agent.environment=agent.py:Game"
    ),
    "a program that is not asynchronous": agent("def run(row): ...\n", "agent.program=agent.py:run"),
    "no such program": agent("", "agent.program=agent.py:run"),
    "an environment and a program": agent(PROGRAM, "agent.program=agent.py:run", "agent.environment=agent.py:Game"),
    "an agent and a program": agent(PROGRAM, "agent.program=agent.py:run", "agent.client=agent.py:run"),
    "no such agent file": setting("agent.client=nowhere.py:run"),
    "no such agent": agent("", "agent.client=agent.py:walk"),
    "an agent without a function": setting("agent.client=agent.py"),
    "an agent that takes no row": agent("async def run(): ...\n", "agent.client=agent.py:run"),
    "an agent that asks for more than there is": agent("async def run(row, url): ...\n", "agent.client=agent.py:run"),
    "an agent that yields": agent("def run(row): yield 1.0\n", "agent.client=agent.py:run"),
    "an agent of no words": setting("agent.client=[]"),
    "an agent that is not installed": setting("agent.client=[no-such-agent]"),
    "sampling of agents that is no choice": agent(AGENT, "agent.client=agent.py:run", "agent.sampling=strictly"),
    "an endpoint that nobody asks": agent(PROGRAM, "agent.program=agent.py:run", "agent.endpoint_port=8000"),
    "an endpoint at another machine's address": agent(
        AGENT, "agent.client=agent.py:run", "agent.endpoint_host=192.0.2.1"
    ),
    "no turns": agent(PROGRAM, "agent.program=agent.py:run", "agent.max_turns=0"),
    "a step longer than its episode": agent(PROGRAM, "agent.program=agent.py:run", "agent.episode_timeout_s=10"),
    "turns without a program": setting("agent.max_turns=3"),
    "a secret that is not there": agent(PROGRAM, "agent.program=agent.py:run", "agent.env={KEY: NOT_SET_HERE}"),
    # run directory and cluster
    "run.dir is a file": written("run", "", dry=False),
    "run.dir holds a run": written("run/events.jsonl", "", dry=False),
    "run.dir holds something else": written("run/notes.txt", "", dry=False),
    "run.dir is too long": setting(f"run.dir={'a' * 300}", dry=False),
    "run.name is a path": setting("run.name=../../esc/x"),
    "run.dir is below a file": setting("run.dir=train.jsonl/run", dry=False),
    "run.dir is empty": setting("run.dir=''"),
    "run.dir is a number": setting("run.dir=5"),
    "no GPU": setting("cluster.device=cuda", dry=False),
    "no Ray there": setting("cluster.backend=ray", "cluster.address=127.0.0.1:PORT", dry=False),
    "no address": setting("cluster.backend=ray", "cluster.address=localhost"),
}

IN_A_PROCESS = (
    "a file that ends the process",
    "a column that no row has",
    "a file that does not import",
    "a file that does not parse",
    "no such function",
    "not a function",
    "no arguments",
    "arguments without names",
    "a column that some rows lack",
    "an empty prompt",
    "lengths beyond the positions",
    "ep of a family without a plan",
    "two tools of one name",
    "tools that give no reward",
    "a tool without a docstring",
    "a server of tools that is not there",
    "a server of tools that is away",
    "a server of tools that breaks the protocol",
    "a server of tools that ends",
    "a server of tools that is late",
    "a tool without a name",
    "a tool that a server has twice",
    "a tool of two servers",
    "tools that the template does not show",
    "a program and no chat template",
    "a program that is not asynchronous",
    "an environment of no known form",
    "an environment that lacks a method",
    "no such program",
    "no such agent",
    "an agent that is not installed",
    "an agent that takes no row",
    "an agent that asks for more than there is",
    "an agent that yields",
)
"""Cases that others are like: they, too, start a process that loads the user's code, read the data or ask a server."""

IN_THE_RUN = {
    "returns None": SCORE + " return None\n",
    "raises": SCORE + " raise ValueError('boom')\n",
    "returns one number for a group": "def score(responses, answer):\n return [1.0]\n",
    "always the same": SCORE + " return 1.0\n",
}
