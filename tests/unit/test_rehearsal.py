"""What a rehearsal writes is what the submit script takes."""

import subprocess
from pathlib import Path

import pytest

import cpu.rehearsal
from cpu.rehearsal import write_rehearsal
from recipe_settings import LaunchSettings, RecipeSettings
from rollout_rows import read_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def policy_is_there(monkeypatch):
    """Building the policy takes minutes, and is tested elsewhere."""
    monkeypatch.setattr(cpu.rehearsal.subprocess, "run", lambda *_, **__: None)


def test_its_settings_are_taken_by_the_submit_script_and_its_rows_by_the_dataset(
    tmp_path, policy_is_there, monkeypatch
):
    path = write_rehearsal(tmp_path / "rehearsal", "http://login:8077", "first")
    monkeypatch.undo()
    done = subprocess.run(
        ["bash", ROOT / "submit_webvoyager.sh", "--dry-run", "--config-env", path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--config-name=cpu_practice_slurm" in done.stdout and "VERL_PLATFORM=cpu" in done.stdout
    given = dict(line.split("=", 1) for line in path.read_text().replace("'", "").splitlines())
    launch = LaunchSettings.from_env(given)
    assert launch.missing() == [] and launch.start_environment == "head"
    assert RecipeSettings.from_env(given).max_open_sessions == 6
    assert all(
        row.initial_url.startswith("http://login:8077/") for row in read_rows([launch.train_file, launch.val_file])
    )


def test_it_says_how_to_submit(tmp_path, policy_is_there, capsys):
    assert cpu.rehearsal.main([str(tmp_path), "--site", "http://login:8077/"]) == 0
    said = capsys.readouterr().out
    assert f"sbatch --gres=none submit_webvoyager.sh --config-env {tmp_path}/config.env" in said
