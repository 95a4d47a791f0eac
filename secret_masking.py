"""What no log may hold, and how it is taken out of texts: passwords, tokens, keys and the values of secret settings.

The server lists a field as `[i] input: ` followed by its `value` attribute and never tells its type (nemo-gym 0.7.0,
resources_servers/interactive_browser/browser/page.py). So what is typed into an `input` counts as a password wherever
the page speaks of one: that hides a user name too, and never lets a password through because its field has no label.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus

from recipe_settings import Secret

if TYPE_CHECKING:
    from observations import Element
    from recipe_settings import RecipeSettings

MASK = "[masked]"

_SHORT = 4
"""A value shorter than this is masked only where it is a whole word: `a` must not empty every text."""

_FORMLESS, _WORD = 5, 16
"""No secret is known by its form in a text shorter than the first, or in one word shorter than the second."""

_PASSWORD_WORDS = re.compile(
    r"passw|passphrase|passcode|\bpwd\b|kennwort|contrase|mot de passe|palavra-passe|\bsenha\b|wachtwoord|l[oö]senord"
    r"|has[lł]o|парол|密码|密碼|パスワード|비밀번호|security code|\bone.time code|\bcv[cv]2?\b",
    re.IGNORECASE,
)

_SECRET_NAMES = (
    r"(?:key|token|passw(?:or)?d|passphrase|pwd|pass|secret|auth|authorization|signature|sig|credentials?"
    r"|session_?id|sessid|jwt)"
)

_PATTERNS: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    # (texts of which one is there, in small letters, whenever the pattern can match; the pattern; what takes its place)
    # Looking for them first makes a page without secrets cost 0.1 ms and not 0.7 ms (3,300 characters).
    (("@",), re.compile(r"(://)[^\s/?#@\"'<>]+@"), rf"\1{MASK}@"),
    (
        ("=",),
        re.compile(rf"([?&;#](?:amp;)?[\w.%\[\]-]*{_SECRET_NAMES}(?:\]|%5D)?=)[^&;#\s\"'<>]+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (
        ("authorization",),
        re.compile(r"(authorization[\"']?\s*[:=]\s*[\"']?)(?:[a-z]+ +)?[^\s\"',;]+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (("bearer ",), re.compile(r"(\bbearer +)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{MASK}"),
    (
        ("sk-", "pk-", "rk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "xox", "akia")
        + ("aiza", "eyj"),
        re.compile(
            r"\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
            r"|\bhf_[A-Za-z0-9]{20,}|\bxox[abeprs]-[A-Za-z0-9-]{10,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{30,}"
            r"|\beyJ[\w-]{8,}\.eyJ[\w-]{4,}\.[\w-]*"
        ),
        MASK,
    ),
    (
        ("apikey", "api_key", "api-key", "access_token", "access-token", "client_secret", "client-secret"),
        re.compile(
            r"((?:api[_-]?key|access[_-]token|client[_-]secret)[\"']?\s*[:=]\s*[\"']?)(?!\[masked\])[^\s\"',;&#]+",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
)


@dataclass(frozen=True)
class Masker:
    """Takes secrets out of texts: those that show by their form, and the values that are given."""

    values: tuple[str, ...] = ()

    @classmethod
    def of_settings(cls, settings: RecipeSettings) -> Masker:
        """Return the masker that knows the values of all settings of kind Secret."""
        secret = (getattr(settings, f.name) for f in fields(settings) if f.metadata["kind"] is Secret)
        return cls(tuple(value for value in secret if value))

    def knowing(self, values: Iterable[str]) -> Masker:
        """Return a masker that knows these values besides."""
        return Masker((*self.values, *values))

    def mask(self, text: str) -> str:
        """Return the text with MASK in place of every secret; what is masked already stays as it is."""
        if self._known is not None:
            text = self._known.sub(MASK, text)
        if len(text) < _FORMLESS or (len(text) < _WORD and text.isalnum()):
            return text
        small = text.lower()
        for needed, pattern, replacement in _PATTERNS:
            for part in needed:
                if part in small:
                    text = pattern.sub(replacement, text)
                    break
        return text

    @cached_property
    def _known(self) -> re.Pattern[str] | None:
        """The values in every form that a text may hold them in: plain, in a JSON text, in an address."""
        forms: set[str] = set()
        for value in filter(str.strip, self.values):
            forms |= {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
            plain = value.encode("utf-8", "replace").decode()
            forms |= {quote(plain, safe=""), quote_plus(plain)}
        # The longest first: a value may hold another one.
        parts = [
            re.escape(form) if len(form) >= _SHORT else rf"(?<!\w){re.escape(form)}(?!\w)"
            for form in sorted(forms, key=lambda form: (-len(form), form))
        ]
        return re.compile("|".join(parts)) if parts else None


def is_password(page: str, elements: Sequence[Element], element_id: int | None) -> bool:
    """Return whether what is typed into this element of the page has to be taken for a password."""
    kind = next((element.kind for element in elements if element.id == element_id), "input")
    return kind == "input" and _PASSWORD_WORDS.search(page) is not None
