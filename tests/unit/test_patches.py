"""Which verl is patched, which is refused, and how a training learns of it: hook, state and the check command.

Importing verl's trainers takes some 20 s of CPU: these tests do it once, and one other process does.
"""

import functools
import importlib
import inspect
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import group_stats
import patches
import patching
import verl_patches
from tests.verl_trainer import (
    LEGACY,
    V1_BALANCE,
    V1_INNER,
    V1_OUTER,
    V1_UPDATE,
    V1_VALIDATION,
    Trainer,
    flagged,
    patched_verl,
    read,
    valid,
)

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(240)  # the first of these tests imports verl's trainers


@pytest.fixture(scope="module")
def verl():
    return patched_verl()


# --- Which verl is patched ---


@pytest.fixture
def unpatched(verl, monkeypatch):
    """verl's modules as before `install`, and no hook; what a test does to them is undone."""
    for target, function in verl.stock.items():
        module, _, name = target.partition(":")
        owner, last = patching._owner(verl.modules[module], name)
        monkeypatch.setattr(owner, last, function)
    for name, module in list(sys.modules.items()):
        if name.startswith("verl.") and hasattr(vars(module).get("compute_advantage"), patching._MARK):
            monkeypatch.setattr(module, "compute_advantage", verl.stock[LEGACY])
    monkeypatch.setattr(patches, "_records", {})
    monkeypatch.setattr(patches, "_failures", {})
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if finder is not patches._HOOK])
    return verl


def statuses() -> dict[str, str]:
    return {record.target: str(record.status) for records in patches._records.values() for record in records}


def test_the_fingerprints_are_those_of_the_installed_release(verl):
    for patch in verl_patches.PATCHES:
        for target, (name, known) in zip(patch.targets, patch.source.items(), strict=True):
            assert patching.fingerprint(verl.stock[target]) == known, name


def test_modules_that_are_imported_already_are_patched_at_once_and_once(unpatched, monkeypatch):
    stale = SimpleNamespace(compute_advantage=unpatched.stock[LEGACY])
    monkeypatch.setitem(sys.modules, "verl.bound_by_name", stale)
    patches.install()
    functions = {target: read(unpatched.modules, target) for target in unpatched.stock}
    patches.install()
    monkeypatch.setattr(patches, "_records", {})
    patches.install()
    for target, function in functions.items():
        assert read(unpatched.modules, target) is function and function.__wrapped__ is unpatched.stock[target]
        assert inspect.signature(function) == inspect.signature(unpatched.stock[target])
    assert sys.meta_path.count(patches._HOOK) == 1
    assert set(statuses().values()) == {"applied"}
    assert stale.compute_advantage is unpatched.v1_utils.compute_advantage is functions[LEGACY]
    assert unpatched.v1_utils.compute_advantage_for_multi_trajectories is unpatched.stock[V1_INNER]
    patches.require_applied()


def test_the_estimator_is_registered(verl):
    assert verl.core_algos.get_adv_estimator_fn("grpo_env_aware") is group_stats.compute_grpo_env_aware_advantage


def other_version(verl, monkeypatch):
    monkeypatch.setattr(verl.package, "__version__", "0.9.2")


def other_source(verl, monkeypatch):
    def _compute_advantage(self, batch, metrics):
        return batch

    monkeypatch.setattr(verl.trainer_base.PPOTrainer, "_compute_advantage", _compute_advantage)


def wrapped_by_another(verl, monkeypatch):
    stock = verl.stock[V1_INNER]

    @functools.wraps(stock)
    def other(*args, **kwargs):
        return stock(*args, **kwargs)

    monkeypatch.setattr(verl.trainer_base, "compute_advantage_for_multi_trajectories", other)


def no_source(verl, monkeypatch):
    exec("def compute_advantage(data, adv_estimator):\n    return data", scope := {})
    monkeypatch.setattr(verl.ray_trainer, "compute_advantage", scope["compute_advantage"])


def missing(verl, monkeypatch):
    monkeypatch.delattr(verl.trainer_base.PPOTrainer, "_val_metrics_update")


def class_missing(verl, monkeypatch):
    monkeypatch.delattr(verl.trainer_base, "PPOTrainer")


def other_update(verl, monkeypatch):
    monkeypatch.setattr(verl.trainer_base.PPOTrainer, "_update_actor", lambda self, batch, metrics: batch)


MINI_BATCHES = {V1_BALANCE, V1_UPDATE}
ALL = {LEGACY, V1_OUTER, V1_INNER, V1_VALIDATION} | MINI_BATCHES


@pytest.mark.parametrize(
    ("change", "refused", "said"),
    [
        (other_version, ALL, r"verl 0\.9\.2 is installed, REQUIRED_VERL\.txt pins 0\.9\.1"),
        (other_source, {V1_OUTER, V1_INNER}, r"the source of PPOTrainer\._compute_advantage is \w+, known is \w+"),
        (wrapped_by_another, {V1_OUTER, V1_INNER}, r"the source of compute_advantage_for_multi\w+ is \w+, known"),
        (no_source, {LEGACY}, r"the source of compute_advantage is unreadable"),
        (missing, {V1_VALIDATION}, r"the source of PPOTrainer\._val_metrics_update is missing"),
        (other_update, MINI_BATCHES, r"the source of PPOTrainer\._update_actor is \w+, known is \w+"),
        (class_missing, ALL - {LEGACY}, r"PPOTrainer\._compute_advantage is missing"),
    ],
    ids=["version", "source", "wrapped", "no source", "method missing", "one of a pair", "class missing"],
)
def test_an_unknown_verl_is_refused_and_left_as_it_is(unpatched, monkeypatch, change, refused, said):
    change(unpatched, monkeypatch)
    before = {target: read(unpatched.modules, target) for target in refused}
    patches.install()
    assert {target for target, status in statuses().items() if status == "refused"} == refused
    assert before == {target: read(unpatched.modules, target) for target in refused}
    with pytest.raises(patches.PatchError) as raised:
        patches.require_applied()
    assert re.search(said, str(raised.value))
    assert "Install verl==0.9.1." in str(raised.value)
    assert "patches.py --check" in str(raised.value)


def test_with_another_version_not_one_function_is_replaced(unpatched, monkeypatch):
    other_version(unpatched, monkeypatch)
    patches.install()
    assert {target: read(unpatched.modules, target) for target in unpatched.stock} == unpatched.stock


def test_a_pin_that_cannot_be_read_is_a_refusal(unpatched, monkeypatch, tmp_path):
    (tmp_path / "REQUIRED_VERL.txt").write_text("MODE=pinned_release\n")
    monkeypatch.setattr(patching, "REQUIRED_VERL", tmp_path / "REQUIRED_VERL.txt")
    patches.install()
    with pytest.raises(patches.PatchError, match="no line VERL_RELEASE=verl==VERSION; restore it"):
        patches.require_applied()


# --- An upstream fix ---


def edited(function, edits: dict[str, str], scope: dict):
    """Return a function of verl with its source changed, in the module that it lives in."""
    source = inspect.cleandoc("\n" + inspect.getsource(function))
    for old, new in edits.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    exec("from __future__ import annotations\n" + source, scope, made := {})
    return made[function.__name__]


FLAGS_ONLY = 'data.non_tensor_batch["extra_fields"] = np.array(rows, dtype=object)\n    '
WITH_IDS = (
    FLAGS_ONLY
    + 'data.non_tensor_batch["env_invalid"] = np.array([row["env_invalid"] for row in rows])\n    '
    + 'ids = [key.rsplit("_", 1)[0] for key in batch.keys]\n    '
    + 'data.non_tensor_batch["rollout_id"] = np.array(ids, dtype=object)\n    '
    + 'data.non_tensor_batch["row_index"] = np.array([int(key.rsplit("_", 1)[1]) for key in batch.keys])\n    '
)


def fix_upstream(verl, monkeypatch, flags: str):
    """Let verl bring `non_tensor_batch` to registered estimators, and the V1 trainer fill it."""
    legacy = edited(
        verl.stock[LEGACY],
        {'if adv_estimator in (AdvantageEstimator.GDPO, "gdpo"):': "if True:"},
        vars(verl.ray_trainer),
    )
    v1 = edited(
        verl.stock[V1_OUTER],
        {
            '"ref_log_prob", "values"]': '"ref_log_prob", "values", "extra_fields"]',
            'response_mask = data["response_mask"]': 'response_mask = data["response_mask"]\n    '
            'rows = list(data["extra_fields"])\n    data.pop("extra_fields")',
            "# 1. apply kl": flags + "# 1. apply kl",
        },
        vars(verl.trainer_base),
    )
    monkeypatch.setattr(verl.package, "__version__", "0.10.0")
    monkeypatch.setattr(verl.ray_trainer, "compute_advantage", legacy)
    monkeypatch.setattr(verl.v1_utils, "compute_advantage", legacy)
    monkeypatch.setattr(verl.trainer_base.PPOTrainer, "_compute_advantage", v1)
    return v1


def test_an_upstream_fix_makes_the_patches_step_aside(unpatched, monkeypatch):
    v1 = fix_upstream(unpatched, monkeypatch, WITH_IDS)
    queue = unpatched.trainer_base.tq
    patches.install()
    assert statuses() == {
        verl_patches.ESTIMATOR_TARGET: "applied",
        LEGACY: "not needed",
        V1_OUTER: "not needed",
        V1_INNER: "not needed",
        V1_VALIDATION: "refused",  # another version; nothing tries these out
        V1_BALANCE: "refused",
        V1_UPDATE: "refused",
    }
    assert unpatched.trainer_base.PPOTrainer._compute_advantage is v1
    assert unpatched.trainer_base.compute_advantage_for_multi_trajectories is unpatched.stock[V1_INNER]
    assert unpatched.trainer_base.tq is queue


def test_with_an_upstream_fix_only_the_estimator_that_reads_flags_is_let_through(unpatched, monkeypatch):
    fix_upstream(unpatched, monkeypatch, WITH_IDS)
    patches.install()
    rows = {"a_0_0": valid("a", 1.0), "a_1_0": valid("a", 0.0), "a_2_0": flagged("a")}
    got = Trainer(unpatched, monkeypatch, rows, adv_estimator="grpo_env_aware").run()
    assert got["a_0_0"]["advantages"][0] == pytest.approx(1 / math.sqrt(2), abs=1e-5)
    with pytest.raises(RuntimeError, match="adv_estimator=grpo .*Set algorithm.adv_estimator to grpo_env_aware, or"):
        Trainer(unpatched, monkeypatch, rows, adv_estimator="grpo").run()


def test_a_fix_without_rollout_ids_is_none(unpatched, monkeypatch):
    fix_upstream(unpatched, monkeypatch, FLAGS_ONLY)
    patches.install()
    assert (statuses()[LEGACY], statuses()[V1_OUTER]) == ("not needed", "refused")
    with pytest.raises(patches.PatchError, match="trying out its own advantages failed with ValueError"):
        patches.require_applied()


def test_the_pinned_verl_fails_the_trials(unpatched):
    assert not verl_patches.verl_trials.legacy_is_right(unpatched.ray_trainer)
    assert not verl_patches.verl_trials.v1_is_right(unpatched.trainer_base)


# --- require_applied ---


def nothing_loaded(monkeypatch):
    for name in patches.TARGETS:
        monkeypatch.delitem(sys.modules, name)


def test_without_hook_and_trainers_training_is_refused(unpatched, monkeypatch):
    nothing_loaded(monkeypatch)
    with pytest.raises(patches.PatchError, match=rf"hook is not installed.*Start Python with {ROOT} on PYTHONPATH"):
        patches.require_applied()


def test_with_the_hook_and_no_trainer_yet_training_may_start(unpatched, monkeypatch):
    nothing_loaded(monkeypatch)
    patches.install()
    patches.require_applied()


def test_trainers_that_were_loaded_before_the_hook_are_refused(unpatched):
    sys.meta_path.insert(0, patches._HOOK)
    with pytest.raises(patches.PatchError) as raised:
        patches.require_applied()
    assert str(raised.value).count("was imported before the import hook was installed") == 2


def test_a_module_that_is_still_running_is_not_patched_half_way(unpatched, monkeypatch):
    monkeypatch.setattr(unpatched.trainer_base.__spec__, "_initializing", True, raising=False)
    patches.install()
    assert V1_OUTER not in statuses()
    with pytest.raises(patches.PatchError, match="trainer_base was imported before the import hook"):
        patches.require_applied()


def test_an_error_while_patching_is_kept_for_the_refusal(unpatched, monkeypatch):
    def broken(module):
        raise KeyError("gone")

    monkeypatch.setattr(verl_patches, "apply", broken)
    patches.install()
    with pytest.raises(patches.PatchError, match=r"ray_trainer: applying the patches failed with KeyError: 'gone'"):
        patches.require_applied()


# --- The hook and the command, in other processes ---


def python(*arguments: str, path: list[Path | str], folder: Path | str = "/") -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_in_a_fresh_process_the_trainers_are_patched_as_they_are_imported(verl):
    code = (
        "import sys\n"
        "assert 'torch' not in sys.modules\n"
        "import verl.trainer.ppo.v1.trainer_base as trainer_base, patches, runpy\n"
        "assert hasattr(trainer_base.PPOTrainer._compute_advantage, '__wrapped__')\n"
        "for loader in (trainer_base.__loader__, trainer_base.__spec__.loader):\n"
        "    assert type(loader).__name__ == 'SourceFileLoader'\n"
        "patches.require_applied()\n"
        "sys.argv = ['patches.py', '--check', '--json']\n"
        f"runpy.run_path({str(ROOT / 'patches.py')!r}, run_name='__main__')\n"
    )
    result = python("-c", code, path=[ROOT])
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["ok"] and answer["hook_at_interpreter_start"]
    assert [patch["status"] for patch in answer["patches"]] == ["applied"] * 7
    assert {patch["target"] for patch in answer["patches"]} == set(verl.stock) | {verl_patches.ESTIMATOR_TARGET}
    assert {patch["verl_version"] for patch in answer["patches"]} == {"0.9.1"}


@pytest.fixture
def other_verl(tmp_path: Path) -> Path:
    """A folder with a small package of verl's name and of another version, with nothing of what is patched."""
    for name in ("verl", *patches.TARGETS):
        file = tmp_path.joinpath(*name.split("."))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".py").write_text("VALUE = 1\n")
    (tmp_path / "verl.py").rename(tmp_path / "verl" / "__init__.py")
    (tmp_path / "verl" / "__init__.py").write_text("__version__ = '9.9'\nprint('noise')\n")
    for folder in (tmp_path / "verl").rglob("*"):
        if folder.is_dir():
            (folder / "__init__.py").touch()
    return tmp_path


def test_a_verl_that_cannot_be_patched_can_still_be_imported(other_verl):
    code = "import verl.trainer.ppo.v1.trainer_base as m; import inspect; print(m.VALUE, inspect.getsource(m))"
    result = python("-c", code, path=[ROOT, other_verl])
    assert (result.returncode, result.stdout) == (0, "noise\n1 VALUE = 1\n\n"), result.stderr
    result = python("-c", f"{code}; import patches; patches.require_applied()", path=[ROOT, other_verl])
    assert result.returncode == 1
    assert "PatchError: Refusing to train" in result.stderr
    assert "verl 9.9 is installed, REQUIRED_VERL.txt pins 0.9.1" in result.stderr


def test_an_error_in_verls_own_module_is_verls(other_verl):
    other_verl.joinpath("verl/trainer/ppo/ray_trainer.py").write_text("raise LookupError('broken verl')\n")
    result = python("-c", "import verl.trainer.ppo.ray_trainer", path=[ROOT, other_verl])
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("LookupError: broken verl")


def test_the_check_of_an_unknown_verl_exits_1_with_a_line_per_patch(other_verl, verl):
    result = python(str(ROOT / "patches.py"), "--check", path=[other_verl])
    assert result.returncode == 1, result.stderr
    *lines, note = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        verl_patches.ESTIMATOR_TARGET,
        LEGACY,
        V1_OUTER,
        V1_INNER,
        V1_VALIDATION,
        V1_BALANCE,
        V1_UPDATE,
    ]
    assert all("  verl 9.9  refused: " in line for line in lines)
    assert note == f"note: this Python did not run sitecustomize.py; training needs PYTHONPATH={ROOT}"


def test_the_check_without_verl_exits_1(tmp_path):
    (tmp_path / "verl.py").write_text("raise ModuleNotFoundError(\"No module named 'verl'\")\n")
    result = python(str(ROOT / "patches.py"), "--check", "--json", path=[tmp_path])
    answer = json.loads(result.stdout)
    assert (result.returncode, answer["ok"], answer["hook_at_interpreter_start"]) == (1, False, False)
    assert len(answer["patches"]) == 7
    assert all(
        "No module named 'verl'. Install verl as REQUIRED_VERL.txt says" in p["reason"] for p in answer["patches"]
    )


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--check", "--all"]], ids=str)
def test_wrong_usage_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        patches.main(arguments)
    assert exit.value.code == 2
    assert "usage: patches.py" in capsys.readouterr().err


def test_importing_the_modules_patches_nothing():
    code = "import patches, patching, verl_patches, sys; print(patches._HOOK in sys.meta_path, 'torch' in sys.modules)"
    result = python("-S", "-c", code, path=[ROOT])
    assert (result.returncode, result.stdout) == (0, "False False\n"), result.stderr


def test_a_reload_goes_through_the_hook_again(unpatched, monkeypatch, other_verl):
    monkeypatch.syspath_prepend(str(other_verl))
    for name in [name for name in sys.modules if name == "verl" or name.startswith("verl.")]:
        monkeypatch.delitem(sys.modules, name)
    patches.install()
    module = importlib.import_module("verl.trainer.ppo.ray_trainer")
    assert "verl.trainer.ppo.ray_trainer" in patches._failures
    monkeypatch.setattr(patches, "_failures", {})
    importlib.reload(module)
    assert "verl.trainer.ppo.ray_trainer" in patches._failures
