"""One request to the judge's OpenAI-compatible endpoint, and what its answer means for the next one.

The library's own retries are off: the total deadline, the waits that a server asks for and the slots are judge.py's.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from failure_symptoms import FailureKind
from rollout_failures import seconds_to_wait

if TYPE_CHECKING:
    from recipe_settings import RecipeSettings

MAX_REPLY_TOKENS = 2048
"""Length limit of a reply, thoughts included.

Without one, a judge that repeats itself writes until the timeout: structured output of vLLM 0.27.1 lets a weak model
put line breaks behind the first brace without end.
"""
_SHOWN_CHARS = 500
"""Characters of an endpoint's error that a reason repeats."""
_RETRIED = frozenset({408, 409, 425, 429})
"""Statuses below 500 that a later attempt can change: timeout, lock held by another request, too early, too many."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "verdict": {"type": "string", "enum": ["SUCCESS", "NOT SUCCESS"]}},
    "required": ["reason", "verdict"],
    "additionalProperties": False,
}
"""What structured output holds the reply to; the reason comes first, as the properties are written in order."""


class OutputFormat(StrEnum):
    """What holds the reply to the schema, in the order of preference."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    NONE = "none"  # the prompt alone


_RESPONSE_FORMATS: Mapping[OutputFormat, dict[str, Any] | None] = {
    OutputFormat.JSON_SCHEMA: {
        "type": "json_schema",
        "json_schema": {"name": "verdict", "strict": True, "schema": SCHEMA},
    },
    OutputFormat.JSON_OBJECT: {"type": "json_object"},
    OutputFormat.NONE: None,
}
_FORMAT_REFUSED = re.compile(r"response_?\s?format|json_?\s?schema|json_object|guided|structured", re.IGNORECASE)


@dataclass(frozen=True)
class Reply:
    """What one request brought: a choice, or why there is none."""

    choice: Mapping[str, Any] | None
    """The first choice of the chat completion; None when there is none."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    kind: FailureKind | None = None
    """Set exactly when there is no choice."""
    problem: str = ""
    """The endpoint's own words where it has any, without the key."""
    retry: bool = False
    """Whether the same request may go well later."""
    retry_after_s: float | None = None
    """The wait that the endpoint asks for."""
    other_format: bool = False
    """The endpoint refused the output format, and the next request of this client uses another one."""


class JudgeClient:
    """Requests to the one endpoint and model of the settings; used in one event loop."""

    def __init__(self, settings: RecipeSettings) -> None:
        self._settings = settings
        self._openai: Any = None
        self._client: Any = None
        self.output_format = OutputFormat.JSON_SCHEMA
        """What the endpoint has not refused so far."""

    async def aclose(self) -> None:
        """Close the connections; a later request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def ask(self, messages: Sequence[dict[str, str]], temperature: float, timeout_s: float) -> Reply:
        """Return what one request brings within `timeout_s`; raises nothing but a cancellation."""
        if self._openai is None:
            # Takes seconds on a cold disk, and the loop has episodes to run.
            self._openai = await asyncio.to_thread(importlib.import_module, "openai")
        openai = self._openai
        used = self.output_format
        response_format = _RESPONSE_FORMATS[used]
        try:
            # The library's timeout is one for each read: an endpoint that drips would never reach it.
            async with asyncio.timeout(timeout_s):
                raw = await self._opened().chat.completions.with_raw_response.create(
                    model=self._settings.judge_model,
                    messages=list(messages),
                    temperature=temperature,
                    max_completion_tokens=MAX_REPLY_TOKENS,
                    **({} if response_format is None else {"response_format": response_format}),
                )
                return self._read(raw.http_response.text)
        except (TimeoutError, openai.APITimeoutError):
            return self._failed(f"no answer within {timeout_s:.1f} s", retry=True)
        except openai.APIStatusError as e:
            return self._refused(e, used)
        except openai.APIConnectionError as e:
            cause = f": {e.__cause__}" if e.__cause__ and str(e.__cause__) else ""
            return self._failed(f"{type(e.__cause__ or e).__name__}{cause}", retry=True)
        except openai.OpenAIError as e:
            return self._failed(f"{type(e).__name__}: {e}", kind=FailureKind.JUDGE_REJECTED)

    def _opened(self) -> Any:
        if self._client is None:
            # The library insists on a key; an endpoint that asks for none does not look at it.
            key = self._settings.judge_api_key or "none"
            omitted = self._openai.Omit()
            self._client = self._openai.AsyncOpenAI(
                base_url=self._settings.judge_url,
                api_key=key,
                max_retries=0,
                timeout=self._settings.judge_timeout_s,
                # Unset, these would come from the environment's OPENAI_ORG_ID and OPENAI_PROJECT_ID.
                default_headers={"OpenAI-Organization": omitted, "OpenAI-Project": omitted},
            )
        return self._client

    def _failed(
        self, problem: str, *, kind: FailureKind = FailureKind.JUDGE_UNREACHABLE, retry: bool = False, **more: Any
    ) -> Reply:
        return Reply(None, kind=kind, problem=self._shown(problem), retry=retry, **more)

    def _shown(self, text: str) -> str:
        """Return the text on one line, cut, without the key, which some endpoints repeat in their refusal."""
        key = self._settings.judge_api_key
        line = " ".join((text.replace(key, "(key not shown)") if key else text).split())
        return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]} [...]"

    def _read(self, body: str) -> Reply:
        """Return the reply that the body of a 200 answer holds."""
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            return self._failed(f"no JSON: {body}", kind=FailureKind.JUDGE_UNPARSEABLE)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return self._failed(f"no chat completion: {body}", kind=FailureKind.JUDGE_UNPARSEABLE)
        usage = answer.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        return Reply(choices[0], _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")))

    def _refused(self, error: Any, used: OutputFormat) -> Reply:
        """Return what an error status means."""
        status, text = error.status_code, error.response.text
        problem = f"HTTP {status} {_error_text(text)}"
        if status == 400 and used is not OutputFormat.NONE and _names_the_format(text):
            formats = list(OutputFormat)
            # Another request may have been refused, and the format changed, while this one was under way.
            if self.output_format is used:
                self.output_format = formats[formats.index(used) + 1]
            return self._failed(problem, kind=FailureKind.JUDGE_REJECTED, other_format=True)
        if status in _RETRIED or status >= 500:
            wait_s = seconds_to_wait(error.response.headers.get("Retry-After"))
            return self._failed(problem, retry=True, retry_after_s=wait_s)
        return self._failed(problem, kind=FailureKind.JUDGE_REJECTED)


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _error(text: str) -> Any:
    """Return the `error` of an answer's body: an object, in vLLM's 401 a string; None when there is none."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return body.get("error") if isinstance(body, dict) else None


def _error_text(text: str) -> str:
    error = _error(text)
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else text


def _names_the_format(text: str) -> bool:
    """Return whether a refusal is about the output format: by the parameter that it names, else by its words.

    vLLM repeats parts of the request in the words of a refusal, so the words alone could be a page's.
    """
    error = _error(text)
    parameter = error.get("param") if isinstance(error, dict) else None
    return bool(_FORMAT_REFUSED.search(parameter if isinstance(parameter, str) and parameter else _error_text(text)))
