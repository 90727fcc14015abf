"""Python scripts are parsed and never run; what only running them would tell is named."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from headway.config.migration.python_configs import read_code
from headway.config.migration.settings_files import read
from headway.config.migration.shell_scripts import missing, written
from headway.config.migration_tables.trl import CONFIG


def settings(text: str, **options: Any) -> dict[str, Any]:
    return read_code(dedent(text), Path("train.py"), options)[0]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1e-6", 1e-6),
        ("-1", -1),
        ("2**10 + 24", 1048),
        ("[1, 'a']", [1, "a"]),
        ("LR * 2", 0.5),
        ("f'{NAME}-{N}'", "run-4"),
        ("args.learning_rate", 5e-6),
        ("os.environ.get('LR', 0.5)", 0.5),
    ],
)
def test_a_value_is_what_the_script_says(expression: str, value: object) -> None:
    found = settings(f"""
        LR, = 0,
        LR = 0.25
        NAME = "run"
        N: int = 4
        parser.add_argument("--learning-rate", type=float, default=5e-6)
        GRPOConfig(value={expression})
    """)
    assert found == {CONFIG: "GRPOConfig", "value": value}


@pytest.mark.parametrize(
    "expression",
    ["load()", "unknown", "x.y.z", "1 / 0", "1 if x else 2", "[i for i in range(3)]", "10**10**10", "5[0]"],
)
def test_what_only_running_would_tell_is_named(expression: str) -> None:
    value = settings(f"GRPOConfig(value={expression})")["value"]
    (name,) = missing(value)
    assert written({"a": [1, value]}) == f"{{'a': [1, '{name}']}}"


def test_mappings_conversions_and_what_is_set_on_a_trainers_configuration_are_followed() -> None:
    found = settings("""
        MORE = {"beta": 0.1}
        config = make(1)
        config.seed = 3
        GRPOTrainer("model", args=config, **MORE, lr=int("4"), kwargs=dict(a=1))
    """)
    assert found == {CONFIG: "GRPOConfig", "seed": 3, "model": "model", "beta": 0.1, "lr": 4, "kwargs": {"a": 1}}


def test_a_data_set_is_followed_through_what_is_done_to_it() -> None:
    found = settings("""
        data = load_dataset("org/set", "main", split="train")
        data = data.filter(keep).map(change)
        parts = data.train_test_split(test_size=0.1)
        GRPOTrainer("model", args=GRPOConfig(), train_dataset=parts["train"], eval_dataset=make())
    """)
    assert found["train_dataset"] == {"dataset": "org/set", "subset": "main", "split": "train"}
    assert found["model"] == "model" and missing(found["eval_dataset"]) == ["make()"]


def test_parts_of_a_data_set_are_told_apart() -> None:
    found = settings("""
        train, val = load_dataset("org/set", split=["train[:5%]", "test[:5%]"])
        train = train.map(change)
        GRPOTrainer("model", train_dataset=train, eval_dataset=val)
    """)
    assert found["train_dataset"] == {"dataset": "org/set", "split": "train[:5%]"}
    assert found["eval_dataset"] == {"dataset": "org/set", "split": "test[:5%]"}
    of_all = settings('data = load_dataset("org/set")\nGRPOTrainer("model", train_dataset=data["other"])')
    assert of_all["train_dataset"] == {"dataset": "org/set", "split": "other"}
    held_out = settings("""
        parts = load_dataset("org/set", split="train").train_test_split(0.1)
        GRPOTrainer("model", train_dataset=parts["train"], eval_dataset=parts["test"])
    """)
    assert held_out["train_dataset"]["split"] == "train" and missing(held_out["eval_dataset"])


def test_a_data_set_that_cannot_be_followed_is_named_by_what_loads_it() -> None:
    found, remarks = read_code(
        'data = change(load_dataset("org/set"))\nGRPOTrainer("m", train_dataset=data)', Path("train.py"), {}
    )
    assert missing(found["train_dataset"])
    assert remarks == ["it loads load_dataset('org/set')"]


def test_what_is_assigned_to_a_configuration_afterwards_is_a_setting() -> None:
    found = settings("""
        script_args, training_args = TrlParser((ScriptArguments, GRPOConfig)).parse_args_and_config()
        if __name__ == "__main__":
            training_args.scale_rewards = "none"
        if training_args.other is None:
            training_args.beta = 0.04
        training_args.learning_rate *= 2
        other.epsilon = 0.1
        GRPOTrainer("m", args=training_args)
    """)
    assert found["scale_rewards"] == "none" and "epsilon" not in found
    assert missing(found["beta"]) == ["training_args.beta = 0.04"] and missing(found["learning_rate"])
    made = settings(
        "args = GRPOConfig(learning_rate=1, beta=0)\nargs.learning_rate = 3e-6\nGRPOTrainer('m', args=args)"
    )
    assert (made["learning_rate"], made["beta"]) == (3e-6, 0)


def test_a_model_is_followed_to_the_name_that_it_is_loaded_by() -> None:
    loaded = "AutoModelForCausalLM.from_pretrained(name, torch_dtype='auto')"
    assert settings(f"name = other = 'org/m'\nmodel = {loaded}\nGRPOTrainer(model)")["model"] == "org/m"
    pair = "model, tokenizer = FastLanguageModel.from_pretrained(model_name='org/m')\nGRPOTrainer(model=model)"
    assert settings(pair)["model"] == "org/m"


def test_functions_of_the_script_are_functions_of_a_file() -> None:
    found = settings("""
        from trl.rewards import accuracy_reward
        from elsewhere import other
        def mine(completions, **kwargs): return [0.0 for _ in completions]
        GRPOTrainer(model="m", reward_funcs=[accuracy_reward, mine, other])
    """)
    assert found["reward_funcs"][:2] == ["accuracy_reward", "train.py:mine"]
    assert missing(found["reward_funcs"]) == ["other"]


def test_options_of_the_command_that_a_script_describes_are_settings(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        dedent('''
            """It's a script.

            accelerate launch --num_processes 4 \\
                train.py \\
                --learning_rate 1e-5 --use_vllm --model_name_or_path org/model
            """
            from trl import GRPOConfig, GRPOTrainer
            trainer = GRPOTrainer(model=model_args.model_name_or_path, args=training_args)
        ''')
    )
    found = read(str(script)).settings
    assert found["learning_rate"] == 1e-5 and found["use_vllm"] is True and found["model"] == "org/model"
    assert found["num_processes"] == 4


def test_a_script_is_not_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'made')!r}, 'w')\nGRPOConfig(output_dir='x')\n")
    assert read(str(script)).settings["output_dir"] == "x"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("launcher", "processes"),
    [
        ("accelerate launch --num_processes=7", 7),
        ("accelerate launch --num_machines 2 --num-processes 16", 16),
        ("torchrun --nproc_per_node=8", 8),
        ("torchrun --nnodes=2 --nproc-per-node 8", 16),
        ("torchrun --nnodes=$N --nproc_per_node=8", ["$N × 8"]),
    ],
)
def test_the_processes_of_a_launcher_are_those_of_all_machines(launcher: str, processes: int | list[str]) -> None:
    found = read(f"{launcher} train.py --learning_rate 1e-6").settings["num_processes"]
    assert (missing(found) or found) == processes
