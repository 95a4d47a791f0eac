"""The judge over real HTTP: what is asked again and when, what is given up, and that no key is ever shown."""

import asyncio
import json
import logging
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

import judge_program
from cpu.practice_judge import MODEL, ScriptError, read_script
from cpu.processes import free_port
from cpu.training_run import REPO_ROOT
from judge import VOTE_TEMPERATURE, Evidence, FailureKind, Judge, Outcome
from judge_client import SCHEMA
from recipe_settings import RecipeSettings, SettingsError
from tests.judge_server import Answer, Fault, JudgeServer, says

KEY = "sk-a-secret-key"
EVIDENCE = Evidence(("navigate x", "finish"), ("URL: x\nTEXT:\n  Price 24.50",))
SUCCESS, FAILURE, NONE = '{"reason": "yes", "verdict": "SUCCESS"}', '{"reason": "no", "verdict": "NOT SUCCESS"}', "Hm."
UNREACHABLE, REJECTED = FailureKind.JUDGE_UNREACHABLE, FailureKind.JUDGE_REJECTED
UNPARSEABLE, REFUSED = FailureKind.JUDGE_UNPARSEABLE, FailureKind.JUDGE_REFUSED


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self):
        self.now = 1000.0
        self.slept = []

    async def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


def settings_for(url, **given):
    return RecipeSettings(judge_url=url, judge_model=MODEL, judge_api_key=KEY, **given)


@asynccontextmanager
async def judging(*script, **given):
    """Yield a judge, its server and its clock."""
    clock = Clock()
    async with JudgeServer(*script) as server:
        async with Judge(settings_for(server.url, **given), clock=lambda: clock.now, sleep=clock.sleep) as judge:
            yield judge, server, clock


async def ask(judge, answer="24.50", reference="24.50"):
    return await judge.score("What is the price?", answer, EVIDENCE, reference)


@pytest.mark.parametrize(("answer", "want"), [(" 24.50 ", Outcome.SUCCESS), ("24.50 or so", Outcome.FAILURE)])
async def test_a_verdict_comes_with_what_it_cost(answer, want):
    async with judging() as (judge, server, _):
        judgement = await ask(judge, answer)
    assert (judgement.verdict.outcome, judgement.verdict.kind) == (want, None)
    assert judgement.verdict.reason.startswith("The final answer is")
    assert (judgement.calls, judgement.unusable) == (1, ())
    assert judgement.prompt_tokens > 500
    assert 0 < judgement.completion_tokens < 100
    (body,) = server.bodies
    assert (body["model"], body["temperature"]) == (MODEL, 0.0)
    form = body["response_format"]
    assert (form["type"], form["json_schema"]["strict"], form["json_schema"]["schema"]) == ("json_schema", True, SCHEMA)
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("answer", [None, "", " \n"])
async def test_no_answer_is_a_failure_without_a_call(answer):
    async with judging() as (judge, server, _):
        judgement = await ask(judge, answer)
    assert (judgement.verdict.outcome, judgement.calls, server.bodies) == (Outcome.FAILURE, 0, [])


async def test_a_judge_that_abstains_gives_no_verdict():
    async with judging() as (judge, _, _):
        judgement = await ask(judge, reference=None)
    assert (judgement.verdict.kind, judgement.calls) == (UNPARSEABLE, 3)


def status(code, text="busy", **more):
    return Answer(Fault.STATUS, status=code, text=text, **more)


@pytest.mark.parametrize(
    "fault",
    [*(status(code) for code in (408, 409, 429, 500, 502, 503, 504)), Fault.DROP],
    ids=lambda fault: str(getattr(fault, "status", fault)),
)
async def test_what_may_pass_is_tried_again_after_a_growing_wait(fault):
    async with judging(*[fault] * 6) as (judge, _, clock):
        judgement = await ask(judge)
    assert judgement.verdict.outcome is Outcome.SUCCESS
    assert (judgement.calls, judgement.unusable) == (7, (UNREACHABLE,) * 6)
    for attempt, slept in enumerate(clock.slept):
        assert 0.25 * 2**attempt <= slept <= 0.5 * 2**attempt


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413, 422])
async def test_what_will_not_pass_is_rejected_at_once_in_the_endpoints_words(code):
    async with judging(status(code, "no such thing"), judge_votes=3) as (judge, _, clock):
        judgement = await ask(judge)
    assert (judgement.verdict.kind, judgement.verdict.reason) == (REJECTED, f"HTTP {code} no such thing")
    assert (judgement.calls, clock.slept) == (1, [])


@pytest.mark.parametrize(
    ("fault", "kind", "calls"),
    [
        (Fault.EMPTY, UNPARSEABLE, 3),
        (Fault.NO_CHOICE, UNPARSEABLE, 3),
        (Fault.CUT, UNPARSEABLE, 3),
        (Fault.IN_REASONING, UNPARSEABLE, 3),
        (Fault.TRUNCATED, FailureKind.JUDGE_TRUNCATED, 3),
        (Fault.FILTERED, REFUSED, 2),
        (Fault.REFUSED, REFUSED, 2),
    ],
)
async def test_a_reply_without_a_verdict_is_asked_for_again_so_often_and_no_more(fault, kind, calls):
    async with judging(*[fault] * 9) as (judge, server, clock):
        judgement = await ask(judge)
    assert (judgement.verdict.kind, judgement.calls, judgement.unusable) == (kind, calls, (kind,) * calls)
    assert all(body["messages"] == server.bodies[0]["messages"] for body in server.bodies)
    assert clock.slept == []
    async with judging(*[fault] * (calls - 1)) as (judge, _, _):
        assert (await ask(judge)).verdict.outcome is Outcome.SUCCESS


async def test_replies_that_are_unusable_in_different_ways_share_the_repetitions():
    async with judging(Fault.EMPTY, Fault.TRUNCATED, Fault.EMPTY) as (judge, _, _):
        judgement = await ask(judge)
    assert judgement.unusable == (UNPARSEABLE, FailureKind.JUDGE_TRUNCATED, UNPARSEABLE)
    assert judgement.verdict.kind is UNPARSEABLE


async def test_the_wait_that_the_endpoint_asks_for_is_kept():
    in_a_minute = format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True)
    answers = [status(429, retry_after=asked) for asked in ("7", "0", "soon", in_a_minute)]
    async with judging(*answers) as (judge, _, clock):
        assert (await ask(judge)).verdict.outcome is Outcome.SUCCESS
    assert 7.0 <= clock.slept[0] <= 7.5
    assert clock.slept[1] >= 0.5  # its own backoff: an endpoint that asks for no wait is not asked in a loop
    assert clock.slept[2] >= 1.0
    assert 50.0 <= clock.slept[3] <= 60.5


async def test_an_endpoint_that_stays_down_ends_with_the_deadline_and_its_last_words():
    async with judging(*[status(503, "loading the model")] * 99, judge_deadline_s=100.0) as (judge, _, clock):
        judgement = await ask(judge)
    assert judgement.verdict.kind is UNREACHABLE
    assert "HTTP 503 loading the model" in judgement.verdict.reason
    assert 70.0 <= judgement.elapsed_s <= 100.0
    assert max(clock.slept) <= 30.0


async def test_a_wait_beyond_the_deadline_is_not_begun():
    async with judging(status(429, retry_after="3600"), judge_deadline_s=900.0) as (judge, _, clock):
        judgement = await ask(judge)
    assert (judgement.verdict.kind, clock.slept) == (UNREACHABLE, [])
    assert "asked to wait 3600 s" in judgement.verdict.reason


async def test_an_endpoint_that_nobody_listens_on_is_unreachable():
    clock = Clock()
    settings = settings_for(f"http://127.0.0.1:{free_port()}/v1", judge_deadline_s=1.0)
    async with Judge(settings, clock=lambda: clock.now, sleep=clock.sleep) as judge:
        judgement = await ask(judge)
    assert judgement.verdict.kind is UNREACHABLE
    assert "Connect" in judgement.verdict.reason


async def test_an_endpoint_that_never_answers_costs_the_calls_timeout_and_is_asked_again():
    async with judging(Fault.HANG, judge_timeout_s=0.5) as (judge, _, _):
        judgement = await ask(judge)
    # On a busy machine an answer of the rule may take that long as well, and is asked for once more.
    assert judgement.verdict.outcome is Outcome.SUCCESS
    assert judgement.unusable[:1] == (UNREACHABLE,) and set(judgement.unusable) == {UNREACHABLE}


@pytest.mark.parametrize(
    ("formats", "asked_with"),
    [
        ((), ["json_schema", "json_schema"]),
        (("json_schema",), ["json_schema", "json_object", "json_object"]),
        (("json_schema", "json_object"), ["json_schema", "json_object", None, None]),
    ],
)
async def test_an_output_format_that_is_refused_is_changed_once_and_remembered(formats, asked_with):
    refusal = Answer(Fault.NO_FORMAT, formats=formats)
    async with judging(*[refusal] * 4) as (judge, server, clock):
        for _ in range(2):
            judgement = await ask(judge)
            assert (judgement.verdict.outcome, judgement.unusable) == (Outcome.SUCCESS, ())
    assert server.formats == asked_with
    assert clock.slept == []


@pytest.mark.parametrize(
    ("refusal", "changes"),
    [
        (status(400, "guided_json is not supported"), True),
        # The parameters as vLLM 0.27.1 names them.
        (status(400, "6 validation errors", param="body.response_format.type"), True),
        (status(400, "cannot be greater than max_model_len=8192", param="max_completion_tokens"), False),
        (status(400, "1 validation error in '... response_format ...'", param="messages"), False),
        (status(422, "response_format"), False),
    ],
    ids=["words", "parameter", "context", "words-of-a-page", "422"],
)
async def test_only_a_400_that_names_the_output_format_changes_it(refusal, changes):
    async with judging(refusal) as (judge, server, _):
        judgement = await ask(judge)
    assert server.formats == (["json_schema", "json_object"] if changes else ["json_schema"])
    assert judgement.verdict.kind is (None if changes else REJECTED)


VOTES = {
    "one": (1, [SUCCESS], Outcome.SUCCESS, 1),
    "two-alike": (2, [SUCCESS, SUCCESS], Outcome.SUCCESS, 2),
    "tie": (2, [SUCCESS, FAILURE], Outcome.FAILURE, 2),
    "tie-certain-early": (2, [FAILURE], Outcome.FAILURE, 1),
    "certain-early": (3, [SUCCESS, SUCCESS], Outcome.SUCCESS, 2),
    "failure-certain-early": (3, [FAILURE, FAILURE], Outcome.FAILURE, 2),
    "majority": (3, [FAILURE, SUCCESS, SUCCESS], Outcome.SUCCESS, 3),
    "five": (5, [SUCCESS, FAILURE, FAILURE, SUCCESS, FAILURE], Outcome.FAILURE, 5),
    "one-missing-but-certain": (3, [NONE, NONE, NONE, SUCCESS, SUCCESS], Outcome.SUCCESS, 5),
    "one-missing-and-split": (3, [NONE, NONE, NONE, SUCCESS, FAILURE], Outcome.UNUSABLE, 5),
    "two-missing": (3, [NONE] * 6, Outcome.UNUSABLE, 6),
    "missing-in-a-tie": (2, [SUCCESS, NONE, NONE, NONE], Outcome.UNUSABLE, 4),
}


@pytest.mark.parametrize(("votes", "replies", "want", "calls"), VOTES.values(), ids=VOTES)
async def test_the_majority_of_the_votes_decides_and_no_call_is_made_after_it(votes, replies, want, calls):
    async with judging(*says(*replies), judge_votes=votes) as (judge, server, _):
        judgement = await ask(judge, "something else", "24.50")
    assert (judgement.verdict.outcome, judgement.calls) == (want, calls)
    assert (judgement.verdict.kind is not None) == (want is Outcome.UNUSABLE)
    assert {body["temperature"] for body in server.bodies} == {0.0 if votes == 1 else VOTE_TEMPERATURE}


async def test_no_more_calls_are_under_way_than_allowed():
    async with judging(judge_concurrency=3) as (judge, server, _):
        server.hold()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(judge)) for _ in range(10)]
            await server.arrived(3)
            server.release()
    assert [task.result().verdict.outcome for task in tasks] == [Outcome.SUCCESS] * 10
    assert server.most_under_way == 3


async def test_a_cancelled_judgement_frees_its_slot():
    async with judging(judge_concurrency=1) as (judge, server, _):
        server.hold()
        holder = asyncio.create_task(ask(judge))
        await server.arrived(1)
        waiter = asyncio.create_task(ask(judge))
        await asyncio.sleep(0)
        for task in (waiter, holder):
            task.cancel()
        assert [type(e) for e in await asyncio.gather(holder, waiter, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2
        server.release()
        assert (await ask(judge)).verdict.outcome is Outcome.SUCCESS


async def test_the_wait_for_a_slot_counts_towards_the_deadline():
    async with JudgeServer() as server, Judge(settings_for(server.url, judge_concurrency=1)) as judge:
        await ask(judge)
        server.hold()
        holder = asyncio.create_task(ask(judge))
        await server.arrived(2)
        judge._settings = settings_for(server.url, judge_deadline_s=0.05)
        judgement = await ask(judge)
        assert (judgement.verdict.kind, judgement.calls) == (UNREACHABLE, 0)
        assert "waiting for a free one" in judgement.verdict.reason
        assert judgement.elapsed_s < 5.0
        server.release()
        assert (await holder).verdict.outcome is Outcome.SUCCESS


async def test_the_slot_is_free_while_a_retry_waits():
    async with JudgeServer(status(503)) as server:
        waiting, go_on = asyncio.Event(), asyncio.Event()

        async def sleep(_):
            waiting.set()
            await go_on.wait()

        async with Judge(settings_for(server.url, judge_concurrency=1), sleep=sleep) as judge:
            first = asyncio.create_task(ask(judge))
            await waiting.wait()
            assert (await ask(judge)).verdict.outcome is Outcome.SUCCESS
            go_on.set()
            assert (await first).calls == 2


async def test_one_judge_is_shared_by_a_loop_for_equal_settings():
    one, same = (Judge.shared(settings_for("http://127.0.0.1:1/v1"), count) for count in (len, lambda text: 1))
    other = Judge.shared(settings_for("http://127.0.0.1:1/v1", judge_votes=3))
    assert one is same
    assert one is not other
    elsewhere = await asyncio.to_thread(lambda: asyncio.run(_shared("http://127.0.0.1:1/v1")))
    assert elsewhere is not one


async def _shared(url):
    return Judge.shared(settings_for(url))


async def test_no_key_is_in_any_reason_log_or_repr(caplog):
    caplog.set_level(logging.DEBUG)
    async with judging(Fault.BAD_KEY, Fault.DROP, Fault.CUT, Fault.RULE) as (judge, server, _):
        rejected, judged = await ask(judge), await ask(judge)
        shown = [repr(judge), repr(vars(judge)), repr(vars(judge._client)), repr(rejected), repr(judged), caplog.text]
    assert rejected.verdict.reason == "HTTP 401 Incorrect API key provided: Bearer (key not shown)."
    assert judged.verdict.outcome is Outcome.SUCCESS
    assert all(f"Bearer {KEY}" == headers["Authorization"] for headers in server.headers)
    assert not [text for text in shown if KEY in text]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (RecipeSettings(), "JUDGE_URL"),
        (
            RecipeSettings(judge_url="http://h/v1", judge_model="m", judge_evidence_tokens=10),
            "JUDGE_EVIDENCE_TOKENS=10",
        ),
    ],
)
def test_settings_that_make_no_judge_are_refused_by_name(settings, named):
    with pytest.raises(SettingsError, match=named):
        Judge(settings)


@pytest.fixture
def program(monkeypatch, capsys):
    """Return a function that runs judge.py's command line, and gives its exit code, output and errors."""
    for variable in [name for name in os.environ if name.startswith("NEMO_GYM")]:
        monkeypatch.delenv(variable)

    async def run(server, *argv, **variables):
        if server is not None:
            monkeypatch.setenv("NEMO_GYM_BROWSER_JUDGE_URL", server.url)
            monkeypatch.setenv("NEMO_GYM_BROWSER_JUDGE_MODEL", MODEL)
            monkeypatch.setenv("NEMO_GYM_BROWSER_JUDGE_API_KEY", KEY)
        for name, value in variables.items():
            monkeypatch.setenv(f"NEMO_GYM_BROWSER_{name}", value)
        try:
            code = await asyncio.to_thread(judge_program.main, list(argv))
        except SystemExit as e:
            code = e.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


async def test_a_check_passes_a_judge_that_knows_both_cases(program):
    async with JudgeServer() as server:
        code, out, _ = await program(server, "--check", "--json")
        assert code == 0
        report = json.loads(out)
        assert (report["healthy"], report["output_format"]) == (True, "json_schema")
        assert [case["outcome"] for case in report["cases"]] == ["success", "failure"]
        assert 6000 < report["cases"][1]["prompt_tokens"] < 7500
        code, out, _ = await program(server, "--check")
        assert (code, out.splitlines()[-1].startswith("healthy: ")) == (0, True)


BAD_JUDGES = {
    "wrong": (says(SUCCESS, SUCCESS), "too weak"),
    "rejects": ([Answer(Fault.BAD_KEY)], "JUDGE_API_KEY"),
    "unparseable": (says(*[NONE] * 6), "structured output"),
    "refuses": ([Answer(Fault.REFUSED)] * 4, "another model"),
    "down": ([status(503, retry_after="999")], "JUDGE_URL"),
}


@pytest.mark.parametrize(("script", "advice"), BAD_JUDGES.values(), ids=BAD_JUDGES)
async def test_a_check_fails_a_judge_that_can_not_be_used_and_says_what_to_do(program, script, advice):
    async with JudgeServer(*script) as server:
        code, out, err = await program(server, "--check")
    assert code == 1
    assert "unhealthy" in out
    assert advice in out[out.index("what to do") :]
    assert KEY not in out + err


@pytest.mark.parametrize(
    ("argv", "variables", "said"),
    [
        (["--check"], {}, "JUDGE_URL"),
        (["--check"], {"JUDGE_MODEL": "m"}, "set both or none"),
        ([], {}, "--check"),
        (["--check", "--output", "x"], {}, "--calibrate"),
        (["--check", "--timeout", "0"], {}, "--timeout 0"),
    ],
)
async def test_wrong_usage_exits_with_2_and_names_what_is_wrong(program, argv, variables, said):
    code, _, err = await program(None, *argv, **variables)
    assert (code, said in err) == (2, True)


def test_judge_py_runs_as_a_program():
    env = {name: value for name, value in os.environ.items() if not name.startswith("NEMO_GYM")}
    done = subprocess.run(
        [sys.executable, "judge.py", "--check"], cwd=REPO_ROOT, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "NEMO_GYM_BROWSER_JUDGE_URL" in done.stderr


def test_the_judge_loads_neither_torch_nor_verl_nor_ray_nor_the_client_library():
    loaded = "import sys, judge, judge_program; print({'torch', 'verl', 'ray', 'openai'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import site; site.main(); {loaded}"],
        cwd=REPO_ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("end", ["input", "signal"])
def test_the_practice_judge_prints_its_address_and_ends_when_told(end):
    with subprocess.Popen(
        [sys.executable, "-m", "cpu.practice_judge", "--port", "0"],
        cwd=REPO_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline().startswith("practice judge: http://127.0.0.1:")
        if end == "input":
            process.stdin.close()
        else:
            process.terminate()
        assert process.wait(10) == 0


def test_a_script_of_faults_is_read_from_a_file(tmp_path):
    path = tmp_path / "faults.json"
    path.write_text('["empty", {"do": "status", "status": 503, "retry_after": "2"}]')
    assert read_script(path) == [Answer(Fault.EMPTY), Answer(Fault.STATUS, status=503, retry_after="2")]


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "no JSON"), ("{}", "no list"), ('["no"]', r"\[0\]"), ('["empty", {"do": "say", "x": 1}]', r"\[1\]")],
)
def test_a_script_that_can_not_be_played_is_refused_by_entry(tmp_path, text, said):
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(ScriptError, match=said):
        read_script(path)
