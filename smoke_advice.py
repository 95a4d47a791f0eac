"""What to do about a failure that the smoke check has seen, by its kind."""

from rollout_failures import FailureKind

_HUNG = (
    "The address takes connections but does not answer. Look for a hung server process or browser; if the server is "
    "only slow, free its CPU or raise --timeout. A seed that was given up on keeps a browser open until the server "
    "is restarted."
)
_WRONG_SERVER = (
    "This does not speak the contract of NeMo Gym's interactive_browser server. Check that the address is the "
    "resources server's own, not a head server's or a proxy's, and that its release is the one in REQUIRED_VERL.txt."
)
_LAUNCH = (
    "In the server's own Python environment run `playwright install --with-deps chromium`, or point "
    "PLAYWRIGHT_BROWSERS_PATH at an installed one, and restart the server. In a container, look also at the memory "
    "limit, the size of /dev/shm, and whether Chromium is started as root without --no-sandbox."
)
ADVICE = {
    FailureKind.ENVIRONMENT_UNREACHABLE: (
        "Nothing takes connections at this address. Start the server, check host and port, and from another machine "
        "check that the server does not listen on 127.0.0.1 alone and that no firewall stands between."
    ),
    FailureKind.BROWSER_LAUNCH_FAILED: f"The server runs, but its Chromium can't start. {_LAUNCH}",
    FailureKind.SERVER_ERROR: (
        "The server runs, but this call failed inside it: its log at this moment says where. "
        f"If the answer speaks of Playwright or Chromium: {_LAUNCH}"
    ),
    FailureKind.START_PAGE_FAILED: (
        "The browser works but could not open the start page. From the server's machine, fetch that address with curl."
    ),
    FailureKind.PAGE_BLOCKED: (
        "The site shows a human check instead of its page: it takes the server's machine for a bot. Let the browser go "
        "out by another address, or leave this site's tasks out of the dataset."
    ),
    FailureKind.SEED_TIMEOUT: _HUNG,
    FailureKind.ACT_TIMEOUT: _HUNG,
    FailureKind.VERIFY_TIMEOUT: _HUNG,
    FailureKind.REQUEST_REJECTED: _WRONG_SERVER,
    FailureKind.MALFORMED_ANSWER: _WRONG_SERVER,
    FailureKind.ENVIRONMENT_DISCONNECTED: (
        "The server dropped the connection: it may be restarting or out of memory. Look at its log and try again."
    ),
    FailureKind.SESSION_LOST: (
        "The server does not know the session that it has just opened. It must run as one process (num_workers: 1), "
        "and a load balancer before it must keep each cookie on one server."
    ),
}
_AT_ONCE = (
    "The server does not keep up with this many sessions. Lower --concurrency (NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS) or "
    "--seeds-at-once (NEMO_GYM_BROWSER_MAX_CONCURRENT_SEEDS) until this kind is gone, or add servers, CPU or memory."
)
_LEFT_OPEN = "A seed that was given up on keeps a browser open until the server is restarted."
LOAD_ADVICE = {
    FailureKind.ENVIRONMENT_UNREACHABLE: (
        "Nothing takes connections at this address, or no longer. If other episodes were healthy, the server died "
        "under the load: look at the end of its log and at its memory. If none was, start it and check host and port."
    ),
    FailureKind.SERVER_ERROR: (
        "This call failed inside the server: its log at this moment says where. If some episodes were healthy, look "
        "there for what ran out: memory, processes, open files or /dev/shm, and hold fewer sessions or add servers. "
        f"If none was, and the answer speaks of Playwright or Chromium: {_LAUNCH}"
    ),
    FailureKind.SEED_TIMEOUT: f"{_AT_ONCE} {_LEFT_OPEN}",
    FailureKind.ACT_TIMEOUT: _AT_ONCE,
    FailureKind.VERIFY_TIMEOUT: _AT_ONCE,
    FailureKind.PROVIDER_FULL: (
        "The browser provider refuses more sessions. Lower NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS below its limit."
    ),
    FailureKind.BROWSER_LAUNCH_FAILED: (
        "Chromium can't start. If some episodes were healthy, look at the memory, processes and /dev/shm that the "
        f"server may use, and hold fewer sessions or add servers. If none was: {_LAUNCH}"
    ),
    FailureKind.BROWSER_DIED: (
        "A browser ended in the middle of its episode. The usual cause under load is memory: a session takes 160 to "
        "500 MiB. Look at the kernel's log for its out-of-memory killer, and lower NEMO_GYM_BROWSER_MAX_OPEN_SESSIONS."
    ),
    FailureKind.SESSION_LOST: (
        "The server does not know a session that it opened: it was restarted in the middle, it runs as more than one "
        "process (num_workers must be 1), or a load balancer before it does not keep each cookie on one server."
    ),
    FailureKind.EPISODE_DEADLINE: f"The episode was not over long after --duration. {_AT_ONCE}",
}
"""What is said instead where many sessions were open at once."""

DEFAULT_ADVICE = "Look at the server's log at this moment; the answer above is all that it told the client."


def advice_for(kind: FailureKind) -> str:
    """Return what to do about a failure of a single episode."""
    return ADVICE.get(kind, DEFAULT_ADVICE)


def advice_under_load(kind: FailureKind) -> str:
    """Return what to do about a failure while many sessions are open at once."""
    return LOAD_ADVICE.get(kind) or advice_for(kind)
