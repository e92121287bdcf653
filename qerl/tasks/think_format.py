"""Whether a completion has the form `<think>..</think><answer>..</answer>`.

The opening `<think>` may be missing: chat templates of reasoning models put it into the prompt.
"""

from typing import Any

TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def soft(text: str, row: dict[str, Any]) -> float:
    """A quarter for each of the four tags that stands exactly once, all tags in their order; 0 if they are out of
    order."""
    places = [text.find(tag) for tag in TAGS]
    once = [text.count(tag) == 1 for tag in TAGS]
    if not once[0] and "<think>" not in text and once[1]:
        once[0], places[0] = True, -1
    found = [place for place, single in zip(places, once, strict=True) if single]
    return sum(once) / len(TAGS) if found == sorted(found) else 0.0


def strict(text: str, row: dict[str, Any]) -> float:
    """1 if the completion is thoughts and an answer, neither empty, with nothing but space around them, else 0."""
    text = text.strip()
    thoughts, end, answer = text.removeprefix("<think>").partition("</think>")
    answer = answer.strip()
    if not end or not answer.startswith("<answer>") or not answer.endswith("</answer>"):
        return 0.0
    inner = answer[len("<answer>") : -len("</answer>")]
    clean = not any(tag in part for tag in TAGS for part in (thoughts, inner))
    return float(clean and bool(thoughts.strip()) and bool(inner.strip()))
