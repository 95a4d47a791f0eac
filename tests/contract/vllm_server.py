"""vLLM's OpenAI server with what its CPU build needs: `python -m tests.contract.vllm_server ARGUMENT...`.

A module of its own, because vLLM's engine process is spawned and imports it again: the platform must be there too.
"""

import runpy

import cpu.verl_platform  # noqa: F401 - answers for the distribution's name

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
