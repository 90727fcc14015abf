"""The engines that ``make bench-rollout`` compares, each behind two calls: load, and answer some requests.

    python -m benchmarks.rollout_engines ENGINE FOLDER CELL      one engine in a process of its own, for `Worker`

Every engine gets the same prompts and writes the same number of tokens for each: there is no stop token, and each
request has its own ``max_tokens``. Lengths are not drawn but are the quantiles of their distribution, in a random
order, so that a batch of 32 has the shape of one of 128.

    uniform       as many requests as slots, all prompts and all answers equally long
    long-tailed   as many requests as slots, prompts and answers log-normal: most short, few as long as is allowed
    ragged        the same with twice as many requests as slots: a slot that is free is taken again
    prefill       long prompts, one token each

All serve the same folder and sample from the whole distribution at temperature 1. Each module is imported by the engine
that needs it: vLLM lives in an environment of its own. Between two cells a process is blocked on its input.

``python -m benchmarks.rollout --update`` measures for how long an update in mid-flight holds 64 requests:

    64 requests decode ─▶ stage ─▶ pause(interrupt) ─▶ activate ─▶ resume ─▶ all contexts prefilled again

Weights are staged beside decoding, as a back buffer allows. The stall begins with the pause and ends when 64 tokens
were sampled under the new version: natively with the step that gives every request its next one; vLLM, which prefills
in several steps, may come to that number before the last request goes on. Both are behind the same protocol.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.runner import serve
from benchmarks.shapes import SIZES, long_tailed

if TYPE_CHECKING:
    from headway.data.interfaces.episode_groups import Group
    from headway.engines.rollout.native.engine import NativeEngine

UPDATE = "update"
KINDS = ("uniform", "long-tailed", "ragged", "prefill")
PROMPT = 32
"""Tokens of a prompt where all are equally long."""
LONGEST_PROMPT, SHORTEST_PROMPT = 64, 4
PREFILL_PROMPT = 256
"""Tokens of a prompt where prefill alone is measured."""
BATCHED_TOKENS = 2048
"""Tokens of one step that prefills, for every engine that asks."""
PAGE = 64
"""Tokens of a page of transformers' continuous batching. Other sizes were not faster."""
IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"
VLLM_ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else it compiles for half a minute, and is not faster
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    IN_PROCESS: "0",  # as fast, and it computes nothing while others are measured
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Request:
    prompt: tuple[int, ...]
    tokens: int
    """Length of its answer."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement."""

    size: str
    threads: int
    concurrent: int
    """Sequences that decode at once."""
    kind: str
    tokens: int
    """The longest answer; 1 for prefill."""

    @property
    def name(self) -> str:
        return f"{self.size}, threads {self.threads}, concurrent {self.concurrent}: {self.kind} {self.tokens}"

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return max(LONGEST_PROMPT + self.tokens, PREFILL_PROMPT + 1)

    def requests(self) -> list[Request]:
        """Return the requests: a function of the cell alone."""
        order = random.Random(f"{self.concurrent} {self.kind} {self.tokens}")
        if self.kind == "uniform":
            prompts, answers = [PROMPT] * self.concurrent, [self.tokens] * self.concurrent
        elif self.kind == "prefill":
            count = 8 if self.size == "100m" else 32
            prompts, answers = [PREFILL_PROMPT] * count, [1] * count
        else:
            count = self.concurrent * (2 if self.kind == "ragged" else 1)
            prompts = long_tailed(count, SHORTEST_PROMPT, LONGEST_PROMPT)
            answers = long_tailed(count, 1, self.tokens)
            order.shuffle(prompts)
            order.shuffle(answers)
        vocabulary = SIZES[self.size].vocabulary
        return [
            Request(tuple(order.randrange(1, vocabulary) for _ in range(prompt)), answer)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]

    def work(self, asked: Sequence[Request]) -> int:
        """Return the number of tokens that count: of the answers, or of the prompts where prefill alone is measured."""
        return sum(len(one.prompt) if self.kind == "prefill" else one.tokens for one in asked)


class Engine(Protocol):
    """One that is loaded."""

    def run(self, requests: Sequence[Request]) -> list[int]:
        """Answer all ``requests``; returns how many tokens each answer has."""

    def close(self) -> None: ...


def group_requests(requests: Sequence[Request], row: int = 0) -> list[Group]:
    """Return groups of one answer, as an episode worker takes them; ``row``: of the first."""
    import numpy as np

    from headway.data.interfaces.episode_groups import Group
    from headway.data.interfaces.rollout import SamplingParams
    from headway.data.types import Prompt

    prompts = [np.array(request.prompt, np.int32) for request in requests]
    return [
        Group(number, Prompt(0, row + number, 0, "bench", "", ids), 1, SamplingParams(request.tokens))
        for number, (ids, request) in enumerate(zip(prompts, requests, strict=True))
    ]


def native_engine(model: Any, **settings: Any) -> NativeEngine:
    from headway.engines.rollout.native.engine import NativeEngine

    usual = {"name": "bench", "seed": 0, "max_batched_tokens": BATCHED_TOKENS, "decode": lambda ids: ""}
    return NativeEngine(model, **{**usual, **settings})


class Native:
    """Headway's own, driven as the pipeline does: from an event loop, beside its decoding thread."""

    def __init__(
        self, folder: Path, slots: int, context: int, device: str = "cpu", dtype: str = "float32", **more: Any
    ) -> None:
        import torch

        from headway.models.pretrained import load_model

        model = load_model(folder, dtype=getattr(torch, dtype)).to(device)
        self._loop = asyncio.new_event_loop()
        self._engine = native_engine(model, slots=slots, max_context=context, **more)
        self._row = 0

    def run(self, requests: Sequence[Request]) -> list[int]:
        return self._loop.run_until_complete(self._run(requests))

    async def _run(self, requests: Sequence[Request]) -> list[int]:
        from headway.agents.episodes.episode_worker import local_episode_worker

        asked = group_requests(requests, self._row)
        self._row += len(asked)  # other uniforms in each round
        lengths = [0] * len(asked)
        async with local_episode_worker(self._engine) as worker:
            async for group in worker.generate(asked):
                lengths[group.number] = group.trajectories[0].length
        return lengths

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()


class Generate:
    """``transformers.generate`` with static batches of ``slots`` rows, padded on the left, in the order given.

    A batch decodes until its longest answer is written.
    """

    def __init__(self, folder: Path, slots: int, context: int, device: str = "cpu", dtype: str = "float32") -> None:
        self._model, self._rows = _module(folder, dtype).to(device), slots

    def run(self, requests: Sequence[Request]) -> list[int]:
        lengths = []
        for start in range(0, len(requests), self._rows):
            batch = requests[start : start + self._rows]
            written = self._batch([request.prompt for request in batch], max(request.tokens for request in batch))
            lengths += [min(written, request.tokens) for request in batch]
        return lengths

    def close(self) -> None: ...

    def _batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, generation_config=_sampling(tokens))
        return int(out.shape[1]) - width


class Continuous:
    """transformers' continuous batching: its manager, with as many requests in a step as there are slots.

    The cache is as large as all slots need. By itself it takes 60% of the machine's memory on a CPU.
    """

    def __init__(self, folder: Path, slots: int, context: int) -> None:
        from transformers import ContinuousBatchingConfig

        self._model = _module(folder)
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=slots * (-(-context // PAGE) + 1) + 1,
            max_batch_tokens=BATCHED_TOKENS,
            max_requests_per_batch=slots,
            allow_block_sharing=False,
        )
        self._manager = self._model.init_continuous_batching(
            generation_config=_sampling(context), continuous_batching_config=config
        )
        self._manager.warmup()
        self._manager.start()
        self._calls = 0

    def run(self, requests: Sequence[Request]) -> list[int]:
        self._calls += 1
        names = {f"{self._calls}-{number}": request for number, request in enumerate(requests)}
        for name, request in names.items():
            self._manager.add_request(list(request.prompt), request_id=name, max_new_tokens=request.tokens)
        lengths: dict[str, int] = {}
        while len(lengths) < len(requests):
            output = self._manager.get_result(timeout=1.0)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("the manager of continuous batching has ended")
            elif output.error is not None:
                raise RuntimeError(f"continuous batching failed: {output.error}")
            elif output.is_finished():
                lengths[output.request_id] = len(output.generated_tokens)
        return [lengths[name] for name in names]

    def close(self) -> None:
        self._manager.stop(block=True, hard_stop=True)


class Vllm:
    """vLLM's offline engine, in this process. Its environment has to be `VLLM_ENVIRONMENT`."""

    def __init__(self, folder: Path, slots: int, context: int) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=context,
            max_num_seqs=slots,
            max_num_batched_tokens=BATCHED_TOKENS,
            enforce_eager=True,
            enable_prefix_caching=False,  # each round has the same prompts
            generation_config="vllm",
            disable_log_stats=True,
        )

    def run(self, requests: Sequence[Request]) -> list[int]:
        from vllm import SamplingParams

        sampling = [SamplingParams(max_tokens=one.tokens, ignore_eos=True, detokenize=False) for one in requests]
        prompts = [{"prompt_token_ids": list(request.prompt)} for request in requests]
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def close(self) -> None: ...


ENGINES: Mapping[str, Callable[[Path, int, int], Engine]] = {
    "native": Native,
    "generate": Generate,
    "continuous": Continuous,
    "vllm": Vllm,
}


def _module(folder: Path, dtype: str = "float32") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def _sampling(tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=0)


def load(name: str, folder: Path, cell: Cell) -> Callable[[Any], Any]:
    """Load an engine for ``cell``, the longest, and touch memory by a short run; returns what answers a cell.

    Where updates are measured, the answer to a number of rounds are their seconds.
    """
    import torch

    torch.set_num_threads(cell.threads)
    if cell.kind == UPDATE:
        os.environ.pop(IN_PROCESS, None)  # vLLM's asynchronous engine has processes of its own
        return lambda rounds: asyncio.run(updates(name, folder, rounds))
    engine = ENGINES[name](folder, cell.concurrent, cell.context)
    engine.run([Request((1,) * PROMPT, 4)] * cell.concurrent)
    return lambda asked: answer(engine, Cell(**asked))


def answer(engine: Engine, cell: Cell) -> dict[str, float]:
    """Return the tokens of one run, and its seconds.

    Raises:
        ValueError: an answer has not as many tokens as were wanted.
    """
    asked = cell.requests()
    start = time.perf_counter()
    lengths = engine.run(asked)
    seconds = time.perf_counter() - start
    check(lengths, asked)
    return {"seconds": seconds, "tokens": cell.work(asked)}


def check(lengths: Sequence[int], asked: Sequence[Request]) -> None:
    """Raise `ValueError` unless every answer has as many tokens as were wanted."""
    if len(lengths) != len(asked):
        raise ValueError(f"{len(lengths)} answers to {len(asked)} requests")
    for number, (length, request) in enumerate(zip(lengths, asked, strict=True)):
        if length != request.tokens:
            raise ValueError(f"answer {number} has {length} tokens; {request.tokens} were wanted")


# ---------------------------------------------------------------------------------------- updates in mid-flight


REQUESTS = 64
TOKENS = 256
WRITTEN = 32
"""Number of tokens that each answer has, at least, when the update comes."""
Update = dict[str, float]
"""Seconds of one update, by phase."""


async def updates(kind: str, path: Path, rounds: int) -> list[Update]:
    """Measure updates in an engine's process."""
    import torch

    from benchmarks.gpu_checks.models import manifest_of, receive_from
    from headway.models.pretrained import load_model

    source = load_model(path, dtype=torch.float32)
    settings = {
        "slots": REQUESTS,
        "max_context": PROMPT + TOKENS,
        "receive": receive_from(dict(source.named_parameters())),
        "manifest": manifest_of(source),
    }
    engine: Any
    if kind == "vllm":
        from headway.engines.rollout.vllm.engine import VllmEngine

        common = {"name": "bench", "seed": 0, "max_batched_tokens": BATCHED_TOKENS}
        engine = VllmEngine(path, dtype="float32", options={"skip_tokenizer_init": True}, **common, **settings)
        await engine.start()
    else:
        engine = native_engine(load_model(path, dtype=torch.float32), **settings)
    try:  # of the first, which touches memory for the first time, nothing counts
        return [await update(engine, version) for version in range(1, rounds + 2)][1:]
    finally:
        await engine.close()


async def update(engine: Any, version: int) -> Update:
    """Update ``engine`` while `REQUESTS` decode on it."""
    from headway.data.interfaces.rollout import OnUpdate

    took: Update = {}

    async def phase(name: str, doing: Awaitable[Any]) -> Any:
        start = time.perf_counter()
        result = await doing
        took[name] = time.perf_counter() - start
        return result

    async def go_on() -> None:
        await engine.resume()
        await sampled(engine, REQUESTS)

    flight = asyncio.create_task(generate(engine))
    try:
        await sampled(engine, WRITTEN * REQUESTS)
        await phase("stage", engine.stage_weights(version))
        paused = await phase("pause", engine.pause(OnUpdate.INTERRUPT))
        await phase("activate", engine.activate(version))
        await engine.stats()  # forget what came before
        await phase("resume", go_on())
    finally:
        flight.cancel()
        with suppress(asyncio.CancelledError):
            await flight
    if paused.interrupted != REQUESTS:
        raise RuntimeError(f"{paused.interrupted} requests were interrupted, of {REQUESTS}")
    return took


async def sampled(engine: Any, tokens: int) -> None:
    """Return when so many tokens were sampled, or more."""
    while tokens > 0:
        await asyncio.sleep(0.001)
        tokens -= (await engine.stats()).generated_tokens


async def generate(engine: Any) -> None:
    from headway.agents.episodes.episode_worker import local_episode_worker

    asked = group_requests([Request(tuple(range(1, PROMPT + 1)), TOKENS)] * REQUESTS)
    async with local_episode_worker(engine) as worker:
        async for _ in worker.generate(asked):
            raise RuntimeError("a request ended in mid-flight")


if __name__ == "__main__":
    engine, folder, cell = sys.argv[1:]
    serve(lambda say: load(engine, Path(folder), Cell(**json.loads(cell))))
