"""Agent loops in verl's form: ``run(sampling_params, **row)`` over token ids, without verl.

class Loop:                                                    # as verl's AgentLoopBase is made: what it takes, by name
    def __init__(self, trainer_config, server_manager, tokenizer, **kwargs): ...
    async def run(self, sampling_params, **row):
        ids = self.tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, return_dict=False)
        said = await self.server_manager.generate(request_id="0", prompt_ids=ids, sampling_params=sampling_params)
        return AgentLoopOutput(prompt_ids=ids, response_ids=said.token_ids, response_mask=[1] * len(said.token_ids), …)

What is trained are the turns that ``generate`` made, with the engine's own log-probs and versions; of the output only
the reward and numbers are used, and it is checked that what it says was sampled was.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from headway.agents.interface.program_chat import Chat
from headway.agents.interface.program_messages import EpisodeEnd, EpisodeStart, ProgramDescription
from headway.agents.interface.user_calls import number
from headway.errors import ProgramFailed, UserCodeError, boundary, shown
from headway.runtime.user_code import Parameters

EXPECTED = (
    "expected an object with verl's fields prompt_ids, response_ids, response_mask and reward_score, or a list of these"
)


@dataclass(slots=True)
class TokenOutput:
    """The tokens of one turn, with the fields of verl's class of that name."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class ServerManager:
    """verl's ``server_manager`` of one episode: its turns are the episode's."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self.sampled: list[int] = []
        """All tokens that were sampled, in the order in which turns ended."""

    async def generate(
        self,
        request_id: Any = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        image_data: Any = None,
        video_data: Any = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Have the policy continue ``prompt_ids`` [P]. Of ``sampling_params`` only limits hold: ``max_tokens`` (or
        ``max_new_tokens``), ``stop`` and ``stop_token_ids``; the distribution is the run's.

        Raises:
            EpisodeOver: a limit has ended the episode.
            ProgramFailed: there are images or videos, or more that ends a turn than is looked for.
        """
        if image_data or video_data:
            raise ProgramFailed("server_manager.generate() was given images or videos, and the policy reads text alone")
        asked = dict(sampling_params or {})
        stop = asked.get("stop") or ()
        answer = await self._chat.continued(
            [int(id) for id in prompt_ids],
            max_tokens=asked.get("max_tokens") or asked.get("max_new_tokens"),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(dict.fromkeys(int(id) for id in asked.get("stop_token_ids") or ())),
        )
        self.sampled += answer.token_ids
        reason = "completed" if answer.finish_reason == "stop" else "length"
        return TokenOutput(list(answer.token_ids), list(answer.logprobs), stop_reason=reason)


class VerlLoop:
    """An agent loop in verl's form. Each episode has a new object of the class, or a deep copy of the object."""

    is_async = True

    def __init__(
        self, found: Any, who: str, params: Mapping[str, Any], model_path: str | None, prompt_length: int
    ) -> None:
        """Make the program of the loop ``found``.

        Args:
            model_path: folder of the policy's tokenizer; None where the model is not there yet.
            prompt_length: most tokens of a prompt.
        """
        self._found, self._who, self._params, self._prompt_length = found, who, dict(params), prompt_length
        run = found.run
        if not inspect.iscoroutinefunction(run):
            raise UserCodeError(
                f"{who}: its run() is a plain function; write async def run(self, sampling_params, **row)"
            )
        if not inspect.isclass(found):
            with boundary(f"{who}: each episode has a copy of it, and none can be made; give its class", UserCodeError):
                deepcopy(found)
        self._tokenizer = None if model_path is None else _tokenizer(model_path)

    def describe(self) -> ProgramDescription:
        return ProgramDescription("verl's agent loop", self.is_async)

    async def run(self, start: EpisodeStart, chat: Chat) -> EpisodeEnd:
        manager = ServerManager(chat)
        messages = [dict(message) for message in start.messages]
        output = await self._made(manager, start).run(dict(start.sampling), **{"raw_prompt": messages, **start.row})
        outputs = output if isinstance(output, list | tuple) else [output]
        if not outputs:
            raise ProgramFailed(f"{self._who}: run() returned {shown(output)}, {EXPECTED}")
        for one in outputs:
            self._check(one, manager.sampled)
        scores = [score for one in outputs if (score := _field(one, "reward_score")) is not None]
        return EpisodeEnd(
            reward=number(scores[-1], f"{self._who}: reward_score") if scores else None,
            metrics={name: value for one in outputs for name, value in _numbers(_field(one, "metrics"))},
        )

    def _made(self, manager: ServerManager, start: EpisodeStart) -> Any:
        if not inspect.isclass(self._found):
            loop = deepcopy(self._found)  # episodes go on side by side, each with what it remembers
            loop.server_manager, loop.tokenizer = manager, self._tokenizer
            return loop
        config = _config(self._prompt_length, start.most_tokens, start.template_kwargs)
        given = {
            "trainer_config": SimpleNamespace(config=config),
            "config": config,
            "server_manager": manager,
            "tokenizer": self._tokenizer,
            "processor": None,
            "dataset_cls": None,
            "data_config": SimpleNamespace(config=config.data),
        }
        loop = self._found(**Parameters.of(self._found).given(given), **self._params)
        for name in ("server_manager", "tokenizer"):
            if not hasattr(loop, name):
                setattr(loop, name, given[name])
        return loop

    def _check(self, output: Any, sampled: Sequence[int]) -> None:
        """Check that ``output`` has verl's fields, and that the tokens of its mask were sampled, in this order."""
        ids, mask = _field(output, "response_ids"), _field(output, "response_mask")
        if ids is None or mask is None or len(ids) != len(mask):
            raise ProgramFailed(f"{self._who}: run() returned {shown(output)}, {EXPECTED}")
        left = iter(sampled)
        for at, (id, is_sampled) in enumerate(zip(ids, mask, strict=True)):
            if is_sampled and int(id) not in left:  # takes what comes before from `left`, too
                raise ProgramFailed(
                    f"{self._who}: response_mask is 1 at token {at} of response_ids ({int(id)}), which was not "
                    "sampled there; give the ids that server_manager.generate() returned, and mask 0 for all others"
                )


def is_verl_loop(found: Any) -> bool:
    """Tell whether ``found`` is an agent loop in verl's form: its ``run`` takes ``sampling_params`` first."""
    run = getattr(found, "run", None)
    return callable(run) and Parameters.of(run).order[:1] == ("sampling_params",)


def _config(prompt_length: int, most_tokens: int, template_kwargs: Mapping[str, Any]) -> Any:
    """The parts of verl's configuration that agent loops read, as far as they mean something here.

    verl's response is all that follows the prompt, in all turns: what tools said, too.
    """
    from omegaconf import OmegaConf

    response_length = most_tokens - prompt_length
    lengths = {"prompt_length": prompt_length, "response_length": response_length, "max_model_len": most_tokens}
    rollout = {**lengths, "multi_turn": {}, "agent": {}}
    model = {"path": None}
    data = {"apply_chat_template_kwargs": dict(template_kwargs), "max_prompt_length": prompt_length}
    data["max_response_length"] = response_length
    both = {"rollout": rollout, "model": model}
    return OmegaConf.create({"actor_rollout_ref": both, **both, "data": data})


def _tokenizer(model_path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _numbers(metrics: Any) -> Iterator[tuple[str, float]]:
    """The finite numbers of ``metrics`` by name. Other values, which have no mean, are left out."""
    dump: Callable[[], Any] | None = getattr(metrics, "model_dump", None)
    plain = metrics if isinstance(metrics, Mapping) else dump() if dump is not None else {}
    for name, value in plain.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield str(name), float(value)
