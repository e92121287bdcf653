r"""Whether two mathematical answers are the same.

Three rungs, each tried where the one before can't say: the same text; plain numbers, compared exactly as fractions; and
math-verify, which parses LaTeX and asks sympy (expressions, tuples, sets, intervals, matrices, equations). math-verify
is imported when first needed. Its own timeouts go by SIGALRM, which fails outside the main thread: they are off here,
and what runs this in earnest (`qerl.tasks.workers`) brings timeouts that end a process. What would surely hang sympy
(towers of powers, giant factorials, endless texts) is refused before it is parsed, for the price of a look.
"""

import logging
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from qerl.tasks.number import Number, clean, parse_number

MAX_LENGTH = 1000  # characters of an answer that sympy is to see
MAX_DEPTH = 40  # of brackets
MAX_DIGITS = 200  # in a row
MAX_POWER = 5000  # decimal digits of a power, roughly
MAX_FACTORIAL = 500

_POWER = re.compile(r"(\d+)?\s*\^\s*")
_FACTORIAL = re.compile(r"(\d+)\s*[)}]*\s*!|\\(?:[dt]?binom|choose)\s*\{?(\d+)")
_GROUP_FACTORIAL = re.compile(r"[)}]\s*!")
_POWER_OF_GROUP = re.compile(r"[)}\]]\s*\^")
_BIG_OPERATORS = re.compile(r"\\(?:sum|prod|int|lim|iint|oint)(?![A-Za-z])")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|lt|gt|leq|geq)(?![A-Za-z])")
_CHOICE = re.compile(r"\(?([A-Za-z])\)?")

_SYMBOLS = {
    **{"π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup "},  # noqa: RUF001
    **{"∩": r"\cap ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}"},  # noqa: RUF001
    **{"∈": r"\in ", "ℝ": r"\mathbb{R}", "θ": r"\theta ", "−": "-", "–": "-", "±": r"\pm ", "∅": r"\emptyset "},  # noqa: RUF001
    **{"**": "^", "<=": r"\le ", ">=": r"\ge ", "!=": r"\ne "},
}
_ASCII_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)")
_ASCII_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|infinity|infty|sin|cos|tan|cot|sec|csc|log|ln|exp|theta)(?![A-Za-z])")
_NATURAL_LOG = re.compile(r"\\log\s*_\s*(?:e(?![A-Za-z])|\{\s*e\s*\})")
_DECIMAL_POWER = re.compile(r"\^\s*\{\s*(-?)(\d{0,9})\.(\d{1,9})\s*\}|\^\s*(-?)(\d{0,9})\.(\d{1,9})")
_SUM_OR_PRODUCT = re.compile(r"[\w)}\]!]\s*(?:[-+*]|\\(?:cdot|times|div)(?![A-Za-z]))")


def same_answer(right: str, given: str) -> bool:
    """Whether `given` is the answer `right`. Not symmetric: forgiveness goes by what the right answer looks like."""
    if not given.strip() or len(given) > 10 * MAX_LENGTH:
        return False
    if _plain_text(right) == _plain_text(given):
        return True
    number, other = parse_number(right), parse_number(given)
    if number is not None and other is not None:
        return number.equals(other)
    if _choice(right) is not None or _choice(given) is not None:
        return _choice(right) == _choice(given)
    if _is_words(right) or _is_words(given):
        return _is_words(right) and _is_words(given) and _words(right) == _words(given)
    if too_heavy(right) or too_heavy(given):
        return False
    return _same_kind(right, given, number) and _verified(to_latex(right), to_latex(given))


def too_heavy(text: str) -> bool:
    """Whether sympy might choke on this text, by a look at its characters."""
    if len(text) > MAX_LENGTH or re.search(rf"\d{{{MAX_DIGITS}}}", text) or _depth(text) > MAX_DEPTH:
        return True
    if text.count("!") > 3 or ("^" in text and _GROUP_FACTORIAL.search(text)):
        return True
    if any(int(found[1] or found[2]) > MAX_FACTORIAL for found in _FACTORIAL.finditer(text)):
        return True
    if _BIG_OPERATORS.search(text) and re.search(r"\d{5}", text):
        return True
    return _power(text.replace("**", "^")) > MAX_POWER


def _power(text: str) -> float:
    """About how many digits the largest power in the text may have."""
    sizes = []
    for found in _POWER.finditer(text):
        base, exponent = found[1] or "", _exponent(text, found.end())
        if re.search(r"[A-Za-z]", re.sub(r"\\(?:cdot|times|frac|[dt]frac|left|right)", "", exponent)):
            continue  # with a variable in it, nothing is worked out
        numbers = [int(digits) for digits in re.findall(r"\d+", exponent)]
        if "!" in exponent or ("^" in exponent and (max(numbers, default=0) > 4 or exponent.count("^") > 1)):
            return math.inf  # a tower
        sizes.append(max(1, len(base)) * math.prod(max(1, number) for number in numbers))
    return math.prod(sizes) if _POWER_OF_GROUP.search(text) else max(sizes, default=0)


def _exponent(text: str, at: int) -> str:
    """The exponent that begins here, with what it is raised to itself."""
    end = at
    depth = 0
    while end < len(text):
        depth += (text[end] in "({[") - (text[end] in ")}]")
        if depth < 0 or (depth == 0 and end > at and text[end] in "+-*/,;= "):
            break
        end += 1
    return text[at:end]


def to_latex(text: str) -> str:
    """The same answer in LaTeX: Unicode symbols, `sqrt(2)`, `pi`, `**` and words around the formula are translated."""
    text = text.strip().strip("$").strip()
    for symbol, latex in _SYMBOLS.items():
        text = text.replace(symbol, latex)
    text = re.sub(r"(?<![<>=\\])\*", r"\\cdot ", text)
    for _ in range(3):
        text = _ASCII_ROOT.sub(r"\\sqrt{\1}", text)
    text = _ASCII_NAMES.sub(lambda found: "\\" + {"infinity": "infty"}.get(found[1], found[1]), text)
    text = _DECIMAL_POWER.sub(_fraction_power, _NATURAL_LOG.sub(r"\\ln ", text))
    text = re.sub(r"\\(?:[,;!:>]|quad|qquad|displaystyle)(?![A-Za-z])", " ", text)
    text = re.sub(r"\\(?:left|right|big|Big|bigg|Bigg)(?![A-Za-z])", "", text)
    text = re.sub(r"\\text\s*\{\s*(?:or|and)\s*\}|(?<![\\A-Za-z])(?:or|and)(?![A-Za-z])", ",", text)
    return text.rstrip(".").strip()


def _fraction_power(found: re.Match[str]) -> str:
    """`^{0.5}` with an exact exponent: sympy would work out the power in floating point."""
    sign, whole, part = found.groups()[:3] if found[3] else found.groups()[3:]
    return f"^{{{sign}\\frac{{{int(whole + part)}}}{{{10 ** len(part)}}}}}"


def _plain_text(text: str) -> str:
    text = re.sub(r"\s+", "", clean(text).replace("dfrac", "frac").replace("tfrac", "frac"))
    return re.sub(r"_\{(\w+)\}", r"_\1", text)


def _choice(text: str) -> str | None:
    r"""The letter of `\text{(C)}`, `(C)` or `C.`; a lone lower-case letter is a variable."""
    found = _CHOICE.fullmatch(clean(text))
    if found is None:
        return None
    marked = "\\text" in text or "(" in text
    return found.group(1).upper() if marked or found.group(1).isupper() else None


def _is_words(text: str) -> bool:
    """Whether an answer is words and no formula: `\\text{Evelyn}`, `no solution`, `Monday`."""
    words = clean(text)
    return bool(re.fullmatch(r"[A-Za-z][A-Za-z'’ .,-]*", words)) and any(  # noqa: RUF001
        len(word) > 2 and word.casefold() not in ("sqrt", "sin", "cos", "tan", "log", "infty", "theta", "inf")
        for word in re.findall(r"[A-Za-z]+", words)
    )


def _words(text: str) -> str:
    return " ".join(re.findall(r"[a-z]+", clean(text).casefold()))


def _same_kind(right: str, given: str, number: Number | None) -> bool:
    """Refuse what math-verify would forgive: an interval's other brackets; for one number a list, an inequality, or a
    sum or product that was not worked out (it may be the question's own); another base (numbers in a base are the same
    only as texts)."""
    one, other = to_latex(right), to_latex(given)
    if _brackets(one) and _brackets(other) and _brackets(one) != _brackets(other):
        return False
    if number is not None:
        listed = "," in re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", other)
        if listed or _RELATION.search(other) or re.search(r"\\(?:pm|cup)(?![A-Za-z])", other):
            return False
        if _SUM_OR_PRODUCT.search(other.rpartition("=")[2]):
            return False
    return not re.search(r"\d_", one + " " + other)


def _brackets(text: str) -> str | None:
    """The outer brackets of an interval, tuple or set; unions and other texts have none."""
    text = re.sub(r"^[A-Za-z]\s*(?:=|\\in(?![A-Za-z]))\s*", "", text).replace("\\{", "{").replace("\\}", "}")
    found = re.fullmatch(r"([(\[{])[^()\[\]]*,[^()\[\]]*([)\]}])", text)
    return found.group(1) + found.group(2) if found else None


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "({[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")}]":
            depth -= 1
    return deepest


def _verified(right: str, given: str) -> bool:
    parse, verify = _math_verify()
    one, other = parse(right), parse(given)
    if not one or not other:
        return False
    # An inequality for an interval is seen only with the inequality as the right answer.
    return verify(one, other) or (bool(_RELATION.search(given)) and verify(other, one))


def prepare() -> None:
    """Import math-verify and sympy, and have them build their tables: the better part of a second, once a process."""
    _verified(r"\frac{x}{2} + 1", r"\frac{x + 2}{2}")


@cache
def _math_verify() -> tuple[Callable[[str], list[Any]], Callable[[list[Any], list[Any]], bool]]:
    """math-verify's parse and verify, without their timeouts and what they log about that."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify import parse as parse_math
    from math_verify import verify as verify_math

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    configs = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def parse(latex: str) -> list[Any]:
        found: list[Any] = parse_math(f"\\boxed{{{latex}}}", extraction_config=configs, parsing_timeout=None)
        return found

    def verify(right: list[Any], given: list[Any]) -> bool:
        return bool(verify_math(right, given, timeout_seconds=None))

    return parse, verify
