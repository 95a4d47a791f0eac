"""Settings: what the environment gives, what is refused and how it is said."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from recipe_settings import LaunchSettings, RecipeSettings, SettingsError, variables

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
    ("text", "urls"),
    [
        ("http://a:1", ("http://a:1",)),
        ("http://a:1,https://b/x/", ("http://a:1", "https://b/x")),
        (" http://a:1/ , http://b:1 ", ("http://a:1", "http://b:1")),
        ("", ()),
    ],
)
def test_several_servers_have_commas_between_them(text, urls):
    assert RecipeSettings.from_env({"NEMO_GYM_URL": text}).environment_urls == urls


@pytest.mark.parametrize(
    ("servers", "sessions", "seeds", "shares"),
    [
        (1, 16, 2, [(16, 2)]),
        (2, 16, 2, [(8, 1), (8, 1)]),
        (3, 16, 4, [(6, 2), (5, 1), (5, 1)]),
        (3, 3, 3, [(1, 1), (1, 1), (1, 1)]),
    ],
)
def test_servers_share_the_caps_and_nothing_else(servers, sessions, seeds, shares):
    urls = [f"http://gym{number}:1" for number in range(servers)]
    caps = {"max_open_sessions": sessions, "max_concurrent_seeds": seeds}
    settings = RecipeSettings(environment_url=",".join(urls), outage_patience_s=7.0, **caps)
    given = settings.servers()
    assert [server.require_environment_url() for server in given] == urls
    assert [(server.max_open_sessions, server.max_concurrent_seeds) for server in given] == shares
    assert {replace(server, environment_url=None, **caps) for server in given} == {
        replace(settings, environment_url=None)
    }


def test_without_an_address_or_with_one_the_settings_are_the_servers():
    for settings in (RecipeSettings(), RecipeSettings(environment_url="http://a:1")):
        assert settings.servers() == (settings,)


def test_caps_below_one_a_server_are_refused_with_both_variables_and_the_fix():
    urls = "http://a:1,http://b:1,http://c:1"
    with pytest.raises(SettingsError) as error:
        RecipeSettings.from_env({"NEMO_GYM_URL": urls, "NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS": "2"})
    sessions, seeds = str(error.value).splitlines()[1:]
    assert "NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS=2: NEMO_GYM_URL names 3 servers" in sessions
    assert "set NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS to 3 or more" in sessions
    assert "NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS=2: NEMO_GYM_URL names 3 servers" in seeds


def test_one_server_is_not_taken_for_several():
    with pytest.raises(
        SettingsError, match="names 2 servers, where one is needed.*name one of them, such as http://a:1"
    ):
        RecipeSettings(environment_url="http://a:1,http://b:1").require_environment_url()


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
        ("NEMO_GYM_URL", "http://a:1 http://b:1", "several addresses have a comma between"),
        ("NEMO_GYM_URL", "http://a:1,b:1", "'b:1' must be http://HOST:PORT"),
        ("NEMO_GYM_URL", "http://a:1,", "'' must be http://HOST:PORT"),
        ("NEMO_GYM_URL", "http://a:1, http://b:1,http://a:1/", "http://a:1 is named twice"),
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
    assert LaunchSettings.from_env(given) == LaunchSettings()


def test_every_variable_of_config_env_example_is_documented():
    lines = (ROOT / "config.env.example").read_text(encoding="utf-8").splitlines()
    undocumented = [
        line
        for above, line in zip(lines, lines[1:], strict=False)
        if "=" in line[:60] and line[0] != "#" and not above.startswith(("#", "TRAIN_FILE="))
    ]
    assert undocumented == []


def test_every_launch_variable_reaches_its_field():
    settings = LaunchSettings.from_env(
        {
            "RUN_NAME": "qwen3-8b.first_try",
            "RESULTS_ROOT": "/results",
            "TRAIN_FILE": "data/train.jsonl",
            "VAL_FILE": "data/val.jsonl",
            "TRAIN_CONFIG": "webvoyager_grpo",
            "MODEL_PATH": "Qwen/Qwen3-8B",
            "GPUS_PER_NODE": "4",
            "TRAIN_PYTHON": "/venv/bin/python",
            "CONTAINER_IMAGE": "verlai/verl:tag",
            "CONTAINER_MOUNTS": "/a:/b,/c:/d:ro",
            "RAY_PORT": "6380",
            "NODES_TIMEOUT_S": "30",
            "REQUEUE": "1",
            "START_ENVIRONMENT": "cpu-nodes",
            "ENVIRONMENT_SERVERS_PER_NODE": "2",
            "ENVIRONMENT_PORT": "18090",
            "GYM_VENV": "/venv-gym",
            "GYM_CONTAINER_IMAGE": "gym:tag",
            "PREFLIGHT_SESSIONS": "3",
        }
    )
    files = (Path("/results"), Path("data/train.jsonl"), Path("data/val.jsonl"))
    training = ("webvoyager_grpo", "Qwen/Qwen3-8B", 4, "/venv/bin/python", "verlai/verl:tag", "/a:/b,/c:/d:ro")
    nodes = (6380, 30.0, True)
    environment = ("cpu-nodes", 2, 18090, Path("/venv-gym"), "gym:tag", 3)
    assert settings == LaunchSettings("qwen3-8b.first_try", *files, *training, *nodes, *environment)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("RUN_NAME", "my run", "must be a name of letters"),
        ("RUN_NAME", "../run", "must be a name of letters"),
        ("RUN_NAME", "-run", "begins with a letter or digit"),
        ("TRAIN_CONFIG", "configs/a.yaml", "must be a name of letters"),
        ("GPUS_PER_NODE", "0", "at least 1"),
        ("RAY_PORT", "80", "at least 1024"),
        ("RAY_PORT", "65536", "at most 65535"),
        ("NODES_TIMEOUT_S", "soon", "a number of seconds"),
        ("REQUEUE", "maybe", "must be one of"),
        ("START_ENVIRONMENT", "node3", "must be one of head, cpu-nodes, or empty"),
        ("PREFLIGHT_SESSIONS", "0", "at least 1"),
    ],
)
def test_a_bad_launch_value_is_refused_with_variable_value_and_what_is_allowed(variable, value, said):
    with pytest.raises(SettingsError) as error:
        LaunchSettings.from_env({variable: value})
    assert variable in str(error.value) and repr(value) in str(error.value) and said in str(error.value)


def test_what_a_launch_lacks_is_listed():
    assert [line.split()[0] for line in LaunchSettings(run_name="a").missing()] == [
        "RESULTS_ROOT",
        "TRAIN_FILE",
        "VAL_FILE",
    ]
    assert LaunchSettings("a", Path("r"), Path("t"), Path("v")).missing() == []


@pytest.mark.parametrize("kind", [RecipeSettings, LaunchSettings])
def test_a_setting_with_a_default_cannot_be_none(kind):
    field = "max_open_sessions" if kind is RecipeSettings else "ray_port"
    with pytest.raises(SettingsError, match="must be a whole number"):
        kind(**{field: None})
