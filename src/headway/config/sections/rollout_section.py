"""The sections of generation and of the transfer of new weights to it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from headway.config.sections.section import Every, Folder, NonNegative, Positive, Probability, Section
from headway.config.transport_facts import TRANSPORTS, known_transport


class RolloutConfig(Section):
    """Generation: sampling, the engine, its devices, validation, the length of the run."""

    name: Literal["native", "vllm"] = "native"
    """The engine: ``native`` is built in, and runs most Hugging Face decoders; ``vllm`` has to be installed."""
    n: int = Field(8, gt=0, le=65_536)
    """Number of trajectories per prompt."""
    temperature: float = Field(1.0, ge=0)
    """Temperature of sampling, and of the log-probs that are trained on. 0 (greedy) is refused."""
    top_p: Probability = 1.0
    """Sample from the most likely tokens whose probabilities add up to this; 1 is off."""
    top_k: NonNegative = 0
    """Sample from this many of the most likely tokens; 0 is off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample only tokens with at least this share of the most likely token's probability; 0 is off."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Penalty on tokens that are already in the prompt or the answer; 1 is off."""
    logit_bias: dict[int, float] = Field(default_factory=dict, json_schema_extra={"propertyNames": {"type": "integer"}})
    """Token id → number added to its logit. Filters, penalties and biases change the behaviour policy."""
    min_tokens: NonNegative = 0
    """Minimum number of an answer's tokens before a stop token may be sampled."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer, beside the model's stop tokens. The scored text includes them."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the scored and shown text. False: only those that end an answer are left out. Strings
    of ``stop`` may be special tokens in either case."""
    total_rollout_steps: Positive | None = None
    """Length of the run in *trained* groups, rounded up to a multiple of B. Give either this or ``data.epochs``."""
    test_freq: Every = 1
    """Versions between two validations; the first and the last version are always validated. -1: only those two."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the served weights; ``auto`` is that of ``model.dtype``."""
    max_concurrent: Positive | None = None
    """Maximum number of trajectories that one replica decodes at once. Bounds memory, not staleness. null: as many as
    may be in flight, ⌊(1+η)·B⌋ · ``n`` divided by the replicas, up to 256. Without ``kv_cache_gib`` their whole
    contexts must also fit into 262,144 tokens, with a minimum of 64 trajectories."""
    max_batched_tokens: Positive = 4096
    """Maximum number of prompt tokens that are read in one step, of the answers that start in it."""
    kv_cache_gib: float | None = Field(None, gt=0)
    """Memory in GiB for the KV cache on each device of a replica, with that of episodes between two turns. If it is
    short, the latter is dropped and prefilled again, and answers wait, or are parked and go on. Default with
    ``native``: enough for ``max_concurrent`` open episodes; with ``vllm``: 1 on a CPU, vLLM's own choice elsewhere."""
    enforce_eager: bool = False
    """Decode without CUDA graphs on GPUs: slower, with less memory. No effect on CPUs."""
    nnodes: NonNegative = 1
    """Number of different machines of the rollout role. Other roles may share them if there is room."""
    n_gpus_per_node: Positive = 1
    """Number of devices on each of the rollout's machines (on CPUs: processes). Each replica has
    ``tensor_model_parallel_size`` of them."""
    tensor_model_parallel_size: Positive = 1
    """Number of devices of one replica, neighbours on one machine, which divide each layer's matrices and heads (with
    ``vllm``). For models that do not fit on one device, or that should decode faster. Each device holds fewer weights,
    which leaves more room for keys and values."""
    threads: NonNegative = 0
    """Number of Torch threads for each device of a replica; 0 divides a machine's cores among the run's devices
    there."""
    greedy_baseline: bool | None = None
    """Give each group an additional greedy answer, whose reward is the baseline. null: only with ``remax``. true: for
    your own estimator that uses baselines."""
    val_n: Positive = 1
    """Number of answers per held-out problem."""
    val_temperature: float = Field(0.0, ge=0)
    """Temperature of validation; 0 is greedy."""
    enable_dual_buffer: bool = True
    """Receive new weights into a second copy while decoding goes on. The copy is in the machine's memory, one for all
    its replicas; or on each replica's GPU if the weights come from the trainer's GPUs. False: decoding is paused, and
    the served weights are overwritten."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's ``AsyncEngineArgs``, such as ``gpu_memory_utilization`` (with ``name: vllm``)."""
    param_update_preduce_bucket_size_mb: float = Field(64, gt=0)
    """Size in MiB of the bucket in which the trainer assembles full tensors."""
    param_update_consume_bucket_size_mb: float = Field(64, gt=0)
    """Size in MiB of the bucket in which the engine copies when it loads."""

    @property
    def replicas(self) -> int:
        """Number of replicas, if devices are given by counts and not by ``trainer.use_nodes_ratios``."""
        return self.nnodes * self.n_gpus_per_node // self.tensor_model_parallel_size


class ParamUpdateConfig(Section):
    """Transfer of new weights to the replicas (docs/parameter-update.md)."""

    schedule: Literal["synchronous", "overlapped"] = "synchronous"
    """Schedule of an update. ``synchronous``: the trainer waits until every replica has loaded. ``overlapped``: it
    waits only for gather, and trains on while each replica receives and loads at its own pace."""
    transport: Annotated[
        str, AfterValidator(known_transport), Field(json_schema_extra={"enum": ["auto", *TRANSPORTS]})
    ] = "auto"
    """Transport of the weights, one of those below. ``auto``: the in-process one if there is only one process, else the
    first that works with ``cluster.backend``."""
    encoding: Literal["full", "delta"] = "full"
    """Encoding of the weights. ``delta`` sends only values that changed in the served dtype; for that the trainer keeps
    a copy in host memory."""
    directory: Folder | None = None
    """Directory for the files of ``disk``, which every worker must reach. Default: ``weights`` in the run's
    directory."""
    verify: bool = True
    """After each update, compare each replica's log-probs with the trainer's on a few fixed sequences. Checksums of
    received weights are always compared."""
    timeout_s: float = Field(120.0, gt=0)
    """Time limit in seconds of one update, or of loading a version; each 50 MB of weights add one second. Also the
    limit for a replica to answer, and to compute a token while requests are open: longer if the longest context takes
    longer to read, and by ten minutes before the first token if kernels are compiled. A late replica is left out, and
    others take over its requests; the run ends if it was the last one."""
