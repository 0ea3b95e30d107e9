"""Tests of the wheel as its users have it: installed into an environment that has vLLM, whose Python runs this file, and called without
a word about where anything is. `cargo xtask test` makes that environment and runs this."""

import base64
import io
import json
import os
import re
import signal
import subprocess
import sysconfig
import tempfile
import threading
import unittest
import urllib.error
import urllib.request
from pathlib import Path

CHIASM = Path(sysconfig.get_path("scripts")) / "chiasm"
IMAGES = Path(__file__).resolve().parents[2] / "crates/chiasm/assets/images"
# Engines start one after the other on a small machine.
STARTUP = 240
# What a CPU engine with a tiny model needs.
ENGINE_FLAGS = ["--enforce-eager", "--block-size", "32", "--max-model-len", "4096", "--dtype", "float32"]
# Nothing of this environment is on the PATH.
ENVIRONMENT = {**os.environ, "PATH": "/usr/bin:/bin"}
MODEL = Path(os.environ["CHIASM_TEST_MODELS"]) / "qwen2vl"


def chiasm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [CHIASM, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


class TestWithoutEngines(unittest.TestCase):
    def test_the_demo_runs(self) -> None:
        demo = chiasm("demo", "--json")
        self.assertEqual(demo.returncode, 0, demo.stderr)
        self.assertIn('"shm"', demo.stdout)

    def test_the_doctor_finds_vllm_and_plugin_of_this_environment(self) -> None:
        doctor = chiasm("doctor", "--json", "--port", "0", MODEL)
        findings = {finding["check"]: finding for finding in map(json.loads, doctor.stdout.splitlines())}
        self.assertEqual(doctor.returncode, 0, doctor.stdout)
        severities = {check: findings[check]["severity"] for check in ("vllm", "plugin", "processor", "model")}
        self.assertEqual(set(severities.values()), {"ok"}, doctor.stdout)
        self.assertIn(str(CHIASM.parent), findings["vllm"]["found"])

    def test_the_doctor_fails_where_serving_would(self) -> None:
        with tempfile.TemporaryDirectory() as empty:
            doctor = chiasm("doctor", "--port", "0", "--vllm", f"{empty}/vllm", empty)
        self.assertEqual(doctor.returncode, 1, doctor.stdout)
        problems = [line.split()[1] for line in doctor.stdout.splitlines() if line.startswith("problem")]
        self.assertEqual(problems, ["vllm", "model"], doctor.stdout)


class TestServing(unittest.TestCase):
    """One engine for all: it takes a while to start."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.state = tempfile.TemporaryDirectory()
        command = [CHIASM, "serve", MODEL, "--served-model-name", "m", "--port", "0", "--mm-arena-gb", "0.1", "--receiver-cache-gb", "0.05"]
        environment = {**ENVIRONMENT, "CHIASM_STATE_DIR": cls.state.name}
        cls.server = subprocess.Popen([*command, "--", *ENGINE_FLAGS], env=environment, stderr=subprocess.PIPE, text=True)
        cls.log: list[str] = []
        listens, ready = threading.Event(), threading.Event()
        cls.lost = False

        def follow() -> None:
            for line in cls.server.stderr:
                cls.log.append(line)
                # The live page tells an address, too.
                serving = re.search(r" serving .*url=(http\S+)/v1$", re.sub(r"\x1b\[\d*m", "", line.rstrip()))
                if serving:
                    cls.url = serving[1]
                    listens.set()
                cls.lost |= "engine lost" in line
                if cls.lost or "all engines are ready" in line:
                    ready.set()
            listens.set()
            ready.set()

        cls.follower = threading.Thread(target=follow, daemon=True)
        cls.follower.start()
        for event in (listens, ready):
            if not event.wait(STARTUP) or cls.lost or cls.server.poll() is not None:
                cls.tearDownClass()
                raise AssertionError("the engine did not start:\n" + "".join(cls.log[-40:]))

    @classmethod
    def tearDownClass(cls) -> None:
        cls.server.send_signal(signal.SIGTERM)
        try:
            cls.server.wait(60)
        finally:
            cls.server.kill()
        cls.state.cleanup()

    def ask(self, image: bytes, kind: str) -> tuple[dict[str, str], dict]:
        url = f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "the quick brown fox"}]
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            self.url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return dict(answer.headers), json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error}: {error.read().decode()}\n" + "".join(self.log[-40:])) from error

    def test_an_image_reaches_the_engine_in_shared_memory(self) -> None:
        headers, answer = self.ask((IMAGES / "dawn.jpg").read_bytes(), "jpeg")
        self.assertEqual(headers["x-chiasm-transfer"], "shm", "".join(self.log))
        self.assertGreater(answer["usage"]["completion_tokens"], 0)

    def test_a_rare_format_is_read_by_vllms_processor(self) -> None:
        from PIL import Image

        tiff = io.BytesIO()
        Image.open(IMAGES / "dawn.jpg").rotate(90).save(tiff, "TIFF")
        headers, answer = self.ask(tiff.getvalue(), "tiff")
        self.assertEqual(headers["x-chiasm-transfer"], "shm", "".join(self.log))
        self.assertGreater(answer["usage"]["completion_tokens"], 0)


if __name__ == "__main__":
    unittest.main()
