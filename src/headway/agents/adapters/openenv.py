"""Environments behind an OpenEnv server: each episode is one WebSocket.

    ▶ {"type": "reset", "data": {"seed": …, "episode_id": …, column: …}}       ◀ {"type": "observation", "data":
    ▶ {"type": "step", "data": {"guess": "7"}}                                     {"observation": {…}, "reward": 1.0,
    ▶ {"type": "close"}                                                            "done": true}}, or an "error"

Follows openenv 0.10 (``core/env_server/http_server.py``, ``serialization.py``): each connection has its own
environment, and ``/schema`` describes actions.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from headway.agents.adapters.environment_loop import EnvironmentProgram, Step
from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, TurnAnswer, said, with_text
from headway.agents.interface.user_calls import failing, number
from headway.errors import ProgramAway, ProgramFailed, UserCodeError, cut, shown

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse

MOST_BYTES = 100 << 20
"""Maximum number of bytes of a message, as in OpenEnv's own client."""
FULL_WAIT_S = 0.5
"""Seconds before a full server is asked again."""
NOT_TEXT = ("done", "reward", "metadata")
"""Fields of every observation that are not shown to the model."""
PARAMS = ("action_field", "observation_field", "timeout_s")


@dataclass(slots=True)
class _OpenEnvEpisode:
    """A connection, and the first observation of its environment."""

    socket: ClientWebSocketResponse
    first: Mapping[str, Any]
    bad_actions: int = 0


class OpenEnvProgram(EnvironmentProgram[_OpenEnvEpisode]):
    """An environment behind an OpenEnv server. Actions are the model's text, observations the user's messages.

    The text fills the action's only required field if that field is text; otherwise the text must be the action as a
    JSON object. The reward of a step goes to the turn before it.
    """

    def __init__(self, url: str, who: str, params: Mapping[str, Any]) -> None:
        """
        Raises:
            UserCodeError: a parameter is unknown or does not fit, or the server is not OpenEnv's.
            ProgramAway: the server is temporarily away.
        """
        if unknown := sorted(set(params) - set(PARAMS)):
            raise UserCodeError(f"{who}: it takes no agent.params.{unknown[0]}; there are {', '.join(PARAMS)}")
        self.who, self._url = who, web_socket(url)
        self._timeout_s = number(params.get("timeout_s", 30.0), f"{who}: agent.params.timeout_s")
        self._action_field: str | None = params.get("action_field")
        self._observation_field: str | None = params.get("observation_field")
        with ThreadPoolExecutor(1) as thread:  # this thread may run a loop
            schema = thread.submit(asyncio.run, self._schema()).result()
        if self._action_field is None:
            self._action_field = text_field(schema)
        elif (known := schema.get("properties")) and self._action_field not in known:
            raise UserCodeError(
                f"{who}: agent.params.action_field={self._action_field}: an action has {', '.join(sorted(known))}"
            )

    @asynccontextmanager
    async def episode(self, start: EpisodeStart) -> AsyncIterator[_OpenEnvEpisode]:
        """Open a connection and reset its environment. Waits while the server is full."""
        until = asyncio.get_running_loop().time() + self._timeout_s
        async with self._session() as session:
            socket, first = await self._connected(session), None
            try:
                while first is None:
                    try:
                        first = await self._reset(socket, start)
                    except _Full:
                        if asyncio.get_running_loop().time() > until:
                            raise
                        # A full server answers the reset but keeps the connection open: a new one is needed.
                        await socket.close()
                        await asyncio.sleep(FULL_WAIT_S)
                        socket = await self._connected(session)
                yield _OpenEnvEpisode(socket, first)
            finally:
                with suppress(Exception):
                    await socket.send_str('{"type": "close"}')
                await socket.close()

    async def begin(self, environment: _OpenEnvEpisode, start: EpisodeStart) -> Step:
        first = environment.first
        return Step(with_text(start.messages, self._text(first), between="\n\n"), bool(first.get("done")))

    async def step(self, environment: _OpenEnvEpisode, answer: TurnAnswer, chat: Chat) -> Step:
        try:
            observed = await self._asked(environment.socket, "step", self._action(answer.text))
        except _BadAction as bad:
            environment.bad_actions += 1
            return Step([said("user", str(bad))])
        reward, done = observed.get("reward"), bool(observed.get("done"))
        worth = 0.0 if reward is None else number(reward, f"{self.who}: the reward of a step")
        return Step([] if done else [said("user", self._text(observed))], done, worth)

    async def end(self, environment: _OpenEnvEpisode) -> EpisodeEnd:
        return EpisodeEnd(metrics={"bad_actions": environment.bad_actions})

    def _action(self, text: str) -> dict[str, Any]:
        if self._action_field is not None:
            return {self._action_field: text}
        with suppress(ValueError):
            found = json.loads(text)
            if isinstance(found, dict):
                return found
        raise _BadAction("Error: an action is a JSON object, and nothing else; this was none. Nothing was done.")

    async def _reset(self, socket: ClientWebSocketResponse, start: EpisodeStart) -> Mapping[str, Any]:
        row = {name: value for name, value in start.row.items() if name != "seed"}
        try:
            return await self._asked(socket, "reset", {"seed": start.row_seed, "episode_id": start.name, **row})
        except _BadAction as bad:
            raise ProgramFailed(f"{self.who}: reset was refused: {bad}") from bad

    def _text(self, observed: Mapping[str, Any]) -> str:
        fields = {name: value for name, value in observed["observation"].items() if name not in NOT_TEXT}
        if self._observation_field is not None:
            if self._observation_field not in fields:
                raise ProgramFailed(
                    f"{self.who}: agent.params.observation_field={self._observation_field}: an observation has "
                    f"{', '.join(sorted(fields)) or 'nothing'}"
                )
            fields = {self._observation_field: fields[self._observation_field]}
        values = list(fields.values())
        return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)

    async def _asked(self, socket: ClientWebSocketResponse, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a message, and wait for the observation that answers it.

        Raises:
            _BadAction: the server says that the action does not fit its schema.
            ProgramFailed: the environment raised, or the server answered with something else.
            ProgramAway: the connection is lost, the server takes no further session, or does not answer in time.
        """
        from aiohttp import WSMsgType

        doing = f"{self.who}: {kind}"
        with suppress(ConnectionError):  # a peer that closes the connection may have said why before
            await socket.send_str(json.dumps({"type": kind, "data": dict(data)}, default=str))
        with failing(f"{doing} within {self._timeout_s:g} s (agent.params.timeout_s)"):
            async with asyncio.timeout(self._timeout_s):
                received = await socket.receive()
        if received.type in (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR):
            raise ProgramAway(f"{doing}: the server closed the connection ({socket.close_code})")
        answer = received.data
        with suppress(TypeError, ValueError):
            answer = json.loads(answer)
        match answer:
            case {"type": "observation", "data": {"observation": dict()} as body}:
                return body  # type: ignore[no-any-return]  # a dict, as it was matched
            case {"type": "error", "data": dict() as body}:
                raise self._error(doing, body)
        expected = 'expected {"type": "observation", "data": {"observation": {…}, "reward": …, "done": …}}'
        raise ProgramFailed(f"{doing}: the server answered {shown(answer)}, {expected}")

    def _error(self, doing: str, body: Mapping[str, Any]) -> Exception:
        text = cut(" ".join(str(body.get("message", body)).split()), 300)
        match body.get("code"):
            case "VALIDATION_ERROR":
                errors = [one for one in body.get("errors") or () if isinstance(one, dict)]
                said_so = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in errors]
                return _BadAction(f"Error: the action does not fit: {'; '.join(said_so) or text}. Nothing was done.")
            case "CAPACITY_REACHED":
                return _Full(
                    f"{self.who}: the server has no room for a further session: {text}; raise its "
                    "max_concurrent_envs, or lower rollout.max_concurrent"
                )
        return ProgramFailed(f"{doing}: the server says: {text}")

    def _session(self) -> ClientSession:
        from aiohttp import ClientSession, ClientTimeout

        # No limit on the whole: a session is as long as its episode, and `_asked` bounds each answer.
        return ClientSession(timeout=ClientTimeout(total=None, sock_connect=self._timeout_s))

    async def _connected(self, session: ClientSession) -> ClientWebSocketResponse:
        from aiohttp import ClientWSTimeout, WSServerHandshakeError

        with failing(f"{self.who}: connecting to {self._url}, where OpenEnv has its WebSocket,"):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await session.ws_connect(
                        self._url, max_msg_size=MOST_BYTES, timeout=ClientWSTimeout(ws_close=5.0)
                    )
            except WSServerHandshakeError as cause:
                # 429 means a full server. Taken for a refusal it failed the episode; now the episode is run again.
                if cause.status < 500 and cause.status != 429:
                    raise
                raise ConnectionError(f"the server answers with status {cause.status}") from cause

    async def _schema(self) -> Mapping[str, Any]:
        """Return the JSON schema of actions; empty if the server does not give it."""
        parts = urlsplit(self._url)
        # [:-3]: without the /ws that `web_socket` appended.
        url = urlunsplit(
            ("https" if parts.scheme == "wss" else "http", parts.netloc, f"{parts.path[:-3]}/schema", "", "")
        )
        with failing(f"{self.who}: asking {url}"):
            async with asyncio.timeout(self._timeout_s), self._session() as session, session.get(url) as response:
                if response.status == 404:
                    return {}
                if response.status >= 500:
                    raise ConnectionError(f"the server answers with status {response.status}")
                found = await response.json()
        action = found.get("action") if isinstance(found, dict) else None
        if not isinstance(action, dict):
            raise UserCodeError(
                f"{self.who}: {url} says {shown(found)}, expected a dict with the schema of an action; give the "
                "address of a server of OpenEnv's"
            )
        return action


class _BadAction(Exception):
    """Exception for an invalid action of the model; its message is for the model."""


class _Full(ProgramAway):
    """Error for a server that takes no further session now."""


def web_socket(url: str) -> str:
    """Return the address of a server's WebSocket: ``ws://host:8000/ws`` for ``http://host:8000``."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    path = parts.path.rstrip("/")
    return urlunsplit((scheme, parts.netloc, path if path.endswith("/ws") else f"{path}/ws", parts.query, ""))


def text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the action's only required field if it is text; else None: an action is then a JSON object."""
    required = [name for name in schema.get("required") or () if name not in NOT_TEXT]
    if len(required) != 1:
        return None
    described = (schema.get("properties") or {}).get(required[0])
    return required[0] if isinstance(described, Mapping) and described.get("type") == "string" else None
