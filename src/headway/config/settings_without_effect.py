"""Settings without effect, and why: other settings make them idle.

An idle setting that the user wrote is an error, one of a mode's is a note, and a dumped configuration leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import floor

from headway.config.algorithm_checks import idle_correction_keys, idle_estimator_keys, idle_loss_keys, idle_role_keys
from headway.config.layers import lies_in
from headway.config.schema import Config, Order
from headway.config.sections.agent_section import idle_program_keys, idle_sandbox_keys
from headway.config.sizing.placement import needs_reference
from headway.config.sizing.run_memory import restarts_trainer
from headway.config.transport_facts import TRANSPORTS, transport_of

Idle = tuple[str, str]
"""A dotted key and why it has no effect."""
READ_BY_SFT = (
    "sft",
    "run.name",
    "run.dir",
    "run.seed",
    "model.path",
    "model.dtype",
    "model.enable_gradient_checkpointing",
    "model.packing",
    "model.trust_remote_code",
    "data.train",
    "data.val",
    "data.prompt_key",
    "data.val_size",
    "data.chat_template",
    "data.chat_template_kwargs",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.max_bad_rows",
    "data.shuffle",
    "data.epochs",
    "data.accept_changes",
    "agent.tool_parser",
    "actor.ppo_max_token_len_per_gpu",
    "actor.grad_clip",
    "actor.fsdp_config",
    "actor.parallel",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.use_nodes_ratios",
    "trainer.threads",
    "trainer.max_actor_ckpt_to_keep",
    "cluster",
    "reports.trackers",
    "reports.project",
    "reports.log_model",
    "reports.prometheus_host",
    "reports.prometheus_port",
)
"""Keys and sections that ``headway sft`` reads."""
IN_PLACE_OF = {
    "actor.optim": "sft.optim",
    "actor.ppo_mini_batch_size": "sft.batch_size",
    "rollout.total_rollout_steps": "sft.max_steps",
    "rollout.test_freq": "sft.val_freq",
    "trainer.save_freq": "sft.save_freq",
}
"""Keys of ``headway train`` → those that ``headway sft`` reads in their place."""


def without_effect(config: Config) -> dict[str, str]:
    """Return every key without effect in this configuration → the reason, defaults included."""
    found: dict[str, str] = {}
    for rules in (
        _model,
        _engine,
        _programs,
        _data,
        _reward,
        _validation,
        _storage,
        _actor,
        _reference,
        _algorithm,
        _update,
        _asynchrony,
        _devices,
        _reports,
    ):
        for key, reason in rules(config):
            found.setdefault(key, reason)
    return found


def unread_by_sft(keys: Iterable[str]) -> Iterator[str]:
    """Yield a line for each of ``keys`` that ``headway sft`` does not read."""
    for key in sorted(keys):
        if not lies_in(key, *READ_BY_SFT):
            own = next((own for theirs, own in IN_PLACE_OF.items() if lies_in(key, theirs)), None)
            yield f"{key} has no effect: headway sft does not read it{f', but {own}' if own else ''}; drop it"


def _model(config: Config) -> Iterator[Idle]:
    if config.model.path is None:
        yield "model.trust_remote_code", "the model is made, not loaded"
    warmup = config.model.warmup
    if warmup is not None and warmup.demonstrations is not None:
        for key in ("target", "min_steps", "give_up", "params"):
            yield (
                f"model.warmup.{key}",
                "demonstrations are learned for max_steps steps; it is for the task's solutions",
            )
    elif warmup is not None:
        yield "model.warmup.conversations", "it is for demonstrations; the task's solutions are made anew for each step"


def _programs(config: Config) -> Iterator[Idle]:
    yield from idle_program_keys(config.agent)
    if config.agent.has_program:
        yield "rollout.skip_special_tokens", "programs get answers with all that they say"
    if not config.agent.has_program or config.async_training.on_update != "drain":
        yield "async_training.drain", "it is for on_update=drain and episodes that a program makes"
    yield from idle_sandbox_keys(config.agent.tools, config.reward.names)


def _data(config: Config) -> Iterator[Idle]:
    data = config.data
    if data.task is not None:
        for key in ("val", "prompt_key", "answer_key"):
            yield f"data.{key}", "problems come from data.task, not from files"
        yield "data.val_size", "data.task has held-out problems of its own: data.task.val_size"
    elif data.held_out_sources:
        yield "data.val_size", "held-out problems come from data.val"
    if not data.held_out_sources:
        size = "data.task.val_size" if data.task is not None else "data.val_size"
        yield "data.val_max_samples", f"it is for data.val; {size} says how many problems are held out"
    if data.chat_template == "never" and not config.agent.has_program:
        yield "data.chat_template_kwargs", "data.chat_template=never renders no template"
    for key in ("prompt_key", "answer_key"):
        sources = [*data.train_sources, *data.held_out_sources]
        if sources and all(getattr(source, key) is not None for source in sources):
            yield f"data.{key}", "every source has its own"


def _engine(config: Config) -> Iterator[Idle]:
    if config.rollout.name == "vllm":
        for key in ("enable_dual_buffer", "param_update_consume_bucket_size_mb"):
            yield f"rollout.{key}", "vLLM receives into a copy in host memory, and loads it in its own way"
    else:
        yield "rollout.engine_kwargs", f"rollout.name is {config.rollout.name}"
    if config.rollout.tensor_model_parallel_size == 1:
        return  # says what is so
    if config.rollout.name != "vllm":
        yield "rollout.tensor_model_parallel_size", f"the {config.rollout.name} engine computes on one device"
    if config.cluster.placement == "shared":
        yield (
            "rollout.tensor_model_parallel_size",
            "with cluster.placement=shared a replica has the device of one training rank, which the model has to fit",
        )


def _reward(config: Config) -> Iterator[Idle]:
    if config.reward.functions is not None:
        for key in ("function", "params"):
            yield f"reward.{key}", "reward.functions is given"
    if not config.reward.overlong_buffer.enable:
        for key in ("len", "penalty_factor"):
            yield f"reward.overlong_buffer.{key}", "reward.overlong_buffer.enable is off"


def _storage(config: Config) -> Iterator[Idle]:
    if config.run.storage is None:
        for key in ("storage_sync_s", "storage_timeout_s"):
            yield f"run.{key}", "run.storage is not given"


def _validation(config: Config) -> Iterator[Idle]:
    data = config.data
    if data.task is None and not data.held_out_sources and data.val_size == 0:
        for key in ("test_freq", "val_n", "val_temperature"):
            yield f"rollout.{key}", "data.val_size=0 leaves no held-out problems"


def _actor(config: Config) -> Iterator[Idle]:
    actor = config.actor
    if actor.clip_ratio_low is not None and actor.clip_ratio_high is not None:
        yield "actor.clip_ratio", "actor.clip_ratio_low and actor.clip_ratio_high are both given"
    for name, optim in (("actor.optim", actor.optim), ("sft.optim", config.sft.optim)):
        if optim.lr_scheduler_type == "constant":
            yield f"{name}.min_lr_ratio", f"the learning rate is constant ({name}.lr_scheduler_type)"


def _reference(config: Config) -> Iterator[Idle]:
    actor = config.actor
    if not actor.use_kl_loss:
        for key in ("actor.kl_loss_coef", "actor.kl_loss_type", "actor.use_bias_correction_kl"):
            yield key, "actor.use_kl_loss is off"
    elif actor.kl_loss_coef == 0:
        for key in ("actor.use_kl_loss", "actor.kl_loss_type", "actor.use_bias_correction_kl"):
            yield key, "actor.kl_loss_coef is 0"
    if not needs_reference(config):
        for key in ("ref.nnodes", "ref.n_gpus_per_node"):
            yield (
                key,
                "no reference policy is used: there is no KL term (actor.use_kl_loss, algorithm.use_kl_in_reward)",
            )


def _algorithm(config: Config) -> Iterator[Idle]:
    yield from idle_estimator_keys(config)
    yield from idle_loss_keys(config)
    yield from idle_correction_keys(config)
    yield from idle_role_keys(config)


def _update(config: Config) -> Iterator[Idle]:
    shared = config.cluster.placement == "shared"
    chosen = transport_of(config.param_update.transport, backend=config.cluster.backend, shared=shared)
    for key in dict.fromkeys(key for facts in TRANSPORTS.values() for key in facts.keys):
        users = [name for name, facts in TRANSPORTS.items() if key in facts.keys]
        if chosen not in users:
            yield f"param_update.{key}", f"only param_update.transport={' or '.join(users)} looks at it"
    if shared:
        yield (
            "rollout.enable_dual_buffer",
            "with cluster.placement=shared nothing decodes while weights arrive, so they are written in place",
        )


def _asynchrony(config: Config) -> Iterator[Idle]:
    settings = config.async_training
    b, eta = config.groups_per_version, settings.staleness_threshold
    if settings.order is not Order.WINDOW:
        yield "async_training.window", f"async_training.order is {settings.order}, not window"
    if settings.order is not Order.READY:
        for key in ("max_lag", "on_overdue"):
            yield f"async_training.{key}", f"async_training.order={settings.order} has a bound on lag of its own"
    elif settings.max_lag is None:
        yield "async_training.on_overdue", "async_training.max_lag is not given"
    if floor(eta * b) > 0:
        return
    if eta > 0:
        yield (
            "async_training.staleness_threshold",
            f"η·B < 1 lets no group run ahead (η = {float(eta):g}, B = {b}); raise η or B, or set η to 0",
        )
    takes_turns = config.cluster.placement == "shared" and settings.trigger_parameter_sync_step > 1
    ahead = ("max_lag", "on_overdue", "fill_queue")
    for key in ahead if takes_turns else ("on_update", "partial_rollout", *ahead):
        yield f"async_training.{key}", "nothing runs ahead (η·B < 1), so nothing is in flight when weights arrive"


def _devices(config: Config) -> Iterator[Idle]:
    roles = ("rollout", "ref", "logp")
    counts = [f"{role}.{key}" for role in roles for key in ("nnodes", "n_gpus_per_node")]
    if config.trainer.use_nodes_ratios is not None:
        for key in counts:
            yield key, "trainer.use_nodes_ratios divides trainer.nnodes × trainer.n_gpus_per_node devices"
    else:
        if config.ref.nnodes == 0:
            yield "ref.n_gpus_per_node", "ref.nnodes=0 puts the reference on the trainer's ranks"
        if config.logp.nnodes == 0:
            yield "logp.n_gpus_per_node", "logp.nnodes=0 recomputes log-probs on the trainer's ranks"
    if config.critic.nnodes == 0:
        yield "critic.n_gpus_per_node", "critic.nnodes=0 puts the critic on the trainer's ranks"
    trainer = config.trainer
    if trainer.snapshot is None:
        yield "trainer.snapshot_freq", "no snapshots are made; set trainer.snapshot=memory"
    elif not restarts_trainer(config):
        why = "max_restarts=0, cluster.backend=inline, cluster.placement=shared or trainer.save_freq=-1"
        yield "trainer.snapshot", f"no training rank is started again with trainer.{why}"
    elif trainer.snapshot_freq % trainer.save_freq == 0:
        yield "trainer.snapshot", f"trainer.save_freq={trainer.save_freq} makes a checkpoint wherever one is due"
    if config.cluster.backend == "inline":
        if not config.trainer.use_nodes_ratios and (
            config.rollout.replicas == 1 or config.cluster.placement == "shared"
        ):
            yield "cluster.max_replica_restarts", "in one process the run ends with its only replica"
        yield "cluster.address", "cluster.backend=inline uses no Ray cluster"


def _reports(config: Config) -> Iterator[Idle]:
    chosen = config.reports.trackers
    users = {
        ("project",): ("wandb", "mlflow", "trackio"),
        ("log_model",): ("wandb", "mlflow", "trackio"),
        ("prometheus_host", "prometheus_port"): ("prometheus",),
    }
    for keys, names in users.items():
        if not set(names) & set(chosen):
            for key in keys:
                yield f"reports.{key}", f"reports.trackers does not name {' or '.join(names)}"
