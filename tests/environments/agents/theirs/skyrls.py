"""SkyRL-gym's environments: its classes, and one by its registry."""

import skyrl_gym
from skyrl_gym.envs.aime.env import AIMEEnv
from skyrl_gym.envs.gsm8k.env import GSM8kEnv
from skyrl_gym.envs.gsm8k.multi_turn_env import GSM8kMultiTurnEnv
from skyrl_gym.envs.searchcode.env import SearchCodeEnv
from skyrl_gym.envs.sql.env import SQLEnv

__all__ = ["AIMEEnv", "GSM8kEnv", "GSM8kMultiTurnEnv", "SQLEnv", "SearchCodeEnv"]


def registered(env_config, extras):
    return skyrl_gym.make("gsm8k_multi_turn", env_config=env_config, extras=extras)
