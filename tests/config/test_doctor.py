from itertools import product
from pathlib import Path

import pytest

from headway.config.doctor import diagnose
from headway.config.loading import dump, load
from headway.config.presets import PRESETS
from headway.errors import ConfigError
from tests.tiers import mostly_slow

from .conftest import Load, Write


@pytest.fixture
def refusal(minimal: Load):
    """The doctor's message about the minimal configuration with overrides."""

    def refusal(*overrides: str) -> str:
        loaded = minimal(*overrides)
        with pytest.raises(ConfigError) as refused:
            diagnose(loaded)
        return str(refused.value)

    return refusal


@pytest.mark.parametrize("mode", PRESETS)
def test_every_mode_runs_by_switching_the_mode_alone(minimal: Load, mode: str) -> None:
    notes = diagnose(minimal(f"mode={mode}"))
    assert notes == []


@pytest.mark.parametrize("mode", PRESETS)
def test_every_mode_runs_with_a_model_data_and_reward_of_the_users_own(minimal: Load, mode: str) -> None:
    overrides = ["model.path=/m", "data.train=train.jsonl", "reward.function=my_reward.py:score"]
    assert diagnose(minimal(f"mode={mode}", *overrides)) == []


PASSING = [
    (),
    ("trainer.n_gpus_per_node=8", "trainer.use_nodes_ratios=[0.5, 0, 0, 0.5]"),
    ("cluster.backend=inline",),
    ("model.path=/m", "data.train=a.jsonl", "data.val=b.jsonl"),
    ("actor.use_kl_loss=true", "actor.kl_loss_coef=0.01", "ref.nnodes=1"),
    ("async_training.order=fifo",),
]


@mostly_slow(
    ("mode", "overrides"),
    product(PRESETS, PASSING),
    quick=[*zip(["colocate_sync", "on_policy", "async_partial"], [PASSING[4], PASSING[1], PASSING[3]], strict=True)],
)
def test_what_passed_once_passes_again_from_its_dump(
    minimal: Load, tmp_path: Path, mode: str, overrides: tuple[str, ...]
) -> None:
    loaded = minimal(f"mode={mode}", *overrides)
    if loaded.config.cluster.placement == "shared" and loaded.config.trainer.use_nodes_ratios is not None:
        pytest.skip("shares divide devices, and these modes share them")
    diagnose(loaded)
    (tmp_path / "config.yaml").write_text(dump(loaded.config))
    again = load(tmp_path / "config.yaml")
    diagnose(again)
    assert again.config == loaded.config


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        # what updates cannot do
        (("mode=colocate_sync", "param_update.transport=broadcast"), "trainer and engine are one process"),
        (("param_update.encoding=delta", "param_update.transport=disk"), "its files are whole versions"),
        (("param_update.encoding=delta", "cluster.backend=inline"), "inside one process nothing has to be sent"),
        (
            ("param_update.encoding=delta", "rollout.enable_dual_buffer=false"),
            "a delta is applied to a copy that a second buffer keeps",
        ),
        (("mode=colocate_sync", "rollout.enable_dual_buffer=false"), "so they are written in place"),
        (("param_update.directory=weights",), "only param_update.transport=disk looks at it"),
        # what cannot progress, or contradicts itself
        (("mode=overlapped", "async_training.staleness_threshold=0"), "overlapped with η=0: nothing may be admitted"),
        (("mode=overlapped", "cluster.placement=shared"), "take turns on shared devices, so nothing overlaps"),
        (("mode=colocate_async", "async_training.on_update=keep"), "an engine that sleeps frees the KV cache"),
        (
            ("mode=async_stale", "async_training.order=ready", "async_training.max_lag=0"),
            "expected at least ⌊1+η−1/B⌋ = 1, a smaller η",
        ),
        # what is missing, or there twice
        (("model.make=null",), "model: give model.path"),
        (("data.task=null", "reward.function=exact_match"), "data: give data.train"),
        (
            ("data.task=null", "data.train=a.jsonl", "reward.function=task"),
            "reward.function=task is data.task's verifier",
        ),
        (("model.warmup={}", "data.train=a.jsonl"), "model.warmup trains on data.task"),
        (("model.warmup={}", "model.make=null"), "model.warmup is for a made model"),
        # the length of the run
        (("rollout.total_rollout_steps=null",), "expected exactly one of rollout.total_rollout_steps and data.epochs"),
        (("data.epochs=1",), "both are given; set one of them to null"),
        (("data.max_response_length=200",), "is 264 tokens, more than model.make.max_position_embeddings=256"),
        # nothing to learn from
        (("rollout.n=1",), "rollout.n=1: grpo compares"),
        (("rollout.n=1", "algorithm.adv_estimator=rloo"), "rollout.n=1: rloo compares"),
        (("critic.optim.lr=0.1",), "adv_estimator=grpo needs no critic"),
        (("algorithm.adv_estimator=gae", "algorithm.pass_k=2"), "algorithm.adv_estimator is gae"),
        (("logp.nnodes=1",), "no log-probs are recomputed"),
        (("actor.prox_logp_method=loglinear",), "takes the engine's log-probs for π_prox"),
        (
            ("async_training.use_rollout_log_probs=false", "actor.prox_logp_method=loglinear", "logp.nnodes=1"),
            "actor.prox_logp_method is loglinear",
        ),
        (
            ("async_training.use_rollout_log_probs=false", "logp.nnodes=1", "mode=colocate_sync"),
            "set logp.nnodes=0, or cluster.placement=split",
        ),
        (("algorithm.guard.action=stop",), "algorithm.guard.min_ess is not given"),
        (
            ("algorithm.guard.min_ess=0.5", "algorithm.guard.action=lower_eta", "mode=on_policy"),
            "there is no η to lower",
        ),
        (
            ("algorithm.guard.min_ess=0.5", "algorithm.guard.action=tighten", "algorithm.policy_loss.loss_mode=gpg"),
            "has no clip range to tighten",
        ),
        (("reward.overlong_buffer.len=9",), "reward.overlong_buffer.enable is off"),
        (
            ("reward.overlong_buffer.enable=true", "reward.overlong_buffer.len=1000"),
            "every answer would be penalised",
        ),
        (("algorithm.kl_penalty=k2",), "algorithm.use_kl_in_reward is off"),
        (
            ("actor.use_kl_loss=true", "actor.kl_loss_type=k3+", "actor.use_bias_correction_kl=true"),
            "both mend the gradient",
        ),
        (("algorithm.adv_estimator=pass_at_k", "rollout.n=4"), "compares subsets of k of more than k answers"),
        (("algorithm.adv_estimator=gigpo",), "program an episode is one turn; choose grpo"),
        (("algorithm.step_weight=2",), "algorithm.adv_estimator is grpo"),
        (("algorithm.policy_loss.loss_mode=t_ppo",), "without algorithm.policy_loss.ignore_last it is ppo_clip"),
        (
            (
                "algorithm.policy_loss.loss_mode=t_ppo",
                "algorithm.policy_loss.ignore_last=5",
                "agent.program=agent.py:run",
            ),
            "those of an episode with a program may be a tool's",
        ),
        (
            ("algorithm.turn_discount=0.9",),
            "without agent.tools, environment, program or client an episode is one turn",
        ),
        (
            (
                "algorithm.policy_loss.loss_mode=truncated_is",
                "async_training.use_rollout_log_probs=false",
                "algorithm.rollout_correction.name=truncate",
            ),
            "staleness would be corrected twice",
        ),
        (("algorithm.policy_loss.loss_mode=gpg", "actor.clip_ratio=0.1"), "loss_mode=gpg does not clip"),
        (("actor.loss_agg_mode=seq-mean-token-sum-norm",), "divides by a constant length: set actor.loss_scale_factor"),
        (("rollout.n=1", "algorithm.filter_groups.enable=true"), "algorithm.filter_groups would filter every group"),
        (("rollout.temperature=0",), "rollout.temperature=0 is greedy"),
        (("rollout.top_p=0.9",), "rollout.top_p=0.9 changes the policy that samples"),
        (("algorithm.rollout_correction.name=truncate",), "there is nothing to correct; set it to false"),
        (("rollout.top_k=5",), "rollout.top_k=5 changes the policy that samples"),
        (("rollout.val_n=4",), "greedy answers are all equal"),
        # places
        (("cluster.backend=inline", "trainer.n_gpus_per_node=2"), "one training rank; trainer.* asks for 2"),
        (("cluster.backend=inline", "param_update.transport=broadcast"), "set it to local, shared_memory, disk, or"),
        (("param_update.transport=local",), "transport=local does not work with cluster.backend=ray"),
        (
            ("cluster.backend=inline", "trainer.n_gpus_per_node=2", "trainer.use_nodes_ratios=[0.5, 0, 0, 0.5]"),
            "trainer.use_nodes_ratios divides devices among processes",
        ),
        (("trainer.use_nodes_ratios=[0.5, 0, 0, 0.5]",), "train's share 0.5 of 1 devices is 0.5 devices"),
        (("rollout.nnodes=0",), "rollout.nnodes: got 0"),
        (("cluster.backend=inline", "rollout.nnodes=2"), "set rollout.nnodes=1, and rollout.n_gpus_per_node"),
        (
            ("trainer.n_gpus_per_node=4", "actor.parallel.tp=8"),
            "tp=8 is 8 ranks, which do not divide the 4 of trainer.nnodes",
        ),
        (
            ("trainer.nnodes=2", "trainer.n_gpus_per_node=4", "actor.parallel.tp=8"),
            "is 8 ranks, which have to be on one machine, and trainer.nnodes × n_gpus_per_node has 4 on each",
        ),
        (
            (
                "trainer.nnodes=2",
                "trainer.n_gpus_per_node=3",
                "trainer.use_nodes_ratios=[2/3, 0, 0, 1/3]",
                "actor.parallel.cp=2",
            ),
            "gives actor devices 0-3 of machines with 3 each: some would be on two",
        ),
        (("reward.timeout_s=200",), "cluster.stall_timeout_s=300 would end the run first"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(refusal, overrides: tuple[str, ...], complaint: str) -> None:
    assert complaint in refusal(*overrides)


RATIOS = ("trainer.n_gpus_per_node=2", "trainer.use_nodes_ratios=[0.5, 0, 0, 0.5]")
FILES = ("data.train=a.jsonl", "data.val=b.jsonl")


@pytest.mark.parametrize(
    ("key", "overrides", "reason"),
    [
        ("actor.kl_loss_coef", ("actor.kl_loss_coef=0.001",), "actor.use_kl_loss is off"),
        ("actor.kl_loss_type", ("actor.kl_loss_type=k1",), "actor.use_kl_loss is off"),
        ("actor.use_kl_loss", ("actor.use_kl_loss=true", "actor.kl_loss_coef=0"), "actor.kl_loss_coef is 0"),
        ("ref.nnodes", ("ref.nnodes=1",), "no reference policy is used"),
        ("ref.n_gpus_per_node", ("actor.use_kl_loss=true", "ref.n_gpus_per_node=2"), "on the trainer's ranks"),
        (
            "actor.clip_ratio",
            ("actor.clip_ratio=0.2", "actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.3"),
            "are both given",
        ),
        ("actor.optim.min_lr_ratio", ("actor.optim.min_lr_ratio=0.1",), "the learning rate is constant"),
        ("data.val_size", ("data.val_size=9",), "data.task has held-out problems of its own"),
        ("data.val_size", (*FILES, "data.val_size=9"), "held-out problems come from data.val"),
        ("data.val_max_samples", ("data.train=a.jsonl", "data.val_max_samples=9"), "data.val_size says how many"),
        (
            "data.chat_template_kwargs",
            (*FILES, "data.chat_template=never", "data.chat_template_kwargs={x: 1}"),
            "never renders no template",
        ),
        ("data.val", ("data.val=b.jsonl",), "problems come from data.task"),
        ("data.prompt_key", ("data.prompt_key=question",), "problems come from data.task"),
        ("data.answer_key", ("data.answer_key=solution",), "problems come from data.task"),
        ("rollout.test_freq", ("data.train=a.jsonl", "data.val_size=0", "rollout.test_freq=2"), "no held-out problems"),
        ("model.trust_remote_code", ("model.trust_remote_code=true",), "the model is made"),
        (
            "algorithm.norm_adv_by_std_in_grpo",
            ("algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"),
            "algorithm.adv_estimator is rloo",
        ),
        ("async_training.window", ("mode=one_step_off", "async_training.window=4"), "async_training.order is fifo"),
        ("async_training.window", ("async_training.order=ready", "async_training.window=B"), "order is ready"),
        ("async_training.staleness_threshold", ("async_training.staleness_threshold=0.01",), "η·B < 1"),
        ("async_training.staleness_threshold", ("async_training.staleness_threshold=1/65",), "η·B < 1"),
        ("async_training.on_update", ("mode=on_policy", "async_training.on_update=interrupt"), "nothing is in flight"),
        ("async_training.partial_rollout", ("mode=on_policy", "async_training.partial_rollout=true"), "η·B < 1"),
        ("async_training.max_lag", ("async_training.max_lag=1",), "order=window has a bound on lag of its own"),
        (
            "async_training.on_overdue",
            ("async_training.order=ready", "async_training.on_overdue=drop"),
            "async_training.max_lag is not given",
        ),
        ("async_training.max_lag", ("mode=stream_off_policy", "async_training.max_lag=1"), "nothing runs ahead"),
        ("rollout.nnodes", (*RATIOS, "rollout.nnodes=1"), "trainer.use_nodes_ratios divides"),
        ("rollout.n_gpus_per_node", (*RATIOS, "rollout.n_gpus_per_node=1"), "trainer.use_nodes_ratios divides"),
        ("cluster.address", ("cluster.backend=inline", "cluster.address=auto"), "uses no Ray cluster"),
        ("trainer.snapshot_freq", ("trainer.snapshot_freq=2",), "there are snapshots with trainer.snapshot alone"),
    ],
)
def test_a_setting_of_the_users_without_effect_is_refused_with_the_reason(
    refusal, key: str, overrides: tuple[str, ...], reason: str
) -> None:
    lines = refusal(*overrides).splitlines()
    assert any(line.startswith(f"{key} has no effect: ") and reason in line for line in lines)


def test_an_eta_of_exactly_one_group_has_an_effect(minimal: Load) -> None:
    assert diagnose(minimal("async_training.staleness_threshold=1/64")) == []


def test_all_problems_come_in_one_message(refusal) -> None:
    lines = refusal("rollout.n=1", "rollout.temperature=0", "data.val_size=3").splitlines()
    assert len(lines) == 3


def test_model_and_data_in_the_same_file_as_their_alternatives_are_refused(write: Write) -> None:
    path = write("model: {make: {}}\ndata: {task: {}}\nrollout: {total_rollout_steps: 512}\n")
    later_task = load(path, ["model.path=/m"]).config
    assert later_task.model.make is None
    (path.parent / "own.yaml").write_text("defaults: [run.yaml]\nmodel: {path: /m}\ndata: {train: a.jsonl}\n")
    with pytest.raises(ConfigError) as refused:
        diagnose(load(path.parent / "own.yaml", ["model.make={}", "data.task.name=sort"]))
    assert refused.value.args[0].splitlines() == [
        "model: model.path and model.make are both given; set one of them to null",
        "data: data.train and data.task are both given; set one of them to null",
    ]


def test_an_idle_value_of_the_modes_is_a_note_and_not_an_error(minimal: Load) -> None:
    assert diagnose(minimal("async_training.order=fifo")) == [
        "async_training.window=B of mode async_partial has no effect: async_training.order is fifo, not window"
    ]


def test_an_eta_of_the_modes_that_lets_no_group_run_ahead_is_a_note(minimal: Load) -> None:
    single = ("actor.ppo_mini_batch_size=1", "async_training.trigger_parameter_sync_step=1")
    notes = diagnose(minimal(*single))
    assert any(note.startswith("async_training.staleness_threshold=0.5 of mode async_partial") for note in notes)


def test_completion_order_with_groups_ahead_is_noted_as_without_a_bound(minimal: Load) -> None:
    notes = diagnose(minimal("mode=stream_off_policy", "async_training.staleness_threshold=0.5"))
    assert any("no bound on lag" in note for note in notes)


def test_a_learning_rate_warmup_as_long_as_the_run_is_noted(minimal: Load) -> None:
    assert "covers all 40 optimizer steps" in diagnose(minimal("actor.optim.lr_warmup_steps=40"))[0]
    assert diagnose(minimal("actor.optim.lr_warmup_steps=39")) == []


def test_the_notes_of_loading_come_first(minimal: Load) -> None:
    notes = diagnose(minimal("data.train=a.jsonl", "async_training.order=fifo"))
    assert [note.split()[0] for note in notes] == ["reward.function", "async_training.window=B"]


def test_sequences_that_are_longer_than_a_micro_batch_are_noted_with_both_numbers(minimal: Load) -> None:
    assert not any("longest sequence" in n for n in diagnose(minimal("actor.ppo_max_token_len_per_gpu=128")))
    note, of_group = diagnose(minimal("actor.ppo_max_token_len_per_gpu=127"))
    assert note.startswith("actor.ppo_max_token_len_per_gpu=127 is less than the longest sequence")
    assert "64 + data.max_response_length=64 = 128 tokens" in note
    assert of_group.endswith("computed once only where the group fits: about 576 tokens here, at most")


def test_a_micro_batch_without_room_for_two_answers_is_noted_as_sharing_no_prompt(minimal: Load) -> None:
    (note,) = diagnose(minimal("actor.ppo_max_token_len_per_gpu=191"))
    assert "=191 has no room for two of the longest answers" in note and "about 576 tokens here" in note
    for enough in (
        ["actor.ppo_max_token_len_per_gpu=192"],
        ["actor.ppo_max_token_len_per_gpu=191", "model.packing=packed"],
    ):
        assert diagnose(minimal(*enough)) == []


def test_slots_for_more_answers_than_are_ever_in_flight_are_noted(minimal: Load) -> None:
    assert diagnose(minimal("async_training.staleness_threshold=0.5", "rollout.max_concurrent=768")) == []
    (note,) = diagnose(minimal("async_training.staleness_threshold=0.5", "rollout.max_concurrent=769"))
    assert note.startswith("rollout.max_concurrent=769: at most 768 answers are in flight in training")
