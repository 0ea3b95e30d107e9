"""Tests of the connector with vLLM's own worker code and a folder, but no model."""

import logging
import os
import pickle
import tempfile
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.worker import ec_connector_model_runner_mixin as worker_code

from chiasm_vllm import embedding_store

LOGGER = "vllm.chiasm_vllm.embedding_store"
Items = dict[str, int]


class Engine:
    """The parts of an engine's scheduler and worker that handle embeddings."""

    def __init__(self, folder: Path, role: str, max_bytes: object = 1 << 20) -> None:
        config = ECTransferConfig(
            ec_connector="EmbeddingStore",
            ec_connector_module_path="chiasm_vllm.embedding_store",
            ec_role=role,
            ec_connector_extra_config={"folder": str(folder), "max_bytes": max_bytes},
        )
        vllm_config = types.SimpleNamespace(ec_transfer_config=config)
        create = ECConnectorFactory.create_connector
        self.scheduler = create(vllm_config, ECConnectorRole.SCHEDULER)
        self.worker = create(vllm_config, ECConnectorRole.WORKER)
        self.cached: set[str] = set()
        self.encoder_cache: dict[str, torch.Tensor] = {}

    def run(
        self, items: Items, before_worker: Callable[[], object] = list
    ) -> tuple[list[str], dict | None]:
        """Runs a request of one step.

        Returns the identifiers that were encoded, and the connector's answer when it finished.
        ``before_worker`` is called between the scheduler and the worker.
        """
        request = Request(items)
        encode = self._schedule(request)
        output = types.SimpleNamespace(
            scheduled_new_reqs=[request],
            scheduled_encoder_inputs={request.req_id: encode} if encode else {},
            finished_req_ids=set(),
        )
        output.ec_connector_metadata = self.scheduler.build_connector_meta(output)
        # The output is sent to other processes.
        output = pickle.loads(pickle.dumps(output))
        before_worker()
        with (
            mock.patch.object(worker_code, "get_ec_transfer", lambda: self.worker),
            worker_code.ECConnectorModelRunnerMixin._get_ec_connector_output(
                output, self.encoder_cache
            ),
        ):
            # Model runners read this after the loads.
            encode = output.scheduled_encoder_inputs.get(request.req_id, [])
            encoded = [request.mm_features[index].identifier for index in encode]
            for identifier in encoded:
                self.encoder_cache[identifier] = random_embedding(identifier, items[identifier])
                self.worker.save_caches(encoder_cache=self.encoder_cache, mm_hash=identifier)
        return encoded, self.scheduler.request_finished(request)[1]

    def _schedule(self, request: "Request") -> list[int]:
        self.scheduler.ensure_cache_available(request, 0)
        encode = []
        for index, feature in enumerate(request.mm_features):
            if feature.identifier in self.cached:
                continue
            if not self.scheduler.has_cache_item(feature.identifier):
                encode.append(index)
            self.cached.add(feature.identifier)
            self.scheduler.update_state_after_alloc(request, index)
        return encode

    def forget(self) -> None:
        self.cached.clear()
        self.encoder_cache.clear()


class Request:
    """The parts of a request that the connector and the runners read."""

    def __init__(self, items: Items) -> None:
        self.req_id = self.request_id = "r"
        self.mm_features = [
            types.SimpleNamespace(
                identifier=identifier, mm_position=PlaceholderRange(offset=0, length=rows)
            )
            for identifier, rows in items.items()
        ]

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.mm_features[index].mm_position.get_num_embeds()


def random_embedding(identifier: str, rows: int) -> torch.Tensor:
    # A slice of a batch, which is what encoders return.
    batch = torch.rand(2 * rows, 16, generator=torch.Generator().manual_seed(len(identifier)))
    return batch.to(torch.bfloat16)[rows:]


class EmbeddingStoreTest(unittest.TestCase):
    def setUp(self) -> None:
        parent = tempfile.TemporaryDirectory()
        self.addCleanup(parent.cleanup)
        self.folder = Path(parent.name) / "store"
        rank = mock.patch.object(embedding_store, "_is_writer", lambda: True)
        rank.start()
        self.addCleanup(rank.stop)
        ranks = mock.patch.object(embedding_store, "_any_rank", lambda flags: flags)
        ranks.start()
        self.addCleanup(ranks.stop)
        device = mock.patch.object(embedding_store, "_device", lambda: "cpu")
        device.start()
        self.addCleanup(device.stop)
        # Many tests provoke warnings.
        silence = logging.NullHandler()
        logging.getLogger(LOGGER).addHandler(silence)
        self.addCleanup(logging.getLogger(LOGGER).removeHandler, silence)

    def engine(self, role: str, **options: object) -> Engine:
        return Engine(self.folder, role, **options)

    def file(self, identifier: str) -> Path:
        return self.folder / f"{identifier}.safetensors"

    def stored(self) -> set[str]:
        return {path.stem for path in self.folder.glob("*.safetensors")}

    def test_consumer_loads_items_of_producer(self) -> None:
        producer = self.engine("ec_producer")
        consumer = self.engine("ec_consumer")
        encoded, answer = producer.run({"a": 3, "b": 5})
        self.assertEqual(encoded, ["a", "b"])
        self.assertEqual(
            answer, {name: {"bytes": self.file(name).stat().st_size} for name in ("a", "b")}
        )
        with self.assertNoLogs(LOGGER):
            self.assertEqual(consumer.run({"a": 3, "b": 5, "c": 2}), (["c"], None))
        for name in ("a", "b"):
            self.assertEqual(consumer.encoder_cache[name].dtype, torch.bfloat16)
            self.assertTrue(torch.equal(consumer.encoder_cache[name], producer.encoder_cache[name]))
        self.assertEqual(self.stored(), {"a", "b"}, "the consumer wrote files")

    def test_engine_with_both_roles_loads_its_own_items(self) -> None:
        engine = self.engine("ec_both")
        self.assertEqual(engine.run({"a": 3})[0], ["a"])
        engine.forget()
        self.assertEqual(engine.run({"a": 3})[0], [])
        self.assertTrue(torch.equal(engine.encoder_cache["a"], random_embedding("a", 3)))

    def test_producer_does_not_encode_stored_item(self) -> None:
        self.engine("ec_producer").run({"a": 3})
        producer = self.engine("ec_producer")
        # The first run finds the item in the folder, the second in the engine's own cache.
        for _ in range(2):
            os.utime(self.file("a"), (1, 1))
            encoded, answer = producer.run({"a": 3})
            self.assertEqual((encoded, list(answer)), ([], ["a"]))
            # Another engine is about to load the file.
            self.assertGreater(self.file("a").stat().st_mtime, 1)

    def test_producer_rewrites_missing_file_of_cached_item(self) -> None:
        first = self.engine("ec_producer")
        second = self.engine("ec_producer")
        first.run({"a": 3})
        second.run({"a": 3})
        # The first producer has encoded the item, the second has loaded it.
        for producer in (first, second):
            self.file("a").unlink()
            encoded, answer = producer.run({"a": 3})
            self.assertEqual((encoded, list(answer)), ([], ["a"]))
            embeddings = load_file(self.file("a"))["embeddings"]
            self.assertTrue(torch.equal(embeddings, random_embedding("a", 3)))

    def test_failed_write_is_not_reported_as_stored(self) -> None:
        producer = self.engine("ec_producer", max_bytes=4000)
        with self.assertLogs(LOGGER) as logs:
            self.assertEqual(producer.run({"big": 200}), (["big"], None))
            self.assertEqual(producer.run({"bigger": 300, "small": 3})[1].keys(), {"small"})
        self.assertEqual(len(logs.output), 1)
        self.assertIn("no room for others within max_bytes", logs.output[0])
        names = (path.name for path in self.folder.iterdir())
        self.assertEqual([name for name in names if name.startswith(".")], [])

    def test_item_with_invalid_identifier_is_encoded(self) -> None:
        producer = self.engine("ec_producer")
        consumer = self.engine("ec_consumer")
        self.assertEqual(producer.run({"../a": 3}), (["../a"], None))
        self.assertEqual(consumer.run({"../a": 3})[0], ["../a"])
        self.assertEqual(list(self.folder.parent.glob("*.safetensors")), [])

    def test_other_rank_does_not_write(self) -> None:
        with mock.patch.object(embedding_store, "_is_writer", lambda: False):
            self.assertEqual(self.engine("ec_producer").run({"a": 3}), (["a"], None))

    def test_item_of_damaged_file_is_encoded_then_rewritten(self) -> None:
        self.engine("ec_producer").run({"a": 3})
        whole = self.file("a").read_bytes()
        self.file("a").write_bytes(whole[:-10])
        self.assertEqual(self.engine("ec_consumer").run({"a": 3})[0], ["a"])
        encoded, answer = self.engine("ec_producer").run({"a": 3})
        self.assertEqual((encoded, list(answer)), (["a"], ["a"]))
        self.assertEqual(self.file("a").read_bytes(), whole)

    def test_file_with_other_row_count_is_not_used(self) -> None:
        self.engine("ec_producer").run({"a": 3})
        with self.assertLogs(LOGGER) as logs:
            self.assertEqual(self.engine("ec_consumer").run({"a": 4})[0], ["a"])
        self.assertIn("a has 3 embeddings and not 4", logs.output[0])
        self.assertEqual(self.engine("ec_producer").run({"a": 4})[0], ["a"])
        self.assertEqual(self.engine("ec_consumer").run({"a": 4})[0], [])

    def test_file_retired_after_lookup_is_loaded(self) -> None:
        self.engine("ec_producer").run({"a": 3})
        consumer = self.engine("ec_consumer")

        def retire() -> None:
            os.rename(self.file("a"), self.folder / "retired/a.safetensors")

        self.assertEqual(consumer.run({"a": 3}, before_worker=retire)[0], [])
        self.assertTrue(torch.equal(consumer.encoder_cache["a"], random_embedding("a", 3)))
        consumer.forget()
        self.assertEqual(consumer.run({"a": 3})[0], ["a"], "the retired file was found")

    def test_last_lookup_decides_loads(self) -> None:
        self.engine("ec_producer").run({"a": 3, "b": 3})
        scheduler = self.engine("ec_consumer").scheduler
        request = Request({"a": 3, "b": 3})
        self.assertEqual([scheduler.has_cache_item(name) for name in ("a", "b")], [True, True])
        # The request was not scheduled, so vLLM looks its items up again. Then the second file is
        # removed too, after its lookup succeeded.
        self.file("a").unlink()
        self.assertEqual([scheduler.has_cache_item(name) for name in ("a", "b")], [False, True])
        self.file("b").unlink()
        for index in range(2):
            scheduler.update_state_after_alloc(request, index)
        output = types.SimpleNamespace(scheduled_new_reqs=[], scheduled_encoder_inputs={})
        loads = scheduler.build_connector_meta(output).loads
        self.assertEqual(loads, {"b": embedding_store.Load(3, "r", 1)})

    def test_load_renews_modification_time(self) -> None:
        self.engine("ec_producer").run({"a": 3})
        os.utime(self.file("a"), (1, 1))
        self.engine("ec_consumer").run({"a": 3})
        self.assertGreater(self.file("a").stat().st_mtime, 1)

    def test_file_damaged_after_lookup_is_removed(self) -> None:
        for damage, reason in (
            (lambda: self.file("a").unlink(), "gone although it was found"),
            (lambda: self.file("a").write_bytes(b"?"), "can't be loaded"),
            (
                lambda: self.file("a").write_bytes(self.file("other").read_bytes()),
                r"has \(4, 16\) .* not 3 embeddings",
            ),
        ):
            self.engine("ec_producer").run({"a": 3, "other": 4})
            consumer = self.engine("ec_consumer")
            with self.assertLogs(LOGGER) as logs:
                encoded, _ = consumer.run({"c": 2, "a": 3, "other": 4}, before_worker=damage)
            self.assertRegex(logs.output[0], reason)
            self.assertEqual(encoded, ["c", "a"])
            self.assertTrue(torch.equal(consumer.encoder_cache["a"], random_embedding("a", 3)))
            self.assertEqual(self.stored(), {"other"})

    def test_good_file_survives_load_without_memory(self) -> None:
        self.engine("ec_producer").run({"a": 3})
        for error in (
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            MemoryError(),
            OSError(12, "Cannot allocate memory"),
        ):
            consumer = self.engine("ec_consumer")
            with (
                mock.patch.object(embedding_store, "load_file", side_effect=error),
                self.assertLogs(LOGGER),
            ):
                self.assertEqual(consumer.run({"a": 3})[0], ["a"], error)
            self.assertEqual(self.stored(), {"a"})
            consumer.forget()
            self.assertEqual(consumer.run({"a": 3})[0], [])

    def test_file_replaced_during_load_is_not_removed(self) -> None:
        self.engine("ec_producer").run({"a": 3})
        whole = self.file("a").read_bytes()

        def replace_then_fail(path: Path, device: str) -> dict[str, torch.Tensor]:
            path.write_bytes(whole)
            raise ValueError("the previous file was damaged")

        with (
            mock.patch.object(embedding_store, "load_file", replace_then_fail),
            self.assertLogs(LOGGER),
        ):
            self.assertEqual(self.engine("ec_consumer").run({"a": 3})[0], ["a"])
        self.assertEqual(self.stored(), {"a"})

    def test_item_that_one_rank_cannot_load_is_encoded_by_all(self) -> None:
        self.engine("ec_producer").run({"a": 3, "b": 3})
        consumer = self.engine("ec_consumer")
        with mock.patch.object(embedding_store, "_any_rank", lambda flags: [False, True]):
            self.assertEqual(consumer.run({"a": 3, "b": 3})[0], ["b"])
        self.assertEqual(set(consumer.encoder_cache), {"a", "b"})

    def test_save_without_memory_stores_no_file(self) -> None:
        producer = self.engine("ec_producer")
        with (
            mock.patch.object(embedding_store, "save", side_effect=MemoryError()),
            self.assertLogs(LOGGER),
        ):
            self.assertEqual(producer.run({"a": 3}), (["a"], None))
        self.assertEqual(self.stored(), set())

    def test_producer_survives_failed_load(self) -> None:
        self.engine("ec_producer").run({"a": 3})
        producer = self.engine("ec_producer")
        with self.assertLogs(LOGGER):
            answer = producer.run({"a": 3}, before_worker=self.file("a").unlink)
            self.assertEqual(answer, ([], None))

    def test_engine_with_invalid_settings_does_not_start(self) -> None:
        for folder, max_bytes, reason in (
            ("relative", 1, "folder"),
            (self.folder, None, "max_bytes"),
            (self.folder, 0, "max_bytes"),
        ):
            with self.assertRaisesRegex(ValueError, reason):
                Engine(folder, "ec_producer", max_bytes)
        Engine(self.folder, "ec_consumer", None)
