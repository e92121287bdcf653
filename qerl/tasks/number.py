r"""Plain numbers as people and models write them, read exactly.

`1,234.50`, `$18`, `\frac{3}{4}`, `2 1/2`, `1.5 \times 10^3`, `40%`, `12 cm`: each becomes a fraction, what a percent
sign or a unit said about it, and nothing is rounded. What is not a plain number (`2x`, `\sqrt{2}`, `(1, 2)`, `3,5`) is
None, and left to a computer algebra system.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction

MAX_LENGTH = 400  # characters; a longer text is not a plain number
MAX_EXPONENT = 400  # of ten

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_TIMES = r"\s*(?:\*|\\times|\\cdot|x|×|·)\s*"  # noqa: RUF001
_POWER = rf"(?:[eE]([-+]?\d{{1,4}})|{_TIMES}10\s*(?:\^|\*\*)\s*\{{?\s*([-+]?\d{{1,4}})\s*\}}?)"
_SCIENTIFIC = re.compile(rf"({_DECIMAL}){_POWER}?")
_POWER_OF_TEN = re.compile(r"10\s*(?:\^|\*\*)\s*(?:\{\s*([-+]?\d{1,4})\s*\}|([-+]?\d{1,4}))")
_RATIO = re.compile(rf"(?:({_DIGITS})\s+)?({_DECIMAL})\s*/\s*({_DECIMAL})")
_FRAC = re.compile(
    rf"(?:({_DIGITS})\s*)?\\[dtc]?frac\s*(?:\{{\s*([-+]?)\s*({_DECIMAL})\s*\}}|(\d))\s*"
    rf"(?:\{{\s*({_DECIMAL})\s*\}}|(\d))"
)
_UNIT = re.compile(r"\s*([^\W\d_][^\d+*=<>(){}\[\],;:|!&\\]*?(?:\s*\^\s*\{?[23]\}?)?)\s*")

_SIGNS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "：": ":", "，": ","})  # noqa: RUF001
_DROPPED = re.compile(r"\\(?:left|right|displaystyle|,|;|!|:|>|quad|qquad|ensuremath)(?![A-Za-z])|\\ |~")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|°")
_ASSIGNED = re.compile(r"\\?[A-Za-z](?:_\{?\w{1,3}\}?)?\s*(?:=|\\approx|≈)\s*")

SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Words after a number that are mathematics and no unit.
_NO_UNITS = {
    *("and", "or", "not", "to", "mod", "plus", "minus", "times", "over", "divided", "by", "sqrt", "root", "pi", "exp"),
    *("sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "infinity", "inf", "squared", "cubed", "factorial"),
    *("half", "halves", "third", "thirds", "quarter", "quarters", "tenths", "hundredths", "thousandths", "base"),
    *("choose", "remainder", "if", "with", "where", "than", "is", "are", "through", "until", "but", "nor", "without"),
}
# Different spellings of one unit; two units of different rows are different answers.
_SPELLINGS = (
    "mm millimeter millimeters millimetre millimetres",
    "cm centimeter centimeters centimetre centimetres",
    "m meter meters metre metres",
    "km kilometer kilometers kilometre kilometres",
    "in inch inches",
    "ft foot feet",
    "yd yard yards",
    "mi mile miles",
    "mg milligram milligrams",
    "g gram grams",
    "kg kilogram kilograms",
    "oz ounce ounces",
    "lb lbs pound pounds",
    "ml milliliter milliliters millilitre millilitres",
    "l liter liters litre litres",
    "sec secs second seconds",
    "min mins minute minutes",
    "h hr hrs hour hours",
    "day days",
    "week weeks",
    "month months",
    "year years",
    "cent cents",
    "dollar dollars",
    "euro euros",
    "degree degrees",
    "radian radians",
    "mph",
    "kph kmh",
)
UNITS = {spelling: row.split()[0] for row in _SPELLINGS for spelling in row.split()}
_LETTERS = {"m": "meters", "g": "grams", "h": "hours", "l": "liters", "L": "liters", "s": "seconds"}
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound sterling", "¥": "yen", "₹": "rupee"}


@dataclass(frozen=True)
class Number:
    value: Fraction  # as written: 40 for 40%
    percent: bool = False
    unit: str | None = None  # a unit of UNITS, in one spelling; None: none, or one that is not known
    power: int | None = None  # of the unit: 2 for cm^2

    def equals(self, given: "Number") -> bool:
        """Whether `given` is this number. 40% is 0.4, and 40 where the sign was left out: the question may have asked
        for percent. Known units must agree where both have one."""
        if self.unit and given.unit and self.unit != given.unit:
            return False
        if self.power and given.power and self.power != given.power:
            return False
        if self.percent == given.percent:
            return self.value == given.value
        if self.percent:
            return given.value in (self.value, self.value / 100)
        return given.value / 100 == self.value or (given.value == self.value and abs(self.value) >= 1)


def clean(text: str) -> str:
    r"""The same answer without typography: LaTeX spacing, `\left`, `\text`, `{,}`, dollar signs, a full stop."""
    text = text.translate(_SIGNS).replace("{,}", ",").replace("\\%", "%").replace("\\$", "$")
    text = _DEGREES.sub(" degrees ", _TEXT.sub(_word, _DROPPED.sub(" ", text)))
    text = text.strip().strip("*").strip()
    for mark in ("$$", "$"):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)].strip()
    for left, right in (("\\(", "\\)"), ("\\[", "\\]")):
        text = text.removeprefix(left).removesuffix(right).strip()
    return text.rstrip(".").strip() if not text.endswith("..") else text


def _word(found: re.Match[str]) -> str:
    """A text's content; a unit of one letter is written out, since outside a text it would be a variable."""
    content = found.group(1).strip()
    return f" {_LETTERS.get(content, found.group(1))} "


def parse_number(text: str) -> Number | None:
    """The number that the whole text is, or None."""
    if len(text) > MAX_LENGTH:
        return None
    text = clean(text)
    if found := _ASSIGNED.match(text):
        text = text[found.end() :]
    text = re.sub(r"^(?:\\approx|≈|=)\s*", "", text)
    sign = 1
    if text[:1] in ("-", "+"):
        sign = -1 if text[0] == "-" else 1
        text = text[1:].lstrip()
    unit = None
    if text[:1] in _CURRENCIES:
        unit = _CURRENCIES[text[0]]
        text = text[1:].lstrip()
        if text[:1] == "-" and sign == 1:
            sign, text = -1, text[1:].lstrip()
    round_ones = text.startswith("(") and text.endswith(")") and text.count("(") == 1
    if round_ones or (text.startswith("{") and text.endswith("}")):
        inner = parse_number(text[1:-1])
        return None if inner is None else replace(inner, value=sign * inner.value, unit=inner.unit or unit)
    found_value = _value(text)
    if found_value is None:
        return None
    value, rest = found_value
    percent = False
    if rest.lstrip().startswith("%"):
        percent, rest = True, rest.lstrip()[1:]
    elif words := re.match(r"\s*(?:percent|per cent)\b", rest):
        percent, rest = True, rest[words.end() :]
    if words := re.match(rf"\s*({'|'.join(SCALES)})s?\b", rest):
        value, rest = value * SCALES[words.group(1)], rest[words.end() :]
    power = None
    if rest.strip():
        if (named := _unit(rest)) is None or (unit and named[0] and named[0] != unit):
            return None
        unit, power = unit or named[0], named[1]
    return Number(sign * value, percent, unit, power)


def _value(text: str) -> tuple[Fraction, str] | None:
    """The unsigned number that the text begins with, and what follows it."""
    if found := _FRAC.match(text):
        whole, sign, top, top_digit, bottom, bottom_digit = found.groups()
        below = _decimal(bottom or bottom_digit)
        if below == 0 or (whole and sign):
            return None
        part = _decimal(top or top_digit) / below * (-1 if sign == "-" else 1)
        return (_decimal(whole) if whole else Fraction(0)) + part, text[found.end() :]
    if found := _RATIO.match(text):
        whole, top, bottom = found.groups()
        if _decimal(bottom) == 0:
            return None
        part = _decimal(top) / _decimal(bottom)
        return (_decimal(whole) if whole else Fraction(0)) + part, text[found.end() :]
    if found := _POWER_OF_TEN.match(text):
        exponent = int(found.group(1) or found.group(2))
        return None if abs(exponent) > MAX_EXPONENT else (Fraction(10) ** exponent, text[found.end() :])
    if found := _SCIENTIFIC.match(text):
        exponent = int(found.group(2) or found.group(3) or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        return _decimal(found.group(1)) * Fraction(10) ** exponent, text[found.end() :]
    return None


def _decimal(text: str) -> Fraction:
    digits = text.replace(",", "").replace(" ", "")
    return Fraction(f"0{digits}" if digits.startswith(".") else digits.rstrip(".") or "0")


def _unit(rest: str) -> tuple[str | None, int | None] | None:
    """The unit that follows a number, in one spelling where it is known, and its power; None: what follows is none."""
    found = _UNIT.fullmatch(rest)
    if not found:
        return None
    words = re.sub(r"[./^{}23²³'\"-]", " ", found.group(1)).casefold().split()
    if not words or len(words) > 6 or any(word in _NO_UNITS for word in words):
        return None
    known = UNITS.get(words[0]) if len(words) == 1 else None
    if not rest[0].isspace() and (known is None or len(words[0]) < 2):
        return None  # 2x, 5m: a product
    if all(len(word) == 1 for word in words):
        return None  # 5 x, 5 a b
    raised = re.search(r"(?:\^\s*\{?([23])\}?|([²³]))\s*$", found.group(1))
    power = None if raised is None else 2 if raised.group(1) == "2" or raised.group(2) == "²" else 3
    return known, power
