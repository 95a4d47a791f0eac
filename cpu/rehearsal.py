"""Makes what a rehearsal of submit_webvoyager.sh needs on a Slurm cluster without GPUs: policy, rows and settings.

    python -m cpu.rehearsal FOLDER --site http://HOST:8077 [--name RUN_NAME]

FOLDER must be seen by every node. The practice site must run at the given address, where the environment servers reach
it: python -m cpu.practice_site serve --host 0.0.0.0
"""

import argparse
import subprocess
import sys
from pathlib import Path

from cpu.practice_tasks import write_rows
from cpu.training_run import CPU_ENVIRONMENT, REPO_ROOT

CONFIG_NAME = "cpu_practice_slurm"


def write_rehearsal(folder: Path, site: str, name: str) -> Path:
    """Return the file of settings after writing it, the rows and the policy; a policy that is there is kept."""
    folder = folder.resolve()
    (folder / "data").mkdir(parents=True, exist_ok=True)
    train, validation = folder / "data" / "train.jsonl", folder / "data" / "validation.jsonl"
    write_rows(train, validation, site)
    command = [sys.executable, "-m", "cpu.small_policy", "--output", str(folder / "policy")]
    subprocess.run(command, cwd=REPO_ROOT, check=True)
    settings = {
        "RUN_NAME": name,
        "RESULTS_ROOT": folder / "results",
        "TRAIN_FILE": train,
        "VAL_FILE": validation,
        "TRAIN_CONFIG": CONFIG_NAME,
        "MODEL_PATH": folder / "policy",
        "GPUS_PER_NODE": 1,
        "TRAIN_PYTHON": sys.executable,
        "START_ENVIRONMENT": "head",
        **{key: value for key, value in CPU_ENVIRONMENT.items() if not key.startswith("PYTHON")},
    }
    path = folder / "config.env"
    path.write_text("".join(f"{key}='{value}'\n" for key, value in settings.items()))
    return path


def main(argv: list[str] | None = None) -> int:
    """Write everything and say how to submit it. Return 0; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m cpu.rehearsal", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder that every node sees")
    parser.add_argument("--site", required=True, help="address of the practice site, http://HOST:PORT")
    parser.add_argument("--name", default="rehearsal", help="RUN_NAME (%(default)s)")
    options = parser.parse_args(argv)
    path = write_rehearsal(options.folder, options.site.rstrip("/"), options.name)
    print(f"rehearsal: wrote {path}; submit it with:")
    print(f"  sbatch --gres=none submit_webvoyager.sh --config-env {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
