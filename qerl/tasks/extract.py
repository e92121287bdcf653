r"""The final answer in a completion, as text.

The forms, of which the one that stands last counts: `<answer>..</answer>`, `\boxed{..}` (nested braces; the last box),
GSM8K's `#### N`, and a line `Answer: ..`. Where there is none, a sentence `the answer is ..` will do; the last number
of the text is the last resort, for tasks that allow it. What a model thinks is not its answer: after `</think>` only
what follows is read, and a thought that never ends has none. Nothing here backtracks: a hostile text costs time in
proportion to its length.
"""

import re

from qerl.tasks.number import parse_number

TAIL = 20_000  # characters: an answer stands near the end
MAX_BOXES = 50  # looked at, from the last

_THINK, _THOUGHT = "<think>", "</think>"
_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = re.compile(r"\\f?box(?:ed)?\b\s*")
_HASHES = re.compile(r"####[ \t]*([^\n#]{1,200})")
_ANSWER_LINE = re.compile(  # at the head of a line, or with a capital: not "to check our answer: .."
    r"(?:(?im:^[ \t>*#_-]{0,8}(?:(?:the|final|my|so|therefore|thus|correct),?[ \t]{1,3}){0,3}answer)"
    r"|\b(?:Answer|ANSWER))"
    r"[ \t]{0,3}(?:\*\*)?[ \t]{0,3}[:：][ \t]{0,3}(?:\*\*)?([^\n]{1,2000})"  # noqa: RUF001
)
_SENTENCE = re.compile(r"\banswer[ \t]{1,3}(?:is|equals|=)[ \t]{0,3}:?([^\n]{1,500})", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![\w.])[-−+]?[$€£]?[-−]?(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?(?:/\d+)?%?(?!\.?\d|\s{0,3}[x×*]\s{0,3}\d)"  # noqa: RUF001
    r"|(?<![\w.])[-−+]?\.\d+"  # noqa: RUF001
)
_INLINE = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)")


def extract(text: str, prose: bool = False) -> str | None:
    """The final answer; None: there is none. `prose`: the last number will do."""
    said = spoken(text)
    if said is None:
        return None
    text = said
    found = [one for one in (_tags(text), boxed(text), _hashes(text), _line(text)) if one is not None]
    if found:
        return max(found)[1]
    if sentences := list(_SENTENCE.finditer(text)):
        return _sentence(sentences[-1].group(1))
    return last_number(text) if prose else None


def spoken(text: str) -> str | None:
    """What stands after the thoughts, of it the end; None where the thoughts never end."""
    end = text.rfind(_THOUGHT)
    if text.rfind(_THINK) > end:
        return None
    return text[max(end + len(_THOUGHT) if end >= 0 else 0, len(text) - TAIL) :]


def boxed(text: str) -> tuple[int, str] | None:
    """Where the last complete box stands, and what is in it."""
    for found in list(_BOX.finditer(text))[: -1 - MAX_BOXES : -1]:
        at = found.end()
        if text[at : at + 1] == "{":
            if (content := _braced(text, at)) is not None:
                return found.start(), content
        elif digits := re.match(r"-?\d+(?:\.\d+)?", text[at : at + 50]):
            return found.start(), digits.group()
    return None


def answer_line(text: str, tail: int = TAIL) -> str | None:
    """What stands after the last `Answer:` near the end of the text, as DAPO asks for it."""
    found = list(_ANSWER_LINE.finditer(text, max(0, len(text) - tail)))
    return _inner(found[-1].group(1)) if found else None


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text, max(0, len(text) - 2000))
    return found[-1] if found else None


def only_number(text: str) -> str | None:
    """The number of a text that has one, and no second."""
    found = _NUMBER.findall(text[:2000])
    return found[0] if len(found) == 1 else None


def _tags(text: str) -> tuple[int, str] | None:
    close = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, close) if close >= 0 else -1
    return (start, _inner(text[start + len(_OPEN) : close])) if start >= 0 else None


def _hashes(text: str) -> tuple[int, str] | None:
    """`#### 18`; a Markdown heading has no number after the hashes and is passed over."""
    for found in reversed(list(_HASHES.finditer(text))):
        if parse_number(found.group(1)) is not None or "\\" in found.group(1):
            return found.start(), _inner(found.group(1))
    return None


def _line(text: str) -> tuple[int, str] | None:
    found = list(_ANSWER_LINE.finditer(text))
    return (found[-1].start(), _inner(found[-1].group(1))) if found else None


def _sentence(text: str) -> str:
    """The answer at the head of a sentence: its formula where it begins with one, else up to the full stop."""
    text = text.strip().lstrip("*").strip()
    if found := _INLINE.match(text):
        return (found.group(1) or found.group(2)).strip()
    end = re.search(r"[.!?](?=\s|$)|\*\*", text)
    return _inner(text[: end.start()] if end else text)


def _inner(text: str) -> str:
    """The content of an answer, less a box, a formula's marks or Markdown around it."""
    text = text.strip()
    if (box := boxed(text)) is not None:
        return box[1].strip()
    text = text.strip("*").strip()
    found = _INLINE.fullmatch(text.rstrip("."))
    return (found.group(1) or found.group(2)).strip() if found else text


def _braced(text: str, at: int) -> str | None:
    """What stands between the brace at this place and the one that closes it."""
    depth = 0
    for place in range(at, len(text)):
        if text[place] == "{" and text[place - 1] != "\\":
            depth += 1
        elif text[place] == "}" and text[place - 1] != "\\":
            depth -= 1
            if depth == 0:
                return text[at + 1 : place].strip()
    return None
