"""That the manifests of ``deploy/kubernetes`` are what Kubernetes' schemas say, and that it would be noticed if they were not.

Run by ``cargo xtask test``. What no schema can say, such as which flags there are, is tested in ``crates/chiasm/src/cli/manifests.rs``.
"""

import unittest
from collections.abc import Callable
from pathlib import Path

import yaml
from kubernetes_validate import SchemaNotFoundError, ValidationError, validate

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
# The oldest version that the manifests are held against, and the newest that the package has schemas of.
OLDEST, NEWEST = "1.29", "1.37"


def manifests() -> list[dict]:
    """Every object of every file."""
    texts = [path.read_text() for path in sorted(FOLDER.glob("*.yaml"))]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text)]


def fault(manifest: dict, version: str = NEWEST) -> str | None:
    """Where a field is unknown, missing or of a wrong type, or that the kind is unknown; ``None`` for a valid manifest."""
    try:
        validate(manifest, version, strict=True)
    except ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except SchemaNotFoundError as error:
        return error.message
    return None


def container(manifest: dict) -> dict:
    return manifest["spec"]["template"]["spec"]["containers"][0]


class ManifestsTest(unittest.TestCase):
    def test_every_manifest_is_valid_in_the_oldest_and_the_newest_version(self) -> None:
        kinds = {manifest["kind"] for manifest in manifests()}
        self.assertLessEqual({"DaemonSet", "Deployment", "Role", "Service"}, kinds)
        for manifest in manifests():
            for version in (OLDEST, NEWEST):
                with self.subTest(kind=manifest["kind"], name=manifest["metadata"]["name"], version=version):
                    self.assertIsNone(fault(manifest, version))
                    self.assertNotIn("namespace", manifest["metadata"])

    def test_what_is_unknown_missing_or_of_a_wrong_type_is_noticed_at_any_depth(self) -> None:
        def after(kind: str, change: Callable[[dict], object]) -> str:
            manifest = next(manifest for manifest in manifests() if manifest["kind"] == kind)
            change(manifest)
            return fault(manifest) or "nothing"

        found = after("DaemonSet", lambda manifest: container(manifest)["readinessProbe"].update(failureTreshold=3))
        self.assertIn("spec.template.spec.containers.0.readinessProbe: ", found)
        self.assertIn("'failureTreshold' was unexpected", found)
        found = after("DaemonSet", lambda manifest: container(manifest)["ports"][0].pop("containerPort"))
        self.assertIn("'containerPort' is a required property", found)
        found = after("Deployment", lambda manifest: manifest["spec"].update(replicas="two"))
        self.assertIn("spec.replicas: 'two' is not of type 'integer'", found)
        found = after("Role", lambda manifest: manifest["rules"][0].update(resources="endpointslices"))
        self.assertIn("rules.0.resources: 'endpointslices' is not of type 'array'", found)
        found = after("PodDisruptionBudget", lambda manifest: manifest.update(apiVersion="policy/v2"))
        self.assertIn("Couldn't find schema", found)


if __name__ == "__main__":
    unittest.main()
