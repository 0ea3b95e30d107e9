"""Tests of the manifests of ``deploy/kubernetes`` against Kubernetes' schemas.

They also test that the schemas find faults. Run by ``cargo xtask test``. Facts that no schema
contains, such as the valid flags, are tested in ``crates/chiasm/src/cli/manifests.rs``.
"""

import unittest
from collections.abc import Callable
from pathlib import Path

import yaml
from kubernetes_validate import SchemaNotFoundError, ValidationError, validate

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
# The oldest version of Kubernetes that the manifests are validated for.
OLDEST = "1.29"
# The newest version for which the package has schemas.
NEWEST = "1.37"


def manifests() -> list[dict]:
    """Returns every object of every file."""
    texts = [path.read_text() for path in sorted(FOLDER.glob("*.yaml"))]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text)]


def fault(manifest: dict, version: str = NEWEST) -> str | None:
    """Describes an unknown or missing field, a wrong type or an unknown kind.

    Returns ``None`` for a valid manifest.
    """
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
    def test_manifests_are_valid_for_both_versions(self) -> None:
        kinds = {manifest["kind"] for manifest in manifests()}
        self.assertLessEqual({"DaemonSet", "Deployment", "Role", "Service"}, kinds)
        for manifest in manifests():
            for version in (OLDEST, NEWEST):
                name = manifest["metadata"]["name"]
                with self.subTest(kind=manifest["kind"], name=name, version=version):
                    self.assertIsNone(fault(manifest, version))
                    self.assertNotIn("namespace", manifest["metadata"])

    def test_schema_violation_is_found_at_any_depth(self) -> None:
        def fault_after(kind: str, change: Callable[[dict], object]) -> str:
            manifest = next(manifest for manifest in manifests() if manifest["kind"] == kind)
            change(manifest)
            return fault(manifest) or "nothing"

        def misspell_threshold(daemon_set: dict) -> None:
            container(daemon_set)["readinessProbe"].update(failureTreshold=3)

        found = fault_after("DaemonSet", misspell_threshold)
        self.assertIn("spec.template.spec.containers.0.readinessProbe: ", found)
        self.assertIn("'failureTreshold' was unexpected", found)
        found = fault_after(
            "DaemonSet", lambda manifest: container(manifest)["ports"][0].pop("containerPort")
        )
        self.assertIn("'containerPort' is a required property", found)
        found = fault_after("Deployment", lambda manifest: manifest["spec"].update(replicas="two"))
        self.assertIn("spec.replicas: 'two' is not of type 'integer'", found)
        found = fault_after(
            "Role", lambda manifest: manifest["rules"][0].update(resources="endpointslices")
        )
        self.assertIn("rules.0.resources: 'endpointslices' is not of type 'array'", found)
        found = fault_after(
            "PodDisruptionBudget", lambda manifest: manifest.update(apiVersion="policy/v2")
        )
        self.assertIn("Couldn't find schema", found)


if __name__ == "__main__":
    unittest.main()
