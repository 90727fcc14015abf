"""GEM's environments, as a user names them in ``agent.environment``."""

import gem
from gem.tools.python_code_tool import PythonCodeTool
from gem.tools.tool_env_wrapper import ToolEnvWrapper
from gem.wrappers.episode_tracking_wrapper import EpisodeTrackingWrapper


def game(name):
    return gem.make(name)


def tracked(name):
    return EpisodeTrackingWrapper(gem.make(name))


def with_python(name):
    return ToolEnvWrapper(gem.make(name), tools=[PythonCodeTool(timeout=20)], tool_reward=0.05)
