"""The endpoint: an HTTP server beside the episode worker, where the agents of its episodes ask for turns.

    agent ──POST, its key──▶ Endpoint ▶ Dialect.read ▶ sampling: the run's ▶ Session ▶ a turn of that episode
      ▲                                                                                        │
      └──────────────── Dialect.answer, or its events ◀────────────────────────────────────────┘

A key is made for one attempt at one episode, and refused afterwards. Data sent with one key is not visible with
another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial

import xxhash
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from headway.agents.endpoint.anthropic_messages import Messages
from headway.agents.endpoint.completions import ChatCompletions, Completions, TokenGenerate
from headway.agents.endpoint.dialect import (
    Dialect,
    ParsedRequest,
    RequestRefused,
    TextCodec,
    Turns,
    differences,
    openai_error,
)
from headway.agents.endpoint.responses import Responses
from headway.agents.endpoint.sessions import OVER, AgentSession
from headway.agents.interface.program_messages import Access, MadeTurn, TurnNote
from headway.errors import ConfigError, EpisodeOver, HeadwayError, UserError, said_by, shown, writable
from headway.runtime.task_groups import off_loop

MOST_BYTES = 32 * 2**20
"""Maximum number of bytes of a request: a context of a million tokens as text has less."""
BODY_TIMEOUT_S = 60.0
"""Limit in seconds for a request's body, of at most `MOST_BYTES`, to arrive."""
CLOSE_TIMEOUT_S = 2.0
"""Seconds that closing waits for requests under way: their episodes are over by then."""
MOST_TOLD = 20
"""Maximum number of different refusals of requests without a valid key that are logged."""
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Host that means all addresses of a machine → the address at which the machine reaches itself."""
SETTINGS = {
    "turns": "agent.max_turns",
    "tokens": "data.max_prompt_length + data.max_response_length",
    "time": "agent.episode_timeout_s",
    "step": "agent.step_timeout_s",
}
"""Limit of an episode → its setting."""
DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), Completions(), Responses(), Messages(), TokenGenerate())
logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answering = Callable[[Dialect, web.Request, AgentSession], Awaitable[web.StreamResponse]]


@dataclass(eq=False, repr=False)
class Endpoint:
    """The HTTP server at which agents ask for turns, on the running event loop."""

    texts: TextCodec
    """The policy's tokenizer."""
    _: KW_ONLY
    models: Sequence[str] = ("policy",)
    """Names of the policy in requests; agents are given the first."""
    tokenizer: str = ""
    """Place of the policy's tokenizer, for agents."""
    strict: bool = False
    """True if requests for other sampling than the run's are refused; otherwise the run's replaces it."""
    max_length: int | None = None
    """Maximum number of tokens of a context with its answer, for clients; None for no limit."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    node: str = "127.0.0.1"
    """Address of this machine for others; agents are given it if ``host`` means all addresses."""
    port: int = 0
    """Port to listen on; 0 for any free port, and then its number once the endpoint listens."""

    def __post_init__(self) -> None:
        reached = self.host
        if self.host in ANY_ADDRESS:  # all addresses of one family
            same_family = (":" in self.node) == (":" in self.host)
            reached = self.node if same_family else ANY_ADDRESS[self.host]
        self._reached = f"[{reached}]" if ":" in reached else reached
        self._key = f"hw-{secrets.token_urlsafe(6)}-"
        """Beginning of all keys of this endpoint, which tells keys of past episodes from foreign ones."""
        self._sessions: dict[str, AgentSession] = {}
        self._told: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._app = web.Application(client_max_size=MOST_BYTES, middlewares=[self._told_as_json])
        self._by_path: dict[str, Dialect] = {}
        for dialect in DIALECTS:
            for prefix in ("", "/v1"):  # clients add their own path to base_url with or without /v1
                for path, answer in ((dialect.path, self._answer), (dialect.counts, self._count)):
                    if path is not None:
                        self._app.router.add_post(prefix + path, partial(self._handle, dialect, answer))
                        self._by_path[prefix + path] = dialect
        self._app.router.add_get("/v1/models", self._list_models)
        self._app.router.add_get("/v1/models/{name:.+}", self._show_model)
        self._app.router.add_get("/health", self._health)

    # ------------------------------------------------------------------------------------- for the episode worker

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        own = logging.getLogger(f"{__name__}.own")
        own.addFilter(_is_own)
        # handler_cancellation: by default aiohttp lets a handler run on after its client has hung up.
        self._runner = web.AppRunner(
            self._app, access_log=None, logger=own, handler_cancellation=True, shutdown_timeout=CLOSE_TIMEOUT_S
        )
        await self._runner.setup()
        # A long queue: all agents of a run begin at the same moment.
        site = web.TCPSite(self._runner, self.host, self.port, backlog=1024)
        try:
            await site.start()
        except (OSError, UnicodeError) as cause:
            await self.close()
            raise cannot_listen(self.host, self.port, cause) from cause
        self.port = self._runner.addresses[0][1]  # for port 0 the one that the system chose

    @property
    def base_url(self) -> str:
        """Address in the form of OpenAI's clients."""
        return f"http://{self._reached}:{self.port}/v1"

    @contextmanager
    def open(self, turns: Turns) -> Iterator[Access]:
        """Answer requests with a new key by ``turns``, for as long as the context lasts."""
        key = f"{self._key}{secrets.token_urlsafe(24)}"
        access = Access(self.base_url, key, self.models[0], self.tokenizer)
        session = self._sessions[key] = AgentSession(turns, access.tag)
        try:
            yield access
        finally:
            del self._sessions[key]
            session.close()

    async def close(self) -> None:
        """Stop listening."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    # ------------------------------------------------------------------------------------- for agents

    @web.middleware
    async def _told_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Report refused requests, wrong paths and wrong methods in the clients' own form."""
        try:
            return await handler(request)
        except RequestRefused as error:
            refused = error
        except web.HTTPException as error:
            why = f"{error.reason}; the endpoint has POST /v1/chat/completions and others"
            refused = RequestRefused(error.status, "not_found", f"{request.method} {request.path}: {why}")
        except ConnectionError:  # the client hung up during the answer: this status goes nowhere
            return web.Response(status=499)
        dialect = self._by_path.get(request.path)
        form = openai_error if dialect is None else dialect.error
        return _json(form(refused.status, refused.code, writable(str(refused))), refused.status)

    async def _handle(self, dialect: Dialect, answer: Answering, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        try:
            return await answer(dialect, request, session)
        except HeadwayError as error:
            told = _refusal(error)
            session.turns.note(TurnNote.REFUSED, f"{request.path}: {told}")
            raise told from None

    async def _answer(self, dialect: Dialect, request: web.Request, session: AgentSession) -> web.StreamResponse:
        # Off the loop: ten megabytes of JSON held up all other episodes for seconds.
        body = await _body(request)
        wanted = await off_loop(len(body), dialect.read, body, self.texts)
        self._check(wanted, session.turns)
        # Of the raw bytes: bodies that differ in a space are different requests.
        digest = xxhash.xxh3_128(body)
        digest.update(request.path.encode())
        digest.update((repeated := request.headers.get("Idempotency-Key", "")).encode(errors="replace"))
        again = request.headers.get("x-stainless-retry-count", "0") not in ("", "0") or bool(repeated)
        async with session.turn(wanted.request, digest.digest(), again=again) as turn:
            id = f"{turn.number}-{session.tag}"
            if wanted.body.stream:
                return await _stream(request, dialect, wanted, turn, id)
            response = _json(dialect.answer(wanted, turn, id))
            await response.prepare(request)
            # Within the context: only an answer that went out whole counts as delivered.
            await response.write_eof()
            return response

    async def _count(self, dialect: Dialect, request: web.Request, session: AgentSession) -> web.StreamResponse:
        body = await _body(request)
        wanted = await off_loop(len(body), dialect.read, body, self.texts)
        self._check_model(wanted.body.model)
        return _json({"object": "response.input_tokens", "input_tokens": await session.turns.count(wanted.request)})

    def _session(self, request: web.Request) -> AgentSession:
        """Return the session of the request's key.

        Raises:
            RequestRefused: there is none. The first such requests are in the episode worker's log: they have no
                episode.
        """
        kind, _, bearer = request.headers.get("Authorization", "").partition(" ")
        given = [bearer.strip() if kind.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
        for key in given:  # Anthropic's clients may send both, one of them made up
            if (session := self._sessions.get(key)) is not None:
                return session
        what = "with a key that is none of this endpoint's" if any(given) else "without a key"
        code, why = "invalid_api_key", f"a request {what}; give the api_key of the episode: Authorization: Bearer KEY"
        if any(key.startswith(self._key) for key in given):
            code, why = "episode_over", f"{OVER}; a key is good while its episode is made"
        said = f"{request.method} {request.path} was refused: {why}"
        if said not in self._told and len(self._told) < MOST_TOLD:
            self._told.add(said)
            logger.warning("%s", said)
        raise RequestRefused(401, code, why)

    def _check(self, wanted: ParsedRequest, turns: Turns) -> None:
        """Check the requested model and sampling."""
        self._check_model(wanted.body.model)
        if turns.trains and (differ := differences(wanted.sampling, turns.sampling)):
            said = f"sampling that training does not follow: {', '.join(differ)}"
            if self.strict:
                raise RequestRefused(
                    400,
                    "sampling_refused",
                    f"{said}; leave it out, or set agent.sampling=override, with which the run's holds",
                )
            turns.note(TurnNote.OVERRIDDEN, said)

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.models:
            raise RequestRefused(
                404,
                "model_not_found",
                f"there is no model {shown(name)} here, only the policy: {', '.join(self.models)}; ask for that, or "
                "add the name to agent.models",
            )

    async def _list_models(self, request: web.Request) -> web.Response:
        self._session(request)
        return _json({"object": "list", "data": [self._model(name) for name in self.models], "has_more": False})

    async def _show_model(self, request: web.Request) -> web.Response:
        self._session(request)
        self._check_model(request.match_info["name"])
        return _json(self._model(request.match_info["name"]))

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "headway",
            "type": "model",
            "display_name": name,
            "max_model_len": self.max_length,
        }

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})


def _is_own(record: logging.LogRecord) -> bool:
    """Tell whether a fault is this server's own. Input that is not HTTP gets an answer; its text may contain keys."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


async def _body(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise RequestRefused(
            408, "timeout", f"the request's body did not come within {BODY_TIMEOUT_S:g} s; send it again"
        ) from None
    except web.RequestPayloadError as error:
        raise RequestRefused(
            400, "invalid_request", f"the request's body cannot be read: {said_by(error)}; send it as JSON, whole"
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise RequestRefused(
            413, "too_large", f"the request's body has more than {MOST_BYTES >> 20} MiB, more than any context"
        ) from None


async def _stream(
    request: web.Request, dialect: Dialect, wanted: ParsedRequest, turn: MadeTurn, id: str
) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    for piece in dialect.events(wanted, turn, id):
        await response.write(piece)
    await response.write_eof()
    return response


def cannot_listen(host: str, port: int, cause: Exception) -> ConfigError:
    """Make the error for an endpoint that cannot listen on this address."""
    return ConfigError(
        f"the endpoint for agents cannot listen at {host}:{port}: {getattr(cause, 'strerror', None) or cause}; set "
        "agent.endpoint_port=0 for any free port, and agent.endpoint_host to an address of this machine"
    )


async def check_address(host: str, port: int) -> None:
    """Listen for a moment. Raises `ConfigError` if ``port`` is in use, or ``host`` is not this machine's address."""
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except (OSError, UnicodeError) as cause:
        raise cannot_listen(host, port, cause) from cause
    server.close()
    await server.wait_closed()


def _refusal(error: HeadwayError) -> RequestRefused:
    """Return the answer to a failed request. Clients recognise a too long context by words of its message."""
    match error:
        case RequestRefused():
            return error
        case EpisodeOver(limit="tokens"):
            said = f"prompt is too long for the maximum context length, {SETTINGS['tokens']}; go on with a shorter one"
            return RequestRefused(400, "context_length_exceeded", said)
        case EpisodeOver():
            return RequestRefused(400, "episode_over", f"{error} ({SETTINGS.get(error.limit, 'agent.side_effects')})")
        case UserError():
            return RequestRefused(400, "invalid_request", str(error))
    return RequestRefused(503, "unavailable", str(error))


def _json(body: dict[str, object], status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(body).encode(), status=status, content_type="application/json")
