"""Gymnasium's environments: one of a user's own in text, and those that are numbers."""

import string

import gymnasium
from gymnasium import spaces

ANY = spaces.Text(max_length=200, min_length=0, charset=string.printable)


class HotCold(gymnasium.Env):
    """A number to find, drawn by Gymnasium's own generator."""

    observation_space = action_space = ANY

    def __init__(self, high=100):
        self.high = high

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = int(self.np_random.integers(self.high))
        hint = (options or {}).get("hint", "none")
        return f"Find a number below {self.high}. Hint: {hint}.", {}

    def step(self, action):
        guess = int(action) if action.isdigit() else -1
        found = guess == self.target
        return ("found" if found else "up" if guess < self.target else "down"), float(found), found, False, {}


gymnasium.register("HotCold-v0", entry_point=HotCold, max_episode_steps=3)


def registered():
    return gymnasium.make("HotCold-v0")


def frozen_lake():
    return gymnasium.make("FrozenLake-v1", is_slippery=False)


def cart_pole():
    return gymnasium.make("CartPole-v1")


class Named(gymnasium.ActionWrapper):
    action_space = ANY

    def action(self, action):
        return ["left", "down", "right", "up"].index(action)


class Told(gymnasium.ObservationWrapper):
    observation_space = ANY

    def observation(self, observation):
        return f"You stand on field {observation} of 16."


def lake_in_text():
    return Told(Named(frozen_lake()))
