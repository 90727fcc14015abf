"""Agents: episodes, the chat and its tokens, programs, tools, the endpoint, rewards."""
