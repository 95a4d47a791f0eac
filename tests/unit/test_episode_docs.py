"""docs/episode_log.md says what the dataclasses say."""

from dataclasses import fields

import pytest

import episode_log
import episode_record
from tests.episode_docs import PAGE, described, page_with, tables


def test_the_page_has_the_tables_of_the_dataclasses():
    text = PAGE.read_text()
    assert text == page_with(text, tables()), "write them anew: python -m tests.episode_docs"


@pytest.mark.parametrize("name", ["AttemptRecord", "ObservationRecord", "TurnRecord", "ModelCallRecord", "RowRecord"])
def test_every_key_has_a_description(name):
    found = described(name)
    assert list(found) == [field.name for field in fields(getattr(episode_record, name))]
    assert [key for key, (_, text) in found.items() if not text] == []


def test_the_page_names_the_limits():
    text = " ".join(PAGE.read_text().split())
    assert f"reply are cut at {episode_log.TEXT_CHARS:,} characters" in text
    assert f"other texts at {episode_log.FIELD_CHARS:,}" in text
    assert f"above {episode_log.LINE_BYTES >> 20} MiB" in text and f"to {episode_log.FILE_BYTES >> 20} MiB" in text
