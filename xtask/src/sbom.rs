//! The bill of materials of the binary in the JSON format of CycloneDX 1.5: the crates that are
//! linked into it or used to build it, with versions and licences.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::cargo::cargo;
use crate::child;
use crate::error::Error;
use crate::notices::Sources;
use crate::workspace::VERSION;
use crate::workspace::Workspace;

/// The package that the bill describes.
const ROOT: &str = "chiasm";

/// The part of `cargo metadata` that the bill needs.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    license_file: Option<String>,
    /// The registry or repository; `None` for packages of this workspace.
    source: Option<String>,
    description: Option<String>,
    manifest_path: PathBuf,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// `dev`, `build`, or `None` for a linked dependency.
    kind: Option<String>,
}

/// Writes the bill of the binary for `target`. Returns the sources of the third-party crates.
pub(crate) fn write(
    workspace: &Workspace,
    target: &str,
    path: &Path,
) -> Result<Vec<Sources>, Error> {
    let mut cargo = cargo(workspace);
    cargo.args(["metadata", "--format-version=1", "--locked", "--filter-platform", target]);
    let what = "cargo metadata";
    let json = |source| Error::Json { what: what.to_owned(), source };
    let metadata: Metadata = serde_json::from_str(&child::read(&mut cargo, what)?).map_err(json)?;
    let bill = serde_json::to_string_pretty(&bill(&metadata)).map_err(json)?;
    fs::write(path, bill + "\n").map_err(Error::io("write", path))?;
    Ok(third_party(&metadata))
}

/// Returns the sources of the third-party crates in the bill.
fn third_party(metadata: &Metadata) -> Vec<Sources> {
    let needs = needs(metadata);
    let reached = reached(root(metadata).map_or("", |package| package.id.as_str()), &needs);
    let is_third_party =
        |package: &&Package| package.source.is_some() && reached.contains(package.id.as_str());
    let sources = |package: &Package| Sources {
        name: format!("{} {}", package.name, package.version),
        folder: package.manifest_path.parent().unwrap_or(&package.manifest_path).to_owned(),
    };
    metadata.packages.iter().filter(is_third_party).map(sources).collect()
}

fn root(metadata: &Metadata) -> Option<&Package> {
    metadata.packages.iter().find(|package| package.name == ROOT && package.source.is_none())
}

fn bill(metadata: &Metadata) -> Value {
    let packages: BTreeMap<&str, &Package> =
        metadata.packages.iter().map(|package| (package.id.as_str(), package)).collect();
    let needs = needs(metadata);
    let root = root(metadata);
    let root_id = root.map_or("", |package| package.id.as_str());
    let reached = reached(root_id, &needs);
    let reference =
        |id: &str| packages.get(id).map_or_else(|| id.to_owned(), |package| reference(package));
    let others = reached.iter().filter(|id| **id != root_id).filter_map(|id| packages.get(id));
    let mut components: Vec<Value> = others.map(|package| component(package)).collect();
    components.push(plugin());
    let dependencies = reached.iter().map(|id| {
        let depends_on: BTreeSet<String> =
            needs.get(id).into_iter().flatten().map(|id| reference(id)).collect();
        json!({"ref": reference(id), "dependsOn": depends_on})
    });
    json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": root.map(|package| component_of_type("application", package))},
        "components": components,
        "dependencies": dependencies.collect::<Vec<_>>(),
    })
}

/// Returns the dependencies of each package, without those of its tests, which are not in the
/// binary.
fn needs(metadata: &Metadata) -> BTreeMap<&str, BTreeSet<&str>> {
    let mut needs = BTreeMap::new();
    for node in &metadata.resolve.nodes {
        let is_shipped = |dependency: &&Dependency| {
            dependency.dep_kinds.iter().any(|kind| kind.kind.as_deref() != Some("dev"))
        };
        let shipped = node.deps.iter().filter(is_shipped);
        let ids = shipped.map(|dependency| dependency.pkg.as_str());
        needs.insert(node.id.as_str(), ids.collect());
    }
    needs
}

/// Returns `root` and its direct and indirect dependencies.
fn reached<'a>(root: &'a str, needs: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::from([root]);
    let mut pending = vec![root];
    while let Some(id) = pending.pop() {
        let next = needs.get(id).into_iter().flatten().filter(|id| reached.insert(id));
        pending.extend(next.copied().collect::<Vec<_>>());
    }
    reached
}

fn reference(package: &Package) -> String {
    format!("pkg:cargo/{}@{}", package.name, package.version)
}

fn component(package: &Package) -> Value {
    component_of_type("library", package)
}

fn component_of_type(kind: &str, package: &Package) -> Value {
    let reference = reference(package);
    json!({
        "type": kind,
        "bom-ref": reference,
        "name": package.name,
        "version": package.version,
        "description": package.description.as_deref().unwrap_or_default().trim(),
        "licenses": [licence(package)],
        "purl": reference,
    })
}

/// Returns the SPDX expression of a package's licence, or the name of its licence file.
fn licence(package: &Package) -> Value {
    match (&package.license, &package.license_file) {
        // Old crates write a slash for OR.
        (Some(expression), _) => {
            json!({"expression": expression.replace('/', " OR ").replace("  ", " ")})
        }
        (None, file) => json!({"license": {"name": file.as_deref().unwrap_or("not stated")}}),
    }
}

/// Returns the component of the vLLM plugin, which the wheel contains beside the binary.
fn plugin() -> Value {
    json!({
        "type": "library",
        "bom-ref": format!("pkg:pypi/chiasm-vllm@{VERSION}"),
        "name": "chiasm_vllm",
        "version": VERSION,
        "licenses": [{"expression": "Apache-2.0"}],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> Metadata {
        let package = |name: &str, license: Value, source: Value| {
            json!({
                "id": name,
                "name": name,
                "version": "1.0.0",
                "license": license,
                "license_file": "COPYING",
                "source": source,
                "description": "What it is.\n",
                "manifest_path": format!("/sources/{name}/Cargo.toml"),
            })
        };
        let needs = |id: &str, kind: Value| json!({"pkg": id, "dep_kinds": [{"kind": kind}]});
        let metadata = json!({
            "packages": [
                package(ROOT, json!("Apache-2.0"), Value::Null),
                package("linked", json!("MIT/Apache-2.0"), json!("registry")),
                package("built-by", Value::Null, json!("registry")),
                package("tested-by", json!("MIT"), json!("registry")),
            ],
            "resolve": {"nodes": [
                {
                    "id": ROOT,
                    "deps": [needs("linked", Value::Null), needs("tested-by", json!("dev"))],
                },
                {"id": "linked", "deps": [needs("built-by", json!("build"))]},
                {"id": "built-by", "deps": []},
                {"id": "tested-by", "deps": []},
            ]},
        });
        serde_json::from_value(metadata).unwrap()
    }

    #[test]
    fn bill_excludes_dev_dependencies() {
        let bill = bill(&metadata());
        let values = |field: &str| -> Vec<String> {
            bill["components"]
                .as_array()
                .unwrap()
                .iter()
                .map(|component| component[field].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(values("name"), ["built-by", "linked", "chiasm_vllm"]);
        assert_eq!(bill["metadata"]["component"]["purl"], "pkg:cargo/chiasm@1.0.0");
        let root = &bill["dependencies"].as_array().unwrap()[1];
        assert_eq!(
            root,
            &json!({"ref": "pkg:cargo/chiasm@1.0.0", "dependsOn": ["pkg:cargo/linked@1.0.0"]})
        );
    }

    #[test]
    fn sources_are_third_party_crates_of_the_bill() {
        let sources: Vec<_> = third_party(&metadata())
            .into_iter()
            .map(|sources| (sources.name, sources.folder))
            .collect();
        let expected = ["linked", "built-by"]
            .map(|name| (format!("{name} 1.0.0"), format!("/sources/{name}").into()));
        assert_eq!(sources, expected);
    }

    #[test]
    fn licence_is_expression_or_file_name() {
        let bill = bill(&metadata());
        let licences = |index: usize| bill["components"][index]["licenses"].clone();
        assert_eq!(licences(0), json!([{"license": {"name": "COPYING"}}]));
        assert_eq!(licences(1), json!([{"expression": "MIT OR Apache-2.0"}]));
    }

    #[test]
    fn required_fields_are_present() {
        let bill = bill(&metadata());
        assert_eq!(
            (&bill["bomFormat"], &bill["specVersion"]),
            (&json!("CycloneDX"), &json!("1.5"))
        );
        let references: BTreeSet<&str> = bill["components"]
            .as_array()
            .unwrap()
            .iter()
            .map(|component| component["bom-ref"].as_str().unwrap())
            .collect();
        assert_eq!(references.len(), 3, "references are unique");
        for component in bill["components"].as_array().unwrap() {
            let is_complete = component["type"].is_string() && component["name"].is_string();
            assert!(is_complete, "{component}");
        }
    }
}
