"""The `browser` section of the config is checked as a whole, before any rollout."""

import pytest
from omegaconf import OmegaConf

from episode_limits import EpisodeLimits, LimitsError


def test_no_section_means_the_documented_defaults():
    assert EpisodeLimits.from_section(None) == EpisodeLimits()


def test_patterns_of_the_config_replace_the_default_ones_and_ignore_case():
    assert EpisodeLimits.from_section({"blocked_page_patterns": None}) == EpisodeLimits()
    assert EpisodeLimits.from_section({"blocked_page_patterns": []}).blocked_patterns == ()
    [pattern] = EpisodeLimits.from_section(OmegaConf.create({"blocked_page_patterns": ["go away"]})).blocked_patterns
    assert pattern.search("GO AWAY")


def test_a_section_of_the_config_sets_its_keys():
    section = OmegaConf.create({"max_turns": 5, "episode_deadline_s": 60})
    assert EpisodeLimits.from_section(section) == EpisodeLimits(max_turns=5, episode_deadline_s=60)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"max_turn": 5}, ["browser.max_turn", "no such key", "max_turns"]),
        ({"max_turns": 0}, ["browser.max_turns=0", "above 0"]),
        ({"max_turns": True}, ["browser.max_turns=True"]),
        ({"max_turns": 2.5}, ["browser.max_turns=2.5", "whole number"]),
        ({"episode_deadline_s": "60"}, ["browser.episode_deadline_s='60'", "a number"]),
        ({"blocked_page_patterns": ["("]}, ["browser.blocked_page_patterns", "'('", "no regular expression"]),
        ({"blocked_page_patterns": ["x*"]}, ["'x*'", "would match every page"]),
        ({"blocked_page_patterns": "human"}, ["'human'", "must be a list of regular expressions"]),
        ({"max_turns": -1, "max_attempts": None}, ["browser.max_turns=-1", "browser.max_attempts=None"]),
    ],
)
def test_every_bad_key_is_named_with_its_value(section, words):
    with pytest.raises(LimitsError) as error:
        EpisodeLimits.from_section(section)
    for word in words:
        assert word in str(error.value)
