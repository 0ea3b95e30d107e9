"""Tests of the provider: attaching, failures, and what it logs."""

import logging
import os
import random
import unittest

import torch

from chiasm_vllm import __version__
from chiasm_vllm.provider import Provider
from tests.frontend_arena import FrontendArena

LOGGER = "vllm.chiasm_vllm.provider"


class ProviderTest(unittest.TestCase):
    def setUp(self) -> None:
        self.frontend = FrontendArena()
        self.addCleanup(self.frontend.close)
        self.provider = Provider(None)
        # Most tests provoke refusals.
        silence = logging.NullHandler()
        logging.getLogger(LOGGER).addHandler(silence)
        self.addCleanup(logging.getLogger(LOGGER).removeHandler, silence)

    def lend(self, data: bytes, lease: int = 0) -> dict:
        return self.frontend.lend(lease, self.frontend.place(data), len(data))

    def test_attach_returns_version_layout_pid(self) -> None:
        self.assertEqual(
            self.provider.attach(self.frontend.name),
            {"plugin": __version__, "layout": 1, "pid": os.getpid()},
        )

    def test_resolved_handle_records_no_failure(self) -> None:
        self.provider.attach(self.frontend.name)
        view = self.provider("uint8", [2, 2], self.lend(b"abcd"))
        self.assertEqual(view.tolist(), [[97, 98], [99, 100]])
        self.assertIsNone(self.provider.take_failure())

    def test_failed_attach_keeps_current_arena(self) -> None:
        self.provider.attach(self.frontend.name)
        with self.assertRaises(ValueError):
            self.provider.attach("arena")
        with self.assertRaises(FileNotFoundError):
            self.provider.attach("chiasm.1.1.0123456789abcdef")
        self.assertEqual(self.provider("uint8", [4], self.lend(b"abcd")).tolist(), list(b"abcd"))

    def test_views_of_replaced_arena_stay_valid(self) -> None:
        self.provider.attach(self.frontend.name)
        old_view = self.provider("uint8", [4], self.lend(b"old!"))
        old_handle = self.lend(b"late", lease=1)
        second = FrontendArena()
        self.addCleanup(second.close)
        self.provider.attach(second.name)
        new_view = self.provider("uint8", [4], second.lend(0, second.place(b"new!"), 4))
        self.assertEqual((bytes(old_view), bytes(new_view)), (b"old!", b"new!"))
        self.assertEqual(self.provider("uint8", [4], old_handle).numel(), 0)
        self.assertIn("another arena", self.provider.take_failure())
        self.assertEqual(self.frontend.mappings(), 2)
        del old_view
        self.assertTrue(self.frontend.is_returned(0))
        self.assertEqual(self.frontend.mappings(), 1)

    def test_handle_without_arena_fails(self) -> None:
        self.assertEqual(self.provider("uint8", [4], self.lend(b"abcd")).numel(), 0)
        self.assertIn("no arena", self.provider.take_failure())

    def test_first_failure_of_message_is_returned_once(self) -> None:
        self.provider.attach(self.frontend.name)
        self.provider("uint8", [5], self.lend(b"abcd"))
        self.provider("complex64", [4], self.lend(b"abcd", lease=1))
        self.provider("uint8", [4], self.lend(b"abcd", lease=2))
        self.assertIn("another length", self.provider.take_failure())
        self.assertIsNone(self.provider.take_failure())

    def test_new_message_clears_failure(self) -> None:
        self.provider("uint8", [4], self.lend(b"abcd"))
        self.provider.begin_message()
        self.assertIsNone(self.provider.take_failure())

    def test_foreign_maps_go_to_fallback_provider(self) -> None:
        seen = []

        def fallback(*arguments: object) -> torch.Tensor:
            seen.append(arguments)
            return torch.ones(2)

        provider = Provider(fallback)
        foreign = {"sender_id": "a", "message_id": 1, "tensor_id": 0}
        self.assertTrue(torch.equal(provider("float32", (2,), foreign), torch.ones(2)))
        self.assertEqual(seen, [("float32", (2,), foreign)])
        provider("uint8", [4], self.lend(b"abcd"))
        self.assertEqual(len(seen), 1)
        self.assertIsNotNone(provider.take_failure())

    def test_foreign_map_without_fallback_provider_fails(self) -> None:
        self.assertEqual(self.provider("float32", (2,), {"sender_id": "a"}).numel(), 0)
        self.assertIn("no handle", self.provider.take_failure())

    def test_failure_cause_is_logged_once(self) -> None:
        self.provider.attach(self.frontend.name)
        with self.assertLogs(LOGGER, "WARNING") as logs:
            for round_ in range(20):
                self.provider("uint8", [5], self.lend(b"abcd"))
                self.provider("uint8", [4], {"chiasm": 2 + round_})
        self.assertEqual(len(logs.records), 2, logs.output)

    def test_arbitrary_maps_never_raise_or_leak_leases(self) -> None:
        self.provider.attach(self.frontend.name)
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        rng = random.Random(seed)
        resolved = 0
        for round_ in range(5_000):
            lease = round_ % 8
            # Always the same slot, because the arena is small.
            handle = self.frontend.lend(lease, self.frontend.slots_offset, 64)
            dtype, shape = rng.choice([("uint8", [64]), ("int64", [2, 4]), ("float32", [16, 1])])
            for _ in range(rng.randrange(3)):
                handle[rng.choice([*handle, "other"])] = garbage(rng)
            for _ in range(rng.randrange(2)):
                handle.pop(rng.choice(list(handle)))
            if rng.random() < 0.2:
                dtype = garbage(rng)
            if rng.random() < 0.2:
                shape = garbage(rng)
            tensor = self.provider(dtype, shape, handle)
            self.assertIsInstance(tensor, torch.Tensor)
            if self.provider.take_failure() is None:
                resolved += 1
                self.assertEqual(tensor.nbytes, 64)
            else:
                self.assertEqual(tensor.numel(), 0)
        self.assertGreater(resolved, 250)
        self.assertLess(resolved, 4_750)
        for lease in range(8):
            view = self.provider(
                "uint8", [64], self.frontend.lend(lease, self.frontend.slots_offset, 64)
            )
            self.assertIsNone(self.provider.take_failure())
            del view
            self.assertTrue(self.frontend.is_returned(lease))


def garbage(rng: random.Random, depth: int = 0) -> object:
    """Returns any value that msgpack can carry."""
    makers = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice(
            [0, 1, -1, 64, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
        ),
        lambda: rng.randrange(-70, 70),
        lambda: rng.choice([0.0, 1.0, 64.0, float("nan"), float("inf")]),
        lambda: rng.choice(
            ["", "uint8", "int64", "complex64", "storage", "f" * 16, "\ud800", "x" * 100_000]
        ),
        lambda: rng.randbytes(rng.randrange(40)),
        lambda: memoryview(b"raw"),
    ]
    if depth < 3:
        makers += [
            lambda: [garbage(rng, depth + 1) for _ in range(rng.randrange(4))],
            lambda: {f"k{n}": garbage(rng, depth + 1) for n in range(rng.randrange(3))},
            lambda: [1] * 100_000,
        ]
    return rng.choice(makers)()


if __name__ == "__main__":
    unittest.main()
