"""Errors that are no bug and no bad setting. (Bad input is a ValueError whose message says what to do.)"""


class Interrupted(RuntimeError):
    """Work that stopped early, with nothing lost; the message says how to go on."""
