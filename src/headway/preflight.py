"""What a run needs from outside, tried before a run's directory is made, a model warmed up or a worker started.

`check_inputs` ─▶ the rows to train on        reward, data: no torch, so that ``--dry-run`` and the doctor can ask, too
`check_model`  ─▶ nothing                     the algorithm's names, the folder of ``model.path``, prompts as tokens
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from headway.config.schema import Config
from headway.data.sources import Rows, build_sources, read_rows
from headway.errors import ConfigError
from headway.rewards.pool import RewardPool
from headway.rewards.request import RewardSpec
from headway.rewards.scorers import make_scorer
from headway.user_code import names_a_file


def check_inputs(config: Config) -> Rows:
    """The run's rows, and the reward tried on their columns. A user's own reward is loaded in a process of its own.

    Raises:
        ConfigError: no such reward or task, or parameters that the task does not take.
        DataError: a data file is missing, or holds something else than it should.
        UserCodeError: the reward's file does not import, or its function needs what the rows lack.
    """
    rows = read_rows(config)
    spec = replace(RewardSpec.of(config), columns=rows.columns)
    if names_a_file(spec.function):
        asyncio.run(_load_in_a_process(spec))
    else:
        make_scorer(spec)
    return rows


def check_model(config: Config, rows: Rows) -> None:
    """Open all of the model but its weights, and read the first prompts as it does.

    Raises:
        ConfigError: no such algorithm, or more tokens than the model has positions.
        DataError: prompts that the tokenizer cannot render, or that are all too long.
        ModelError: the folder is missing or incomplete, or holds no causal language model.
    """
    from headway.engines.rollout.vllm.launch import check_installed
    from headway.engines.train.advantages import FetchAdvantages
    from headway.engines.train.fsdp.objective import Objective

    FetchAdvantages(config.algorithm)
    Objective(config)
    if config.rollout.name == "vllm" and config.cluster.address is None:
        check_installed()  # here, where all workers will be
    if config.model.path is None:
        return
    from headway.models.loading import load_config, load_tokenizer

    trust_remote_code = config.model.trust_remote_code
    _check_positions(config, load_config(config.model.path, trust_remote_code=trust_remote_code))
    build_sources(config, load_tokenizer(config.model.path, trust_remote_code=trust_remote_code), rows)


async def _load_in_a_process(spec: RewardSpec) -> None:
    pool = RewardPool(spec, workers=1, retries=0, log_path=None)
    try:
        await pool.start()
    finally:
        await pool.close()


def _check_positions(config: Config, model_config: Any) -> None:
    limit = getattr(model_config, "max_position_embeddings", None)
    length = config.data.max_prompt_length + config.data.max_response_length
    if limit is not None and length > limit:
        raise ConfigError(
            f"data.max_prompt_length={config.data.max_prompt_length} + data.max_response_length="
            f"{config.data.max_response_length} is {length} tokens, more than the {limit} positions of the model at "
            f"{config.model.path}; lower the lengths"
        )
