"""Dates in task texts: what counts as one, when it has passed, and that moving it changes nothing else."""

import re
import time
from datetime import date, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from task_dates import Shift, find_dates, names_relative_time, shift_dates

TODAY = date(2026, 12, 1)


def days(text):
    return [[day.isoformat() for day in span.days] for span in find_dates(text).spans]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("on March 8th, 2024.", [["2024-03-08"]]),
        ("on 8 March 2024?", [["2024-03-08"]]),
        ("on the 8th of March, 2024", [["2024-03-08"]]),
        ("on Sept. 3, 2024, at 10:30", [["2024-09-03"]]),
        ("MARCH 8 2024", [["2024-03-08"]]),
        ("march 8, 2024", [["2024-03-08"]]),
        ("March 8,2024", [["2024-03-08"]]),
        ("March 1-7, 2024", [["2024-03-01", "2024-03-07"]]),
        ("March 1 to 7, 2024", [["2024-03-01", "2024-03-07"]]),
        ("1 – 7 March 2024", [["2024-03-01", "2024-03-07"]]),
        ("Jan 1 to Jan 4, 2024", [["2024-01-01"], ["2024-01-04"]]),
        ("Jan 1 to 4 Feb 2024", [["2024-01-01"], ["2024-02-04"]]),
        ("Jan 1-4 Feb 2024", [["2024-01-01"], ["2024-02-04"]]),
        ("from Jan 1, Jan 3 and Jan 5, 2024", [["2024-01-01"], ["2024-01-03"], ["2024-01-05"]]),
        ("from Friday Mar 1 to Sunday, Mar 3, 2024", [["2024-03-01"], ["2024-03-03"]]),
        ("from Dec 28, 2023 to Jan 3, 2024", [["2023-12-28"], ["2024-01-03"]]),
        ("from Dec 28 to Jan 3, 2024", [["2023-12-28"], ["2024-01-03"]]),
        ("Mar 8, 2024-Mar 10, 2024", [["2024-03-08"], ["2024-03-10"]]),
        ("2024-03-08T10:00 or 2024/03/09", [["2024-03-08"], ["2024-03-09"]]),
        ("20/12/2023", [["2023-12-20"]]),
        ("12/20/2023", [["2023-12-20"]]),
        ("20-12-2023", [["2023-12-20"]]),
        ("15/01/2024-20/01/2024", [["2024-01-15"], ["2024-01-20"]]),
        ("03/04/2024", [["2024-04-03", "2024-03-04"]]),
        ("05/05/2024", [["2024-05-05"]]),
        ("a room for 2 January 10, 2024", [["2024-01-10"]]),
        ("29 February 2024", [["2024-02-29"]]),
        ("on May 4", [[]]),
        ("4th of July", [[]]),
        ("Jan 1 to Jan 4", [[], []]),
        ("February 29", [[]]),
        ("Jan 1, 2024 to Jan 4", [["2024-01-01"], []]),
    ],
)
def test_a_day_is_read_in_every_form(text, want):
    assert days(text) == want


@pytest.mark.parametrize(
    "text",
    [
        "bill number A92024",
        "in 2024",
        "March 2024",
        "1/2 cup",
        "Section 12/2023",
        "version 1.2.2024",
        "10.12.2023.4",
        "you may 4 times march 7 miles",
        "$20 March sale",
        "May 5% or May 4.5 stars, March 20:30",
        "at 3-4-2024-7",
        "https://a.example/2024/03/08/march-8-2024 www.a.example/2024-03-08",
        "https://a.example/?day=2024-03-08&until=20/12/2023 www.a.example/?d=(2024-03-08)",
        "Marching 8, 2024",
        "item 20240308",
        "ISBN 978-2024-03-08",
    ],
)
def test_what_only_looks_like_a_day_is_none(text):
    found = find_dates(text)
    assert (found.spans, found.impossible, found.unread) == ((), (), ())


@pytest.mark.parametrize("text", ["31 February 2024", "February 30", "February 29, 2023", "31/31/2024", "2024-13-01"])
def test_a_day_that_no_calendar_has_is_told_apart(text):
    found = find_dates(f"Book for {text} please")
    assert (found.spans, found.impossible) == ((), (text,))
    assert not found.expired(TODAY)


def test_a_range_with_one_impossible_end_is_impossible():
    assert find_dates("April 29-31, 2024").impossible == ("April 29-31, 2024",)


def test_a_year_of_two_digits_is_told_apart():
    assert find_dates("on 3/4/24").unread == ("3/4/24",)


@pytest.mark.parametrize(
    ("text", "today", "want"),
    [
        ("Dec 1, 2026", TODAY, False),
        ("Nov 30, 2026", TODAY, True),
        ("Nov 30 to Dec 5, 2026", TODAY, True),
        ("Nov 30", TODAY, False),
        ("03/04/2026", date(2026, 3, 5), True),
        ("03/04/2026", date(2026, 3, 4), False),
        ("no day", TODAY, False),
    ],
)
def test_a_text_is_expired_when_any_of_its_days_may_have_passed(text, today, want):
    assert find_dates(text).expired(today) is want


@pytest.mark.parametrize(
    ("text", "want", "years"),
    [
        ("Jan 1 to Jan 4, 2024", "Jan 1 to Jan 4, 2027", 3),
        ("from Dec 28, 2023 to Jan 3, 2024!", "from Dec 28, 2026 to Jan 3, 2027!", 3),
        ("from Dec 28 to Jan 3, 2024", "from Dec 28 to Jan 3, 2027", 3),
        ("on Dec 1, 2025 and 2025", "on Dec 1, 2026 and 2025", 1),
        ("20/12/2023 in bill A92024", "20/12/2026 in bill A92024", 3),
        ("03/04/2024", "03/04/2027", 3),
        ("2024-03-08, 31 February 2024, May 4", "2027-03-08, 31 February 2024, May 4", 3),
        ("Nov 1, 2026 or Dec 24, 2026", "Nov 1, 2027 or Dec 24, 2027", 1),
        ("Monday, March 8, 2021", "Monday, March 8, 2027", 6),
    ],
)
def test_dates_move_together_by_the_fewest_years(text, want, years):
    shift = shift_dates(text, find_dates(text), TODAY)
    assert (shift.text, shift.years) == (want, years)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("29 February 2024", "2027 is not a leap year"),
        ("Friday, March 8, 2024", "weekday"),
        ("March 8, 2024 (Friday)", "weekday"),
        ("Fri. 8 March 2024", "weekday"),
        ("May 4, 1950 or May 4, 2050", "beyond 2099"),
    ],
)
def test_a_date_that_would_become_wrong_is_not_moved(text, reason):
    assert reason in shift_dates(text, find_dates(text), TODAY)


def test_29_february_moves_to_a_leap_year():
    text = "29 February 2024"
    assert shift_dates(text, find_dates(text), date(2027, 5, 1)).text == "29 February 2028"


def test_nothing_is_moved_that_has_not_passed():
    with pytest.raises(ValueError, match="no date"):
        shift_dates("Dec 24, 2026", find_dates("Dec 24, 2026"), TODAY)


FORMS = [
    "{d:%B} {d.day}, {d.year}",
    "{d.day} {d:%b} {d.year}",
    "{d:%Y-%m-%d}",
    "{d:%d/%m/%Y}",
    "{d:%b} {d.day}-{d.day}, {d.year}",
]
NOISE = st.text(alphabet="abc XYZ.,:;()'$%é中\n0123456789/-", max_size=15)


@example([(date(2049, 1, 1), FORMS[0]), (date(1951, 1, 1), FORMS[0])], [""] * 4, date(2001, 1, 2))
@given(
    st.lists(st.tuples(st.dates(date(1950, 1, 1), date(2050, 12, 31)), st.sampled_from(FORMS)), min_size=1, max_size=3),
    st.lists(NOISE, min_size=4, max_size=4),
    st.dates(date(2000, 1, 1), date(2040, 12, 31)),
)
def test_moving_dates_changes_nothing_but_digits_of_years(dates, noise, today):
    text = "".join(f"{n} | {form.format(d=d)} | " for n, (d, form) in zip(noise, dates, strict=False)) + noise[-1]
    found = find_dates(text)
    if not found.expired(today):
        return
    shift = shift_dates(text, found, today)
    if not isinstance(shift, Shift):
        return
    again = find_dates(shift.text)
    assert len(shift.text) == len(text)
    outside, at = [], 0
    for span in found.spans:
        outside.append((at, span.start))
        at = span.end
    for start, end in [*outside, (at, len(text))]:
        assert shift.text[start:end] == text[start:end]
    assert [re.sub(r"\d{4}", "Y", s.text) for s in again.spans] == [re.sub(r"\d{4}", "Y", s.text) for s in found.spans]
    assert not again.expired(today)
    # The fewest years: one less, and some day would still lie before today.
    earliest = min(day for span in again.spans for day in span.days)
    assert earliest - timedelta(days=366) < today


@given(st.text(alphabet="MarchJn 0123456789/-,.thtoand20\n", max_size=200))
def test_any_text_is_read_in_order_without_overlaps(text):
    at = 0
    for span in find_dates(text).spans:
        assert at <= span.start < span.end
        assert text[span.start : span.end] == span.text
        at = span.end


def test_a_long_and_hostile_text_is_read_in_linear_time():
    text = "May 4" + " " * 50_000 + "8 March " * 5_000 + "1" * 50_000 + "-1 to " * 5_000
    begun = time.process_time()
    find_dates(text)
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(("text", "want"), [("the Latest", True), ("next Monday", True), ("snow", False), ("", False)])
def test_relative_words_are_told(text, want):
    assert names_relative_time(text) is want
