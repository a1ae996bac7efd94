"""Chromium without a window, driven by its DevTools protocol over a pipe."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
FLAGS += [
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
]


def program() -> str | None:
    """Where a Chromium lies, if this machine has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Navigated(RuntimeError):
    """The page was left while it was asked."""


class Chromium:
    """One page of a Chromium with a profile of its own; `close` ends it and leaves nothing.

    `requests` are the addresses that the page has asked for, `errors` what its console has said
    and the exceptions that nobody caught.
    """

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_in, self.to = os.pipe()
        self.of, theirs_out = os.pipe()
        given = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]

        def place() -> None:  # Chromium reads 3 and writes 4
            os.dup2(given[0], 3)
            os.dup2(given[1], 4)

        self.process = subprocess.Popen(
            [program(), *FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            env=os.environ | {"HOME": self.folder.name, "XDG_CONFIG_HOME": self.folder.name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs_in, theirs_out, *given):
            os.close(end)
        self.buffer = b""
        self.number = 0
        self.session = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        (page,) = [
            target
            for target in self.call("Target.getTargets")["targetInfos"]
            if target["type"] == "page"
        ]
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        os.close(self.to)
        os.close(self.of)
        self.folder.cleanup()

    def call(self, method: str, **parameters: object) -> dict:
        """Call a method of the protocol; return its result, or raise what it says went wrong."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        answer = self.wait_for(lambda told: told.get("id") == message["id"])
        if "error" in answer:
            said = answer["error"]["message"]
            wrong = Navigated if "navigated" in said else RuntimeError
            raise wrong(f"{method}: {said}")
        return answer["result"]

    def wait_for(self, wanted: Callable[[dict], bool], seconds: float = 60) -> dict:
        """Read what the browser tells until it is what is wanted, and note it all."""
        end = time.monotonic() + seconds
        while True:
            while b"\0" in self.buffer:
                line, _, self.buffer = self.buffer.partition(b"\0")
                told = json.loads(line)
                self.note(told)
                if wanted(told):
                    return told
            ready, _, _ = select.select([self.of], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium has not answered")
            self.buffer += os.read(self.of, 1 << 16)

    def note(self, told: dict) -> None:
        parameters = told.get("params", {})
        match told.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(parameters["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning"):
                self.errors.append(json.dumps(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(parameters["entry"]))

    # What a reader does

    def open(self, address: str) -> None:
        """Go to an address and wait until it is loaded."""
        if wrong := self.call("Page.navigate", url=address).get("errorText"):
            raise RuntimeError(f"{address}: {wrong}")
        self.wait_for(lambda told: told.get("method") == "Page.loadEventFired")

    def run(self, script: str) -> object:
        """The value of an expression in the page, or of its promise."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def until(self, script: str, seconds: float = 10) -> object:
        """Wait until an expression in the page is true; return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(Navigated):
                if value := self.run(script):
                    return value
            time.sleep(0.05)
        raise TimeoutError(script)

    def look(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the screen, and whether the reader prefers light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
