"""Serves the practice site and writes its tasks as NeMo Gym rows.

python -m cpu.practice_site serve --port 8077
python -m cpu.practice_site rows --train train.jsonl --validation validation.jsonl --base-url http://127.0.0.1:8077
"""

import argparse
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cpu.practice_pages import html_text, page_at
from cpu.practice_tasks import Task, TaskKind, make_tasks, write_rows

__all__ = ["PracticeServer", "Task", "TaskKind", "main", "make_tasks", "write_rows"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        page = page_at(f"http://{self.headers.get('Host', 'localhost')}{self.path}")
        body = html_text(page).encode()
        self.send_response(page.status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet: a line for every page would hide what else the log holds."""


class PracticeServer(ThreadingHTTPServer):
    """The practice site on a port of this machine; port 0 takes a free one."""

    daemon_threads = True
    # socketserver's backlog of 5 makes connections of many browsers at once wait for a retry of a second.
    request_queue_size = 128

    def __init__(self, host: str, port: int):
        super().__init__((host, port), _Handler)

    @property
    def base_url(self) -> str:
        """Return the address of the site, without a slash at the end."""
        return f"http://{self.server_address[0]}:{self.server_address[1]}"


def _serve(host: str, port: int) -> int:
    try:
        server = PracticeServer(host, port)
    except OSError as error:
        reason = f"can't listen on {host}:{port}: {error.strerror}"
        print(f"practice site: {reason}. Choose another --port.", file=sys.stderr)
        return 1
    print(f"practice site: {server.base_url}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Return the exit status of the command line."""
    parser = argparse.ArgumentParser(prog="python -m cpu.practice_site", description="The offline practice site.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve the site until interrupted")
    serve.add_argument("--host", default="127.0.0.1")
    serve.add_argument("--port", type=int, default=8077)
    rows = commands.add_parser("rows", help="write the tasks as NeMo Gym rows")
    rows.add_argument("--train", type=Path, required=True)
    rows.add_argument("--validation", type=Path, required=True)
    rows.add_argument("--base-url", required=True)
    rows.add_argument("--train-count", type=int, default=90)
    rows.add_argument("--validation-count", type=int, default=50)
    options = parser.parse_args(argv)
    if options.command == "serve":
        return _serve(options.host, options.port)
    counts = write_rows(
        options.train, options.validation, options.base_url, options.train_count, options.validation_count
    )
    print(f"practice site: wrote {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
