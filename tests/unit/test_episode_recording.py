"""An attempt is recorded as it went over the wire, and played again without a browser."""

import asyncio
import json
import logging
import socket
from pathlib import Path

import aiohttp
import pytest

import episode_recording
import episode_replay
import smoke_environment
from episode_log import read_episodes
from episode_record import AttemptRecord
from episode_recording import Recordings
from episode_replay import Recording, ReplayError, ReplayServer
from exchanges import Exchange
from secret_masking import MASK
from tests.agent_loop_harness import CLICK_ABOUT, FINISH, ROW, call
from tests.fake_environment import Do, FakeEnvironment, Fault
from tests.fake_site import GYM_FILES, Button, Field, Page
from tests.recordings import compare_exchange


@pytest.fixture(autouse=True)
def fresh_folders(monkeypatch):
    """What a process has recorded counts as long as it lives."""
    monkeypatch.setattr(episode_recording, "_folders", {})


def recordings(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


async def record(build, tmp_path, replies, environment, **settings) -> tuple[Path, dict]:
    """Return the one recording that a rollout of one attempt leaves, and the attempt's line."""
    folder = tmp_path / "recordings"
    loop, _ = build(environment, list(replies), settings={"record_dir": folder} | settings, max_attempts=1)
    await loop.run({}, **ROW)
    (path,) = folder.iterdir()
    return path, read_episodes(tmp_path)[0][-1]


async def replayed(build, tmp_path, replies, path, **settings) -> dict:
    """Return the line of the same rollout against the replay."""
    async with ReplayServer(Recording.read(path)) as server:
        loop, _ = build(server, list(replies), settings=settings, max_attempts=1)
        await loop.run({}, **ROW)
    return read_episodes(tmp_path)[0][-1]


def shape(line: dict) -> dict:
    """Return what has to be the same when an attempt is played again."""
    keys = (
        "outcome stop_reason reward failure_kind failure_fault failure_evidence last_call actions answer rows".split()
    )
    pages = [turn["observation"] and turn["observation"]["sha256"] for turn in line["turn_records"]]
    return {key: line[key] for key in keys} | {"pages": pages, "start": line["start_page"]}


async def test_a_recording_is_what_went_over_the_wire(build, environment, tmp_path):
    path, _ = await record(build, tmp_path, [CLICK_ABOUT, FINISH], environment)
    assert path.name == "step7-about-u-1-r2-a1-success.json"
    content = json.loads(path.read_text())
    assert [(e["path"], e["request"]) for e in content["exchanges"][:4]] == [
        ("/seed_session", {"initial_url": "site/index.html", "verifier_metadata": {"url_contains": "about"}}),
        ("/browser_observe", {}),
        ("/browser_click", {"element_id": 1}),
        ("/browser_finish", {"answer": "ALPHA-42"}),
    ]
    assert [e["path"] for e in content["exchanges"][4:]] == ["/verify", "/close_session"]
    assert content["attempt"]["outcome"] == "success" and content["attempt"]["actions"] == ["click", "finish"]
    assert all(e["elapsed_s"] >= 0 for e in content["exchanges"])
    # The form is that of the recordings of the real server, so what replays those holds a server to this one.
    async with FakeEnvironment() as fresh:
        assert await compare_exchange(fresh.url, content) == []


FAULTS = {
    "no fault": (None, "success"),
    "the session is lost": (Fault(Do.LOSE_SESSION, path="/browser_click"), "session_lost"),
    "the browser dies": (Fault(Do.KILL_BROWSER, path="/browser_click"), "browser_died"),
    "the server is full": (Fault(Do.STATUS, path="/seed_session", status=503, retry_after="7"), "provider_full"),
    "a proxy answers": (Fault(Do.GARBAGE, path="/browser_click", text="<html>oops</html>"), "malformed_answer"),
    "the connection breaks": (Fault(Do.DISCONNECT, path="/browser_click"), "environment_disconnected"),
    "a call hangs": (Fault(Do.HANG, path="/browser_click"), "act_timeout"),
    "the score is none": (Fault(Do.ANSWER, path="/verify", body={"reward": None}), "malformed_answer"),
    "an action fails": (Fault(Do.ERROR, path="/browser_click", text="click failed: Timeout 5000ms exceeded."), None),
}


@pytest.mark.parametrize(("fault", "end"), FAULTS.values(), ids=FAULTS)
async def test_an_attempt_is_reproduced_without_its_environment(build, tmp_path, fault, end):
    replies, limits = [CLICK_ABOUT, FINISH], {"act_timeout_s": 1.0 if end == "act_timeout" else 20.0}
    async with FakeEnvironment(faults=[fault] if fault else []) as environment:
        path, before = await record(build, tmp_path, replies, environment, **limits)
    after = await replayed(build, tmp_path, replies, path, **limits)
    assert end is None or end in (before["failure_kind"], before["outcome"])
    assert shape(after) == shape(before)


async def test_a_refused_connection_is_told_and_left_out_of_the_replay(build, tmp_path):
    environment = FakeEnvironment()
    async with environment:
        pass  # nobody listens at its address any more
    path, line = await record(build, tmp_path, [FINISH], environment)
    assert line["failure_kind"] == "environment_down"
    assert recordings(path.parent)[0]["exchanges"][0]["unreachable"] is True
    assert all("unreachable" not in exchange for exchange in Recording.read(path).exchanges)


async def test_sessions_are_replayed_apart_and_as_often_as_asked(build, environment, tmp_path):
    path, _ = await record(build, tmp_path, [CLICK_ABOUT, FINISH], environment)
    async with ReplayServer(Recording.read(path)) as server:
        loops = [build(server, [CLICK_ABOUT, FINISH])[0] for _ in range(3)]
        await asyncio.gather(*(loop.run({}, **ROW) for loop in loops))
    assert [line["outcome"] for line in read_episodes(tmp_path)[0]] == ["success"] * 4


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        (
            [call(action="navigate", url="http://a.example/")],
            'expected /browser_click {"element_id": 1}, and /browser_nav',
        ),
        (
            [call(action="click", element=0)],
            'expected /browser_click {"element_id": 1}, and /browser_click {"element_id": 0',
        ),
        (
            [CLICK_ABOUT, call(action="finish", answer="no")],
            'expected /browser_finish {"answer": "ALPHA-42"}, and /brow',
        ),
    ],
    ids=["another action", "another element", "another answer"],
)
async def test_another_request_is_told_what_was_expected(build, environment, tmp_path, replies, said):
    path, _ = await record(build, tmp_path, [CLICK_ABOUT, FINISH], environment)
    line = await replayed(build, tmp_path, replies, path)
    assert line["outcome"] == "invalid" and said in line["failure_evidence"]
    assert "HTTP 409" in line["failure_evidence"] and path.stem in line["failure_evidence"]


async def test_after_its_end_a_recording_has_no_more_answers(build, environment, tmp_path):
    path, _ = await record(build, tmp_path, [FINISH], environment)
    async with ReplayServer(Recording.read(path)) as server, aiohttp.ClientSession() as http:
        http.cookie_jar._unsafe = True
        exchanges = json.loads(path.read_text())["exchanges"]
        for exchange in exchanges:
            async with http.post(server.url + exchange["path"], json=exchange["request"]) as response:
                assert response.status == 200
        async with http.post(f"{server.url}/browser_observe", json={}) as response:
            assert response.status == 409 and "the recording ends here" in await response.text()
        async with http.post(f"{server.url}/close_session", json={}) as response:
            assert await response.json() == {"closed": True}


async def test_a_password_is_in_no_recording_and_its_replay_takes_any(build, tmp_path):
    login = Page("Log in", "Your Password", (Field("password"), Button("Go", action="next")))
    site = {f"{GYM_FILES}site/index.html": login, f"{GYM_FILES}site/next?password=hunter2%21": Page("In", "hunter2!")}
    replies = [call(action="type", element=0, text="hunter2!"), call(action="click", element="Go"), FINISH]
    async with FakeEnvironment(site) as environment:
        path, before = await record(build, tmp_path, replies, environment)
    assert "hunter2" not in path.read_text() and path.read_text().count(MASK) >= 3
    after = await replayed(build, tmp_path, replies, path)
    assert shape(after) == shape(before)


# --- Bounds ---


def attempt(**given) -> AttemptRecord:
    return AttemptRecord(uid=f"{given}", **given)


def exchange(text: str = "{}") -> Exchange:
    made = Exchange("/seed_session", {})
    made.answered(200, text, {})
    return made


async def test_the_first_recordings_of_each_kind_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(episode_recording, "MOST_FAILED", 3)
    monkeypatch.setattr(episode_recording, "MOST_OTHERS", 1)
    for rollout in range(5):
        for outcome in ("success", "failure", "invalid"):
            await Recordings(tmp_path).keep(attempt(rollout=rollout, outcome=outcome), [exchange()])
    kept = sorted((r["attempt"]["outcome"], r["attempt"]["rollout"]) for r in recordings(tmp_path))
    assert kept == [("invalid", 0), ("invalid", 1), ("invalid", 2), ("success", 0)]
    assert Recordings(tmp_path).new_exchanges() is None
    assert Recordings(tmp_path / "other").new_exchanges() == []
    assert Recordings(None).new_exchanges() is None


@pytest.mark.parametrize("broken", ["size", "folder", "content"])
async def test_a_recording_that_cannot_be_kept_is_one_warning(tmp_path, monkeypatch, caplog, broken):
    folder = tmp_path / "recordings"
    if broken == "size":
        monkeypatch.setattr(episode_recording, "FILE_BYTES", 1000)
    elif broken == "folder":
        folder.write_text("no folder")
    text = "x" * 2000 if broken == "size" else "{}"
    bad = Exchange("/seed_session", {"a": object()}) if broken == "content" else exchange(text)
    with caplog.at_level(logging.WARNING):
        for rollout in range(3):
            await Recordings(folder).keep(attempt(rollout=rollout), [bad])
    assert len(caplog.records) == 1 and "Recordings are missing" in caplog.text
    assert recordings(folder) == []


async def test_without_a_folder_no_exchange_is_kept(build, environment, tmp_path):
    loop, _ = build(environment, [FINISH])
    seen = []
    loop.recordings.keep = lambda record, exchanges, secrets: seen.append(exchanges) or asyncio.sleep(0)
    await loop.run({}, **ROW)
    assert seen == [None] and list(tmp_path.glob("*.json")) == []


# --- The program ---


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "no JSON"),
        ("[]", "a JSON object with `exchanges`"),
        ('{"exchanges": [1]}', r"exchanges\[0\]: no JSON object"),
        ('{"exchanges": [{"event": "stop_server"}]}', "stop_server needs a real server"),
        ('{"exchanges": [{"session": "a", "path": "/x"}]}', "`request` is missing"),
        ('{"exchanges": [{"session": "a", "path": "/x", "request": {}}]}', "neither `status` nor one of"),
        (
            '{"exchanges": [{"session": "a", "path": "/x", "request": {}, "status": 200}]}',
            "one of `response` and `text`",
        ),
        (
            json.dumps({"exchanges": [{"session": s, "path": "/x", "request": {}, "given_up": True} for s in "ab"]}),
            "exchanges of 2 sessions",
        ),
    ],
)
def test_a_file_that_is_no_recording_is_refused(tmp_path, capsys, content, said):
    path = tmp_path / "recording.json"
    path.write_text(content)
    with pytest.raises(ReplayError, match=said) as error:
        Recording.read(path)
    assert str(error.value).startswith(f"{path}: ")
    with pytest.raises(SystemExit) as ended:
        smoke_environment.main(["--replay", str(path)])
    assert ended.value.code == 2 and str(path) in capsys.readouterr().err


def test_wrong_usage_and_a_taken_port_have_their_exit_codes(tmp_path, capsys):
    path = tmp_path / "recording.json"
    path.write_text('{"exchanges": []}')
    for arguments in (["--replay", str(tmp_path / "none.json")], [f"--replay={path}", "--port", "70000"]):
        with pytest.raises(SystemExit) as ended:
            smoke_environment.main(arguments)
        assert ended.value.code == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert smoke_environment.main([f"--replay={path}", "--port", str(taken.getsockname()[1])]) == 1
    assert "choose a --port" in capsys.readouterr().err


async def test_the_program_says_where_it_serves_what(build, environment, tmp_path, capsys):
    path, _ = await record(build, tmp_path, [FINISH], environment)
    capsys.readouterr()
    serving = asyncio.create_task(episode_replay.serve(Recording.read(path), "127.0.0.1", 0))
    printed = ""
    while "NEMO_GYM_URL=" not in printed:
        await asyncio.sleep(0)
        printed += capsys.readouterr().out
    url = printed.partition("NEMO_GYM_URL=")[2].partition(";")[0]
    assert f"replaying {path.stem} (5 requests) at {url}\n" in printed
    seed = json.loads(path.read_text())["exchanges"][0]["request"]
    async with aiohttp.ClientSession() as http, http.post(f"{url}/seed_session", json=seed) as response:
        assert response.status == 200
    serving.cancel()
    await asyncio.wait({serving})
