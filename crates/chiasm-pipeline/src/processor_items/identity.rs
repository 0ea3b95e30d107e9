//! Digests of the settings and files that change an item's tensors, apart from its own file.

use std::collections::BTreeMap;
use std::path::Path;

use chiasm_backend::PlanClass;
use chiasm_media::ContentHash;
use serde_json::{Map, Value};

/// Returns an object with its keys sorted, recursively.
pub(super) fn sorted(object: &Map<String, Value>) -> Value {
    fn sorted_value(value: &Value) -> Value {
        match value {
            Value::Object(object) => sorted(object),
            Value::Array(list) => list.iter().map(sorted_value).collect(),
            other => other.clone(),
        }
    }
    let entries: BTreeMap<&String, Value> =
        object.iter().map(|(key, value)| (key, sorted_value(value))).collect();
    entries.into_iter().map(|(key, value)| (key.clone(), value)).collect::<Map<_, _>>().into()
}

/// Returns a digest of the files that decide how media are processed: all files except weights.
pub(super) fn digest(model: &Path) -> ContentHash {
    const EXTENSIONS: [&str; 5] = ["json", "jinja", "model", "py", "txt"];
    let is_relevant = |path: &Path| {
        path.extension().is_some_and(|extension| EXTENSIONS.iter().any(|known| extension == *known))
    };
    let entries = std::fs::read_dir(model).into_iter().flatten().flatten();
    let mut files: Vec<_> =
        entries.map(|entry| entry.path()).filter(|path| is_relevant(path)).collect();
    files.sort();
    let parts = files.iter().flat_map(|path| {
        let name =
            path.file_name().map(|name| name.as_encoded_bytes().to_vec()).unwrap_or_default();
        [
            name,
            ContentHash::digest(&std::fs::read(path).unwrap_or_default()).to_string().into_bytes(),
        ]
    });
    ContentHash::digest(&parts.fold(Vec::new(), |all, part| PlanClass::item_identity(&all, &part)))
}
