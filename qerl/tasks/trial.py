"""Tests on one side, the solution on the other: the two programs that judge a function inside the sandbox.

A solution that shares an interpreter with its tests can pass them all without solving anything: by ending the process
with status 0, by printing what a passing run prints, by returning an object that equals everything, by rewriting the
tests in memory. So it has a process of its own (`serve`) that holds nothing but the solution. The tests run in another
(`judge`), and call the function through a pipe: arguments and results travel as plain data, which is rebuilt on the
tests' side from known types only. All that a solution can do is to answer calls, and the right answers pass.

Values that are no plain data, such as a tree's nodes, stay with the solution; the tests hold a handle to them, can read
and set its attributes and pass it back, and it equals nothing but itself.

This file is sent into the sandbox as text, with a last line that calls one of the two. Standard library only.
"""

import ast
import builtins
import collections
import importlib
import json
import os
import sys
import types
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, TextIO

Encoded = Any  # what json takes
LONGEST_LINE = 1 << 26
MOST_ITEMS = 1_000_000  # that are taken from an iterator

COLLECTIONS: dict[str, type] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
BY_TEXT: dict[str, type] = {"Decimal": Decimal, "Fraction": Fraction}
TYPES: dict[str, type] = {t.__name__: t for t in (bool, int, float, complex, str, bytes, list, tuple, set, dict)}


def encode(value: Any, other: Callable[[Any], Encoded]) -> Encoded:
    """Plain data as JSON; `other` encodes what is none."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item, other) for item in value]
    for name, kind in COLLECTIONS.items():
        if isinstance(value, kind):
            return {name: [encode(item, other) for item in value]}  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(item, other)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for name, kind in BY_TEXT.items():
        if isinstance(value, kind):
            return {name: str(value)}
    if isinstance(value, type) and value in TYPES.values():
        return {"type": value.__name__}
    if hasattr(value, "__next__") or isinstance(value, type({}.keys()) | type({}.values()) | type({}.items())):
        return {"iterator": [encode(item, other) for item, _ in zip(value, range(MOST_ITEMS), strict=False)]}
    return other(value)


def decode(value: Encoded, other: Callable[[str, Any], Any]) -> Any:
    if isinstance(value, list):
        return [decode(item, other) for item in value]
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name in COLLECTIONS:
        return COLLECTIONS[name](decode(item, other) for item in content)
    if name == "dict":
        return {decode(key, other): decode(item, other) for key, item in content}
    if name == "iterator":
        return iter([decode(item, other) for item in content])
    if name == "int":
        return int(content, 16)
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(*map(float, content))
    if name == "range":
        return range(*map(int, content))
    if name in BY_TEXT:
        return BY_TEXT[name](str(content))
    if name == "type":
        return TYPES[content]
    return other(name, content)


# ---- the solution's side


def serve(solution: str, requests: TextIO, replies: TextIO) -> None:
    """Run the solution, then answer calls for as long as they come."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(solution, "solution.py", "exec"), module.__dict__)
    kept: list[Any] = []

    def keep(value: Any) -> Encoded:
        kept.append(value)
        return {"handle": len(kept) - 1}

    def find(name: str, content: Any) -> Any:
        return kept[content] if name == "handle" else getattr(module, content)

    for line in requests:
        action, subject, *arguments = decode(json.loads(line), find)
        try:
            if action == "call":
                positional, named = arguments
                result = subject(*positional, **named)
            elif action == "get":
                result = getattr(subject, arguments[0])
            else:
                setattr(subject, *arguments)
                result = None
            reply = {"result": encode(result, keep)}
        except Exception as error:  # noqa: BLE001 - it belongs to the tests, which may expect it
            reply = {"error": [next(kind.__name__ for kind in type(error).__mro__ if hasattr(builtins, kind.__name__))]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


# ---- the tests' side


class Handle:
    """A value that stays with the solution, or the name of one."""

    def __init__(self, channel: "Channel", reference: Encoded) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_reference", reference)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return object.__getattribute__(self, "_channel").ask("call", self, list(positional), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object.__getattribute__(self, "_channel").ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_channel").ask("set", self, name, value)


class Channel:
    def __init__(self, requests: TextIO, replies: TextIO) -> None:
        self.requests, self.replies = requests, replies

    def ask(self, action: str, subject: Handle, *arguments: Any) -> Any:
        self.requests.write(json.dumps(encode([action, subject, *arguments], self.reference)) + "\n")
        self.requests.flush()
        line = self.replies.readline(LONGEST_LINE)
        if not line.endswith("\n"):
            raise RuntimeError("the solution has ended")
        reply = json.loads(line)
        if "error" in reply:
            kind = getattr(builtins, str(reply["error"][0]), RuntimeError)
            raise kind() if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError()
        return decode(reply["result"], self.handle)

    def reference(self, value: Any) -> Encoded:
        if not isinstance(value, Handle):
            raise TypeError(f"a {type(value).__name__} can't be given to the solution")
        return object.__getattribute__(value, "_reference")

    def handle(self, name: str, content: Any) -> Handle:
        if name != "handle" or not isinstance(content, int):
            raise ValueError("not a reply")
        return Handle(self, {"handle": content})

    def name(self, name: str) -> Handle:
        return Handle(self, {"name": name})


def names_to_ask_for(tests: str) -> set[str]:
    """Names that the tests use and that must come from the solution.

    A builtin is the tests' own, so that a solution that defines `set` or `abs` does not change what they compare; only
    where they use no other name is it the function under test (MBPP has one that is called `sum`).
    """
    nodes = [node for node in ast.walk(ast.parse(tests))]
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {(a.asname or a.name).partition(".")[0] for n in nodes if isinstance(n, ast.Import) for a in n.names}
    bound |= {alias.asname or alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    wanted = {name for name in used - bound if not hasattr(builtins, name)} - sys.stdlib_module_names
    if wanted:
        return wanted
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]  # outermost first
    return {call.id for call in calls[:1] if isinstance(call, ast.Name)}


def judge(tests: str, setup: str, asked: list[str] | None, token: str, requests: TextIO, replies: TextIO) -> None:
    """Run the tests; print the token if they pass.

    asked: the names that come from the solution; None: whatever names_to_ask_for finds.
    """
    verdict = os.dup(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    channel = Channel(requests, replies)
    namespace: dict[str, Any] = {"__name__": "tests"}
    whole = setup + "\n" + tests
    used = {node.id for node in ast.walk(ast.parse(whole)) if isinstance(node, ast.Name)}
    namespace |= {name: importlib.import_module(name) for name in used & sys.stdlib_module_names}
    if asked is None:
        namespace |= {name: channel.name(name) for name in names_to_ask_for(whole)}
        exec(compile(whole, "tests.py", "exec"), namespace)
    else:
        exec(compile(setup, "setup.py", "exec"), namespace)
        namespace |= {name: channel.name(name) for name in asked}
        exec(compile(tests, "tests.py", "exec"), namespace)
    os.write(verdict, token.encode())
