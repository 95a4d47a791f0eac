"""No secret gets into a log, and what is none stays readable."""

import json

import pytest

from observations import read_elements
from recipe_settings import RecipeSettings
from secret_masking import MASK, Masker, is_password

LOGIN = "URL: https://a.example/login\nTITLE: Log in\nELEMENTS:\n  [0] input: \n  [1] input: \n  [2] button: Go"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("see https://bob:hunter2@a.example/x", f"see https://{MASK}@a.example/x"),
        ("https://ghtoken@a.example/x", f"https://{MASK}@a.example/x"),
        ("https://a.example/?token=abc&page=2", f"https://a.example/?token={MASK}&page=2"),
        ("https://a.example/?api_key=abc#x", f"https://a.example/?api_key={MASK}#x"),
        ("/p?a=1&accessToken=abc", f"/p?a=1&accessToken={MASK}"),
        ("/p?a=1&amp;Password=a%20b", f"/p?a=1&amp;Password={MASK}"),
        ("/p?user[password]=abc", f"/p?user[password]={MASK}"),
        ("/p?PHPSESSID=abc&sig=d", f"/p?PHPSESSID={MASK}&sig={MASK}"),
        ("Authorization: Bearer abc.def", f"Authorization: {MASK}"),
        ('{"authorization": "Basic dTpw"}', f'{{"authorization": "{MASK}"}}'),
        ("sent bearer abcdefgh12", f"sent bearer {MASK}"),
        ("Incorrect API key provided: sk-abcdefghijklmnop1234.", f"Incorrect API key provided: {MASK}."),
        ("ghp_abcdefghijklmnopqrst1234 hf_abcdefghijklmnopqrst", f"{MASK} {MASK}"),
        ("eyJhbGciOiJI.eyJzdWIi.c2ln", MASK),
        ('{"api_key": "abc", "n": 1}', f'{{"api_key": "{MASK}", "n": 1}}'),
        ("x-api-key: abc", f"x-api-key: {MASK}"),
        ("://a@", f"://{MASK}@"),
        ("AKIAABCDEFGHIJKLMNOP", MASK),
    ],
    ids=lambda value: value[:24],
)
def test_secrets_are_known_by_their_form(text, masked):
    assert Masker().mask(text) == masked
    assert Masker().mask(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "https://a.example/search?keyword=red&tokenizer=x",
        "mail bob@a.example about the key = 3 rule",
        "https://a.example/@bob/posts?q=a@b",
        "Forgot your password? Reset the token.",
        "The bearer of this ticket",
        "sk-learn and eyJ alone",
        "author: Bob, authorized dealers",
    ],
)
def test_what_is_no_secret_stays(text):
    assert Masker().mask(text) == text


@pytest.mark.parametrize(
    ("value", "text", "masked"),
    [
        ("hunter2", "type hunter2, hunter22 ?p=hunter2", f"type {MASK}, {MASK}2 ?p={MASK}"),
        ('p"w\\ü', json.dumps({"text": 'p"w\\ü'}), f'{{"text": "{MASK}"}}'),
        ('p"w\\ü', json.dumps({"text": 'p"w\\ü'}, ensure_ascii=False), f'{{"text": "{MASK}"}}'),
        ("a b&c", "/?x=a%20b%26c /?x=a+b%26c", f"/?x={MASK} /?x={MASK}"),
        ("abc", "abc abcd zabc", f"{MASK} abcd zabc"),
        ("", "nothing", "nothing"),
        ("   ", "a   b", "a   b"),
        ("a\ud800b", "x a\ud800b", f"x {MASK}"),
    ],
    ids=["plain", "json ascii", "json", "address", "short: whole words", "empty", "blank", "half a surrogate pair"],
)
def test_known_values_are_masked_in_every_form(value, text, masked):
    assert Masker((value,)).mask(text) == masked


def test_the_longer_of_two_values_is_masked_whole():
    assert Masker(("pass", "passport")).mask("my passport") == f"my {MASK}"


def test_values_of_secret_settings_are_known():
    settings = RecipeSettings(judge_url="http://j/v1", judge_model="m", judge_api_key="very-secret-key")
    assert Masker.of_settings(settings).mask("401: very-secret-key is wrong for m") == f"401: {MASK} is wrong for m"


@pytest.mark.parametrize(
    ("shown", "element", "expected"),
    [
        ("Username Password", 1, True),
        ("Username Password", 0, True),
        ("Forgot your PASSWORD?", 1, True),
        ("Benutzer Kennwort", 1, True),
        ("Enter the passcode", 1, True),
        ("Search our shop", 1, False),
        ("The compass is wide", 1, False),
        ("Password", 2, False),
        ("Password", 9, True),
    ],
    ids=["password", "its user name", "anywhere", "German", "passcode", "search", "compass", "a button", "unlisted"],
)
def test_what_is_typed_on_a_page_that_speaks_of_passwords_is_one(shown, element, expected):
    page = f"{LOGIN}\nTEXT:\n  {shown}"
    assert is_password(page, read_elements(page), element) is expected
