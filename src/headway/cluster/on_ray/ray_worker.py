"""Worker on Ray: the actor that runs a role in its own process, and the driver's end of it.

driver: RayWorker ──actor calls──▶ WorkerActor ──▶ RoleHost ──▶ role
                   ◀── results, or references to them ──
        RayPeer ──frames, where calls are many──▶ CallServer ──▶ RoleHost

What Ray reports of its cluster, such as a worker's death, goes to a log of the run and not to the terminal.

Ray has no setting for it: a driver prints what its raylet reports on stdout, in colours, whatever ``log_to_driver``
says. So the function that prints is replaced while a run is connected; where this version of Ray has no such function,
nothing is changed.

Deaths of workers are told in one message each.

Other processes call the worker often over `RayPeer`. Ray gives its address, and the reason if it is gone.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any, NoReturn

import ray
import ray._private.worker as printing
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from headway.cluster.machine.token_files import TokenPart, read_copy, read_rows, remove_abandoned
from headway.cluster.machine.worker_setup import importing, set_up_process, threads_of
from headway.cluster.on_ray.network_interface import answers, network_environment, stops_answering
from headway.cluster.on_ray.ray_node import RayNode, Watched, replaced
from headway.cluster.on_ray.resource_pool import alive_nodes, described
from headway.cluster.on_ray.worker_connections import (
    CallAddress,
    CallFailed,
    CallServer,
    ConnectionEnded,
    WorkerConnection,
    connected,
)
from headway.cluster.role_host import RoleHost
from headway.cluster.worker_plan import WorkerSpec
from headway.config.sizing.timeouts import MACHINE_ANSWERS_S, MACHINE_ATTEMPTS, TOKENS_REMOVED_S, Timeouts, model_nbytes
from headway.data.types import Handle, RowTokens
from headway.errors import HeadwayError, RunError, StallError, TokensLost, WorkerDied
from headway.pipeline.recovery.liveness import ProcessLook, given_up, look_at
from headway.runtime.progress import Heartbeat
from headway.runtime.task_groups import concurrently, never


class RayPeer:
    """`headway.cluster.worker_group.Peer` over the handle of an actor. Can be pickled, without its connection.

    An ended connection is not reopened: the caller reports the worker as lost, and it is replaced.
    """

    def __init__(self, name: str, pid: int | None, log: str, actor: Any) -> None:
        """Create a client that connects at its first call. ``log``: path of the worker's log, for messages."""
        self.name = name
        self._pid = pid
        self._log = log
        self._actor = actor
        self._connection: WorkerConnection | None = None
        self._connecting = asyncio.Lock()

    def __reduce__(self) -> tuple[type[RayPeer], tuple[Any, ...]]:
        return RayPeer, (self.name, self._pid, self._log, self._actor)

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await (await self._connected(method)).call(method, *args)
        except (ConnectionEnded, CallFailed) as error:
            raise await self._translated(method, error) from error

    async def each(self, method: str, *args: Any, apart_s: float = 0.0) -> AsyncGenerator[Any, None]:
        try:
            async with aclosing((await self._connected(method)).each(method, *args, apart_s=apart_s)) as items:
                async for item in items:
                    yield item
        except (ConnectionEnded, CallFailed) as error:
            raise await self._translated(method, error) from error

    def close(self) -> None:
        """Close the connection. Open calls fail as if the worker were gone."""
        if self._connection is not None:
            self._connection.close()

    async def _connected(self, doing: str) -> WorkerConnection:
        async with self._connecting:  # calls that come side by side share one connection
            if self._connection is None:
                try:
                    self._connection = await connected(await self._actor.address.remote())
                except RayError as error:
                    told = failure if isinstance(error, RayTaskError) else death
                    raise told(self.name, self._pid, self._log, doing, error) from error
            return self._connection

    async def _translated(self, doing: str, error: ConnectionEnded | CallFailed) -> HeadwayError:
        if isinstance(error, CallFailed):
            return RunError(f"worker {self.name} failed in {doing!r}: {error}. Its log: {self._log}")
        try:
            await self._actor.process.remote()  # Ray knows why an actor is gone; one that answers is only unreachable
        except RayError as why:
            return death(self.name, self._pid, self._log, doing, why)
        return WorkerDied(f"worker {self.name} is out of reach during {doing!r}: {error}. Its log: {self._log}")


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_VANISHED = "Worker unexpectedly exits with a connection error"
"""Text in Ray's error for a process that ended by SIGKILL or a crash."""


def failure(name: str, pid: int | None, log: str, doing: str, error: RayError) -> HeadwayError:
    """Return the error to raise for Ray's ``error`` in the call ``doing`` of a worker. ``log``: place of its log."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, HeadwayError):
            return cause
        return RunError(f"worker {name} failed in {doing!r}: {type(cause).__name__}: {cause}. Its log: {log}")
    if not isinstance(error, RayActorError | OutOfMemoryError):
        return RunError(f"worker {name}, {doing!r}: {type(error).__name__}: {error}")
    return death(name, pid, log, doing, error)


def death(name: str, pid: int | None, log: str, doing: str, error: RayError) -> WorkerDied:
    """Return the error for a worker whose process ended during the call ``doing``, with the cause."""
    if isinstance(error, OutOfMemoryError):
        why = (
            f"Ray ended it because its machine's memory had almost run out: {str(error).splitlines()[0]}. Fewer "
            "workers or smaller batches need less; RAY_memory_usage_threshold says how full is too full"
        )
    elif _VANISHED in str(error):  # for a kill from outside Ray lists only possible causes
        why = (
            "If the log does not tell why, the process was killed from outside: most often by the kernel, because "
            "memory had run out (`dmesg` tells; fewer workers or smaller batches need less)"
        )
    else:  # the first lines, without their colours and the list of ids
        said = str(error).splitlines()
        lines = (_COLOUR.sub("", line).strip() for line in said if line.strip() and line[0] != "\t")
        why = f"Ray says: {' '.join(lines)[:300]}"
    process = "its process" if pid is None else f"its process (pid {pid})"
    return WorkerDied(f"worker {name} died: {process} ended during {doing!r}. Its log: {log}. {why}")


MAX_CALLS = 100_000
"""Maximum number of concurrent calls of an actor: a pause must get through beside all other calls."""


class WorkerActor:
    """Actor in the worker's process. It sets the process up before it imports the role's modules."""

    def __init__(self, spec: WorkerSpec, device: str, log_file: Path, sharing: int) -> None:
        """Set up the process and the role. ``sharing``: number of the run's devices on the machine, which share its
        cores.
        """
        threads = threads_of(spec.threads, sharing)
        # Before any import of torch, which reads its environment once.
        set_up_process(spec.name, threads, log_file, only_trains=spec.only_trains)
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        os.environ.update(network_environment(host, os.environ))
        with importing():
            for module in spec.modules:
                import_module(module)
        role = spec.role(
            **spec.arguments,
            name=spec.name,
            device=device,
            threads=threads,
            fetch=self._fetch,
            put=ray.put,
            host=host,
        )
        self._host = RoleHost(role, spec.name)
        self._address = host
        self._server: CallServer | None = None
        self._objects_s = Timeouts.of(spec.arguments["config"]).objects_s

    async def process(self) -> tuple[int, str]:
        """Return the process id and the node. An answer means that the worker is up."""
        self._loop = asyncio.get_running_loop()  # `_fetch`, on the role's thread, awaits Ray's references on this loop
        return os.getpid(), _node()

    async def call(self, method: str, *args: Any) -> Any:
        return await self._host.call(method, *args)

    async def keep(self, method: str, parts: Sequence[Sequence[int]], *args: Any) -> tuple[Any, ...]:
        """Run the method. Returns one result that reports its end, and one for each kept part."""
        result = await self._host.call(method, *args)
        return None, *([result[place] for place in part] for part in parts)

    async def address(self) -> CallAddress:
        """Return the address at which other processes of the run call this worker without Ray."""
        if self._server is None:
            self._server = CallServer(self._host, self._address)
        return self._server.address

    async def heartbeat(self) -> Heartbeat:
        return await self._host.heartbeat()

    async def forever(self) -> None:
        """Wait for ever: the call fails when the process ends."""
        await never()

    def _fetch(self, handles: Sequence[Handle[Any]]) -> list[Any]:
        """Fetch all objects side by side: files of this machine are read, other objects come by Ray. Tokens of a lost
        machine are read from the journal. Raises `TokensLost` if they are not there.

        Called on the role's thread, so that the event loop is free for the fetch.
        """
        objects = {handle: read_rows(handle.file, handle.rows) for handle in handles if isinstance(handle, TokenPart)}
        elsewhere: dict[str, list[TokenPart]] = defaultdict(list)
        for part, tokens in objects.items():
            if tokens is None:
                elsewhere[part.file.host].append(part)
        references = [handle for handle in handles if handle not in objects]
        # Single objects first, then one list for each machine.
        brought = iter(self._awaited(references, elsewhere) if references or elsewhere else ())
        objects |= {handle: next(brought) for handle in handles if handle not in objects}
        for parts in elsewhere.values():
            objects |= zip(parts, next(brought), strict=True)
        return [objects[handle] for handle in handles]

    def _awaited(self, handles: Sequence[Handle[Any]], elsewhere: Mapping[str, Sequence[TokenPart]]) -> list[Any]:
        nodes = _alive() if elsewhere else {}

        async def fetch() -> list[Any]:
            there = (_brought(host, nodes, parts, self._objects_s) for host, parts in elsewhere.items())
            return await asyncio.gather(*handles, *there)

        fetching = asyncio.run_coroutine_threadsafe(fetch(), self._loop)
        try:
            return fetching.result(self._objects_s)
        except ObjectLostError as lost:
            raise _tokens_lost("columns of finished groups were on a machine that Ray has no more") from lost
        except TimeoutError:
            fetching.cancel()  # the time limit of `result` leaves the coroutine running
            missing = ray.wait(list(handles), num_returns=len(handles), timeout=0)[1] if handles else []
            names = ", ".join(handle.hex() for handle in missing[:3])
            waits = [f"{len(missing)} of {len(handles)} objects of Ray's object store ({names})"] if missing else []
            waits += [f"tokens on {host}" for host in elsewhere]
            raise StallError(f"{', '.join(waits)} did not come within {self._objects_s:g} s") from None


class RayWorker:
    """Implementation of `Worker` by a Ray actor."""

    def __init__(
        self,
        spec: WorkerSpec,
        device: str,
        log_file: Path,
        sharing: int,
        options: dict[str, Any],
        ray_here: RayNode | None = None,
    ) -> None:
        """Create the driver's end of a worker. ``ray_here``: Ray node that this process started; None if Ray was
        joined.
        """
        self.name = spec.name
        self._ray = ray_here
        self._killed = False
        self.log_file = log_file
        self.pid: int | None = None
        """Id of the worker's process; None until it is up."""
        weights = model_nbytes(spec.arguments.get("model_path", ""))
        timeouts = Timeouts.of(spec.arguments["config"], weights)
        self.killed_s = timeouts.killed_s
        """Longest time from a kill until the process is gone, in seconds."""
        self._unanswered_s = timeouts.unanswered_s
        self._process: Watched | None = None
        """Watch on the worker's process; None before it is up, or if it runs on another machine."""
        self._node: dict[str, Any] | None = None
        """Description of the worker's machine by `ray.nodes`; None before it is up, or on the driver's machine."""
        self._unreachable = False
        """True once the worker's machine, if it is not the driver's, no longer answers."""
        # Ray names a process after its actor's class, in ps and in the dashboard: so each worker has a class of its
        # name.
        named = type(f"{spec.name} {log_file.parent.parent.name}", (WorkerActor,), {})
        # No restarts by Ray: its new process would have no model, no place in a group and no connections.
        actor: Any = ray.remote(named).options(max_concurrency=MAX_CALLS, max_restarts=0, **options)
        self._actor: Any = actor.remote(spec, device, log_file, sharing)

    async def up(self) -> None:
        with self._failures("starting"):
            self.pid, node = await self._actor.process.remote()
        if node == _node():
            self._process = Watched(self.pid)
        else:
            self._node = await asyncio.to_thread(described, node)

    async def call(self, method: str, *args: Any) -> Any:
        with self._failures(method):
            return await self._actor.call.remote(method, *args)

    async def keep(self, method: str, parts: Sequence[Sequence[int]], *args: Any) -> list[Handle[Any]]:
        with self._failures(method):
            # With one result Ray returns its reference, not a list of one.
            returned = self._actor.keep.options(num_returns=1 + len(parts)).remote(method, parts, *args)
            done, *kept = returned if parts else [returned]
            await done  # only the first: awaiting the others would unpickle arrays here
            if kept and self._node is not None:  # a copy comes here, as their machine may be lost
                ray.wait(kept, num_returns=len(kept), timeout=0, fetch_local=True)
            return kept

    def peer(self) -> RayPeer:
        return RayPeer(self.name, self.pid, self._log, self._actor)

    async def heartbeat(self) -> Heartbeat:
        with self._failures("heartbeat"):
            beat: Heartbeat = await self._actor.heartbeat.remote()
            return beat

    async def died(self) -> NoReturn:
        with self._failures("supervision"):
            await self._actor.forever.remote()
        raise WorkerDied(f"worker {self.name} stopped")

    async def lost(self) -> NoReturn:
        """Wait for a loss as `Worker.lost` does. Ray takes a minute or more to notice that a machine is silent."""

        async def is_given_up() -> NoReturn:
            why = await given_up(self.heartbeat, self._look, self._unanswered_s)
            raise WorkerDied(f"worker {self.name} (pid {self.pid}) {why}. Its log: {self._log}")

        silent = [] if self._node is None else [self._machine_lost(self._node)]
        await concurrently([self.died(), is_given_up(), *silent])
        await never()  # not reached: one of them has raised

    async def _look(self) -> ProcessLook | None:
        """Return the state of the process, as seen by a process on its machine; None if unknown."""
        if self._node is None or self.pid is None:
            return None if self.pid is None else look_at(self.pid)
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(MACHINE_ANSWERS_S):
                there = _look_there.options(scheduling_strategy=_on(self._node["NodeID"]))
                seen: ProcessLook | None = await there.remote(self.pid)
                return seen
        return None

    async def _machine_lost(self, node: dict[str, Any]) -> NoReturn:
        await stops_answering(node["NodeManagerAddress"], node["NodeManagerPort"])
        self._unreachable = True
        raise WorkerDied(
            f"worker {self.name} is lost: its machine, {_place(node)}, does not answer any more: Ray's process there "
            f"took no connection, {MACHINE_ATTEMPTS} times in a row. Its log: {self._log}"
        )

    async def kill(self) -> None:
        if self._ray is not None and self._ray.lost is not None:
            return  # Ray is gone; the process ends with Ray's other processes (`RayNode.leave`)
        self._killed = True  # before the kill: a requested end must not look like a loss of Ray
        ray.kill(self._actor, no_restart=True)
        if self._unreachable:
            return  # nobody could tell when it is gone
        try:
            async with asyncio.timeout(self.killed_s):
                with suppress(WorkerDied):
                    await self.died()
                if self._process is not None:
                    await self._process.ended()  # Ray reports some ends early
        except TimeoutError:
            raise RunError(f"worker {self.name} was killed and is still there after {self.killed_s:.0f} s") from None

    @property
    def _log(self) -> str:
        """Describe the place of the worker's log: on its machine, unless the driver sees the same run directory."""
        if self._node is None or self.log_file.exists():
            return str(self.log_file)
        return f"{self.log_file} on {_place(self._node)}"

    @contextmanager
    def _failures(self, doing: str) -> Iterator[None]:
        """Turn Ray's errors in the block into Headway's. The role's own errors pass unchanged."""
        try:
            yield
        except RayError as error:
            raise self._translated(doing, error) from error

    def _translated(self, doing: str, error: RayError) -> HeadwayError:
        """Return the error to raise for Ray's ``error``. A lost Ray is checked first, since it makes workers end or
        fail.
        """
        ray_here = None if self._killed else self._ray
        if ray_here is not None and (lost := ray_here.lost) is not None:
            return WorkerDied(f"worker {self.name} died during {doing!r}: {lost}")
        if ray_here is not None and isinstance(error, RayActorError | OutOfMemoryError):
            ray_here.keep_logs()
        return failure(self.name, self.pid, self._log, doing, error)


async def _brought(
    host: str, nodes: Mapping[str, dict[str, Any]], parts: Sequence[TokenPart], within_s: float
) -> list[Mapping[int, RowTokens]]:
    """Return rows stored on the machine ``host``: from there or, if it is gone or does not answer within half of the
    time, from the journal. ``nodes``: Ray's machines, as `_alive` returns them.
    """
    read: list[Mapping[int, RowTokens] | None] = [None for _ in parts]
    node, in_journal = nodes.get(host), all(part.file.copy is not None for part in parts)
    # Asked first where it need not be waited for: Ray takes a minute to notice that it is gone.
    if node is not None and (not in_journal or await answers(host, node["NodeManagerPort"])):
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(within_s / 2 if in_journal else None):
                read = await _read.options(scheduling_strategy=_on(node["NodeID"])).remote(parts)
    missing = [at for at, rows in enumerate(read) if rows is None]
    for at in missing:
        read[at] = await asyncio.to_thread(read_copy, parts[at].file, parts[at].rows)
    if lost := sum(rows is None for rows in read):
        raise _tokens_lost(
            f"the tokens of {lost} groups were on {host}, which has them no more or is gone, and the journal lacks them"
        )
    return [rows for rows in read if rows is not None]


def _tokens_lost(what: str) -> TokensLost:
    return TokensLost(f"{what}. `headway train --resume RUN` makes groups again that the newest checkpoint lacks")


@ray.remote(num_cpus=0)
def _read(parts: Sequence[TokenPart]) -> list[Mapping[int, RowTokens] | None]:
    # The copy, too: where there was no room for the file, this machine sees it first.
    return [read_rows(part.file, part.rows) or read_copy(part.file, part.rows) for part in parts]


@ray.remote(num_cpus=0)
def _look_there(pid: int) -> ProcessLook | None:
    return look_at(pid)


async def remove_elsewhere(directory: Path) -> None:
    """Remove ``directory``, and those of killed runs, from Ray's other answering machines within `TOKENS_REMOVED_S`.

    Machines without a worker of this run are included: a resumed run may use fewer machines.
    """

    async def remove(host: str, node: dict[str, Any]) -> None:
        if await answers(host, node["NodeManagerPort"]):
            await _remove.options(scheduling_strategy=_on(node["NodeID"])).remote(directory)

    with suppress(RayError, TimeoutError):
        async with asyncio.timeout(TOKENS_REMOVED_S):
            nodes, here = await asyncio.to_thread(_alive), _node()
            there = (remove(host, node) for host, node in nodes.items() if node["NodeID"] != here)
            await asyncio.gather(*there, return_exceptions=True)  # one that is lost meanwhile keeps no other waiting


@ray.remote(num_cpus=0)
def _remove(directory: Path) -> None:
    rmtree(directory, ignore_errors=True)
    remove_abandoned(directory.parent)


def _alive() -> dict[str, dict[str, Any]]:
    """Return Ray's machines by address."""
    return {node["NodeManagerAddress"]: node for node in alive_nodes()}


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    """Return a strategy that pins a task to a machine. The task fails once Ray knows that the machine is lost."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _place(node: dict[str, Any]) -> str:
    """Name a machine for messages, as `headway.cluster.roles.role.place` does."""
    return f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"


def _node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node


def messages_in(log_file: Path) -> AbstractContextManager[None]:
    """Append Ray's messages to ``log_file`` until the block ends. The file is made with the first one."""

    def keep(data: Mapping[str, Any], *_: object, **__: object) -> None:
        with suppress(OSError):  # a full disk would end Ray's thread, with a message on the terminal
            log_file.parent.mkdir(parents=True, exist_ok=True)
            with log_file.open("a", encoding="utf-8") as file:
                file.writelines(f"{time.strftime('%H:%M:%S')}  {line}\n" for line in data["lines"])

    return replaced(printing, "print_to_stdstream", lambda prints: keep)
