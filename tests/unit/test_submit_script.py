"""submit_webvoyager.sh without Slurm: its settings, what it refuses before anything starts, and its dry run."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from recipe_settings import variables

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "submit_webvoyager.sh"
NEEDED = {
    "RUN_NAME": "first",
    "RESULTS_ROOT": "/results",
    "TRAIN_FILE": "/data/train.jsonl",
    "VAL_FILE": "/data/val.jsonl",
    "NEMO_GYM_URL": "http://gym:18080",
}


def written(folder: Path, lines: list[str] | None = None, **changes: str | None) -> Path:
    """Return a config.env of these lines, or of what is needed with changes; None leaves a key out."""
    settings = {key: value for key, value in {**NEEDED, **changes}.items() if value is not None}
    path = folder / "config.env"
    path.write_text("\n".join(lines if lines is not None else [f"{k}={v}" for k, v in settings.items()]) + "\n")
    return path


def submit(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Return what the script answered, run as a user would by hand: without any of the settings in the environment."""
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in variables() and not key.startswith(("SLURM_", "NEMO_GYM", "RAY_", "HF_"))
    }
    return subprocess.run(
        ["bash", SCRIPT, *arguments], env={**inherited, **environment}, capture_output=True, text=True, cwd="/"
    )


def commands(output: str) -> list[list[str]]:
    """Return the commands that a dry run printed, as the words that a shell would see."""
    return [shlex.split(line) for line in output.splitlines() if line.startswith("  srun ")]


def shown(output: str) -> dict[str, str]:
    """Return the settings that a dry run printed."""
    return dict(
        line.strip().split("=", 1) for line in output.splitlines() if line.startswith("  ") and "srun" not in line
    )


def test_a_dry_run_shows_the_whole_job_in_order(tmp_path):
    done = submit("--dry-run=3", "--config-env", written(tmp_path))
    assert done.returncode == 0, done.stderr
    programs = [
        next(word for word in command if word.endswith(".py") or word in ("verl.trainer.main_ppo", "bash"))
        for command in commands(done.stdout)
    ]
    ray = ["bash"] * 3
    assert programs == ["preflight.py", "smoke_environment.py", *ray, "cluster_check.py", "verl.trainer.main_ppo"]
    nodes = [next(word for word in c if word.startswith("--nodelist")) for c in commands(done.stdout) if "bash" in c]
    assert nodes == ["--nodelist=NODE1", "--nodelist=NODE2", "--nodelist=NODE3"]


def test_the_training_gets_the_jobs_size_and_the_users_overrides_last_and_unchanged(tmp_path):
    overrides = ["data.train_batch_size=64", "+trainer.note='two words'", "browser.blocked_page_patterns=[a,b]"]
    done = submit("--dry-run", "--config-env", written(tmp_path, MODEL_PATH="Qwen/Qwen3-4B"), "--", *overrides)
    train = commands(done.stdout)[-1]
    assert train[-3:] == overrides
    assert {"trainer.nnodes=2", "trainer.n_gpus_per_node=8", "--config-name=webvoyager_grpo"} <= set(train)
    assert {"data.train_files='/data/train.jsonl'", "actor_rollout_ref.model.path='Qwen/Qwen3-4B'"} <= set(train)
    assert "trainer.default_local_dir='/results/first/checkpoints'" in train
    preflight = commands(done.stdout)[0]
    assert preflight[preflight.index("--") + 1 :] == train[train.index("verl.trainer.main_ppo") + 1 :]


@pytest.mark.parametrize(
    ("nodes", "given", "config"),
    [
        (1, None, "webvoyager_grpo_one_node"),
        (2, None, "webvoyager_grpo"),
        (16, None, "webvoyager_grpo"),
        (1, "mine", "mine"),
    ],
)
def test_the_config_goes_by_the_number_of_nodes_unless_one_is_named(tmp_path, nodes, given, config):
    done = submit(f"--dry-run={nodes}", "--config-env", written(tmp_path, TRAIN_CONFIG=given))
    assert f"--config-name={config}" in commands(done.stdout)[-1]


def test_a_dry_run_shows_no_secret_and_no_command_holds_one(tmp_path):
    secrets = {
        "NEMO_GYM_BROWSER_JUDGE_API_KEY": "sk-judge-1",
        "WANDB_API_KEY": "wandb-1",
        "HF_TOKEN": "hf-1",
        "RAY_AUTH_TOKEN": "ray-1",
    }
    path = written(
        tmp_path,
        NEMO_GYM_URL="http://user:pass-1@gym:18080",
        NEMO_GYM_BROWSER_JUDGE_URL="http://judge/v1",
        NEMO_GYM_BROWSER_JUDGE_MODEL="m",
        **secrets,
    )
    done = submit("--dry-run", "--config-env", path)
    assert done.returncode == 0, done.stderr
    for secret in [*secrets.values(), "pass-1"]:
        assert secret not in done.stdout + done.stderr
    assert {key: shown(done.stdout)[key] for key in secrets} == dict.fromkeys(secrets, "(not shown)")
    assert shown(done.stdout)["NEMO_GYM_URL"] == "http://(not shown)@gym:18080"
    assert shown(done.stdout)["NEMO_GYM_BROWSER_JUDGE_EVIDENCE_TOKENS"] == "6000"
    assert any("judge.py" in command for command in commands(done.stdout))


def test_a_dry_run_touches_nothing(tmp_path):
    results = tmp_path / "results"
    assert submit("--dry-run", "--config-env", written(tmp_path, RESULTS_ROOT=str(results))).returncode == 0
    assert not results.exists()


def test_the_environment_wins_over_the_file_and_the_file_over_the_template(tmp_path):
    path = written(tmp_path, GPUS_PER_NODE="4", NODES_TIMEOUT_S="30")
    done = submit("--dry-run", "--config-env", path, GPUS_PER_NODE="2")
    settings = shown(done.stdout)
    assert (settings["GPUS_PER_NODE"], settings["NODES_TIMEOUT_S"], settings["RAY_PORT"]) == ("2", "30", "6379")
    assert "from the environment, not from" in done.stdout and done.stdout.splitlines()[0].endswith(": GPUS_PER_NODE")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("RUN_NAME=plain", "plain"),
        ("RUN_NAME=plain   # why", "plain"),
        ("RUN_NAME='single'", "single"),
        ('RUN_NAME="double"  # why', "double"),
        ("export RUN_NAME=exported", "exported"),
        ("RUN_NAME=windows\r", "windows"),
    ],
)
def test_a_line_of_the_file_means_what_a_shell_would_make_of_it(tmp_path, line, value):
    others = [f"{key}={text}" for key, text in NEEDED.items() if key != "RUN_NAME"]
    done = submit("--dry-run", "--config-env", written(tmp_path, ["# a comment", "", line, *others]))
    assert done.returncode == 0, done.stderr
    assert shown(done.stdout)["RUN_NAME"] == value


def test_a_leading_tilde_is_the_home_folder(tmp_path):
    done = submit("--dry-run", "--config-env", written(tmp_path, RESULTS_ROOT="~/results"), HOME="/home/me")
    assert shown(done.stdout)["RESULTS_ROOT"] == "/home/me/results"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RUN_NAME": None}, "RUN_NAME is not set"),
        ({"RESULTS_ROOT": ""}, "RESULTS_ROOT is not set"),
        ({"TRAIN_FILE": None}, "TRAIN_FILE is not set"),
        ({"VAL_FILE": None}, "VAL_FILE is not set"),
        ({"NEMO_GYM_URL": None}, "neither NEMO_GYM_URL nor START_ENVIRONMENT is set"),
        ({"START_ENVIRONMENT": "head"}, "NEMO_GYM_URL and START_ENVIRONMENT are both set"),
        ({"NEMO_GYM_URL": None, "START_ENVIRONMENT": "here"}, "START_ENVIRONMENT=here: head, cpu-nodes, or empty"),
        ({"RUN_NAME": "../up"}, "RUN_NAME=../up: letters, digits"),
        ({"GPUS_PER_NODE": "eight"}, "GPUS_PER_NODE=eight: must be a whole number"),
        ({"NEMO_GYM_BROWSER_MAX_SESSIONS": "3"}, "NEMO_GYM_BROWSER_MAX_SESSIONS: no such setting"),
        ({"RESULT_ROOT": "/r"}, "RESULT_ROOT: no such setting"),
        ({"RUN_NAME": "$USER"}, "config.env:1: RUN_NAME: put the value in single quotes"),
        ({"RUN_NAME": "`id`"}, "config.env:1: RUN_NAME: put the value in single quotes"),
        ({"RUN_NAME": "two words"}, "config.env:1: RUN_NAME: put the value in single quotes"),
        ({"RUN_NAME": "'open"}, "config.env:1: RUN_NAME: put the value in single quotes"),
        ({"RUN_NAME ": "x"}, "config.env:6: not a line KEY=value"),
    ],
)
def test_a_setting_that_is_missing_or_malformed_is_named_and_nothing_starts(tmp_path, change, said):
    done = submit("--dry-run", "--config-env", written(tmp_path, **change))
    assert done.returncode == 2
    assert said in done.stderr
    assert "srun" not in done.stdout


def test_a_key_that_stands_twice_is_refused(tmp_path):
    lines = [f"{key}={value}" for key, value in NEEDED.items()]
    done = submit("--dry-run", "--config-env", written(tmp_path, [*lines, "RUN_NAME=second"]))
    assert done.returncode == 2 and "config.env:6: RUN_NAME is set a second time" in done.stderr


def test_all_faults_are_listed_at_once_without_the_values_of_broken_lines(tmp_path):
    path = written(tmp_path, ["NEMO_GYM_BROWSER_JUDGE_API_KEY = sk-1", "RUN_NAME='a b'", "HF_TOKEN=$sk-2"])
    done = submit("--dry-run", "--config-env", path)
    assert done.returncode == 2 and "7 problem(s) in the settings" in done.stderr
    assert "sk-1" not in done.stderr and "sk-2" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--dry-run", "trainer.save_freq=5"],
            "unknown argument trainer.save_freq=5; overrides for verl stand after --",
        ),
        (["--dry-run=none"], "--dry-run=none: a number of nodes"),
        (["--dry-run", "--config-env", "/nowhere/config.env"], "no file /nowhere/config.env; copy config.env.example"),
    ],
)
def test_wrong_usage_is_said(arguments, said):
    done = submit(*arguments)
    assert done.returncode == 2 and said in done.stderr


def test_outside_a_job_it_says_how_to_submit_it(tmp_path):
    done = submit("--config-env", written(tmp_path))
    assert done.returncode == 2 and "not inside a Slurm job; submit it: sbatch submit_webvoyager.sh" in done.stderr


def test_a_copy_of_the_script_elsewhere_finds_the_recipe_or_says_how(tmp_path):
    copy = tmp_path / "slurm_script"
    copy.write_text(SCRIPT.read_text())
    arguments = ["bash", copy, "--dry-run", "--config-env", written(tmp_path)]
    environment = {"PATH": os.environ["PATH"], "HOME": "/root"}
    lost = subprocess.run(arguments, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert lost.returncode == 2 and "submit from its folder, or export RECIPE_DIR" in lost.stderr
    for variable in ("SLURM_SUBMIT_DIR", "RECIPE_DIR"):
        found = subprocess.run(arguments, env={**environment, variable: ROOT}, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr


def test_help_is_the_head_of_the_script():
    done = submit("--help")
    assert done.returncode == 0 and "sbatch [SBATCH OPTIONS] submit_webvoyager.sh" in done.stdout
    assert "#SBATCH" not in done.stdout


def test_a_container_mounts_what_the_job_reads_and_writes(tmp_path):
    path = written(tmp_path, CONTAINER_IMAGE="verlai/verl:tag", CONTAINER_MOUNTS="/scratch:/scratch:ro")
    for command in commands(submit("--dry-run", "--config-env", path).stdout):
        options = dict(word.split("=", 1) for word in command if word.startswith("--container-"))
        assert options["--container-image"] == "verlai/verl:tag"
        assert options["--container-workdir"] == str(ROOT)
        mounts = options["--container-mounts"].split(",")
        assert {f"{ROOT}:{ROOT}", "/results:/results", "/data:/data", "/scratch:/scratch:ro"} == set(mounts) - {
            f"{venv}:{venv}" for venv in [(ROOT / ".venv-gym").resolve()]
        }


@pytest.mark.parametrize(("where", "node"), [("head", "NODE1"), ("cpu-nodes", "CPUNODE1")])
def test_an_environment_beside_the_job_starts_before_the_smoke_check(tmp_path, where, node):
    path = written(tmp_path, NEMO_GYM_URL=None, START_ENVIRONMENT=where, ENVIRONMENT_SERVERS_PER_NODE="2")
    done = submit("--dry-run", "--config-env", path)
    assert done.returncode == 0, done.stderr
    server, smoke = commands(done.stdout)[1:3]
    assert "environment_servers.py" in server and f"--nodelist={node}" in server
    assert server[server.index("--servers") + 1] == "2"
    assert ("--het-group=1" in server) == (where == "cpu-nodes")
    assert "smoke_environment.py" in smoke


@pytest.mark.parametrize("key", ["NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS", "NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS"])
def test_each_server_that_the_job_starts_needs_its_share_of_the_caps(tmp_path, key):
    beside = {"NEMO_GYM_URL": None, "START_ENVIRONMENT": "head", "ENVIRONMENT_SERVERS_PER_NODE": "3"}
    caps = {"NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS": "3", "NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS": "3"}
    assert submit("--dry-run", "--config-env", written(tmp_path, **beside, **caps)).returncode == 0
    done = submit("--dry-run", "--config-env", written(tmp_path, **beside, **caps | {key: "2"}))
    assert done.returncode == 2 and f"{key}=2 is less than 1 for each of the 3 servers" in done.stderr
