"""Settings: what the environment gives, what is refused and how it is said."""

import re
from pathlib import Path

import pytest

from recipe_settings import RecipeSettings, SettingsError, variables

ROOT = Path(__file__).resolve().parents[2]


def test_an_empty_environment_gives_the_documented_defaults():
    settings = RecipeSettings.from_env({})
    assert settings == RecipeSettings(
        environment_url=None,
        seed_timeout_s=150.0,
        act_timeout_s=60.0,
        verify_timeout_s=150.0,
        close_timeout_s=20.0,
        max_open_sessions=16,
        max_concurrent_seeds=2,
        outage_patience_s=600.0,
        outage_after_seeds=10,
        drop_invalid=False,
        episode_log_dir=None,
        judge_url=None,
        judge_model=None,
        judge_api_key=None,
        judge_timeout_s=120.0,
        judge_deadline_s=900.0,
        judge_concurrency=8,
        judge_votes=1,
        judge_evidence_tokens=6000,
        record_dir=None,
    )


def test_every_variable_reaches_its_field():
    settings = RecipeSettings.from_env(
        {
            "NEMO_GYM_URL": " http://gym:8000/ ",
            "NEMO_GYM_BROWSER_SEED_TIMEOUT_S": "120",
            "NEMO_GYM_BROWSER_ACT_TIMEOUT_S": "45.5",
            "NEMO_GYM_BROWSER_VERIFY_TIMEOUT_S": "121",
            "NEMO_GYM_BROWSER_CLOSE_TIMEOUT_S": "3",
            "NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS": "7",
            "NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS": "1",
            "NEMO_GYM_BROWSER_OUTAGE_PATIENCE_S": "9",
            "NEMO_GYM_BROWSER_OUTAGE_AFTER_SEEDS": "4",
            "NEMO_GYM_BROWSER_DROP_INVALID": "1",
            "NEMO_GYM_BROWSER_EPISODE_LOG_DIR": "logs/episodes",
            "NEMO_GYM_BROWSER_JUDGE_URL": "https://judge.example/v1/",
            "NEMO_GYM_BROWSER_JUDGE_MODEL": "Qwen/Qwen3-32B",
            "NEMO_GYM_BROWSER_JUDGE_API_KEY": "sk-1",
            "NEMO_GYM_BROWSER_JUDGE_TIMEOUT_S": "30",
            "NEMO_GYM_BROWSER_JUDGE_DEADLINE_S": "90",
            "NEMO_GYM_BROWSER_JUDGE_CONCURRENCY": "2",
            "NEMO_GYM_BROWSER_JUDGE_VOTES": "3",
            "NEMO_GYM_BROWSER_JUDGE_EVIDENCE_TOKENS": "500",
            "NEMO_GYM_BROWSER_RECORD_DIR": "logs/recordings",
            "UNRELATED": "kept out",
        }
    )
    judge = ("https://judge.example/v1", "Qwen/Qwen3-32B", "sk-1", 30, 90, 2, 3, 500)
    environment = ("http://gym:8000", 120, 45.5, 121, 3, 7, 1, 9, 4, True, Path("logs/episodes"))
    assert settings == RecipeSettings(*environment, *judge, Path("logs/recordings"))


def test_a_key_is_never_shown():
    assert "sk-1" not in repr(RecipeSettings(judge_api_key="sk-1"))
    for make in (
        lambda: RecipeSettings.from_env({"NEMO_GYM_BROWSER_JUDGE_API_KEY": "sk-1 and more"}),
        lambda: RecipeSettings(judge_api_key="sk-1 and more"),
    ):
        with pytest.raises(SettingsError, match=r"\(not shown\): must be text without white space") as error:
            make()
        assert "sk-1" not in str(error.value)


@pytest.mark.parametrize("given", [{"judge_url": "http://judge:8000/v1"}, {"judge_model": "judge"}])
def test_a_judges_address_and_model_are_set_together(given):
    with pytest.raises(SettingsError, match="JUDGE_URL and NEMO_GYM_BROWSER_JUDGE_MODEL: one is set without the other"):
        RecipeSettings(**given)


def test_an_empty_variable_means_the_default():
    assert RecipeSettings.from_env({"NEMO_GYM_URL": "", "NEMO_GYM_BROWSER_ACT_TIMEOUT_S": " "}) == RecipeSettings()


@pytest.mark.parametrize(
    ("text", "dropped"),
    [
        ("1", True),
        ("true", True),
        ("Yes", True),
        ("ON", True),
        ("0", False),
        ("False", False),
        ("no", False),
        ("off", False),
    ],
)
def test_a_switch_is_read_in_all_its_spellings(text, dropped):
    assert RecipeSettings.from_env({"NEMO_GYM_BROWSER_DROP_INVALID": text}).drop_invalid is dropped


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://127.0.0.1:18000", "http://127.0.0.1:18000"),
        ("https://gym.example/browser//", "https://gym.example/browser"),
        ("http://[::1]:8000/", "http://[::1]:8000"),
    ],
)
def test_a_base_url_loses_only_its_trailing_slash(url, kept):
    assert RecipeSettings.from_env({"NEMO_GYM_URL": url}).require_environment_url() == kept


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("NEMO_GYM_URL", "127.0.0.1:8000", "must be http://HOST:PORT"),
        ("NEMO_GYM_URL", "ftp://host", "must be http://HOST:PORT"),
        ("NEMO_GYM_URL", "http://", "must be http://HOST:PORT"),
        ("NEMO_GYM_URL", "http://host:port", "must be http://HOST:PORT"),
        ("NEMO_GYM_URL", "http://host:99999", "must be http://HOST:PORT"),
        ("NEMO_GYM_URL", "http://[::1", "must be http://HOST:PORT"),
        ("NEMO_GYM_URL", "http://host/?a=1", "without query"),
        ("NEMO_GYM_URL", "http://a host", "must be http://HOST:PORT"),
        ("NEMO_GYM_BROWSER_SEED_TIMEOUT_S", "119.9", "at least 120 (giving up on a seed leaks"),
        ("NEMO_GYM_BROWSER_ACT_TIMEOUT_S", "44", "at least 45"),
        ("NEMO_GYM_BROWSER_VERIFY_TIMEOUT_S", "60", "at least 120"),
        ("NEMO_GYM_BROWSER_JUDGE_EVIDENCE_TOKENS", "255", "at least 256 (hardly a page"),
        ("NEMO_GYM_BROWSER_CLOSE_TIMEOUT_S", "0", "above 0"),
        ("NEMO_GYM_BROWSER_CLOSE_TIMEOUT_S", "20s", "a number of seconds"),
        ("NEMO_GYM_BROWSER_OUTAGE_PATIENCE_S", "inf", "finite"),
        ("NEMO_GYM_BROWSER_OUTAGE_PATIENCE_S", "nan", "finite"),
        ("NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS", "0", "at least 1"),
        ("NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS", "2.5", "a whole number"),
        ("NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS", "-1", "at least 1"),
        ("NEMO_GYM_BROWSER_OUTAGE_AFTER_SEEDS", "0", "at least 1"),
        ("NEMO_GYM_BROWSER_DROP_INVALID", "2", "must be one of 1, true, yes, on, 0, false, no, off"),
        ("NEMO_GYM_BROWSER_DROP_INVALID", "None", "must be one of"),
        ("NEMO_GYM_BROWSER_SEED_TIMEOUT", "150", "did you mean NEMO_GYM_BROWSER_SEED_TIMEOUT_S?"),
        ("NEMO_GYM_BROWSER_ZZZ", "1", "known: NEMO_GYM_URL"),
    ],
)
def test_a_bad_value_is_refused_with_variable_value_and_what_is_allowed(variable, value, said):
    with pytest.raises(SettingsError) as error:
        RecipeSettings.from_env({variable: value})
    assert variable in str(error.value) and repr(value) in str(error.value) and said in str(error.value)


def test_all_bad_variables_are_listed_at_once():
    with pytest.raises(SettingsError) as error:
        RecipeSettings.from_env(
            {"NEMO_GYM_URL": "x", "NEMO_GYM_BROWSER_ACT_TIMEOUT_S": "1", "NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS": "many"}
        )
    lines = str(error.value).splitlines()[1:]
    assert [line.split("=")[0].strip() for line in lines] == [
        "NEMO_GYM_URL",
        "NEMO_GYM_BROWSER_ACT_TIMEOUT_S",
        "NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS",
    ]


def test_the_constructor_takes_small_timeouts_and_refuses_what_can_never_work():
    assert RecipeSettings(environment_url="http://h:1/", seed_timeout_s=0.1).environment_url == "http://h:1"
    with pytest.raises(SettingsError) as error:
        RecipeSettings(seed_timeout_s=0, max_open_sessions=True, environment_url="nowhere", drop_invalid="0")
    assert len(str(error.value).splitlines()) == 5


def test_a_missing_environment_url_names_the_variable_and_the_fix():
    with pytest.raises(SettingsError, match=r"NEMO_GYM_URL is not set(.|\n)*export NEMO_GYM_URL="):
        RecipeSettings.from_env({}).require_environment_url()


def test_the_process_environment_is_the_default_source(monkeypatch):
    for variable in variables():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NEMO_GYM_URL", "http://gym:1")
    assert RecipeSettings.from_env().environment_url == "http://gym:1"


def test_config_env_example_names_the_same_variables_with_their_defaults():
    text = (ROOT / "config.env.example").read_text(encoding="utf-8")
    given = dict(re.findall(r"^([A-Z_]+)=(.*)$", text, flags=re.MULTILINE))
    assert tuple(given) == variables()
    assert RecipeSettings.from_env(given) == RecipeSettings()


def test_every_variable_of_config_env_example_is_documented():
    lines = (ROOT / "config.env.example").read_text(encoding="utf-8").splitlines()
    undocumented = [
        line
        for above, line in zip(lines, lines[1:], strict=False)
        if "=" in line[:60] and line[0] != "#" and not above.startswith("#")
    ]
    assert undocumented == []
