"""Role of a node's episode worker: a process without torch and without user code."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any

from headway.agents.chat.chat_template import answer_decoder
from headway.agents.episodes.episode_worker import EpisodeWorker
from headway.agents.episodes.program_workers import ProgramWorkers, chat_hosting
from headway.cluster.machine.token_files import TokenFile, TokenFiles, TokenPlace
from headway.cluster.machine.worker_setup import collecting_seldom
from headway.cluster.roles.role import Role
from headway.cluster.snapshots import SnapshotMemory
from headway.cluster.worker_group import Dispatch, register
from headway.data.interfaces.episode_groups import Group
from headway.data.interfaces.rollout import Priority
from headway.data.journal import CompletionJournal, JournalWriter
from headway.data.types import GroupTokens, Handle, Trajectory
from headway.models.tokenizer import load_tokenizer, torch_hidden

GATHER_S = 0.03
"""Seconds for which finished groups are gathered. Waking up for each group would double the work of episode worker and
driver, on cores shared with trainer and engine; making a batch of groups takes far longer."""


class EpisodeWorkerRole(Role):
    """Role of an `EpisodeWorker`, with its tokenizer and the processes of an agent program, if there is one.

    Callers name the episode worker's own methods as those of ``worker``, such as ``worker.hold``.
    """

    def __init__(self, *, run_dir: Path, tokens: TokenPlace | None, **arguments: Any) -> None:
        """
        Args:
            run_dir: the run's directory, for logs of programs' output and the journal. Without access to it, or without
            a configured journal, no journal is written.
            tokens: place for the tokens of finished groups; None if they stay in this process.
        """
        super().__init__(**arguments)
        self._run_dir = run_dir
        self.snapshots = SnapshotMemory()
        self._process = ExitStack()
        """Settings of the process, if it belongs to the episode worker alone."""
        self._completed: CompletionJournal | None = None
        self._files = None if tokens is None else TokenFiles(self.name, tokens, self._host)

    @register(Dispatch.RANK_ZERO)
    def build(self) -> None:
        """Load the tokenizer."""
        with torch_hidden():
            self._tokenizer = load_tokenizer(self._model_path, trust_remote_code=self._config.model.trust_remote_code)

    @register(Dispatch.RANK_ZERO)
    async def serve(self) -> None:
        """Start the episode worker on the running loop, and the workers of the agent program, if there is one."""
        hosting = None
        if self._config.agent.has_program:
            programs = ProgramWorkers(self.name, self._config, self._run_dir / "logs", self._model_path)
            with torch_hidden():
                hosting = chat_hosting(self._config, self._tokenizer, programs, self._host)
            await hosting.start()
        with torch_hidden():
            decode = answer_decoder(self._tokenizer, skip_special_tokens=self._config.rollout.skip_special_tokens)
        self._completed = self._completions()
        gather_s = 0.0  # the driver's own process need not be woken
        if self._files is not None:
            self._process.enter_context(collecting_seldom())
            gather_s = GATHER_S
        self.worker = EpisodeWorker(self.name, decode, hosting, gather_s=gather_s, journal=self._completed)

    def _completions(self) -> CompletionJournal | None:
        block, sync_s = self._config.groups_per_version, self._config.run.journal_sync_s
        folder = self._run_dir / "journal"
        # A directory may be left by an earlier process, whose settings had a journal.
        if not self._config.writes_journal or not folder.is_dir():
            return None
        return CompletionJournal(JournalWriter(folder, self.name, groups_per_block=block, sync_s=sync_s))

    async def generate(
        self, requests: Sequence[Group], on: str | None, forgotten: Sequence[TokenFile]
    ) -> AsyncGenerator[tuple[int, tuple[Trajectory, ...], Handle[GroupTokens] | None], None]:
        """Yield each group's number, episodes and handle of its tokens; None for tokens that are not for training.
        ``forgotten``: handles that are no longer used.
        """
        files, journal = self._files, self._completed
        if files is not None:
            files.remove(forgotten)
        async with aclosing(self.worker.generate(requests, on=on)) as groups:
            async for group in groups:
                tokens = group.tokens
                if files is not None:
                    trains = group.priority is Priority.TRAINING
                    copy = None if journal is None else partial(journal.keep, group.number)
                    tokens = files.write(tokens, copy) if tokens is not None and trains else None
                yield group.number, group.trajectories, tokens

    async def close(self) -> None:  # type: ignore[override]
        """Leave all replicas."""
        if hasattr(self, "worker"):  # otherwise the start failed before `serve`
            await self.worker.close()
        self._process.close()
