"""Prepared rows go through NeMo Gym's own `gym dataset collate`: its row checks and its schema of task data.

`.venv-gym` holds the server and not the clients that collate downloads datasets with, so these modules are empty here;
a collate that called one would fail.
"""

import json
import subprocess
from pathlib import Path

import pytest

from cpu.gym_server import GYM_VENV
from prepare_webvoyager_data import main

COLLATE = """
import sys, types
for name, attribute in (("devtools", "pprint"), ("nemo_gym.gitlab_utils", "download_jsonl_dataset"),
                        ("nemo_gym.hf_utils", "download_hf_dataset_as_jsonl")):
    sys.modules[name] = types.ModuleType(name)
    setattr(sys.modules[name], attribute, print if attribute == "pprint" else None)
from omegaconf import OmegaConf
from nemo_gym.train_data_utils import TrainDataProcessor
file, mode, kind = sys.argv[1:]
dataset = {"name": "prepared", "type": kind, "jsonl_fpath": file, "license": "Apache 2.0"}
server = {"entrypoint": "app.py", "domain": "agent", "datasets": [dataset]}
TrainDataProcessor().run(OmegaConf.create({
    "interactive_browser": {"resources_servers": {"interactive_browser": server}},
    "mode": mode, "output_dirpath": "collated",
}))
"""

TASKS = [
    {
        "web_name": f"Site {n % 3}",
        "id": f"Site {n % 3}--{n}",
        "ques": f"Find thing {n} — now",
        "web": "https://a.example/",
    }
    for n in range(12)
]
SPECS = {
    "Site 0--0": {"answer_equals": "42"},
    "Site 1--1": {"final_url": "https://a.example/end"},
    "Site 2--2": {"url_contains": "end"},
    "Site 0--3": {"dom_contains": "Done"},
}


def collate(rows: Path, mode: str, kind: str) -> subprocess.CompletedProcess:
    command = [str(GYM_VENV / "bin/python"), "-c", COLLATE, str(rows), mode, kind]
    return subprocess.run(command, cwd=rows.parent, capture_output=True, text=True, timeout=55, check=False)


@pytest.fixture
def prepared(tmp_path) -> Path:
    """Return the folder of twelve prepared tasks, four of them scored by the environment."""
    files = {"list.jsonl": "\n".join(map(json.dumps, TASKS)), "specs.json": json.dumps(SPECS)}
    files |= {"answers.json": json.dumps({"Site 1--4": "a" * 2000}), "system.txt": "Browse."}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    flags = ["--verifier", str(tmp_path / "specs.json"), "--reference-answers", str(tmp_path / "answers.json")]
    flags += ["--system-prompt", str(tmp_path / "system.txt"), "--val-fraction", "0.5"]
    assert main(["--input", str(tmp_path / "list.jsonl"), "--output-dir", str(tmp_path / "out"), *flags]) == 0
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("mode", "kind", "file"),
    [
        ("example_validation", "example", "train.jsonl"),
        ("example_validation", "example", "val.jsonl"),
        ("train_preparation", "train", "train.jsonl"),
        ("train_preparation", "validation", "val.jsonl"),
    ],
)
def test_collate_takes_every_prepared_row_as_it_is(prepared, mode, kind, file):
    done = collate(prepared / file, mode, kind)
    assert done.returncode == 0, done.stderr[-2000:]
    collated = [json.loads(line) for line in (prepared / "collated" / f"{kind}.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (prepared / file).read_text().splitlines()]
    assert collated == [row | {"task_source": "interactive_browser"} for row in rows]
    metrics = json.loads((prepared / "collated" / f"{kind}_metrics.json").read_text())
    assert metrics["Number of examples"] == len(rows) > 0
    assert "task_data validation" not in done.stdout


def test_collate_would_have_refused_the_site_beside_the_start_page(prepared):
    row = json.loads((prepared / "train.jsonl").read_text().splitlines()[0]) | {"web_name": "Site 1"}
    (prepared / "wrong.jsonl").write_text(json.dumps(row) + "\n")
    done = collate(prepared / "wrong.jsonl", "example_validation", "example")
    assert done.returncode != 0
    assert "web_name (1 rows)" in done.stderr
