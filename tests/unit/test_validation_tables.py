"""What a person sees of a validation in the trackers: episodes, through verl's own loggers."""

from types import SimpleNamespace

import pytest
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

from episode_record import AttemptOutcome, AttemptRecord, TurnRecord
from rollout_stats import AttemptReport, RolloutReport, ShownEpisode, StepSummary
from secret_masking import MASK, Masker
from tests.agent_loop_harness import CLICK_ABOUT, FINISH, ROW
from tests.fake_environment import Do, FakeEnvironment, Fault
from validation_tables import EpisodeTables, chosen_episodes, show_episodes, shown_episode


def report(task: str, rollout: int = 0, reward: float | None = 1.0, shown: bool = True) -> RolloutReport:
    episode = ShownEpisode(f"{task}: do it", f"episode {task} {rollout}") if shown else None
    return RolloutReport(3, f"u-{task}", rollout, reward, (AttemptReport("", "", "click", 1),), episode)


def trainer(count: int = 2) -> SimpleNamespace:
    config = SimpleNamespace(trainer=SimpleNamespace(log_val_generations=count))
    return SimpleNamespace(config=config, validation_generations_logger=ValidationGenerationsLogger("p", "e"))


TURNS = [
    TurnRecord(turn=1, action="navigate", arguments={"url": "https://a.example/?token=abc"}),
    TurnRecord(turn=2, action="click", arguments={"element_id": 3}, element="a: Next page"),
    TurnRecord(turn=3, action="type", arguments={"element_id": 4, "text": "red\nkettle"}, element="input:"),
    TurnRecord(turn=4, action="click", arguments={"element_id": 9}, failure_kind="element_not_usable"),
    TurnRecord(turn=5, action="", mistake="broken_json"),
    TurnRecord(turn=6, action="finish", arguments={"answer": "42"}),
]


def test_an_episode_is_told_an_action_a_line():
    record = AttemptRecord(
        task_id="a-1",
        site="a.example",
        question="Find\nthe price.",
        outcome=AttemptOutcome.SUCCESS,
        reward=1.0,
        stop_reason="finished",
        scored_by="judge",
        judge_reason="It is right.",
        answer="42",
        turn_records=TURNS,
    )
    shown = shown_episode(record, Masker())
    assert shown.task == "a-1 (a.example): Find the price."
    assert shown.episode.split("  \n") == [
        "success: reward 1 by the judge, finished – It is right.",
        "",
        f"1. navigate https://a.example/?token={MASK}",
        "2. click [3] a: Next page",
        '3. type "red kettle" into [4] input:',
        "4. click [9] – element_not_usable",
        "5. no usable call (broken_json)",
        "6. finish",
        "",
        "answer: 42",
    ]


def test_an_invalid_episode_says_what_failed():
    record = AttemptRecord(task_id="a", failure_kind="session_lost", failure_evidence="no active session hunter2")
    shown = shown_episode(record, Masker(("hunter2",)))
    assert shown.episode.split("  \n") == [f"invalid: session_lost – no active session {MASK}", "", "", "no answer"]


def test_a_long_episode_is_bounded():
    turns = [TurnRecord(turn=n, action="navigate", arguments={"url": "x" * 5000}) for n in range(1, 1001)]
    shown = shown_episode(AttemptRecord(question="y" * 10_000, turn_records=turns), Masker())
    assert len(shown.task) + len(shown.episode) < 20_000
    assert "(940 turns are not shown)" in shown.episode
    assert "\n1. navigate" in shown.episode and "\n1000. navigate" in shown.episode


def test_the_same_tasks_are_chosen_whatever_the_order_and_invalid_ones_are_among_them():
    reports = [report(task, rollout, None if task == "c" else 1.0) for task in "abcdef" for rollout in (0, 1)]
    chosen = chosen_episodes(reports, 8)
    assert chosen == chosen_episodes(reports[::-1], 8) and len(chosen) == 8
    assert {score for _, _, score in chosen_episodes(reports, 12)} == {1.0, None}
    assert chosen_episodes([report("a", shown=False)], 3) == []


# --- Through verl's classes ---


def test_verls_logger_is_replaced_once_and_others_are_left_alone():
    own = trainer()
    show_episodes(own, reports := [report("a")])
    first = own.validation_generations_logger
    assert isinstance(first, EpisodeTables) and (first.project_name, first.experiment_name) == ("p", "e")
    show_episodes(own, reports)
    assert own.validation_generations_logger is first
    other = SimpleNamespace(validation_generations_logger="a logger of somebody else")
    show_episodes(other, reports)
    show_episodes(None, reports)
    assert other.validation_generations_logger == "a logger of somebody else"


def read_texts(folder) -> dict[int, str]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        event.step: event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("val/generations/text_summary")
    }


def test_tensorboard_shows_the_episodes(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    own = trainer()
    show_episodes(own, [report("a"), report("b", reward=None)])
    own.validation_generations_logger.log(["console", "tensorboard"], [("system prompt", "markup", 0.0)], 5)
    own.validation_generations_logger.writer.close()
    text = read_texts(tmp_path)[5]
    assert "**Input:** a: do it" in text and "**Output:** episode b 0" in text
    assert "**Score:** 1.0" in text and "**Score:** None" in text and "markup" not in text


def test_without_reports_the_tables_are_verls(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    own = trainer()
    show_episodes(own, [report("a", shown=False)])
    own.validation_generations_logger.log(["tensorboard"], [("system prompt", "markup", 0.0)], 5)
    own.validation_generations_logger.writer.close()
    assert "**Output:** markup" in read_texts(tmp_path)[5]


def test_wandbs_table_takes_every_validation_also_with_invalid_rollouts():
    own = trainer(count=2)
    for step, rewards in enumerate(((1.0, 0.0), (None, 1.0), (None, None), (0.0, 1.0))):
        show_episodes(own, [report(task, 0, reward) for task, reward in zip("ab", rewards, strict=True)])
        # verl's own samples: the invalid rollouts are missing.
        samples = [("in", "out", reward) for reward in rewards if reward is not None]
        own.validation_generations_logger.log(["wandb"], samples, step)
    table = own.validation_generations_logger.validation_table
    assert [row[0] for row in table.data] == [0, 1, 2, 3]
    assert table.columns == ["step", "input_1", "output_1", "score_1", "input_2", "output_2", "score_2"]
    assert table.data[1][3::3] in ([None, 1.0], [1.0, None])


def test_every_figure_reaches_console_and_tensorboard(tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path))
    spoiled = AttemptReport("session_lost", "environment", "click", 1, generation_s=1.0)
    summary = StepSummary.of([report("a"), RolloutReport(3, "u", 0, None, (spoiled,))])
    metrics = summary.metrics() | summary.metrics("browser/val")
    tracking = Tracking("p", "e", default_backend=["console", "tensorboard"])
    tracking.log(metrics, step=3)
    tracking.logger["tensorboard"].finish()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(metrics)
    printed = capsys.readouterr().out
    assert all(f"{name}:" in printed for name in metrics)


# --- From a rollout ---


@pytest.mark.parametrize("count", [0, 5])
async def test_a_rollout_tells_its_episode_only_if_tables_are_asked_for(build, environment, base_config, count):
    loop, _ = build(environment, [CLICK_ABOUT, FINISH])
    loop.config.trainer.log_val_generations = count
    await loop.run({}, **ROW)
    (told,) = loop.gate.reports
    assert (told.shown is not None) == (count > 0)
    if told.shown:
        assert told.shown.task == "about: Open About."
        assert told.shown.episode.split("  \n")[2:4] == ["1. click [1] a: About", "2. finish"]


async def test_a_rollouts_report_counts_tokens_and_seconds(build, tmp_path):
    async with FakeEnvironment(faults=[Fault(Do.LOSE_SESSION, path="/browser_click", times=1)]) as environment:
        loop, policy = build(environment, [CLICK_ABOUT, CLICK_ABOUT, FINISH])
        (output,) = await loop.run({}, **ROW)
    first, second = loop.gate.reports[0].attempts
    assert (first.failure_kind, second.failure_kind) == ("session_lost", "")
    assert second.generated_tokens == sum(output.response_mask) and 0 < first.generated_tokens < second.generated_tokens
    assert min(first.environment_s, second.environment_s) > 0.0
