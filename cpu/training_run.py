"""One training of the CPU profile: the command that starts verl's trainer, its environment, and where results lie."""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cpu.processes import ProcessTree

REPO_ROOT = Path(__file__).resolve().parent.parent
CONFIG_NAME = "cpu_practice"

CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu.verl_platform",
    # verl names its FSDP engine classes after the device; the one for cuda is the one that runs on any platform.
    "VERL_ENGINE_DEVICE": "cuda",
    # The browsers need the cores as much as the engine: no pinning, one thread each, and Ray's workers not below them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",
    # Two cores are busy with two active sessions; more only wait longer and take 200 MiB each.
    "NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS": "6",
    # A flagged row costs a forward pass, and shows as a zero in the dumps that the demo is judged by.
    "NEMO_GYM_BROWSER_DROP_INVALID": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "WANDB_MODE": "disabled",
    "HYDRA_FULL_ERROR": "1",
    "PYTHONWARNINGS": "ignore::FutureWarning",
}


@dataclass(frozen=True)
class RunFolder:
    """Where one run keeps what it reads and writes."""

    root: Path

    @property
    def policy(self) -> Path:
        """The Hugging Face folder of the policy that training starts from."""
        return self.root / "policy"

    @property
    def train_rows(self) -> Path:
        """Rows to train on."""
        return self.root / "data" / "train.jsonl"

    @property
    def validation_rows(self) -> Path:
        """Rows that are never trained on."""
        return self.root / "data" / "validation.jsonl"

    @property
    def checkpoints(self) -> Path:
        """verl's `global_step_N` folders."""
        return self.root / "checkpoints"

    @property
    def rollouts(self) -> Path:
        """verl's dumps of the training batches, one JSONL file a step."""
        return self.root / "rollouts"

    @property
    def validations(self) -> Path:
        """verl's dumps of the validations, one JSONL file for each step that validated."""
        return self.root / "validations"

    @property
    def episodes(self) -> Path:
        """The episode log: one line for each attempt at a rollout."""
        return self.root / "episodes"

    @property
    def log(self) -> Path:
        """What the trainer and all of Ray's workers print."""
        return self.root / "train.log"

    def metrics(self) -> dict[int, dict[str, float]]:
        """Return verl's metrics by step, those of a resumed run over those of the run that it resumed."""
        by_step: dict[int, dict[str, float]] = {}
        for path in sorted(self.root.glob("metrics-*.jsonl")):
            for line in path.read_text().splitlines():
                # A line that is being written right now has no end yet.
                if line.endswith("}"):
                    entry = json.loads(line)
                    by_step.setdefault(entry["step"], {}).update(entry["data"])
        return dict(sorted(by_step.items()))

    def next_metrics_path(self) -> Path:
        """Return a path for the next start's metrics: verl truncates the file that it opens."""
        return self.root / f"metrics-{len(list(self.root.glob('metrics-*.jsonl'))):03d}.jsonl"

    def last_checkpoint(self) -> int:
        """Return the step of the newest checkpoint, 0 if there is none."""
        marker = self.checkpoints / "latest_checkpointed_iteration.txt"
        return int(marker.read_text()) if marker.exists() else 0


@dataclass
class TrainingRun:
    """verl's trainer as a process tree of its own, Ray and vLLM included."""

    folder: RunFolder
    environment_url: str
    seed: int
    overrides: Sequence[str] = ()
    extra_environment: Mapping[str, str] = field(default_factory=dict)
    tree: ProcessTree | None = None
    _ray_folder: str = ""

    def command(self) -> list[str]:
        """Return the command line: the stock entry point of verl with this recipe's config."""
        settings = {
            "data.train_files": self.folder.train_rows,
            "data.val_files": self.folder.validation_rows,
            "data.seed": self.seed,
            "actor_rollout_ref.model.path": self.folder.policy,
            "actor_rollout_ref.rollout.seed": self.seed,
            "actor_rollout_ref.actor.data_loader_seed": self.seed,
            "trainer.default_local_dir": self.folder.checkpoints,
            "trainer.rollout_data_dir": self.folder.rollouts,
            "trainer.validation_data_dir": self.folder.validations,
            "ray_kwargs.ray_init._temp_dir": self._ray_folder,
            "hydra.run.dir": self.folder.root / "hydra",
        }
        return [
            sys.executable,
            "-m",
            "verl.trainer.main_ppo",
            f"--config-path={REPO_ROOT / 'configs'}",
            f"--config-name={CONFIG_NAME}",
            "trainer.logger=[console,file]",
            *(f"{'+' if key.endswith('_temp_dir') else ''}{key}={value}" for key, value in settings.items()),
            *self.overrides,
        ]

    def environment(self) -> dict[str, str]:
        """Return the environment of the trainer; Ray's workers inherit it."""
        python_path = os.environ.get("PYTHONPATH", "")
        return {
            **os.environ,
            **CPU_ENVIRONMENT,
            "PYTHONPATH": f"{REPO_ROOT}{os.pathsep}{python_path}" if python_path else str(REPO_ROOT),
            "NEMO_GYM_URL": self.environment_url,
            "NEMO_GYM_BROWSER_EPISODE_LOG_DIR": str(self.folder.episodes),
            "VERL_FILE_LOGGER_PATH": str(self.folder.next_metrics_path()),
            **self.extra_environment,
        }

    def start(self) -> None:
        """Start training; returns at once. Raises ProcessError if it can't be started."""
        # Unix sockets in it must stay under 108 characters, so it can't lie in the run's folder.
        self._ray_folder = tempfile.mkdtemp(prefix="ray-")
        self.tree = ProcessTree(
            "training", self.command(), log_path=self.folder.log, env=self.environment(), cwd=REPO_ROOT
        )

    def stop(self) -> None:
        """End training with every process that belongs to it, and remove Ray's own folder."""
        if self.tree is not None:
            self.tree.stop()
        if self._ray_folder:
            shutil.rmtree(self._ray_folder, ignore_errors=True)
