"""Real training on tasks of which the environment scores some and the judge the others; the judge goes away meanwhile.

verl's V1 trainer, Ray and vLLM are real, and so is the way to the judge, which answers by a rule; the environment is
the fake one, which plays the practice site.
"""

import json
import socketserver
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from cpu.practice_judge import MODEL
from cpu.training_run import REPO_ROOT
from episode_log import read_episodes
from tests.practice_environment import PracticeEnvironment
from tests.whole_training import new_folder, train_to_the_end

pytestmark = [pytest.mark.training, pytest.mark.timeout(900)]

STEPS, PROMPTS, ROLLOUTS = 3, 5, 4
TURNED_AWAY = 3
"""Calls that find nobody before the judge is back."""


def have_answers_judged(path) -> dict[str, str]:
    """Rewrite the rows so that the judge scores those with an answer; return the right answers by task."""
    rows, answers = [json.loads(line) for line in path.read_text().splitlines()], {}
    for row in rows:
        if "answer_equals" in row["verifier_metadata"]:
            metadata = row["responses_create_params"]["metadata"]
            answers[metadata["task_id"]] = row.pop("verifier_metadata")["answer_equals"]
            metadata |= {"scored_by": "judge", "reference_answer": answers[metadata["task_id"]]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return answers


class NobodyHome(socketserver.ThreadingTCPServer):
    """Takes the judge's address while it is away, counts who calls and hangs up."""

    allow_reuse_address = True

    def __init__(self, port: int) -> None:
        self.callers = 0
        super().__init__(("127.0.0.1", port), socketserver.BaseRequestHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request, client_address) -> None:
        """Count the caller."""
        self.callers += 1

    def leave(self) -> None:
        """Free the address."""
        self.shutdown()
        self.server_close()


class JudgeThatGoesAway:
    """The practice judge as a program: killed after the first step, back once it was missed."""

    def __init__(self, folder) -> None:
        self.folder, self.killed, self.nobody = folder, False, None
        self.process = self._start(0)
        self.url = self.process.stdout.readline().split()[2]
        self.port = int(self.url.split(":")[2].split("/")[0])

    def _start(self, port: int) -> subprocess.Popen:
        command = [sys.executable, "-m", "cpu.practice_judge", "--port", str(port)]
        return subprocess.Popen(command, cwd=REPO_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tick(self, training) -> None:
        """Go away or come back if it is time."""
        if not self.killed and any("actor/grad_norm" in data for data in self.folder.metrics().values()):
            self.stop()
            self.killed, self.nobody = True, NobodyHome(self.port)
        elif self.nobody is not None and self.nobody.callers >= TURNED_AWAY:
            self.nobody.leave()
            self.nobody, self.process = None, self._start(self.port)

    def stop(self) -> None:
        """End the program."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The finished run's folder, the right answers of the judged tasks, and the judge."""
    folder = new_folder(tmp_path_factory.mktemp("judged"))
    answers = have_answers_judged(folder.train_rows) | have_answers_judged(folder.validation_rows)
    judge = JudgeThatGoesAway(folder)
    settings = {
        "NEMO_GYM_BROWSER_JUDGE_URL": judge.url,
        "NEMO_GYM_BROWSER_JUDGE_MODEL": MODEL,
        "NEMO_GYM_BROWSER_DROP_INVALID": "0",
        "NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS": "32",
        "NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS": "32",
    }
    overrides = [
        f"trainer.total_training_steps={STEPS}",
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.rollout.n={ROLLOUTS}",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
    ]
    try:
        with PracticeEnvironment() as environment:
            exit_code = train_to_the_end(folder, environment.url, overrides, settings, judge.tick)
        assert exit_code == 0, folder.log.read_text()[-3000:]
    finally:
        judge.stop()
        if judge.nobody is not None:
            judge.nobody.leave()
    return folder, answers, judge


def episodes_of(folder) -> list[dict]:
    episodes, problems = read_episodes(folder.episodes)
    assert problems == []
    return episodes


def test_judge_was_away_and_was_missed(run):
    folder, _, judge = run
    assert judge.killed and judge.nobody is None
    assert any(episode["judge_calls"] > 1 for episode in episodes_of(folder))
    shares = [data.get("browser/judge/unusable_share/judge_unreachable", 0) for data in folder.metrics().values()]
    assert max(shares) > 0


def test_every_judged_reward_is_what_the_rule_says_of_the_answer(run):
    folder, answers, _ = run
    judged = [episode for episode in episodes_of(folder) if episode["scored_by"] == "judge"]
    assert judged
    for episode in judged:
        said = " ".join((episode["answer"] or "").split()).casefold()
        assert episode["reward"] == float(said == answers[episode["task_id"]].casefold()), episode
    assert {0.0, 1.0} == {episode["reward"] for episode in judged}


def test_no_rollout_was_lost_to_the_judges_absence_and_none_was_made_a_zero(run):
    folder, _, _ = run
    assert [episode["failure_kind"] for episode in episodes_of(folder) if episode["failure_kind"]] == []
    steps = [data for data in folder.metrics().values() if "actor/grad_norm" in data]
    assert len(steps) == STEPS
    assert {data["browser/invalid_share"] for data in steps} == {0.0}


def test_each_task_is_scored_by_the_one_whom_its_row_names(run):
    folder, answers, _ = run
    for episode in episodes_of(folder):
        by_judge = episode["task_id"] in answers
        assert episode["scored_by"] == ("judge" if by_judge else "environment")
        assert (episode["last_call"] == "verify") is not by_judge
    steps = [data for data in folder.metrics().values() if "browser/judge/episodes" in data]
    asked = sum(episode["judge_calls"] > 0 for episode in episodes_of(folder))
    assert sum(data["browser/judge/episodes"] for data in steps) == asked
