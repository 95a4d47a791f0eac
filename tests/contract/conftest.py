"""The real environment server and misbehaving pages, for the contract tests. Nothing here is faked.

A machine without the server or a browser fails these tests, with the command that sets them up: skipping would hide
that nothing was checked.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from cpu.gym_server import GymServer
from cpu.processes import free_port
from environment_session import BrowserSession, EnvironmentGate
from rollout_failures import DEFAULT_BLOCKED_PATTERNS
from tests.contract.episodes import settings_for

HERE = Path(__file__).parent

PAGES = {
    "/": "<title>start</title><a href=/next>next page</a> <a href=/stuck>stuck page</a>"
    "<form action=/next><input name=q><button>send</button></form><p>a plain start page</p>",
    "/login": "<title>log in</title><form action=/next><label>User <input name=u></label> "
    "<label>Password <input type=password name=p></label><button>enter</button></form>",
    "/next": "<title>next</title><p>this is the next page</p><a href=/>back</a>",
    # Goes to an address that never answers: an observe waits for that navigation without any limit of its own.
    "/stuck": "<title>stuck</title><p>stuck</p><script>setTimeout(() => location = '/never', 50)</script>",
    "/leaving": "<title>leaving</title><p>leaving</p><script>setTimeout(() => location = '/held', 50)</script>",
    "/held": "<title>held</title><p>held no more</p>",
    # Says which marker the browser kept from an earlier visit, then leaves one.
    "/marker": "<title>marker</title><p id=p></p><script>p.innerText = 'kept ' + localStorage.getItem('m') + ' ' + "
    "document.cookie; localStorage.setItem('m', 'yes'); document.cookie = 'c=yes'</script>",
    "/dead-link": "<title>dead link</title><a href=http://no-such-host.invalid/>nowhere</a>",
    "/check": "<title>Just a moment...</title><h1>shop</h1><p>Verify you are human by completing the action below.",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.contract)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GymServer]:
    """Return the running server. A test that ends or restarts it leaves it running again."""
    with GymServer(free_port(), tmp_path_factory.mktemp("gym") / "gym.log") as running:
        yield running


class Site:
    """A small site. /never takes a request and never answers; /held answers once the test releases it."""

    def __init__(self) -> None:
        self.asked_for_held = threading.Event()
        self.release_held = threading.Event()
        self._over = threading.Event()
        site = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                if path == "/never":
                    site._over.wait()
                    return
                if path == "/held":
                    site.asked_for_held.set()
                    site.release_held.wait()
                body = PAGES.get(path, "<title>none</title>").encode()
                self.send_response(200 if path in PAGES else 404)
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._httpd.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._httpd.server_port}"

    def close(self) -> None:
        self._over.set()
        self.release_held.set()
        self._httpd.shutdown()
        self._thread.join()
        self._httpd.server_close()


@pytest.fixture
def held_site() -> Iterator[Site]:
    """Return a site of the test's own, whose /held no other test has released."""
    opened = Site()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Return the address of a small site."""
    opened = Site()
    yield opened.url
    opened.close()


@pytest.fixture
async def session(server: GymServer, nothing_left: Callable[[], Awaitable[None]]) -> AsyncIterator[BrowserSession]:
    """Return an open session. However its test ends, no browser is left once it is closed."""
    settings = settings_for(server, act_timeout_s=45.0)
    async with BrowserSession(settings, EnvironmentGate(settings), DEFAULT_BLOCKED_PATTERNS) as opened:
        yield opened
    await nothing_left()


@pytest.fixture
def browsers_gone(server: GymServer) -> Callable[[], Awaitable[None]]:
    """Return a coroutine that ends once no browser of the server runs, and fails after 10 s."""
    return lambda: _wait_until(lambda: not server.browser_pids())


@pytest.fixture
def nothing_left(server: GymServer) -> Callable[[], Awaitable[None]]:
    """Return a coroutine that ends once the server is alone, without browsers and drivers, and fails after 10 s."""
    return lambda: _wait_until(lambda: server.pids() == [server.pid])


async def _wait_until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.05)
