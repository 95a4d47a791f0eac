"""The dataset: verl's columns, selection, the length filter, resuming, and the check of files from the shell."""

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dataset import NeMoGymBrowserDataset, columns, main
from rollout_rows import RowsError, read_rows

ROOT = Path(__file__).resolve().parents[2]

SCORED_BY_URL = {"verifier_metadata": {"url_contains": "form"}, "initial_url": "http://shop.example/"}


def a_row(task, **changes):
    """Return a row of the released shape, without a system message."""
    row = {
        "responses_create_params": {"input": [{"role": "user", "content": task}]},
        "initial_url": "site/index.html",
        "verifier_metadata": {"answer_equals": "ALPHA-42"},
    }
    return row | changes


class WordTokenizer:
    """Stands in for a tokenizer: one token a word of the rendered messages and tool schemas."""

    def __init__(self):
        self.template_arguments = []

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, **arguments):
        assert add_generation_prompt and not tokenize
        self.template_arguments.append(arguments)
        return " ".join(message["content"] for message in messages) + " " + json.dumps(arguments.get("tools", []))

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": text.split()}


@pytest.fixture
def write_rows(tmp_path):
    def write(count=10, name="rows.jsonl", **changes):
        path = tmp_path / name
        rows = [a_row(f"task {i}", **changes) for i in range(count)]
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        return str(path)

    return write


def build(files, max_samples=-1, tokenizer=None, processor=None, **data):
    """Return the dataset as verl's trainers build it, from the `data` group of the configuration."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import create_rl_dataset

    custom = {"path": "pkg://dataset", "name": "NeMoGymBrowserDataset"}
    config = OmegaConf.create({"custom_cls": custom, "shuffle": False, "seed": None, "use_shm": False, **data})
    files = files if isinstance(files, str) else OmegaConf.create(list(files))
    return create_rl_dataset(files, config, tokenizer or WordTokenizer(), processor, max_samples=max_samples)


def indices(dataset):
    return [dataset[i]["index"] for i in range(len(dataset))]


def test_verl_builds_this_very_class_and_a_row_has_all_columns(write_rows):
    dataset = build(write_rows(1))
    assert type(dataset) is NeMoGymBrowserDataset
    row = dataset[0]
    assert torch.equal(row.pop("dummy_tensor"), torch.zeros(1, dtype=torch.uint8))
    assert [message["role"] for message in row["raw_prompt"]] == ["system", "user"]
    assert row["raw_prompt"][1]["content"] == "task 0"
    del row["raw_prompt"]
    assert row == {
        "tools_kwargs": {
            "browser": {
                "initial_url": "site/index.html",
                "verifier_metadata_json": '{"answer_equals": "ALPHA-42"}',
                "task": "task 0",
                "judged": False,
                "reference_answer": "",
            }
        },
        "index": 0,
        "data_source": "site",
        "agent_name": "browser_tool_agent",
        "reward_model": {"style": "environment", "ground_truth": ""},
        "extra_info": {"index": 0, "task_id": "rows.jsonl:1", "split": ""},
    }


def test_the_agent_loop_reads_the_task_back_from_the_columns(write_rows):
    from browser_task import BrowserTask

    (row,) = read_rows([write_rows(1, **SCORED_BY_URL)])
    task = BrowserTask.from_row({**columns(row, 0), "uid": "u", "session_id": 0, "global_steps": 1})
    assert task.verifier_metadata == {"url_contains": "form"}
    assert (task.initial_url, task.task_id, task.data_source) == ("http://shop.example/", row.task_id, "shop.example")


def test_several_files_make_one_index_and_their_scoring_specs_stay_apart_in_a_batch(write_rows):
    from verl.utils import tensordict_utils
    from verl.utils.dataset.rl_dataset import collate_fn

    dataset = build([write_rows(1, "a.jsonl"), write_rows(1, "b.jsonl", **SCORED_BY_URL)])
    batch = tensordict_utils.get_tensordict(collate_fn([dataset[0], dataset[1]]))
    specs = [batch["tools_kwargs"][i]["browser"]["verifier_metadata_json"] for i in range(2)]
    assert [json.loads(spec) for spec in specs] == [{"answer_equals": "ALPHA-42"}, {"url_contains": "form"}]
    assert list(batch["index"]) == [0, 1]


def test_a_bad_row_stops_the_run_before_it_starts(write_rows):
    with pytest.raises(RowsError, match="neither the environment nor the judge"):
        build([write_rows(2), write_rows(2, "unscored.jsonl", verifier_metadata={})])


def test_judged_rows_are_loaded_where_a_judge_is_configured_and_refused_where_none_is(write_rows, monkeypatch):
    files = [write_rows(2), write_rows(3, "judged.jsonl", verifier_metadata=None)]
    with pytest.raises(
        RowsError, match=r"judged.jsonl:1: verifier_metadata: is missing here and in 2 more rows.*JUDGE_URL"
    ):
        build(files)
    monkeypatch.setenv("NEMO_GYM_BROWSER_JUDGE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("NEMO_GYM_BROWSER_JUDGE_MODEL", "judge")
    dataset = build(files)
    styles = [dataset[i]["reward_model"]["style"] for i in range(len(dataset))]
    assert styles == ["environment"] * 2 + ["judge"] * 3


def test_reference_answer_reaches_the_judges_column_and_no_message(write_rows, monkeypatch):
    from browser_task import BrowserTask

    params = {"input": "How much is it?", "metadata": {"reference_answer": "42 EUR"}}
    (row,) = read_rows([write_rows(1, verifier_metadata=None, responses_create_params=params)])
    made = columns(row, 0)
    task = BrowserTask.from_row(made)
    assert (task.judged, task.reference_answer, task.question) == (True, "42 EUR", "How much is it?")
    assert "42" not in str(made["raw_prompt"])


@pytest.mark.parametrize("max_samples", [-1, 0, 10, 11])
def test_no_effective_limit_keeps_every_row_in_order(write_rows, max_samples):
    assert indices(build(write_rows(10), max_samples, shuffle=True, seed=1)) == list(range(10))


def test_max_samples_without_shuffle_takes_the_first_rows(write_rows):
    assert indices(build(write_rows(10), 3)) == [0, 1, 2]


def test_max_samples_with_shuffle_takes_the_choice_that_verl_would_take(write_rows):
    want = np.random.default_rng(7).choice(10, size=4, replace=False).tolist()
    assert indices(build(write_rows(10), 4, shuffle=True, seed=7)) == want


def test_a_random_choice_without_a_seed_is_warned_of(write_rows, caplog):
    with caplog.at_level(logging.WARNING, logger="dataset"):
        assert len(build(write_rows(10), 4, shuffle=True)) == 4
    assert "data.seed is unset" in caplog.text


def test_overlong_prompts_are_dropped_counted_and_keep_the_others_index(write_rows, caplog):
    long = write_rows(2, "long.jsonl", verifier_metadata={"dom_contains": "x"})
    Path(long).write_text(Path(long).read_text(encoding="utf-8").replace("task 0", "word " * 300), encoding="utf-8")
    with caplog.at_level(logging.WARNING, logger="dataset"):
        dataset = build([long, write_rows(1)], filter_overlong_prompts=True, max_prompt_length=200)
    assert indices(dataset) == [1, 2]
    assert dataset.dropped_overlong == 1
    assert "dropped 1 of 3 rows" in caplog.text and "data.max_prompt_length=200" in caplog.text


def test_the_length_filter_is_off_unless_asked_for(write_rows):
    assert len(build(write_rows(2), filter_overlong_prompts=False, max_prompt_length=1)) == 2


def test_dropping_every_row_is_an_error_that_names_the_setting(write_rows):
    with pytest.raises(ValueError, match=r"all 2 rows(.|\n)*data\.max_prompt_length=5 (.|\n)*raise"):
        build(write_rows(2), filter_overlong_prompts=True, max_prompt_length=5)


def test_the_length_filter_sees_the_tool_schema_and_template_arguments_of_the_rollout(write_rows, monkeypatch):
    from omegaconf import OmegaConf
    from verl.tools import tool_registry
    from verl.tools.schemas import OpenAIFunctionToolSchema

    # The real loader would import the agent loop, and with it half of verl and Ray.
    def load_all_tools(tool_config_path, function_tool_path):
        (tool,) = OmegaConf.to_container(OmegaConf.load(tool_config_path))["tools"]
        return [SimpleNamespace(tool_schema=OpenAIFunctionToolSchema.model_validate(tool["tool_schema"]))]

    monkeypatch.setattr(tool_registry, "load_all_tools", load_all_tools)
    tokenizer = WordTokenizer()
    data = {"filter_overlong_prompts": True, "max_prompt_length": 1000, "function_tool_path": None}
    data |= {"tool_config_path": str(ROOT / "configs" / "browser_tool.yaml")}
    data |= {"apply_chat_template_kwargs": {"enable_thinking": False}}
    build(write_rows(1), tokenizer=tokenizer, **data)
    (arguments,) = tokenizer.template_arguments
    assert arguments["enable_thinking"] is False
    (schema,) = arguments["tools"]
    assert schema["function"]["name"] == "browser"
    assert schema["function"]["parameters"]["properties"]["action"]["enum"][0] == "observe"


def test_a_template_that_fails_stops_the_run_instead_of_dropping_rows(write_rows):
    class Broken(WordTokenizer):
        def apply_chat_template(self, *_, **__):
            raise KeyError("template")

    with pytest.raises(KeyError):
        build(write_rows(1), tokenizer=Broken(), filter_overlong_prompts=True, max_prompt_length=1000)


def test_with_a_processor_its_template_counts_and_no_pictures_are_found(write_rows):
    processor = WordTokenizer()
    dataset = build(write_rows(1), processor=processor, filter_overlong_prompts=True, max_prompt_length=1000)
    assert len(processor.template_arguments) == 1
    found = asyncio.run(type(dataset).process_multi_modal_info(dataset[0]["raw_prompt"], 14, None))
    assert found == (None, None, None)
    assert asyncio.run(type(dataset).process_vision_info([], 14, None)) == (None, None)


def test_one_rollouts_edits_do_not_reach_the_next(write_rows):
    dataset = build(write_rows(1))
    first = dataset[0]
    first["raw_prompt"][-1]["content"] = "edited"
    first["tools_kwargs"]["browser"]["initial_url"] = "edited"
    assert dataset[0]["raw_prompt"][-1]["content"] == "task 0"
    assert dataset[0]["tools_kwargs"]["browser"]["initial_url"] == "site/index.html"


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's own call, on every construction
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_dataloader_goes_on_where_it_stopped(write_rows, shuffle):
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn

    path = write_rows(10)

    def loader():
        dataset = build(path, shuffle=shuffle, seed=3)
        sampler = create_rl_sampler(dataset.config, dataset)
        return StatefulDataLoader(dataset, batch_size=2, num_workers=0, collate_fn=collate_fn, sampler=sampler)

    first = loader()
    batches = iter(first)
    for _ in range(2):
        next(batches)
    state = first.state_dict()
    want = [list(batch["index"]) for batch in batches]
    second = loader()
    second.load_state_dict(state)
    assert [list(batch["index"]) for batch in second] == want
    assert len(want) == 3


def test_the_check_prints_a_line_per_file_and_exits_0(write_rows, capsys):
    files = [write_rows(2), write_rows(1, "b.jsonl", **SCORED_BY_URL)]
    assert main(files) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"{files[0]}: ok, 2 good row(s) | scored by: answer_equals 2 | data sources: site 2",
        f"{files[1]}: ok, 1 good row(s) | scored by: url_contains 1 | data sources: shop.example 1",
    ]
    assert err == ""


def test_the_check_lists_every_problem_on_stderr_and_exits_2(write_rows, capsys):
    files = [write_rows(2, initial_url="x"), write_rows(1, "good.jsonl"), write_rows(1, "b.jsonl", url_contains="x")]
    assert main(files) == 2
    out, err = capsys.readouterr()
    assert [line.split(": ")[1].split(",")[0] for line in out.splitlines()] == ["2 problem(s)", "ok", "1 problem(s)"]
    assert [line.split(": ")[0] for line in err.splitlines()] == [f"{files[0]}:1", f"{files[0]}:2", f"{files[2]}:1"]


def test_the_check_speaks_json(write_rows, capsys):
    path = write_rows(1, initial_url="x")
    assert main(["--json", path]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    (file,) = report["files"]
    assert (file["file"], file["rows"], file["problems"][0]["line"]) == (path, 0, 1)
    assert file["problems"][0]["key"] == "initial_url"


def test_the_check_without_a_file_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2


def test_the_check_runs_without_torch_and_verl(write_rows):
    code = """
import runpy, sys
try:
    runpy.run_path("dataset.py", run_name="__main__")
finally:
    print(sorted({"torch", "verl", "ray", "numpy", "aiohttp"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, write_rows(1)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
