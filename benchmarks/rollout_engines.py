"""The engines that ``make bench-rollout`` compares, each behind two calls: load, and answer some requests.

    python -m benchmarks.rollout_engines ENGINE FOLDER SETTING      one engine in a process of its own, for `Worker`

Between two cells a process is blocked on its input: nothing computes while another engine is measured.

All serve the same folder in float32 and sample from the whole distribution at temperature 1. Each module is imported by
the engine that needs it: vLLM lives in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.rollout_workload import BATCHED_TOKENS, PROMPT, Cell, Request, Setting, requests, work
from benchmarks.runner import serve

if TYPE_CHECKING:
    from headway.data.interfaces.episode_groups import Group

PAGE = 64
"""Tokens of a page of transformers' continuous batching. Other sizes were not faster."""
WAIT_S = 1.0
"""Between two looks at whether its thread is still there."""
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


class Engine(Protocol):
    """One that is loaded."""

    def run(self, requests: Sequence[Request]) -> list[int]:
        """Answer all ``requests``; how many tokens each answer has."""

    def close(self) -> None: ...


def groups(requests: Sequence[Request], row: int = 0) -> list[Group]:
    """Groups of one answer, as an episode worker takes them; ``row``: of the first."""
    import numpy as np

    from headway.data.interfaces.episode_groups import Group
    from headway.data.interfaces.rollout import SamplingParams
    from headway.data.types import Prompt

    return [
        Group(
            number,
            Prompt(0, row + number, 0, "bench", "", np.array(request.prompt, np.int32)),
            1,
            SamplingParams(request.tokens),
        )
        for number, request in enumerate(requests)
    ]


class Native:
    """Headway's own, driven as the pipeline does: from an event loop, beside its decoding thread."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        import torch

        from headway.engines.rollout.native import NativeEngine
        from headway.models.pretrained import load_model

        self._loop = asyncio.new_event_loop()
        self._engine = NativeEngine(
            load_model(folder, dtype=torch.float32),
            name="bench",
            seed=0,
            slots=setting.concurrent,
            max_context=setting.context,
            max_batched_tokens=BATCHED_TOKENS,
            decode=lambda ids: "",
        )
        self._row = 0

    def run(self, requests: Sequence[Request]) -> list[int]:
        return self._loop.run_until_complete(self._run(requests))

    async def _run(self, requests: Sequence[Request]) -> list[int]:
        from headway.agents.episodes.episode_worker import local_episode_worker

        asked = groups(requests, self._row)
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
    """``transformers.generate`` with static batches of ``concurrent`` rows, padded on the left, in the order given.

    A batch decodes until its longest answer is written.
    """

    def __init__(self, folder: Path, setting: Setting) -> None:
        self._model = _module(folder)
        self._rows = setting.concurrent

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
        ids = torch.zeros(len(prompts), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(ids, attention_mask=mask, generation_config=_sampling(tokens))
        return int(out.shape[1]) - width


class Continuous:
    """transformers' continuous batching: its manager, with as many requests in a step as there are slots.

    The cache is as large as all slots need. By itself it takes 60% of the machine's memory on a CPU.
    """

    def __init__(self, folder: Path, setting: Setting) -> None:
        from transformers import ContinuousBatchingConfig

        self._model = _module(folder)
        pages = setting.concurrent * (-(-setting.context // PAGE) + 1)
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages + 1,
            max_batch_tokens=BATCHED_TOKENS,
            max_requests_per_batch=setting.concurrent,
            allow_block_sharing=False,
        )
        self._manager = self._model.init_continuous_batching(
            generation_config=_sampling(setting.tokens), continuous_batching_config=config
        )
        self._manager.warmup()
        self._manager.start()
        self._calls = 0

    def run(self, requests: Sequence[Request]) -> list[int]:
        self._calls += 1
        names = {f"{self._calls}-{number}": number for number in range(len(requests))}
        for name, number in names.items():
            request = requests[number]
            self._manager.add_request(list(request.prompt), request_id=name, max_new_tokens=request.tokens)
        lengths: dict[int, int] = {}
        while len(lengths) < len(requests):
            output = self._manager.get_result(timeout=WAIT_S)
            if output is None:
                if not self._manager.is_running():
                    raise RuntimeError("the manager of continuous batching has ended")
                continue
            if output.error is not None:
                raise RuntimeError(f"continuous batching failed: {output.error}")
            if output.is_finished():
                lengths[names[output.request_id]] = len(output.generated_tokens)
        return [lengths[number] for number in range(len(requests))]

    def close(self) -> None:
        self._manager.stop(block=True, hard_stop=True)


class Vllm:
    """vLLM's offline engine, in this process. Its environment has to be `VLLM_ENVIRONMENT`."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=setting.context,
            max_num_seqs=setting.concurrent,
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


ENGINES: Mapping[str, Callable[[Path, Setting], Engine]] = {
    "native": Native,
    "generate": Generate,
    "continuous": Continuous,
    "vllm": Vllm,
}


def _module(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _sampling(tokens: int) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=tokens, pad_token_id=0)


# ------------------------------------------------------------------------------------------ a process


def load(name: str, folder: Path, setting: Setting) -> Callable[[dict[str, Any]], dict[str, float]]:
    """Load an engine, and touch what is touched first by a short run; returns what answers a cell."""
    import torch

    torch.set_num_threads(setting.threads)
    engine = ENGINES[name](folder, setting)
    engine.run([Request((1,) * PROMPT, 4)] * setting.concurrent)
    return lambda cell: answer(engine, Cell(**cell))


def answer(engine: Engine, cell: Cell) -> dict[str, float]:
    """Tokens of one run, and its seconds by the clock and on cores. Raises `ValueError` for one with other answers."""
    asked = requests(cell)
    start, computed = time.perf_counter(), time.process_time()
    lengths = engine.run(asked)
    seconds, computed = time.perf_counter() - start, time.process_time() - computed
    check(lengths, asked)
    return {"seconds": seconds, "cpu_seconds": computed, "tokens": work(cell, asked)}


def check(lengths: Sequence[int], asked: Sequence[Request]) -> None:
    """Raise `ValueError` unless every answer has as many tokens as were wanted."""
    if len(lengths) != len(asked):
        raise ValueError(f"{len(lengths)} answers to {len(asked)} requests")
    for number, (length, request) in enumerate(zip(lengths, asked, strict=True)):
        if length != request.tokens:
            raise ValueError(f"answer {number} has {length} tokens; {request.tokens} were wanted")


if __name__ == "__main__":
    name, folder, setting = sys.argv[1:]
    serve(lambda: load(name, Path(folder), Setting(**json.loads(setting))))
