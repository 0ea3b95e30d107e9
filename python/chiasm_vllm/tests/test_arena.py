"""Tests of views, leases and mappings of an arena."""

import gc
import os
import struct
import unittest

import numpy as np
import torch

from chiasm_vllm.arena import Arena
from chiasm_vllm.handle import Handle, HandleRefused
from tests.frontend_arena import TABLE_OFFSET, FrontendArena


class ArenaTest(unittest.TestCase):
    """An arena that the frontend's side creates and the engine's side opens."""

    def setUp(self) -> None:
        self.frontend = FrontendArena()
        self.addCleanup(self.frontend.close)
        self.arena = Arena(self.frontend.name)

    def lend(self, data: bytes, lease: int = 0) -> Handle:
        return Handle.parse(self.frontend.lend(lease, self.frontend.place(data), len(data)))


class ViewTest(ArenaTest):
    def test_view_has_slot_bytes_in_every_dtype(self) -> None:
        values = {
            "uint8": torch.arange(0, 240, dtype=torch.uint8),
            "bool": torch.tensor([True, False] * 12),
            "int8": torch.arange(-12, 12, dtype=torch.int8),
            "int16": torch.arange(-12, 12, dtype=torch.int16),
            "int32": torch.arange(-12, 12, dtype=torch.int32),
            "int64": torch.arange(24) - (1 << 62),
            "float16": torch.linspace(-3, 3, 24).to(torch.float16),
            "bfloat16": torch.linspace(-3, 3, 24).to(torch.bfloat16),
            "float32": torch.linspace(-3, 3, 24),
            "float64": torch.linspace(-3, 3, 24, dtype=torch.float64),
        }
        for lease, (dtype, expected) in enumerate(values.items()):
            lease %= self.arena.leases
            with self.subTest(dtype):
                expected = expected.reshape(2, -1, 3)
                data = expected.view(torch.uint8).numpy().tobytes()
                view = self.arena.resolve(dtype, list(expected.shape), self.lend(data, lease))
                self.assertEqual(view.dtype, expected.dtype)
                self.assertEqual(view.shape, expected.shape)
                self.assertTrue(torch.equal(view, expected))
                self.assertTrue(view.is_contiguous())

    def test_view_shares_memory_with_slot(self) -> None:
        offset = self.frontend.place(bytes(100_000))
        view = self.arena.resolve(
            "uint8", [100_000], Handle.parse(self.frontend.lend(0, offset, 100_000))
        )
        self.frontend.memory[offset + 77_777] = 9
        self.assertEqual(view[77_777], 9)

    def test_scalar_is_view_of_slot(self) -> None:
        scalar = self.arena.resolve("int64", [], self.lend(struct.pack("<q", -5)))
        self.assertEqual((scalar.shape, scalar.item()), ((), -5))
        self.assertFalse(self.frontend.is_returned(0))

    def test_empty_tensor_returns_lease_at_once(self) -> None:
        for dtype, shape in (("float32", [0, 1176]), ("uint8", [0]), ("bfloat16", [3, 0, 2])):
            empty = self.arena.resolve(dtype, shape, self.lend(b""))
            self.assertEqual((list(empty.shape), empty.dtype), (shape, getattr(torch, dtype)))
            self.assertTrue(self.frontend.is_returned(0))


class ReturnTest(ArenaTest):
    def test_lease_is_returned_with_last_reference(self) -> None:
        tensor = self.arena.resolve("float32", [6, 4], self.lend(bytes(96)))
        references = {
            "slice": tensor[2:4],
            "column": tensor[:, 1],
            "reshaped": tensor.reshape(3, 8),
            "other dtype": tensor.view(torch.uint8),
            "transposed": tensor.t(),
            "detached": tensor.detach(),
            "array": tensor.numpy(),
            "array's view": tensor.numpy()[1:],
            "storage": tensor.untyped_storage(),
        }
        del tensor
        while references:
            gc.collect()
            self.assertFalse(self.frontend.is_returned(0), references.keys())
            references.popitem()
        self.assertTrue(self.frontend.is_returned(0))

    def test_copy_does_not_keep_lease(self) -> None:
        copy = self.arena.resolve("uint8", [64], self.lend(bytes(range(64)))).clone()
        self.assertTrue(self.frontend.is_returned(0))
        self.assertEqual(copy.tolist(), list(range(64)))

    def test_view_in_reference_cycle_is_returned_by_collector(self) -> None:
        cycle = [self.arena.resolve("uint8", [64], self.lend(bytes(64)))]
        cycle.append(cycle)
        del cycle
        gc.collect()
        self.assertTrue(self.frontend.is_returned(0))

    def test_lease_is_returned_with_its_generation(self) -> None:
        offset = self.frontend.place(bytes(64))
        for generation in range(1, 4):
            handle = Handle.parse(self.frontend.lend(0, offset, 64))
            self.assertEqual(handle.generation, generation)
            view = self.arena.resolve("uint8", [64], handle)
            self.assertEqual(self.frontend.returned_generation(0), generation - 1)
            del view
            self.assertEqual(self.frontend.returned_generation(0), generation)
            self.frontend.take_back(0)

    def test_leases_of_one_slot_are_returned_separately(self) -> None:
        offset = self.frontend.place(bytes(64))
        first = self.arena.resolve("uint8", [64], Handle.parse(self.frontend.lend(0, offset, 64)))
        second = self.arena.resolve("uint8", [64], Handle.parse(self.frontend.lend(1, offset, 64)))
        del first
        self.assertEqual(
            (self.frontend.is_returned(0), self.frontend.is_returned(1)), (True, False)
        )
        del second
        self.assertTrue(self.frontend.is_returned(1))

    def test_forked_child_returns_no_lease(self) -> None:
        view = self.arena.resolve("uint8", [64], self.lend(bytes(64)))
        child = os.fork()
        if child == 0:
            del view
            os._exit(0)
        os.waitpid(child, 0)
        self.assertFalse(self.frontend.is_returned(0))
        del view
        self.assertTrue(self.frontend.is_returned(0))


class RefusalTest(ArenaTest):
    def assert_refused(
        self, cause: str, handle: Handle, dtype: object = "uint8", shape: object = (64,)
    ) -> None:
        with self.assertRaises(HandleRefused) as refusal:
            self.arena.resolve(dtype, shape, handle)
        self.assertIn(cause, refusal.exception.cause)

    def test_handle_without_lent_lease_does_not_return_lease(self) -> None:
        handle = self.lend(bytes(64))
        self.assert_refused(
            "another arena", handle._replace(arena=f"{self.frontend.number ^ 1:016x}")
        )
        self.assert_refused("not in the table", handle._replace(lease=self.arena.leases))
        self.assert_refused("not lent", handle._replace(lease=1))
        self.assert_refused("another generation", handle._replace(generation=handle.generation + 1))
        self.assertFalse(self.frontend.is_returned(0))
        view = self.arena.resolve("uint8", [64], handle)
        self.assert_refused("used before", handle)
        self.assertFalse(self.frontend.is_returned(0))
        del view
        self.assert_refused("used before", handle)
        self.frontend.take_back(0)
        self.assert_refused("not lent", handle)

    def test_lease_returned_by_earlier_mapping_is_refused(self) -> None:
        handle = self.lend(bytes(64))
        self.arena.resolve("uint8", [64], handle)
        self.arena = Arena(self.frontend.name)
        self.assert_refused("used before", handle)

    def test_refused_slot_dtype_or_shape_returns_lease(self) -> None:
        def refused(
            cause: str, dtype: object = "uint8", shape: object = (64,), **fields: int
        ) -> None:
            with self.subTest(cause, dtype=dtype, shape=shape, **fields):
                self.assert_refused(cause, self.lend(bytes(64))._replace(**fields), dtype, shape)
                self.assertTrue(self.frontend.is_returned(0))

        refused("not the lease's", offset=0)
        refused("not the lease's", length=63)
        refused("another length", shape=(65,))
        refused("another length", shape=())
        refused("another length", dtype="int64", shape=(64,))
        refused("another length", shape=(1 << 62, 1 << 62))
        for dtype in ("float128", "qint8", "Tensor", "__class__", "", None, 7, ["uint8"], b"uint8"):
            refused("handles can't have", dtype=dtype)
        for shape in (
            None,
            64,
            "64",
            {"a": 1},
            [-64],
            [64.0],
            [True],
            ["64"],
            [None],
            [0, 1 << 63],
            [1] * 65,
        ):
            refused("not a list of sizes", shape=shape)

    def test_impossible_empty_tensor_returns_lease(self) -> None:
        with self.assertRaises(RuntimeError):
            self.arena.resolve("uint8", [0, (1 << 63) - 1, (1 << 63) - 1], self.lend(b""))
        self.assertTrue(self.frontend.is_returned(0))

    def test_slot_outside_slot_area_is_refused(self) -> None:
        end = self.frontend.length
        for offset, length in (
            (0, 64),
            (TABLE_OFFSET, 64),
            (self.frontend.slots_offset - 64, 64),
            (self.frontend.slots_offset + 1, 64),
            (end - 64, 128),
            (end, 64),
            (end + 4096, 64),
            ((1 << 64) - 64, 64),
        ):
            with self.subTest(offset=offset, length=length):
                handle = Handle.parse(self.frontend.lend(0, offset, length))
                self.assert_refused("where none can be", handle, shape=(length,))
                self.assertTrue(self.frontend.is_returned(0))


class MappingTest(unittest.TestCase):
    def setUp(self) -> None:
        self.frontend = FrontendArena()
        self.addCleanup(self.frontend.close)

    def test_mapping_lives_until_last_view_ends(self) -> None:
        data = np.arange(4096, dtype=np.int64)
        arena = Arena(self.frontend.name)
        self.frontend.remove_name()
        handle = Handle.parse(
            self.frontend.lend(3, self.frontend.place(data.tobytes()), data.nbytes)
        )
        view = arena.resolve("int64", [64, 64], handle)
        rows = view[1:3]
        del arena, view
        gc.collect()
        self.assertEqual(self.frontend.mappings(), 2)
        self.assertTrue(np.array_equal(rows.numpy(), data.reshape(64, 64)[1:3]))
        self.assertFalse(self.frontend.is_returned(3))
        del rows
        self.assertTrue(self.frontend.is_returned(3))
        self.assertEqual(self.frontend.mappings(), 1)

    def test_arena_without_views_unmaps_at_once(self) -> None:
        descriptors = len(os.listdir("/proc/self/fd"))
        arena = Arena(self.frontend.name)
        self.assertEqual(self.frontend.mappings(), 2)
        del arena
        self.assertEqual(
            (self.frontend.mappings(), len(os.listdir("/proc/self/fd"))), (1, descriptors)
        )


if __name__ == "__main__":
    unittest.main()
