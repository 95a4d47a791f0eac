"""A proxy in front of a real environment server that fails a share of the seeds, as a program of its own.

python -m benchmarks.learning.broken_seeds SERVER_URL SITE SHARE SEED

Prints its address and serves until its standard input is closed. Seeds whose start address does not begin with SITE,
and all other calls, go through to the server and back as they are.
"""

import asyncio
import json
import sys
from typing import Self

import aiohttp
from aiohttp import web

from tests.fault_script import share_draw
from tests.practice_environment import LAUNCH_REFUSED

_PASSED_ON = ("Cookie", "Content-Type")


class BrokenSeeds:
    """Passes calls on, and counts the seeds of the site that it breaks."""

    def __init__(self, server_url: str, site: str, share: float, seed: int) -> None:
        self._server_url, self._site, self._share, self._seed = server_url, site, share, seed
        self._seeds = 0

    def _strikes(self, path: str, body: bytes) -> bool:
        if path != "/seed_session" or not json.loads(body).get("initial_url", "").startswith(self._site):
            return False
        self._seeds += 1
        return share_draw(self._seed, self._seeds) < self._share

    async def handle(self, request: web.Request) -> web.Response:
        """Return the server's answer, or the refusal."""
        body = await request.read()
        if self._strikes(request.path, body):
            return web.json_response(LAUNCH_REFUSED, status=500)
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        async with self._http.post(self._server_url + request.path, data=body, headers=headers) as answer:
            response = web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
            for cookie in answer.headers.getall("Set-Cookie", []):
                response.headers.add("Set-Cookie", cookie)
            return response

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/{path:.*}", self.handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        # Cookies are the client's; a slow answer is the client's to give up on.
        unlimited = aiohttp.ClientTimeout(total=None)
        self._http = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), timeout=unlimited)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()
        await self._http.close()


async def serve(proxy: BrokenSeeds) -> None:
    """Print the address and serve until standard input is closed."""
    async with proxy:
        print(proxy.url, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    url, site, share, seed = sys.argv[1:]
    asyncio.run(serve(BrokenSeeds(url, site, float(share), int(seed))))
