"""A judge that goes by a rule, behind the OpenAI-compatible API that real ones have; for the CPU profile and tests.

    python -m cpu.practice_judge --port 0 [--faults FILE]

It says SUCCESS exactly when the final answer is the reference answer, case and spaces aside; without a reference it
says UNKNOWN, which is no usable verdict. It reads nothing else, so no page can talk it into anything. It prints its
address, and ends on Ctrl-C, on SIGTERM, or with its standard input where that is a pipe.

FILE holds a JSON list of answers, one for each request in turn, before the rule answers: "rule", a fault by its name
(see Fault), or an object {"do": fault, ...} with more of it, such as {"do": "status", "status": 503}.

Source of the wire format: vLLM 0.27.1, vllm/entrypoints/openai/{chat_completion,engine}/protocol.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from judge_prompt import estimate_tokens, read_sections

MODEL = "practice-judge"


class Fault(StrEnum):
    """What is done to a request."""

    RULE = "rule"  # answers by the rule
    SAY = "say"  # answers with `text` as the reply
    STATUS = "status"  # answers with `status`, `text` as the error's message, `param` and `retry_after`
    DROP = "drop"  # closes the connection
    CUT = "cut"  # answers 200 with half of the JSON
    HANG = "hang"  # never answers
    EMPTY = "empty"  # a completion without text
    NO_CHOICE = "no_choice"  # a completion without a choice
    IN_REASONING = "in_reasoning"  # the rule's verdict, in the reasoning field alone
    FILTERED = "filtered"  # a content filter stopped it
    REFUSED = "refused"  # the refusal field
    TRUNCATED = "truncated"  # cut by the length limit
    NO_FORMAT = "no_format"  # 400 that names response_format, while the request has one of the `formats`; else the rule
    BAD_KEY = "bad_key"  # 401 that repeats the key


@dataclass(frozen=True)
class Answer:
    """One line of a script."""

    do: Fault = Fault.RULE
    text: str = ""
    status: int = 500
    param: str | None = None
    retry_after: str | None = None
    formats: tuple[str, ...] = ("json_schema", "json_object")


class ScriptError(ValueError):
    """A script that can't be played; names file, entry and fix."""


def read_script(path: Path) -> list[Answer]:
    """Return the answers that a file holds. Raises ScriptError, OSError."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ScriptError(f"{path}: is no JSON ({e}). Fix: a JSON list of answers.") from None
    if not isinstance(entries, list):
        raise ScriptError(f"{path}: is no list. Fix: a JSON list of answers.")
    answers = []
    for number, entry in enumerate(entries):
        try:
            given = {"do": entry} if isinstance(entry, str) else dict(entry)
            answers.append(Answer(**{**given, "do": Fault(given["do"])}))
        except (TypeError, ValueError, KeyError):
            known = f"`do` one of {', '.join(Fault)}, and of {', '.join(f.name for f in fields(Answer))}"
            raise ScriptError(f"{path}: [{number}]: {json.dumps(entry)} is no answer. Fix: {known}.") from None
    return answers


def rule_verdict(messages: Sequence[dict[str, str]]) -> str:
    """Return the reply by the rule. Raises ValueError on a prompt that judge_prompt.py did not make."""
    sections = read_sections(messages)
    if "REFERENCE ANSWER" not in sections:
        return json.dumps({"reason": "There is no reference answer to compare with.", "verdict": "UNKNOWN"})
    answer, reference = (" ".join(sections[name].split()).casefold() for name in ("FINAL ANSWER", "REFERENCE ANSWER"))
    verdict = "SUCCESS" if answer == reference else "NOT SUCCESS"
    relation = "is" if answer == reference else "is not"
    return json.dumps({"reason": f"The final answer {relation} the reference answer.", "verdict": verdict})


class PracticeJudge:
    """The server; `async with` starts and ends it. Answers by the script, one entry a request, then by the rule."""

    def __init__(self, script: Sequence[Answer] = (), host: str = "127.0.0.1", port: int = 0) -> None:
        self.script = list(script)
        self.url = ""
        """Base address of the API, once the server runs."""
        self._host, self._port = host, port
        self._over = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._completions)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self.url = f"http://{self._host}:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, await request.json())

    async def answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Return the answer to one request: the script's next, else the rule's."""
        return await self.play(self.script.pop(0) if self.script else Answer(), request, body)

    async def play(self, answer: Answer, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """Return what a line of the script does to a request."""
        used = (body.get("response_format") or {}).get("type")
        match answer.do:
            case Fault.STATUS:
                headers = {} if answer.retry_after is None else {"Retry-After": answer.retry_after}
                return _error(answer.status, answer.text, answer.param, headers)
            case Fault.DROP:
                request.transport.abort()
                return web.Response()
            case Fault.HANG:
                await self._over.wait()
                return web.Response(status=503)
            case Fault.BAD_KEY:
                return _error(401, f"Incorrect API key provided: {request.headers.get('Authorization')}.")
            case Fault.NO_FORMAT if used in answer.formats:
                return _error(400, f"response_format of type {used} is not supported", "response_format")
        if answer.do is Fault.SAY:
            return _completion(body, {"content": answer.text})
        try:
            verdict = rule_verdict(body["messages"])
        except (KeyError, TypeError, ValueError) as e:
            return _error(400, f"the practice judge can't read this: {e}")
        return self._odd(answer.do, body, verdict)

    def _odd(self, do: Fault, body: dict[str, Any], verdict: str) -> web.Response:
        """Return a completion that brings the rule's verdict, or fails to."""
        whole = _completion(body, {"content": verdict})
        match do:
            case Fault.CUT:
                return web.Response(text=whole.text[: len(whole.text) // 2], content_type="application/json")
            case Fault.EMPTY:
                return _completion(body, {"content": ""})
            case Fault.NO_CHOICE:
                return web.json_response({**json.loads(whole.text), "choices": []})
            case Fault.IN_REASONING:
                return _completion(body, {"content": None, "reasoning": verdict, "reasoning_content": verdict})
            case Fault.FILTERED:
                return _completion(body, {"content": ""}, "content_filter")
            case Fault.REFUSED:
                return _completion(body, {"content": None, "refusal": "I can't help with that."})
            case Fault.TRUNCATED:
                return _completion(body, {"content": verdict[: len(verdict) // 2]}, "length")
        return whole


def _error(status: int, message: str, param: str | None = None, headers: dict[str, str] | None = None) -> web.Response:
    error = {"message": message, "type": "BadRequestError" if status < 500 else "InternalServerError"}
    return web.json_response({"error": {**error, "param": param, "code": status}}, status=status, headers=headers)


def _completion(body: dict[str, Any], message: dict[str, Any], finish_reason: str = "stop") -> web.Response:
    prompt_tokens = sum(estimate_tokens(str(m.get("content"))) for m in body.get("messages", []))
    completion_tokens = estimate_tokens(message.get("content") or "")
    whole = {"role": "assistant", "content": None, "refusal": None, "reasoning": None, **message}
    choice = {"index": 0, "message": whole, "logprobs": None, "finish_reason": finish_reason, "stop_reason": None}
    usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    return web.json_response(
        {
            "id": "chatcmpl-practice",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model", MODEL),
            "choices": [choice],
            "usage": usage,
        }
    )


async def _serve(script: Sequence[Answer], host: str, port: int) -> None:
    """Serve until Ctrl-C or SIGTERM, or until the standard input ends, if it is a pipe."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)

    def wait_for_the_end() -> None:
        while os.read(0, 4096):
            continue
        loop.call_soon_threadsafe(over.set)

    async with PracticeJudge(script, host, port) as judge:
        print(f"practice judge: {judge.url} (model {MODEL})", flush=True)
        mode = os.fstat(0).st_mode
        # Not a terminal: one that is read by a job in its background stops that job.
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            threading.Thread(target=wait_for_the_end, daemon=True).start()
        await over.wait()


def main(argv: list[str] | None = None) -> int:
    """Serve until told to end. Return 0, or 1 when the port can't be had; wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m cpu.practice_judge", description="A judge that goes by a rule.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="TCP port; 0 takes a free one")
    parser.add_argument("--faults", type=Path, metavar="FILE", help="JSON list of answers to give before the rule's")
    options = parser.parse_args(argv)
    try:
        script = read_script(options.faults) if options.faults else []
    except ScriptError as e:
        parser.error(str(e))
    except OSError as e:
        parser.error(f"--faults {options.faults}: {e.strerror}")
    try:
        asyncio.run(_serve(script, options.host, options.port))
    except OSError as e:
        reason = f"can't listen on {options.host}:{options.port}: {e.strerror}"
        print(f"practice judge: {reason}. Choose another --port.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
