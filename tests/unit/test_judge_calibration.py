"""Calibration: figures worked out by hand, faults of the labelled rows by line, and an output to go on from."""

import asyncio
import dataclasses
import json
import os

import pytest

import judge_program
from cpu.practice_judge import MODEL
from cpu.training_run import REPO_ROOT
from judge import Judge, Judgement, Outcome, Verdict
from judge_calibration import Calibration, Figures, Kept, LabelledError, calibrate, read_labelled, report_lines, wilson
from judge_verdict import FailureKind
from recipe_settings import RecipeSettings
from tests.judge_server import Fault, JudgeServer

LABELLED = REPO_ROOT / "cpu" / "judge_labelled.jsonl"
SETTINGS = RecipeSettings(judge_url="http://127.0.0.1:1/v1", judge_model="m")


def near(value):
    return pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize(
    ("hits", "n", "want"),
    [
        # Worked out with z = 1.96: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n).
        (0, 0, (None, None, None)),
        (5, 10, (0.5, 0.2366, 0.7634)),
        (0, 10, (0.0, 0.0, 0.2775)),
        (10, 10, (1.0, 0.7225, 1.0)),
        (81, 263, (0.3080, 0.2553, 0.3662)),  # Newcombe (1998), Statistics in Medicine 17, 857-872, table I
        (1, 29, (0.0345, 0.0061, 0.1718)),  # the same
    ],
)
def test_a_share_comes_with_wilsons_interval(hits, n, want):
    share = wilson(hits, n)
    assert (share.value, share.low, share.high) == (want if n == 0 else tuple(near(value) for value in want))


def test_the_figures_are_those_worked_out_by_hand():
    figures = Figures(true_success=20, false_success=5, false_failure=10, true_failure=15)
    assert figures.n == 50
    assert (figures.agreement.value, figures.precision.value, figures.recall.value) == (0.7, 0.8, near(20 / 30))
    # Observed 0.7, by chance 0.5 · 0.6 + 0.5 · 0.4 = 0.5, so kappa is 0.4. Its variance, times n(1 - 0.5)²:
    # 0.4(1 - 1.1 · 0.6)² + 0.3(1 - 0.9 · 0.6)² = 0.10972, and 0.6²(0.1 · 1.1² + 0.2 · 0.9²) = 0.10188,
    # less (0.4 - 0.5 · 0.6)² = 0.01, is 0.2016; √(0.2016 / 12.5) = 0.12700, times 1.96 is 0.24891.
    kappa = figures.kappa
    assert (kappa.value, kappa.low, kappa.high) == (near(0.4), near(0.4 - 0.24891), near(0.4 + 0.24891))


UNDEFINED = {
    "nothing": (Figures(0, 0, 0, 0), {"agreement", "precision", "recall", "kappa"}),
    "no-positives": (Figures(0, 0, 0, 7), {"precision", "recall", "kappa"}),
    "all-positive": (Figures(7, 0, 0, 0), {"kappa"}),
    "never-success": (Figures(0, 0, 3, 4), {"precision"}),
    "no-success-labelled": (Figures(0, 3, 0, 4), {"recall"}),
    "all-wrong": (Figures(0, 3, 4, 0), set()),
}


@pytest.mark.parametrize(("figures", "undefined"), UNDEFINED.values(), ids=UNDEFINED)
def test_a_figure_without_a_denominator_is_undefined_and_never_0(figures, undefined):
    names = ("agreement", "precision", "recall", "kappa")
    assert {name for name in names if getattr(figures, name).value is None} == undefined


@pytest.mark.parametrize(
    ("figures", "kappa"), [(Figures(5, 0, 0, 5), 1.0), (Figures(0, 5, 5, 0), -1.0), (Figures(2, 2, 2, 2), 0.0)]
)
def test_kappa_runs_from_always_wrong_to_always_right(figures, kappa):
    assert figures.kappa.value == near(kappa)
    assert -1.0 <= figures.kappa.low <= figures.kappa.high <= 1.0


def a_row(**changes):
    row = {"id": "1", "site": "s", "task": "t", "answer": "a", "actions": [], "observations": ["o"], "label": "success"}
    return {k: v for k, v in (row | changes).items() if v is not ...}


@pytest.fixture
def file(tmp_path):
    def write(*rows):
        path = tmp_path / "labelled.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


FAULTS = {
    "no-json": ("{", "is no JSON"),
    "list": ("[]", "is no JSON object"),
    "no-id": (a_row(id=...), "id: null is no text"),
    "blank-task": (a_row(task=" "), 'task: " " is no text'),
    "no-answer": (a_row(answer=...), "answer: is missing"),
    "answer-number": (a_row(answer=3), "answer: 3 is no text"),
    "reference-list": (a_row(reference=[]), "reference: [] is no text"),
    "actions-text": (a_row(actions="click"), "actions: is no list of texts"),
    "observation-null": (a_row(observations=[None]), "observations: is no list of texts"),
    "label": (a_row(label="SUCCESS"), 'label: "SUCCESS" is no label'),
    "label-list": (a_row(label=[]), "label: [] is no label"),
    "further-key": (a_row(verdict="x"), "verdict: is not known"),
    "same-id": (a_row(), "id: '1' is also on line 1"),
}


@pytest.mark.parametrize(("row", "said"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_a_labelled_row_is_named_with_its_line_and_fix(file, row, said):
    with pytest.raises(LabelledError) as caught:
        read_labelled(file(a_row(), "", row))
    (line,) = str(caught.value).splitlines()[1:]
    assert f"labelled.jsonl:3: {said}" in line
    assert "Fix:" in line


def test_all_faults_are_listed_at_once(file):
    with pytest.raises(LabelledError, match=r"^4 problem"):
        read_labelled(file("{", a_row(id="", label=""), a_row(task=None)))


def test_a_file_without_rows_is_refused(file):
    with pytest.raises(LabelledError, match="holds no row"):
        read_labelled(file(""))


class ScriptedJudge:
    """Gives the verdicts of its script by task; counts what it is asked."""

    def __init__(self, verdicts):
        self.verdicts = verdicts
        self.asked = []

    async def score(self, task, answer, evidence, reference=None):
        self.asked.append(task)
        return Judgement(self.verdicts[task], 1, 10, 2, 0.5, ())


YES, NO = Verdict(Outcome.SUCCESS, "y"), Verdict(Outcome.FAILURE, "n")
NONE = Verdict(Outcome.UNUSABLE, "?", FailureKind.JUDGE_TRUNCATED)


def rows_of(file, *labels_by_site):
    rows = [a_row(id=str(n), task=f"t{n}", site=site, label=label) for n, (site, label) in enumerate(labels_by_site)]
    return read_labelled(file(*rows))


async def test_rows_without_a_usable_verdict_are_counted_and_left_out(file):
    rows = rows_of(file, ("b", "success"), ("b", "failure"), ("a", "success"), ("a", "failure"))
    judge = ScriptedJudge({"t0": YES, "t1": YES, "t2": NONE, "t3": NO})
    calibration = await calibrate(judge, rows, SETTINGS, None)
    assert (calibration.figures, calibration.unusable) == (Figures(1, 1, 0, 1), {"judge_truncated": 1})
    assert calibration.by_site == {"a": Figures(0, 0, 0, 1), "b": Figures(1, 1, 0, 0)}
    lines = report_lines(calibration)
    assert "n          3 of 4 rows; no usable verdict: 1" in lines
    assert lines[-2:] == [line for line in lines if line.startswith(("a ", "b "))]
    assert [int(cell) for cell in lines[-1].split()[1:]] == [1, 1, 0, 0]


async def test_undefined_figures_are_shown_as_a_dash_and_as_null(file):
    calibration = Calibration(tuple(Kept(row, Outcome.UNUSABLE, "k") for row in rows_of(file, ("a", "success"))))
    assert [line.split()[1] for line in report_lines(calibration)[:4]] == ["-"] * 4
    assert calibration.as_json()["kappa"] == {"value": None, "low": None, "high": None}


async def test_a_second_run_asks_only_for_what_has_no_usable_verdict(file, tmp_path):
    rows = rows_of(file, ("a", "success"), ("a", "failure"))
    output = tmp_path / "verdicts.jsonl"
    first = ScriptedJudge({"t0": YES, "t1": NONE})
    await calibrate(first, rows, SETTINGS, output)
    with output.open("a") as cut:
        cut.write('{"digest": "12')  # a run that was killed while it wrote
    second = ScriptedJudge({"t1": NO})
    calibration = await calibrate(second, rows, SETTINGS, output)
    assert (sorted(first.asked), second.asked) == (["t0", "t1"], ["t1"])
    assert calibration.figures == Figures(1, 0, 0, 1)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["success", "unusable", "failure"]
    assert [line["kind"] for line in lines] == [None, "judge_truncated", None]
    assert {"id", "site", "label", "reason", "calls", "prompt_tokens", "elapsed_s"} <= lines[0].keys()


@pytest.mark.parametrize(
    "change", [{"judge_model": "other"}, {"judge_votes": 3}, {"judge_evidence_tokens": 999}], ids=str
)
async def test_a_verdict_of_another_judge_is_not_taken_over(file, tmp_path, change):
    rows = rows_of(file, ("a", "success"))
    for settings in (SETTINGS, dataclasses.replace(SETTINGS, **change)):
        judge = ScriptedJudge({"t0": YES})
        await calibrate(judge, rows, settings, tmp_path / "verdicts.jsonl")
        assert judge.asked == ["t0"]


@pytest.mark.parametrize("content", [b"my notes", b"my notes\n", b'{"a": 1}\n', b"\xff\n"])
async def test_a_file_that_is_no_output_of_a_calibration_is_left_as_it_is(file, tmp_path, content):
    output = tmp_path / "notes.txt"
    output.write_bytes(content)
    with pytest.raises(LabelledError, match="no verdict of a calibration"):
        await calibrate(ScriptedJudge({}), rows_of(file, ("a", "success")), SETTINGS, output)
    assert output.read_bytes() == content


async def test_the_practice_judge_agrees_with_its_labelled_rows_as_far_as_is_known():
    rows = read_labelled(LABELLED)
    async with JudgeServer() as server:
        settings = RecipeSettings(judge_url=server.url, judge_model=MODEL)
        async with Judge(settings) as judge:
            calibration = await calibrate(judge, rows, settings, None)
    # Comparing letters misses three answers in other words, and one wrong answer is the reference answer of last week.
    assert calibration.figures == Figures(true_success=20, false_success=1, false_failure=3, true_failure=20)
    assert calibration.unusable == {"judge_unparseable": 1}
    assert (len(rows), len(calibration.by_site)) == (45, 4)
    assert len([row for row in rows if row.answer is None]) == 4


@pytest.fixture
def program(monkeypatch, capsys):
    async def run(server, *argv):
        for variable in [name for name in os.environ if name.startswith("NEMO_GYM")]:
            monkeypatch.delenv(variable)
        monkeypatch.setenv("NEMO_GYM_BROWSER_JUDGE_URL", server.url)
        monkeypatch.setenv("NEMO_GYM_BROWSER_JUDGE_MODEL", MODEL)
        try:
            code = await asyncio.to_thread(judge_program.main, [str(argument) for argument in argv])
        except SystemExit as e:
            code = e.code
        return code, *capsys.readouterr()

    return run


async def test_the_program_prints_the_figures_and_keeps_the_verdicts(program, tmp_path):
    output = tmp_path / "verdicts.jsonl"
    async with JudgeServer() as server:
        code, out, err = await program(server, "--calibrate", LABELLED, "--output", output)
        assert (code, "45/45" in err) == (0, True)
        assert "agreement  0.909  95% [0.788, 0.964]" in out
        assert "judge_unparseable 1" in out
        asked = len(server.bodies)
        code, out, _ = await program(server, "--calibrate", LABELLED, "--output", output, "--json")
    assert len(server.bodies) - asked == 3  # the row without a reference, again
    report = json.loads(out)
    assert (code, report["n"], report["rows"], report["unusable"]) == (0, 44, 45, {"judge_unparseable": 1})
    assert report["precision"]["value"] == near(20 / 21)
    assert report["confusion"]["weather"] == {
        "true_success": 5,
        "false_success": 1,
        "false_failure": 0,
        "true_failure": 5,
    }


async def test_the_program_says_that_no_row_could_be_judged(program, file):
    async with JudgeServer(*[Fault.BAD_KEY] * 9) as server:
        code, out, _ = await program(server, "--calibrate", file(a_row()))
    assert (code, "judge_rejected 1" in out) == (1, True)


@pytest.mark.parametrize("bad", ["faulty", "missing"])
async def test_the_program_refuses_rows_that_it_can_not_use(program, file, tmp_path, bad):
    async with JudgeServer() as server:
        path = file("{") if bad == "faulty" else tmp_path / "none.jsonl"
        code, _, err = await program(server, "--calibrate", path)
    assert (code, str(path) in err, "Fix:" in err) == (2, True, True)
