"""What a training needs besides GPUs and an environment, and how a fault in it is said."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import preflight
from preflight import PreflightError
from recipe_settings import LaunchSettings, RecipeSettings, variables

ROOT = Path(__file__).resolve().parents[2]
NEEDED = {"RUN_NAME": "first", "RESULTS_ROOT": "/r", "TRAIN_FILE": "/t", "VAL_FILE": "/v", "NEMO_GYM_URL": "http://g:1"}
SCORED = {"initial_url": "https://a.example/", "verifier_metadata": {"url_contains": "about"}}
JUDGED = {"initial_url": "https://a.example/"}


@pytest.fixture
def environ(monkeypatch):
    """Set the process's variables to these alone."""

    def to(**values: str) -> None:
        for variable in variables():
            monkeypatch.delenv(variable, raising=False)
        for variable, value in values.items():
            monkeypatch.setenv(variable, value)

    return to


def rows(path: Path, *rows: dict) -> Path:
    task = {"responses_create_params": {"input": [{"role": "user", "content": "Open the About page."}]}}
    path.write_text("".join(json.dumps(task | row) + "\n" for row in rows))
    return path


def launch(folder: Path, **changes) -> LaunchSettings:
    return LaunchSettings("first", folder, folder / "train.jsonl", folder / "val.jsonl", gpus_per_node=8, **changes)


def config(**trainer):
    values = {"nnodes": 2, "n_gpus_per_node": 8, "save_freq": 10, "default_local_dir": "/nowhere", **trainer}
    rollout = {"rollout": {"n": 8}}
    return OmegaConf.create({"trainer": values, "data": {"train_batch_size": 32}, "actor_rollout_ref": rollout})


def test_settings_that_are_complete_pass(environ):
    environ(**NEEDED)
    assert preflight.check_settings() == ["run first in /r"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RUN_NAME": ""}, ["RUN_NAME is not set: the run's name"]),
        ({"NEMO_GYM_URL": ""}, ["NEMO_GYM_URL is not set, and neither is START_ENVIRONMENT"]),
        ({"START_ENVIRONMENT": "head"}, ["START_ENVIRONMENT and NEMO_GYM_URL are both set"]),
        (
            {"RAY_PORT": "80", "NEMO_GYM_BROWSER_DROP_INVALID": "2"},
            ["NEMO_GYM_BROWSER_DROP_INVALID='2'", "RAY_PORT='80'"],
        ),
    ],
)
def test_every_setting_that_is_missing_or_unusable_is_named(environ, change, said):
    environ(**{**NEEDED, **change})
    with pytest.raises(PreflightError) as error:
        preflight.check_settings()
    lines = str(error.value).splitlines()
    assert len(lines) == len(said) and all(line.startswith(text) for line, text in zip(lines, said, strict=True))


def test_rows_are_counted_by_who_scores_them(tmp_path):
    settings = launch(tmp_path)
    rows(settings.train_file, SCORED, JUDGED)
    rows(settings.val_file, SCORED)
    judge = RecipeSettings(judge_url="http://judge/v1", judge_model="m")
    lines = preflight.check_rows(settings, judge)
    assert lines == [
        f"TRAIN_FILE {settings.train_file}: 2 rows (scored by: judge 1, url_contains 1)",
        f"VAL_FILE {settings.val_file}: 1 rows (scored by: url_contains 1)",
    ]


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ([SCORED, JUDGED, JUDGED], "TRAIN_FILE: {file}:2 and 1 more rows need a judge, and none is configured"),
        ([], "TRAIN_FILE: {file}: holds no row"),
        ([{"initial_url": "nowhere", **{"verifier_metadata": {}}}], "TRAIN_FILE: {file}:1"),
        (None, "TRAIN_FILE: {file}"),
    ],
    ids=["judged without judge", "empty", "broken", "no file"],
)
def test_rows_that_cannot_be_trained_on_are_named(tmp_path, train, said):
    settings = launch(tmp_path)
    if train is not None:
        rows(settings.train_file, *train)
    rows(settings.val_file, SCORED)
    with pytest.raises(PreflightError) as error:
        preflight.check_rows(settings, RecipeSettings())
    assert str(error.value).startswith(said.format(file=settings.train_file))


def test_many_broken_rows_are_cut_with_a_pointer_to_all_of_them(tmp_path):
    settings = launch(tmp_path)
    rows(settings.train_file, *[{"initial_url": "https://a.example/", "verifier_metadata": {}}] * 50)
    rows(settings.val_file, SCORED)
    with pytest.raises(PreflightError) as error:
        preflight.check_rows(settings, RecipeSettings())
    assert len(str(error.value).splitlines()) == preflight.SHOWN_PROBLEMS + 1
    assert f"python dataset.py {settings.train_file}" in str(error.value)


@pytest.mark.parametrize(("sessions", "waves"), [(16, 16), (64, 4), (100, 3), (256, 1), (1000, 1)])
def test_the_length_of_a_step_is_said_in_episodes(tmp_path, sessions, waves):
    recipe = RecipeSettings(max_open_sessions=sessions)
    told, start = preflight.check_config(config(), 2, launch(tmp_path), recipe)
    assert told == (
        f"256 rollouts a step on 16 GPU(s), {min(sessions, 256)} sessions at once: {waves} episode(s) one after another"
    )
    assert start == "starts at step 1: no checkpoint in /nowhere"


@pytest.mark.parametrize(
    ("trainer", "said"),
    [
        ({"nnodes": 4}, "the config asks for 4 node(s) of 8 GPU(s), the job gives 2 of 8"),
        ({"n_gpus_per_node": 4}, "the config asks for 2 node(s) of 4 GPU(s)"),
        ({"save_freq": -1}, "trainer.save_freq=-1: no checkpoint would be written"),
    ],
)
def test_a_config_that_does_not_fit_the_job_is_refused(tmp_path, trainer, said):
    with pytest.raises(PreflightError, match=r"^" + said.replace("(", r"\(").replace(")", r"\)")):
        preflight.check_config(config(**trainer), 2, launch(tmp_path), RecipeSettings())


def test_a_resumed_run_says_where_it_goes_on_and_a_lost_checkpoint_is_no_silent_new_start(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("30\n")
    trained = config(default_local_dir=str(tmp_path))
    with pytest.raises(PreflightError, match="names step 30, but there is no global_step_30 beside it"):
        preflight.check_config(trained, 2, launch(tmp_path), RecipeSettings())
    (tmp_path / "global_step_30").mkdir()
    _, start = preflight.check_config(trained, 2, launch(tmp_path), RecipeSettings())
    assert start == f"resumes at step 30 of {tmp_path}"


def test_results_that_cannot_be_written_are_named(tmp_path):
    assert preflight.check_results(launch(tmp_path)) == []
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match=r"RESULTS_ROOT: .*file/first can't be written: Not a directory"):
        preflight.check_results(launch(tmp_path / "file"))


@pytest.mark.timeout(240)
def test_the_config_is_composed_by_verl_with_the_users_overrides_and_a_typo_is_shown_in_its_words():
    arguments = [f"--config-path={ROOT / 'configs'}", "--config-name=webvoyager_grpo", "data.train_files=t"]
    arguments += ["data.val_files=v", "trainer.default_local_dir=c"]
    assert preflight.compose([*arguments, "trainer.save_freq=7"]).trainer.save_freq == 7
    with pytest.raises(PreflightError, match=r"(?s)verl does not take the config:.*save_frequency"):
        preflight.compose([*arguments, "trainer.save_frequency=7"])


def test_another_release_of_verl_is_refused(monkeypatch):
    monkeypatch.setattr(preflight.importlib.metadata, "version", lambda name: "0.1.0")
    with pytest.raises(PreflightError, match=r"verl 0\.1\.0 is installed, REQUIRED_VERL\.txt pins \d+\.\d+\.\d+"):
        preflight.check_verl()


@pytest.mark.timeout(180)
def test_the_patches_must_be_there_from_the_start_of_the_interpreter(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (line,) = preflight.check_verl()
    assert "patched names" in line
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(PreflightError, match="must be the first folder on PYTHONPATH"):
        preflight.check_verl()


def test_every_check_runs_and_each_failure_is_listed(environ, monkeypatch, capsys, tmp_path):
    environ(**{**NEEDED, "RESULTS_ROOT": str(tmp_path)})

    def refuse(*_):
        raise PreflightError("first line\nsecond line")

    for name in ("check_verl", "check_rows"):
        monkeypatch.setattr(preflight, name, refuse)
    monkeypatch.setattr(preflight, "compose", lambda arguments: config())
    assert preflight.main(["--nodes", "2", "--", "--config-name=x"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1:4] == ["preflight: verl FAILED", "  first line", "  second line"]
    assert "preflight: results ok" in said and said[-2].startswith("preflight: config ok; 256 rollouts")
    assert said[-1] == "preflight: not started; failed: verl, rows"


def test_nothing_else_is_looked_at_through_broken_settings(environ, monkeypatch, capsys):
    environ(**{**NEEDED, "TRAIN_FILE": ""})
    monkeypatch.setattr(preflight, "check_verl", lambda: [])
    assert preflight.main(["--nodes", "2", "--", "--config-name=x"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "preflight: not started; failed: settings"
