"""The `fsdp` train engine, as one of its ranks sees it: synchronous, single program, multiple data.

    rows of this rank ─▶ Learner: micro-batches, backward, one step or none ─▶ StepReport
                            └── the loss of each: Objective

Every method is collective unless it says otherwise: all ranks call it, in the same order. The default process group is
the caller's, and a process keeps its rank for life; on GPUs it is an NCCL group, and ``device`` is the current device.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save

from headway.config.schema import Config
from headway.data.assignment import GroupId
from headway.data.interfaces.training import StepContext, StepReport, TrainedRow
from headway.data.packing import CollatedRow, Tree
from headway.engines.train.fsdp.column_engines import ProximalWeights
from headway.engines.train.fsdp.device_mesh import TrainMesh, from_rank_zero, reduce_numbers
from headway.engines.train.fsdp.learner import BatchTotals, Learner, Sums
from headway.engines.train.fsdp.micro_batches import collate, on_device
from headway.engines.train.fsdp.objective import NOTHING_APART, Objective, SplitEpisodes
from headway.engines.train.fsdp.sharded_module import forward_sharded, probe, sharded_policy
from headway.engines.train.fsdp.shards import gather, given_parts
from headway.engines.weights.outgoing_version import Window
from headway.engines.weights.transports.disk import write_files
from headway.engines.weights.weight_layout import Manifest, build_manifest
from headway.models.dtypes import compute_dtype
from headway.models.pretrained import replaced_when_complete
from headway.models.tokenizer import load_tokenizer
from headway.models.weight_files import file_tensors, persistent_buffers
from headway.runtime.progress import progress_here

LONGEST = 2048
"""Most response tokens of a row that is shown; longer responses are shown without their middle."""


class SampledRows:
    """Collects, on one rank, the rows of sampled groups as an optimizer step trains them, for the run's reports.

    Other rows cost nothing.
    """

    def __init__(self, rows: Sequence[CollatedRow], groups: Collection[GroupId]) -> None:
        """Select those of this rank's ``rows`` that belong to ``groups``."""
        self._wanted = {
            id(row): place for place, row in enumerate(rows) if row.episode is not None and row.episode[:3] in groups
        }
        """Identity of a row, as an object → its place among the step's rows."""
        self._seen: dict[int, tuple[CollatedRow, Tensor, Tensor]] = {}
        """Rows that were seen, by place. Read at the end: reading would wait for the device."""

    def look(self, rows: Sequence[CollatedRow], logprobs: Float[Tensor, " M"], entropy: Float[Tensor, " M"]) -> None:
        """Collect one micro-batch's wanted rows, with the forward pass's results for their tokens."""
        lengths = [len(row.loss_mask) for row in rows]
        # Detached: the graph would stay in memory.
        parts = (values.detach().split(lengths) for values in (logprobs, entropy))
        for row, *computed in zip(rows, *parts, strict=True):
            if (place := self._wanted.get(id(row))) is not None:
                self._seen[place] = (row, *computed)

    def rows(self) -> tuple[TrainedRow, ...]:
        """Return what was seen, in the order of the step's rows."""
        return tuple(_trained(*seen) for _, seen in sorted(self._seen.items()))


def _trained(row: CollatedRow, *computed: Tensor) -> TrainedRow:
    logprobs_T, entropy_T = (values.float().cpu().numpy() for values in computed)
    length = len(row.loss_mask)
    kept = np.arange(length)
    if length > LONGEST:
        kept = np.concatenate([kept[: LONGEST // 2], kept[-(LONGEST // 2) :]])
    assert row.episode is not None
    return TrainedRow(
        episode=row.episode,
        # A copy, as the indexing by `kept` makes them, too: a view would keep the whole row in memory.
        prompt_ids=row.input_ids[: row.prompt_length].copy(),
        ids=row.input_ids[row.prompt_length :][kept],
        mask=row.loss_mask[kept],
        versions=row.versions[kept],
        behaviour=row.logprobs[kept],
        logprobs=logprobs_T[kept],
        entropy=entropy_T[kept],
        columns={str(name): values[kept] for name, values in row.columns.items()},
        cut=length - len(kept),
    )


EXPORT_BUCKET = 256 * 2**20
"""Bytes of an export that are gathered, and written, at a time."""


class FsdpEngine:
    """One rank of the trainer, with its shards of the policy and the optimizer. Its `learner` has the checkpoints."""

    def __init__(self, model_path: str, config: Config, total_optimizer_steps: int, mesh: TrainMesh) -> None:
        """Load, shard and set up the optimizer.

        Args:
            model_path: Hugging Face folder, or a model's name on the hub.
            total_optimizer_steps: of the whole run; the learning-rate schedule ends there.
            mesh: the ranks that train, as this one sees them.

        Raises:
            ModelError: on every rank, when the model cannot be used.
        """
        self._config = config
        self._mesh, self._device = mesh, mesh.device
        self._model_path = model_path
        self._policy = sharded_policy(model_path, config, mesh)
        self.padded = self._policy.padded
        """Reason why rows are padded and not packed, where the model is it; None otherwise."""
        self._files = file_tensors(self._policy.lm)
        self._objective = Objective(config)
        whole = config.trainer.snapshot is not None
        self.learner = Learner(self._policy, config.actor, total_optimizer_steps, whole_copies=whole)
        # With one train batch a version all ask for its start before its first step, where the policy still is.
        keeps = config.async_training.trigger_parameter_sync_step > 1
        self._at_version = ProximalWeights(self._policy, keeps_copy=keeps)

    # ------------------------------------------------------------------------------------------ compute

    def forward_logprobs(self, rows: Sequence[CollatedRow]) -> list[NDArray[np.float32]]:
        """The [T] float32 log-probs of each of this rank's ``rows`` (nats, ``rollout.temperature`` applied)."""
        return forward_sharded(self._policy, rows)

    def proximal_logprobs(self, rows: Sequence[CollatedRow], version: int) -> list[NDArray[np.float32]]:
        """Log-probs [T] of each of ``rows`` under the policy before the first optimizer step of ``version``.

        To be called before that step, and then at any time until the next version's. Raises `RunError` otherwise.
        """
        with self._at_version.restored(version):
            return self.forward_logprobs(rows)

    def train_step(self, rows: Sequence[CollatedRow], context: StepContext) -> StepReport:
        """Take one optimizer step on a mini-batch of which ``rows`` are this rank's share. See `Learner.step`.

        The report has those of ``rows`` that ``context`` wants shown, with the numbers of the step's forward pass.
        """
        self._at_version.stepping(context.version)  # first: a step that fails may have moved the weights already
        whole = self._objective.looks_at_sequences
        shown = SampledRows(rows, context.shown)
        part = partial(self._part, context, apart=self._apart(rows) if whole else NOTHING_APART, shown=shown)
        report = self.learner.step(rows, part, whole_episodes=whole)
        return replace(report, shown=shown.rows()) if context.shown else report

    def _apart(self, rows: Sequence[CollatedRow]) -> SplitEpisodes:
        """Look at the episodes of ``rows`` that no micro-batch holds whole, in a pass without gradient."""
        packing = self._policy.packing
        indices = packing.apart(rows, packing(rows, whole_episodes=True))
        (most,) = reduce_numbers([len(indices)], dist.ReduceOp.MAX, self._device)
        if not most:
            return NOTHING_APART
        apart = [rows[i] for i in indices]
        return SplitEpisodes(apart, self.forward_logprobs(apart))

    def _part(
        self,
        context: StepContext,
        rows: Sequence[CollatedRow],
        trees: Sequence[Tree],
        totals: BatchTotals,
        *,
        apart: SplitEpisodes = NOTHING_APART,
        shown: SampledRows | None = None,
    ) -> tuple[torch.Tensor, Sums]:
        columns = self._objective.collate(rows, totals.lengths, apart)
        batch, columns = on_device(self._device, collate(rows, trees, self._policy.ranks), columns)
        logprobs, entropy = self._policy(batch)
        if shown is not None:
            shown.look(rows, logprobs, entropy)
        return self._objective(columns, totals, logprobs, entropy, context)

    # ------------------------------------------------------------------------------------------ weights

    def probe(self) -> NDArray[np.float32]:
        """Compute the log-probs [8] of the probe's sequences under the current weights."""
        return probe(self._policy)

    def manifest(self, dtype: torch.dtype, *, most_senders: int = 1) -> Manifest:
        """The layout of the weights in ``dtype``: names and shapes of the model's files, tied ones once.

        All ranks of one copy of the model send a share of them, up to ``most_senders`` ranks.
        """
        files = build_manifest((file.name, file.shape, dtype) for file in self._files)
        return replace(files, senders=min(most_senders, self._mesh.copy.size()))

    def gather(self, manifest: Manifest, bucket_bytes: int, *, everywhere: bool = False) -> Iterator[Window]:
        """Yield this rank's share of the weights by buckets, on its device; all weights if ``everywhere``.

        Rank k has share k of ``manifest.shares()``, if there is one. Every rank must draw all buckets; each is valid
        until the next one is drawn. A rank holds two buckets, and nothing else.
        """
        given = given_parts(dict(self._policy.lm.named_parameters()), self._files)
        return gather(given, manifest, bucket_bytes, self._mesh, everywhere=everywhere)

    # ------------------------------------------------------------------------------------------ files

    def export(self, path: Path) -> None:
        """Write the weights, in the served dtype, with config and tokenizer as a Hugging Face folder. Atomic.

        The files are shards of at most 5 GB, each with whole tensors; rank zero writes them as they are gathered.
        """
        dtype, lm = getattr(torch, compute_dtype(self._config, self._device)), self._policy.lm
        buffers, files = persistent_buffers(lm), file_tensors(lm, buffers=True)
        # Buffers, such as biases of routers, keep their own dtype.
        of = {file.name: buffers[file.parameter].dtype for file in files if file.parameter in buffers}
        manifest = build_manifest((file.name, file.shape, of.get(file.name, dtype)) for file in files)
        parts = given_parts(dict(lm.named_parameters()) | buffers, files)
        windows = gather(parts, manifest, EXPORT_BUCKET, self._mesh)
        config = copy.deepcopy(lm.config)  # the model's own keeps its dtype
        config.dtype = dtype
        config.architectures = [type(lm).__name__]

        def write() -> None:
            try:
                tokenizer = load_tokenizer(self._model_path, trust_remote_code=self._config.model.trust_remote_code)
                with replaced_when_complete(path) as folder, progress_here().writing(folder):
                    write_files(folder, manifest, windows)
                    if lm.is_remote_code():
                        custom_object_save(lm, folder, config=config)
                    config.save_pretrained(folder)
                    if lm.generation_config is not None:
                        lm.generation_config.save_pretrained(folder)
                    tokenizer.save_pretrained(folder)
            finally:
                deque(windows, maxlen=0)  # also after an error: the other ranks gather to the end

        # Before they wait for rank zero: each window is a collective, in which it needs them.
        if dist.get_rank() != 0:
            deque(windows, maxlen=0)
        from_rank_zero(write)
