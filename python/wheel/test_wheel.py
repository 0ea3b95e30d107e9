"""Tests of the wheel as users have it: installed into an environment with vLLM, without settings.

The environment's Python runs this file. Commands get no paths of the installation. `cargo xtask
test` makes the environment and runs this file.
"""

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
# Long, because engines start one after the other on a small machine.
STARTUP_TIMEOUT_S = 240
# The flags of a CPU engine with a tiny model.
ENGINE_FLAGS = [
    "--enforce-eager",
    "--block-size",
    "32",
    "--max-model-len",
    "4096",
    "--dtype",
    "float32",
]
# The PATH does not contain this environment.
ENVIRONMENT = {**os.environ, "PATH": "/usr/bin:/bin"}
MODEL = Path(os.environ["CHIASM_TEST_MODELS"]) / "qwen2vl"


def chiasm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [CHIASM, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


class TestWithoutEngines(unittest.TestCase):
    def test_demo_runs(self) -> None:
        demo = chiasm("demo", "--json")
        self.assertEqual(demo.returncode, 0, demo.stderr)
        self.assertIn('"shm"', demo.stdout)

    def test_doctor_finds_packages_of_this_environment(self) -> None:
        doctor = chiasm("doctor", "--json", "--port", "0", MODEL)
        findings = {
            finding["check"]: finding for finding in map(json.loads, doctor.stdout.splitlines())
        }
        self.assertEqual(doctor.returncode, 0, doctor.stdout)
        checks = ("vllm", "plugin", "processor", "model")
        severities = {check: findings[check]["severity"] for check in checks}
        self.assertEqual(set(severities.values()), {"ok"}, doctor.stdout)
        self.assertIn(str(CHIASM.parent), findings["vllm"]["found"])

    def test_doctor_fails_when_serving_would_fail(self) -> None:
        with tempfile.TemporaryDirectory() as empty:
            doctor = chiasm("doctor", "--port", "0", "--vllm", f"{empty}/vllm", empty)
        self.assertEqual(doctor.returncode, 1, doctor.stdout)
        lines = doctor.stdout.splitlines()
        problems = [line.split()[1] for line in lines if line.startswith("problem")]
        self.assertEqual(problems, ["vllm", "model"], doctor.stdout)


class TestServing(unittest.TestCase):
    """Tests that share one engine, because it takes long to start."""

    @classmethod
    def setUpClass(cls) -> None:
        cls.state = tempfile.TemporaryDirectory()
        flags = ["--served-model-name", "m", "--port", "0"]
        memory = ["--mm-arena-gb", "0.1", "--receiver-cache-gb", "0.05"]
        command = [CHIASM, "serve", MODEL, *flags, *memory, "--", *ENGINE_FLAGS]
        environment = {**ENVIRONMENT, "CHIASM_STATE_DIR": cls.state.name}
        cls.server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        cls.log: list[str] = []
        listening = threading.Event()
        ready = threading.Event()
        cls.lost = False

        def follow_log() -> None:
            for line in cls.server.stderr:
                cls.log.append(line)
                # The line of the live page has an address too, which does not end in /v1.
                plain = re.sub(r"\x1b\[\d*m", "", line.rstrip())
                serving = re.search(r" serving .*url=(http\S+)/v1$", plain)
                if serving:
                    cls.url = serving[1]
                    listening.set()
                cls.lost |= "engine lost" in line
                if cls.lost or "all engines are ready" in line:
                    ready.set()
            listening.set()
            ready.set()

        cls.follower = threading.Thread(target=follow_log, daemon=True)
        cls.follower.start()
        for event in (listening, ready):
            if not event.wait(STARTUP_TIMEOUT_S) or cls.lost or cls.server.poll() is not None:
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

    def chat(self, image: bytes, image_format: str) -> tuple[dict[str, str], dict]:
        url = f"data:image/{image_format};base64,{base64.b64encode(image).decode()}"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "the quick brown fox"},
        ]
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
            "temperature": 0,
        }
        request = urllib.request.Request(
            self.url + "/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return dict(answer.headers), json.load(answer)
        except urllib.error.HTTPError as error:
            message = f"{error}: {error.read().decode()}\n" + "".join(self.log[-40:])
            raise AssertionError(message) from error

    def test_image_reaches_engine_in_shared_memory(self) -> None:
        headers, answer = self.chat((IMAGES / "dawn.jpg").read_bytes(), "jpeg")
        self.assertEqual(headers["x-chiasm-transfer"], "shm", "".join(self.log))
        self.assertGreater(answer["usage"]["completion_tokens"], 0)

    def test_rare_format_is_read_by_vllms_processor(self) -> None:
        from PIL import Image

        tiff = io.BytesIO()
        Image.open(IMAGES / "dawn.jpg").rotate(90).save(tiff, "TIFF")
        headers, answer = self.chat(tiff.getvalue(), "tiff")
        self.assertEqual(headers["x-chiasm-transfer"], "shm", "".join(self.log))
        self.assertGreater(answer["usage"]["completion_tokens"], 0)


if __name__ == "__main__":
    unittest.main()
