"""Calendar days that a task's text names: found, compared with a day of reference, moved by whole years.

Read as a day: `March 8th, 2024`, `8 March 2024`, `March 1-7, 2024`, `Jan 1 to Jan 4, 2024` (one year for both ends, or
the year before it for a first end that stands later in the year), `2024-03-08`, `2024/03/08`, `20/12/2023` and
`20-12-2023`. In the last two the number above 12 is the day; `03/04/2024` has two readings and counts as both days.
A month and a day without a year are found too, but lie neither before nor after any day.

Not read: anything inside an address, a year or a month alone, numbers that only look alike (`A92024`, `1/2`,
`12/2023`). A day that no calendar has (`31 February 2024`) and a year of two digits (`3/4/24`) are told apart from
dates and left alone.
"""

import calendar
import re
from dataclasses import dataclass
from datetime import date

_RELATIVE = re.compile(
    r"\b(?:latest|newest|today|tonight|tomorrow|yesterday|current(?:ly)?|recent(?:ly)?|upcoming|now|"
    r"(?:this|next|last|past) (?:week|weekend|month|year|season|\w+day))\b"
)

LAST_YEAR = 2099
"""Last year that is read as one; the first is 1900."""

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|"
    r"Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\.?"
)
_WEEKDAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs?)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_ORDINAL = r"(?:st|nd|rd|th)?"
_YEAR = r"(?:19|20)\d\d"
_TO = r"(?:-|–|—|to|through|thru|until|till|and|or|&)"
# White space is bounded everywhere: a question of a hundred thousand spaces must not take quadratic time.
_SPACE = r"\s{0,3}"
_BEFORE_YEAR = rf"(?:{_SPACE},{_SPACE}|\s{{1,3}})"
_END = rf"(?![\w:%]|[.,/]\d|-\d(?!\d?{_ORDINAL}\s{{1,3}}{_MONTH}))"

_MONTH_FIRST = re.compile(
    rf"(?<!\w)(?P<month>{_MONTH})\s{{1,3}}(?:the\s)?(?P<day>\d{{1,2}}){_ORDINAL}"
    rf"(?:{_SPACE}{_TO}{_SPACE}(?P<last>\d{{1,2}}){_ORDINAL}(?!\w|{_SPACE}(?:of\s)?{_MONTH}))?"
    rf"(?:{_BEFORE_YEAR}(?P<year>{_YEAR}))?{_END}",
    re.IGNORECASE,
)
_DAY_FIRST = re.compile(
    rf"(?<![\w/.:$€£])(?<!\w-)(?P<day>\d{{1,2}}){_ORDINAL}(?:{_SPACE}{_TO}{_SPACE}(?P<last>\d{{1,2}}){_ORDINAL})?"
    rf"\s{{1,3}}(?:of\s)?(?P<month>{_MONTH})(?:{_BEFORE_YEAR}(?P<year>{_YEAR}))?{_END}",
    re.IGNORECASE,
)
_ISO = re.compile(
    rf"(?<![\w/.-])(?P<year>{_YEAR})(?P<by>[-/])(?P<month>\d\d)(?P=by)(?P<day>\d\d)(?:(?![\w/-]|\.\d)|(?=T\d))"
)
_NUMERIC = re.compile(
    # A hyphen beside it belongs to a number of another kind, unless it joins two such dates.
    rf"(?<![\w/.])(?:(?<!-)|(?<=/\d\d\d\d-))(?P<one>\d{{1,2}})(?P<by>[-/])(?P<two>\d{{1,2}})(?P=by)"
    rf"(?P<year>{_YEAR}|\d\d)(?![\w/]|\.\d|-(?!\d{{1,2}}/\d{{1,2}}/))"
)
_ANY_MONTH = "|".join(_MONTHS)
# One is found in every lower-case text that holds a date, and in few others. Ignoring the case in the pattern itself
# would take ten times as long.
_WORTH_A_LOOK = tuple(
    re.compile(pattern)
    for pattern in (
        r"\d[-/]\d",
        rf"(?:{_ANY_MONTH})[a-z]{{0,6}}\.?\s{{1,3}}(?:the\s)?\d",
        rf"\d{_ORDINAL}\s{{1,3}}(?:of\s)?(?:{_ANY_MONTH})",
    )
)
_ADDRESS = re.compile(r"(?:https?://|www\.)\S+", re.IGNORECASE)
_JOIN = re.compile(
    rf"(?:,?{_SPACE}{_TO}|,){_SPACE}(?:(?:on|from)\s{{1,3}})?(?:{_WEEKDAY}\.?,?\s{{1,3}})?(?:the\s)?", re.IGNORECASE
)
_WEEKDAY_BEFORE = re.compile(rf"\b({_WEEKDAY})\.?,?\s{{1,3}}(?:the\s)?$", re.IGNORECASE)
_WEEKDAY_AFTER = re.compile(rf"^,?\s{{0,3}}\(?({_WEEKDAY})\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DateSpan:
    """One date or range of days as the text writes it."""

    start: int
    """Offset of its first character in the text."""
    end: int
    """Offset behind its last character."""
    text: str
    days: tuple[date, ...]
    """The days that it names: both ends of a range, both readings of an ambiguous date; empty without a year."""
    year_at: int | None
    """Offset of its own four-digit year; None when it has none or takes it from the date that it is joined to."""
    ambiguous: bool = False
    """Whether day and month could change places."""


@dataclass(frozen=True, slots=True)
class TextDates:
    """Everything in a text that is or looks like a day, in the text's order."""

    spans: tuple[DateSpan, ...] = ()
    impossible: tuple[str, ...] = ()
    """Spellings of days that no calendar has."""
    unread: tuple[str, ...] = ()
    """Dates whose year has two digits: which century and which order is anyone's guess."""

    def expired(self, today: date) -> bool:
        """Return whether any day that the text may mean lies before `today`."""
        return any(day < today for span in self.spans for day in span.days)


_NO_DATES = TextDates()


@dataclass(frozen=True, slots=True)
class Shift:
    """A text whose dates were moved."""

    text: str
    years: int
    """Whole years by which every date moved; at least 1."""
    spans: tuple[str, ...]
    """The dates as they stood in the original text."""


@dataclass(frozen=True, slots=True)
class _Mention:
    """A match, before a missing year was looked for in its neighbour."""

    start: int
    end: int
    month: int
    day_numbers: tuple[int, ...]
    year: int | None
    year_at: int | None
    months_and_days: tuple[tuple[int, int], ...] = ()
    """The readings of a numeric date; empty for the others."""
    doubtful: bool = False
    """Whether it may be no date at all unless a year says so, such as the verb in `you may 4`."""


def names_relative_time(text: str) -> bool:
    """Return whether a word's meaning moves with the day on which the task is tried, such as `latest` or `today`."""
    return _RELATIVE.search(text.lower()) is not None


def find_dates(text: str) -> TextDates:
    """Return the dates of a text."""
    lower = text.lower()
    if not any(pattern.search(lower) for pattern in _WORTH_A_LOOK):
        return _NO_DATES
    mentions, unread = _mentions(text)
    spans, impossible = [], []
    for mention in _with_inherited_years(text, mentions):
        written = text[mention.start : mention.end]
        if mention.year is None and mention.doubtful:
            continue
        readings = mention.months_and_days or tuple((mention.month, day) for day in mention.day_numbers)
        real = tuple(pair for pair in readings if _is_day(mention.year, *pair))
        if not real or (not mention.months_and_days and len(real) < len(readings)):
            impossible.append(written)
            continue
        days = () if mention.year is None else tuple(date(mention.year, *pair) for pair in real)
        ambiguous = bool(mention.months_and_days) and len(set(real)) > 1
        spans.append(DateSpan(mention.start, mention.end, written, days, mention.year_at, ambiguous))
    return TextDates(tuple(spans), tuple(impossible), tuple(unread))


def shift_dates(text: str, dates: TextDates, today: date) -> Shift | str:
    """Return the text with all its dates moved together by the fewest whole years after which none lies before `today`.

    Only the digits of years change. Returns the reason instead when a day does not exist in its new year, or when the
    text names the weekday of a date that would then fall on another, or when a year is beyond those that are read.
    """
    dated = [span for span in dates.spans if span.days]
    years = max(today.year - d.year + ((d.month, d.day) < (today.month, today.day)) for s in dated for d in s.days)
    if years < 1:
        raise ValueError(f"no date of {text[:80]!r} lies before {today}")
    pieces, done = [], 0
    for span in dated:
        for day in span.days:
            if day.year + years > LAST_YEAR:
                return f"{span.text!r} moved by {years} year(s) lies beyond {LAST_YEAR}"
            if not _is_day(day.year + years, day.month, day.day):
                return f"{span.text!r} moved by {years} year(s) is no day: {day.year + years} is not a leap year"
        weekday = _named_weekday(text, span)
        moved = {day.replace(year=day.year + years).weekday() for day in span.days}
        if weekday is not None and len(span.days) == 1 and moved != {weekday}:
            return f"{span.text!r} moved by {years} year(s) no longer falls on the weekday that the task names"
        if span.year_at is not None:
            pieces += [text[done : span.year_at], str(int(text[span.year_at : span.year_at + 4]) + years)]
            done = span.year_at + 4
    return Shift("".join([*pieces, text[done:]]), years, tuple(span.text for span in dated))


def _mentions(text: str) -> tuple[list[_Mention], list[str]]:
    """Return what looks like a date, in the text's order, and the dates with a year of two digits."""
    found: list[_Mention] = []
    unread: list[str] = []
    left = _ADDRESS.sub(_blank, text)
    for pattern, read in ((_ISO, _iso), (_NUMERIC, _numeric), (_MONTH_FIRST, _named), (_DAY_FIRST, _named)):
        for match in pattern.finditer(left):
            mention = read(match)
            if mention.year is not None and mention.year < 100:
                unread.append(match[0])
            else:
                found.append(mention)
        # What one form has read is no other's: in `Jan 1 to 4 Feb` the days first would be `1 to 4 Feb`.
        left = pattern.sub(_blank, left)
    return sorted(found, key=lambda mention: mention.start), unread


def _blank(match: re.Match[str]) -> str:
    return "\0" * len(match[0])


def _named(match: re.Match[str]) -> _Mention:
    month = _MONTHS.index(match["month"][:3].lower()) + 1
    numbers = tuple(int(match[group]) for group in ("day", "last") if match[group])
    year, year_at = (int(match["year"]), match.start("year")) if match["year"] else (None, None)
    return _Mention(*match.span(), month, numbers, year, year_at, doubtful=match["month"][0].islower())


def _iso(match: re.Match[str]) -> _Mention:
    return _Mention(*match.span(), int(match["month"]), (int(match["day"]),), int(match["year"]), match.start("year"))


def _numeric(match: re.Match[str]) -> _Mention:
    one, two = int(match["one"]), int(match["two"])
    readings = ((two, one), (one, two)) if one != two else ((one, two),)
    return _Mention(*match.span(), 0, (), int(match["year"]), match.start("year"), readings)


def _with_inherited_years(text: str, mentions: list[_Mention]) -> list[_Mention]:
    """Return the mentions, each without a year that is joined to a dated one behind it taking that one's year."""
    done: list[_Mention] = []
    for mention in reversed(mentions):
        after = done[-1] if done else None
        inherits = mention.year is None and after is not None and after.year is not None and after.day_numbers
        if inherits and _JOIN.fullmatch(text, mention.end, after.start):
            later = (mention.month, mention.day_numbers[-1]) > (after.month, after.day_numbers[0])
            year = after.year - later
            mention = _Mention(mention.start, mention.end, mention.month, mention.day_numbers, year, None)
        done.append(mention)
    return done[::-1]


def _is_day(year: int | None, month: int, day: int) -> bool:
    """Return whether the calendar has the day; without a year, whether any year has it."""
    if not 1 <= month <= 12:
        return False
    return 1 <= day <= calendar.monthrange(2024 if year is None else year, month)[1]


def _named_weekday(text: str, span: DateSpan) -> int | None:
    """Return the weekday beside the date, 0 for Monday; None when the text names none."""
    match = _WEEKDAY_BEFORE.search(text, max(0, span.start - 20), span.start)
    match = match or _WEEKDAY_AFTER.search(text[span.end : span.end + 20])
    return _WEEKDAYS.index(match[1][:3].lower()) if match else None
