"""A run's page says what its log says, by a count of its own; no text of the log becomes a part of the page."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict, replace

import pytest

import episode_report
from episode_record import AttemptOutcome, AttemptRecord, ModelCallRecord, ObservationRecord, TurnRecord
from report_details import choose, embed, script_json
from report_figures import Rate, figures_of
from report_log import EpisodeFiles, NoEpisodesError
from report_metrics import SessionMetrics
from tests.episode_samples import sample_episodes, write_samples
from tests.report_pages import PageReader

HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> {{ 7*7 }} \u2028 \" ' & $x$ \ud800"


def write_log(folder, records, name="episodes-node1-1.jsonl", end="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record if isinstance(record, dict) else asdict(record)) for record in records]
    (folder / name).write_text("".join(f"{line}\n" for line in lines[:-1]) + lines[-1] + end)


def page_of(run, **options):
    return PageReader(episode_report.write_report(run, **options).read_text(encoding="utf-8"))


def attempts_of(folder):
    return episode_report.read_attempts(EpisodeFiles(folder))


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """Return a run with failures, retries that are under way and half a line; its lines; and its page."""
    run = tmp_path_factory.mktemp("runs") / "sampled"
    write_samples(run / "episodes", episodes=500)
    lines = []
    for path in sorted((run / "episodes").iterdir()):
        kept = []
        for text in path.read_text().split("\n"):
            try:
                line = json.loads(text)
            except ValueError:
                kept.append(text)
                continue
            # The last attempts at two retried rollouts are not there yet.
            if line["attempt"] < 2 or line["global_step"] not in (7, 9):
                kept.append(text)
                lines.append(line)
        path.write_text("\n".join(kept))
    return run, lines, page_of(run, output=run / "page.html", details=40)


def naive_rates(lines):
    """Count success the long way: every rollout by its attempts, in plain loops."""
    rollouts = defaultdict(list)
    for line in lines:
        rollouts[line["uid"], line["rollout"]].append(line)
    solved = valid = invalid = unfinished = 0
    for attempts in rollouts.values():
        last = max(attempts, key=lambda line: line["attempt"])
        if not last["final"]:
            unfinished += 1
        elif last["failure_kind"]:
            invalid += 1
        else:
            valid += 1
            solved += last["reward"] == 1.0
    return [f"{solved}/{valid}", f"{solved}/{valid + invalid}", str(invalid), str(unfinished)]


def rates_in(cells):
    return [cells[0].split()[-1], cells[1].split()[-1], cells[2], cells[3]]


@pytest.mark.parametrize(
    ("caption", "split", "key"),
    [
        ("success over training", "train", "global_step"),
        ("success in validations", "validation", "global_step"),
        ("sites of the training", "train", "site"),
        ("sites of the validation", "validation", "site"),
        ("tasks of the training", "train", "task_id"),
        ("tasks of the validation", "validation", "task_id"),
    ],
    ids=lambda value: value.replace(" ", "-"),
)
def test_both_success_rates_with_their_counts_equal_an_independent_count_of_the_log(sampled, caption, split, key):
    _, lines, page = sampled
    parts = defaultdict(list)
    for line in lines:
        if line["split"] == split:
            parts[str(line[key])].append(line)
    shown = {row[0]: rates_in(row[1:]) for row in page.tables[caption][1:]}
    assert shown == {name: naive_rates(part) for name, part in parts.items()}
    assert any(counts[2] != "0" for counts in shown.values()) or split == "validation"


def test_the_totals_equal_an_independent_count_of_the_log(sampled):
    _, lines, page = sampled
    for split in ("train", "validation"):
        valid, everything, _, _ = naive_rates([line for line in lines if line["split"] == split])
        name = {"train": "training"}.get(split, split)
        assert page.texts[f"{name}-valid"].split()[-1] == valid
        assert page.texts[f"{name}-all"].split()[-1] == everything
    assert naive_rates(lines)[3] != "0", "the sample has to hold rollouts that are being tried again"


def test_failures_by_kind_and_last_call_equal_an_independent_count_of_the_log(sampled):
    _, lines, page = sampled
    head, *rows = page.tables["invalid attempts by kind and last call to the environment"]
    shown = {
        (row[0], call): int(cell) for row in rows for call, cell in zip(head[4:], row[4:], strict=True) if cell != "·"
    }
    failed = [line for line in lines if line["failure_kind"]]
    assert shown == Counter((line["failure_kind"], line["last_call"]) for line in failed)
    assert {row[0]: int(row[2]) for row in rows} == Counter(line["failure_kind"] for line in failed)
    stayed = Counter(line["failure_kind"] for line in failed if line["final"])
    assert {row[0]: int(row[3]) for row in rows} == {row[0]: stayed[row[0]] for row in rows}


def test_what_episodes_went_on_after_equals_an_independent_count_of_the_log(sampled):
    _, lines, page = sampled
    counts = Counter()
    for line in lines:
        for turn in line["turn_records"]:
            counts.update((mistake, "reply") for mistake in [*turn["discarded"], turn["mistake"]] if mistake)
            if turn["failure_kind"]:
                counts[turn["failure_kind"], turn["action"]] += 1
    shown = {
        (row[0], row[1]): int(row[2]) for row in page.tables["failures and mistakes that episodes went on after"][1:]
    }
    assert shown == counts


def test_turns_lengths_and_times_equal_an_independent_count_of_the_log(sampled):
    _, lines, page = sampled
    by_step = defaultdict(list)
    for line in lines:
        if line["split"] == "train":
            by_step[str(line["global_step"])].append(line)
    for step, attempts, turns, generated, _, *times in page.tables["attempts, turns, lengths and time"][1:]:
        part = by_step.pop(step)
        tokens = sum(call["generated_tokens"] for line in part for call in line["call_records"])
        assert int(attempts) == len(part)
        assert float(turns) == pytest.approx(sum(line["turns"] for line in part) / len(part), abs=0.051)
        assert float(generated) == pytest.approx(tokens / len(part), abs=0.51)
        for name, shown in zip(("generation_s", "environment_s", "waiting_s", "judge_s"), times, strict=True):
            seconds = sum(line[name] for line in part)
            assert float(shown.replace("\u202f", "")) == pytest.approx(seconds, abs=0.051)
    assert not by_step


def test_the_list_holds_every_attempt_and_the_viewer_those_that_the_page_says(sampled):
    run, lines, page = sampled
    index = page.index()
    uids, columns = index["names"]["uid"], index["columns"]
    listed = Counter(zip((uids[u] for u in columns["uid"]), columns["rollout"], columns["attempt"], strict=True))
    assert listed == Counter((line["uid"], line["rollout"], line["attempt"]) for line in lines)
    details = page.details()
    assert sorted(details) == index["details"] and 0 < len(details) <= 40
    for number, record in details.items():
        name = index["files"][columns["file"][number]]
        text = (run / "episodes" / name).read_text().split("\n")[columns["line"][number] - 1]
        assert record == json.loads(text)


def test_half_a_line_costs_that_line_alone_and_is_named(tmp_path):
    write_samples(tmp_path / "episodes", episodes=40, half_line=False)
    whole = page_of(tmp_path)
    with (tmp_path / "episodes" / "episodes-node2-102.jsonl").open("a") as file:
        file.write('{"schema": 2, "started_at": 17600')
    cut = page_of(tmp_path)
    assert cut.tables == whole.tables
    assert "log" in {attributes.get("id") for _, attributes in cut.tags} - {a.get("id") for _, a in whole.tags}
    assert "episodes-node2-102.jsonl:" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"ended_at": 2, "ta', "control character"),
        ("[1]", "no record"),
        ('{"schema": 2, "ended_at": 1e999}', "infinite"),
        ('{"schema": 2, "ended_at": NaN}', "NaN"),
        ('{"schema": 2, "ended_at": 1, "turns": "three"}', "turns is"),
        ('{"schema": 2, "ended_at": 1, "outcome": "<b>"}', "outcome is"),
        ('{"schema": 2, "ended_at": 1, "turn_records": [null]}', "turn_records"),
        ('{"schema": 2, "ended_at": 1, "call_records": [{}]}', "prompt_tokens"),
        ('{"schema": 2, "ended_at": 1, "turns": 1' + "0" * 400 + "}", "too large"),
        (
            '{"schema": 2, "ended_at": 1, "call_records": [{"prompt_tokens": 1e999, "generated_tokens": 1}]}',
            "prompt_tokens is 'inf'",
        ),
    ],
    ids=[
        "half",
        "list",
        "infinite",
        "nan",
        "wrong-type",
        "unknown-outcome",
        "no-turn",
        "no-call",
        "huge",
        "infinite-call",
    ],
)
def test_a_line_that_cannot_be_counted_is_named_and_left_out(tmp_path, line, reason):
    write_log(tmp_path, [AttemptRecord(task_id="a", reward=1.0, outcome=AttemptOutcome.SUCCESS, uid="u")])
    with (tmp_path / "episodes-node1-1.jsonl").open("a") as file:
        file.write(line + "\n")
    files = EpisodeFiles(tmp_path)
    assert [attempt.task for attempt in episode_report.read_attempts(files)] == ["a"]
    assert files.unreadable == 1
    assert files.problems[0].startswith("episodes-node1-1.jsonl:2: ") and reason in files.problems[0]


def test_lines_of_the_older_schema_are_counted(tmp_path):
    old = {"ended_at": 5.0, "global_step": 1, "uid": "u", "rollout": 0, "task_id": "t", "split": "train", "turns": 2}
    write_log(tmp_path, [old | {"reward": 1.0}, old | {"rollout": 1, "reward": None, "failure_kind": "session_lost"}])
    counts = figures_of(attempts_of(tmp_path)).training.total
    assert (counts.solved, counts.valid, counts.invalid, counts.failures) == (1, 1, 1, {"session_lost": 1})


def test_a_log_that_grows_is_read_on_from_where_it_ended(tmp_path):
    first, second, third = (AttemptRecord(task_id=name) for name in "abc")
    write_log(tmp_path, [first, second], end="")
    files = EpisodeFiles(tmp_path)
    assert [record["task_id"] for _, record in files.new_records()] == ["a"]
    with (tmp_path / "episodes-node1-1.jsonl").open("a") as file:
        file.write("\n")
    write_log(tmp_path, [third], "episodes-node2-1.jsonl")
    grown = list(files.new_records())
    assert [record["task_id"] for _, record in grown] == ["b", "c"]
    assert [files.record_at(place)["task_id"] for place, _ in grown] == ["b", "c"]
    assert list(files.new_records()) == [] and files.half_lines() == []


def hostile_record():
    page = ObservationRecord("0" * 64, len(HOSTILE), HOSTILE, HOSTILE)
    turn = TurnRecord(
        1, HOSTILE, {"text": HOSTILE}, HOSTILE, mistake=HOSTILE, error=HOSTILE, failure_kind=HOSTILE, observation=page,
        reply=HOSTILE, call=HOSTILE,
    )  # fmt: skip
    return AttemptRecord(
        uid=HOSTILE, task_id=HOSTILE, split=HOSTILE, site=HOSTILE, question=HOSTILE, stop_reason=HOSTILE,
        failure_kind=HOSTILE, failure_fault=HOSTILE, failure_evidence=HOSTILE, last_call=HOSTILE, answer=HOSTILE,
        turns=1, actions=[HOSTILE], start_page=page, turn_records=[turn],
        call_records=[ModelCallRecord(HOSTILE, None, 1, HOSTILE, 1, 1)],
    )  # fmt: skip


def test_texts_from_the_web_and_the_policy_never_become_a_part_of_the_page(tmp_path):
    write_log(tmp_path, [hostile_record(), AttemptRecord(task_id="tame", outcome=AttemptOutcome.FAILURE, reward=0.0)])
    page = page_of(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert (
        "<img" not in text and "<script>alert" not in text and "49" not in page.tables["tasks of the validation"][1][0]
    )
    programs = [attributes for tag, attributes in page.tags if tag == "script" and "type" not in attributes]
    assert programs == [{}]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert page.details()[0]["turn_records"][0]["reply"] == HOSTILE
    assert page.index()["names"]["task"] == [HOSTILE, "tame"]


def test_the_page_loads_nothing_and_runs_one_script_of_its_own(sampled):
    _, _, page = sampled
    loading = [
        (tag, name, value)
        for tag, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "srcset", "action", "data") or (name == "href" and not (value or "").startswith("#"))
    ]
    assert loading == [("link", "href", "data:,")] + [use for use in loading if use[1] == "xlink:href"]
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]


@pytest.mark.parametrize("text", ["</script>", "<!--", "a\u2028b\u2029c", "\ud800", "&amp;", "{{ x }}"], ids=ascii)
def test_json_in_a_script_element_reads_back_the_same_and_holds_nothing_of_html(text):
    made = script_json({"text": text})
    assert json.loads(made) == {"text": text}
    assert not set(made) & set("<>&\u2028\u2029")
    made.encode("utf-8")


def test_equal_logs_make_equal_pages(tmp_path):
    write_samples(tmp_path / "episodes", episodes=60)
    first = episode_report.write_report(tmp_path, tmp_path / "first.html").read_bytes()
    assert episode_report.write_report(tmp_path, tmp_path / "second.html").read_bytes() == first


@pytest.mark.parametrize("count", [1, 3], ids=["one", "three"])
def test_a_run_that_has_only_begun_has_a_page(tmp_path, count):
    write_log(tmp_path / "episodes", list(sample_episodes(count))[:count])
    assert len(page_of(tmp_path).index()["columns"]["step"]) == count


def test_a_long_runs_curve_pools_steps_and_loses_none(tmp_path):
    steps = range(1, 251)
    write_log(
        tmp_path,
        [AttemptRecord(uid=f"{n}", global_step=n, reward=1.0, outcome=AttemptOutcome.SUCCESS) for n in steps],
    )
    periods = figures_of(attempts_of(tmp_path)).training.periods
    assert len(periods) <= 60
    assert sum(period.counts.valid for period in periods) == 250
    assert [(a.last_step + 1) for a in periods[:-1]] == [b.first_step for b in periods[1:]]


@pytest.mark.parametrize(
    ("solved", "rollouts", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
    ids=["none", "half", "all", "newcombe-1998"],
)
def test_intervals_are_wilsons(solved, rollouts, low, high):
    assert Rate(solved, rollouts).interval() == pytest.approx((low, high), abs=1e-4)


def test_a_rate_of_nothing_is_none_and_not_zero():
    assert Rate(0, 0).value is None and Rate(0, 0).interval() is None


def test_details_come_as_whole_rollouts_the_included_ones_first(tmp_path):
    write_samples(tmp_path, episodes=300)
    attempts = attempts_of(tmp_path)
    wanted = attempts[100].uid
    chosen = choose(attempts, 25, [wanted])
    assert len(chosen) == len(set(chosen)) <= 25
    assert {attempts[i].uid for i in chosen[:4]} == {wanted}
    keys = [attempt.rollout_key for attempt in attempts]
    assert all(keys.count(keys[i]) == sum(keys[j] == keys[i] for j in chosen) for i in chosen)
    spread = choose(attempts, 60)
    assert {attempts[i].failure_kind for i in spread} >= {a.failure_kind for a in attempts}
    assert len({attempts[i].step for i in spread}) > 5
    assert choose(attempts, 0, [wanted]) == []


def test_details_stay_within_their_bytes_and_say_how_many_did_not_fit(tmp_path):
    write_samples(tmp_path, episodes=50)
    files = EpisodeFiles(tmp_path)
    attempts = episode_report.read_attempts(files)
    details = embed(files, attempts, list(range(20)), most=30_000)
    assert 0 < len(details.texts) < 20 and details.left_out == 20 - len(details.texts)
    assert sum(len(text.encode()) for text in details.texts.values()) <= 30_000


@pytest.mark.parametrize(
    ("files", "values"),
    [
        (
            {"metrics-000.jsonl": '{"step":1,"data":{"browser/sessions_opened":4.0}}\n'
             '{"step":2,"data":{"browser/sessions_opened":5}}\n{"step":3,"da',
             "metrics-001.jsonl": '{"step":2,"data":{"browser/sessions_opened":6}}\n'},
            {"opened": {1: 4.0, 2: 6.0}},
        ),
        (
            {"logs/job-7/train.log": "noise\n(TaskRunner pid=1) step:3 - browser/sessions_opened:np.float64(7.0) - "
             "browser/sessions_closed:7.0 - a/b:1\n"},
            {"closed": {3: 7.0}, "opened": {3: 7.0}},
        ),
        ({}, {}),
    ],
    ids=["metrics-of-a-resumed-run", "console-log", "none"],
)  # fmt: skip
def test_sessions_are_those_that_the_trainer_counted(tmp_path, files, values):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert episode_report.read_sessions(tmp_path) == values


def test_a_metrics_line_that_is_being_written_is_read_once_it_is_whole(tmp_path):
    path = tmp_path / "metrics-000.jsonl"
    path.write_text('{"step":1,"data":{"browser/sessions_opened":4}}\n{"step":2,"data":{"browser/sessions_open')
    metrics = SessionMetrics(tmp_path)
    assert metrics.read_new() == {"opened": {1: 4.0}}
    with path.open("a") as file:
        file.write('ed":5}}\n')
    assert metrics.read_new() == {"opened": {1: 4.0, 2: 5.0}}


def test_the_failure_that_ended_an_episode_is_none_that_it_went_on_after(tmp_path):
    turns = [TurnRecord(1, "click", failure_kind="bad_element"), TurnRecord(2, "click", failure_kind="browser_died")]
    ended = AttemptRecord(turn_records=turns, turns=2, failure_kind="browser_died")
    write_log(tmp_path, [ended, replace(ended, turn_records=turns[::-1])])
    assert figures_of(attempts_of(tmp_path)).passing == {
        ("bad_element", "click"): 2,
        ("browser_died", "click"): 1,
    }


def test_the_program_writes_the_page_and_names_it(tmp_path, capsys):
    write_samples(tmp_path / "elsewhere", episodes=20)
    page = tmp_path / "pages" / "a.html"
    assert episode_report.main([str(tmp_path), "-o", str(page), "--episodes", str(tmp_path / "elsewhere")]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert [path.name for path in page.parent.iterdir()] == ["a.html"]


@pytest.mark.parametrize("half", [False, True], ids=["no-log", "half-a-first-line"])
def test_nothing_to_report_yet_is_exit_1_and_says_what_to_do(tmp_path, capsys, half):
    if half:
        write_log(tmp_path, [AttemptRecord()], end="")
    assert episode_report.main([str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "episode" in said and str(tmp_path) in said
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    "arguments", [["{}/missing"], ["{}", "--details", "-1"], ["{}", "--interval", "0"], []], ids=ascii
)
def test_wrong_usage_is_exit_2(tmp_path, capsys, arguments):
    try:
        status = episode_report.main([argument.format(tmp_path) for argument in arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2 and "error" in capsys.readouterr().err


def test_a_run_without_a_log_raises_for_programs_that_ask(tmp_path):
    with pytest.raises(NoEpisodesError, match="NEMO_GYM_BROWSER_EPISODE_LOG_DIR"):
        episode_report.write_report(tmp_path)


def test_a_later_attempt_decides_and_an_earlier_line_that_comes_late_does_not(tmp_path):
    lost = AttemptRecord(uid="u", attempt=1, final=False, failure_kind="session_lost")
    won = replace(lost, attempt=2, final=True, failure_kind="", reward=1.0, outcome=AttemptOutcome.SUCCESS)
    write_log(tmp_path, [replace(won, ended_at=1.0), replace(lost, ended_at=2.0)])
    total = figures_of(attempts_of(tmp_path)).total
    assert (total.solved, total.valid, total.invalid, total.unfinished) == (1, 1, 0, 0)
