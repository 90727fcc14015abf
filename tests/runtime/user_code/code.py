"""What the workers of these tests hold: code that does what its job says."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headway.errors import ConfigError, RunError
from headway.runtime.workers import worker_main
from headway.runtime.workers.user_code_boundary import killed_after


class NotOurs(Exception):
    """An exception that does not survive pickling."""

    def __init__(self, a: str, b: object) -> None:
        super().__init__(a)


class Code:
    """Does what a job's first word says."""

    def __init__(self) -> None:
        self.served = 0
        self.at_the_end = ""

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "torch": "torch" in sys.modules}

    async def serve(self, job: tuple[Any, ...], ask: Any) -> Any:
        self.served += 1
        return await getattr(self, job[0])(ask, *job[1:])

    async def close(self) -> None:
        print(self.at_the_end, end="")

    async def swallows(self, ask: Any) -> None:
        """Go on whatever is asked of it, and have the process say so at its end."""
        self.at_the_end = "closed"
        while True:
            with suppress(asyncio.CancelledError):
                await ask("begun")
                await asyncio.sleep(600)

    async def meet_in_threads(self, ask: Any, number: int) -> int:
        """Wait in threads until all of them are there."""
        meeting = threading.Barrier(number, timeout=30)
        return len(await asyncio.gather(*(asyncio.to_thread(meeting.wait) for _ in range(number))))

    async def pid(self, ask: Any) -> int:
        return os.getpid()

    async def count(self, ask: Any) -> int:
        return self.served

    async def echo(self, ask: Any, what: Any) -> Any:
        return what

    async def asks(self, ask: Any, times: int, nap_s: float = 0.0) -> list[Any]:
        """One ask after another; with naps that leave the loop to others."""
        answers = []
        for k in range(times):
            answers.append(await ask(k))
            if nap_s:
                await asyncio.sleep(nap_s)
        return answers

    async def asks_and_blocks(self, ask: Any, times: int, nap_s: float) -> list[Any]:
        """The same for code without an event loop."""
        answers = []
        for k in range(times):
            answers.append(await ask(k))
            time.sleep(nap_s)  # noqa: ASYNC251
        return answers

    async def asks_together(self, ask: Any, times: int) -> list[Any]:
        return list(await asyncio.gather(*(ask(k) for k in range(times))))

    async def gives_up_asking(self, ask: Any) -> str:
        try:
            async with asyncio.timeout(0.05):
                return str(await ask("never"))
        except TimeoutError:
            return str(await ask("whether it was given up"))

    async def asks_in_vain(self, ask: Any) -> str:
        try:
            return str(await ask(0))
        except RunError as error:
            return f"{type(error).__name__}: {error}"

    async def sleeps(self, ask: Any, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    async def holds_the_loop(self, ask: Any, seconds: float) -> str:
        time.sleep(seconds)  # noqa: ASYNC251
        return "held"

    async def holds_the_loop_in_a_task(self, ask: Any, seconds: float) -> None:
        await asyncio.create_task(self.holds_the_loop(ask, seconds))

    async def steps_for(self, ask: Any, seconds: float) -> str:
        """Keeps the loop busy without holding it: steps of which each is short, with no look at the connection."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.01)  # noqa: ASYNC251
            await asyncio.sleep(0)
        return "stepped"

    async def backtracks(self, ask: Any) -> None:
        re.match("(a+)+$", "a" * 60 + "b")  # never gives the interpreter back

    async def keeps_the_lock(self, ask: Any) -> None:
        ctypes.PyDLL(None).sleep(1000)  # sleeps in C without giving the interpreter back

    async def stops(self, ask: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    async def raises(self, ask: Any, text: str) -> None:
        raise NotOurs(text, lambda: 0)

    async def raises_ours(self, ask: Any, text: str) -> None:
        raise ConfigError(text)

    async def exits(self, ask: Any) -> None:
        sys.exit(4)

    async def exits_in_a_task(self, ask: Any) -> None:
        await asyncio.create_task(self.exits(ask))

    async def interrupts(self, ask: Any) -> None:
        raise KeyboardInterrupt

    async def dies(self, ask: Any) -> None:
        os._exit(3)

    async def killed(self, ask: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def forks(self, ask: Any) -> str:
        os.fork()
        return "once"

    async def forks_and_raises(self, ask: Any) -> None:
        os.fork()
        raise NotOurs("once", 0)

    async def forks_and_asks(self, ask: Any) -> str:
        os.fork()
        return str(await ask("whom"))

    async def forks_and_goes_on(self, ask: Any, notes: str) -> None:
        waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.1, waited.set_result, None)
        os.fork()
        await waited
        os.write(os.open(notes, os.O_CREAT | os.O_APPEND | os.O_WRONLY), b"went on\n")

    async def closes_everything(self, ask: Any) -> None:
        os.closerange(0, 1000)

    async def overdue(self, ask: Any) -> None:
        with killed_after(0.05):
            while True:
                pass

    async def function(self, ask: Any) -> Any:
        return lambda: 0

    async def not_here(self, ask: Any) -> Any:
        """A class that only the worker has."""
        module = type(sys)("only_there")
        sys.modules["only_there"] = module
        module.Thing = type("Thing", (), {"__module__": "only_there"})  # type: ignore[attr-defined]
        return module.Thing()  # type: ignore[attr-defined]

    async def asks_not_here(self, ask: Any) -> Any:
        return await ask(await self.not_here(ask))

    async def awaits(self, ask: Any) -> None:
        await asyncio.sleep(0)

    async def own_loop(self, ask: Any) -> str:
        async def inside() -> str:
            return "ran"

        return asyncio.run(inside())

    async def random(self, ask: Any) -> float:
        return random.random()

    async def prints(self, ask: Any, text: str, to: str = "stdout") -> None:
        if to == "process":
            os.system(f"echo {text}")  # noqa: ASYNC221
        else:
            print(text, file=getattr(sys, to))

    async def environment(self, ask: Any, name: str) -> str | None:
        return os.environ.get(name)

    async def raises_the_environment(self, ask: Any, name: str) -> None:
        raise RuntimeError("x" * 290 + os.environ[name])

    async def starts_a_process(self, ask: Any) -> int:
        return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600")  # noqa: ASYNC220

    async def session(self, ask: Any) -> tuple[int, bool]:
        return os.getsid(0), signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@dataclass(frozen=True)
class CodeSpec:
    """How `Code` is loaded: what happens on the way is ``loading``."""

    loading: str = ""
    shown: str = "code.py:Code"
    others: Mapping[str, Any] = field(default_factory=dict)

    def load(self) -> Code:
        match self.loading:
            case "fails":
                raise NotOurs("odd\nthing", lambda: 0)
            case "refuses":
                raise ConfigError("there is no such code")
            case "dies":
                os._exit(7)
            case "hangs":
                time.sleep(600)
            case "waits less":
                worker_main.LEAVES_S = 0.2
        return Code()
