"""The sections of generation and of the transfer of new weights to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from headway.config.sections.section import Every, Folder, NonNegative, Positive, Probability, Section
from headway.config.transport_facts import TRANSPORTS, known_transport


class RolloutConfig(Section):
    """Generation: sampling, the engine, its devices, validation, the length of the run."""

    name: Literal["native", "vllm"] = "native"
    """The engine: ``native`` is Headway's own, over most Hugging Face decoders; ``vllm`` has to be installed."""
    n: int = Field(8, gt=0, le=65_536)
    """Number of trajectories per prompt."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of sampling, and of the log-probs that are trained on. 0 is greedy, and refused."""
    top_p: Probability = 1.0
    """Sample from the most likely tokens that have this probability together; 1 is off."""
    top_k: NonNegative = 0
    """Sample from this many of the most likely tokens; 0 is off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample only tokens of at least this share of the most likely one's probability; 0 is off."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Penalty on tokens that prompt or answer have already; 1 is off."""
    logit_bias: dict[int, float] = Field(default_factory=dict, json_schema_extra={"propertyNames": {"type": "integer"}})
    """Token id → number added to its logit. Filters, penalties and biases change the behaviour policy."""
    min_tokens: NonNegative = 0
    """Number of an answer's tokens before which no stop token is sampled."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, beside the model's stop tokens. The text that is scored has them."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text that is scored and shown. Otherwise only those that end an answer are left
    out; strings of ``stop`` may be special tokens in any case."""
    total_rollout_steps: Positive | None = None
    """Length of the run in *trained* groups, rounded up to a multiple of B. Exactly one of this and ``data.epochs`` is
    given."""
    test_freq: Every = 1
    """Versions between two validations; the first and the last version are always validated. -1: only those two."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the served weights; ``auto`` is that of ``model.dtype``."""
    max_concurrent: Positive | None = None
    """Trajectories that one replica decodes at once. Bounds memory, not staleness. null: as many as may be in flight,
    ⌊(1+η)·B⌋ · ``n`` divided by the replicas, up to 256; fewer where ``kv_cache_gib`` does not bound the memory and so
    many whole contexts have more than 262,144 tokens together, but 64 at least."""
    max_batched_tokens: Positive = 4096
    """Most prompt tokens of the answers that start in one step."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory in GiB for keys and values on each device of a replica, those of episodes between two turns included.
    Where it is short, these are prefilled again, and answers wait, or are parked and go on. Default with ``native``:
    enough for as many open episodes as decode at once (``max_concurrent``); with ``vllm``: 1 on a CPU, vLLM's own
    choice elsewhere."""
    enforce_eager: bool = False
    """Decode without CUDA graphs on GPUs: slower, with less memory. On CPUs there are none."""
    nnodes: NonNegative = 1
    """Number of machines of the rollout role, each another one. Those of other roles may be the same, where there is
    room."""
    n_gpus_per_node: Positive = 1
    """Number of devices on each of the rollout's machines (on CPUs: processes). Each replica has
    ``tensor_model_parallel_size`` of them."""
    tensor_model_parallel_size: Positive = 1
    """Number of devices of one replica, neighbours on one machine, which divide each layer's matrices and heads (with
    ``vllm``). For models that one device has no room for, or that should decode faster: what they hold is divided, so
    that more is left for keys and values."""
    threads: NonNegative = 0
    """Number of Torch threads for each device of a replica; 0 divides the cores of the machine that it is on among the
    run's devices there."""
    greedy_baseline: bool | None = None
    """Give each group a greedy answer beside its own, whose reward is their baseline. null: with ``remax``. true:
    for an estimator of your own that looks at baselines."""
    val_n: Positive = 1
    """Number of answers per held-out problem."""
    val_temperature: float = Field(0.0, ge=0)
    """Temperature of validation; 0 is greedy."""
    enable_dual_buffer: bool = True
    """Receive new weights into a second copy while decoding goes on: in the machine's memory, one for all of its
    replicas, or on each replica's GPU where they come from the trainer's. Off: decoding is paused first, and they are
    written over the ones that were served."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's ``AsyncEngineArgs``, such as ``gpu_memory_utilization`` (with ``name: vllm``)."""
    param_update_preduce_bucket_size_mb: float = Field(64, gt=0)
    """Size in MiB of the bucket in which the trainer assembles full tensors."""
    param_update_consume_bucket_size_mb: float = Field(64, gt=0)
    """Size in MiB of the bucket in which the engine copies when it loads."""

    @property
    def replicas(self) -> int:
        """Number of replicas, where counts place them (and not ``trainer.use_nodes_ratios``)."""
        return self.nnodes * self.n_gpus_per_node // self.tensor_model_parallel_size


class ParamUpdateConfig(Section):
    """Transfer of new weights to the replicas (docs/parameter-update.md)."""

    schedule: Literal["synchronous", "overlapped"] = "synchronous"
    """Schedule of an update. ``synchronous``: the trainer waits until every replica has loaded. ``overlapped``: it
    waits for gather alone, and trains on while replicas receive and load, each at its own pace."""
    transport: Annotated[
        str, AfterValidator(known_transport), Field(json_schema_extra={"enum": ["auto", *TRANSPORTS]})
    ] = "auto"
    """The carrier of the weights, one of those below. ``auto`` is the one within the process where there is only one
    process, else the first that works with ``cluster.backend``."""
    encoding: Literal["full", "delta"] = "full"
    """Encoding of the weights. ``delta`` sends only what changed in the served dtype; the trainer then keeps a copy of
    it in host memory."""
    directory: Folder | None = None
    """Directory for the files of ``disk``, which every worker must reach. Default: ``weights`` in the run's
    directory."""
    verify: bool = True
    """Compare, after each update, what each replica serves with the trainer on a few fixed sequences. Checksums of what
    was received are always compared."""
    timeout_s: float = Field(120.0, gt=0)
    """Most seconds that one update, or the load of a version, may take, and one more for each 50 MB of weights. It is
    also how long a replica may take to answer, or may compute no token while calls are open: longer where the longest
    context takes longer to read, and by ten minutes before the first token where kernels are compiled. A replica that
    is late is left out, and others take over its calls; the run ends when it was the last."""
