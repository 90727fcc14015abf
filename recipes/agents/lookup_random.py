"""A control for ``lookup.yaml``: the same tool, but what it says has nothing to do with the key."""

import random


async def look_up(key: str) -> int:
    """Look a key up in the table.

    Args:
        key: the key
    """
    return random.randrange(10)
