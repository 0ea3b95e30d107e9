//! What changes an item's tensors beside its file, as bytes that differ where it does.

use std::collections::BTreeMap;
use std::path::Path;

use chiasm_backend::PlanClass;
use chiasm_media::ContentHash;
use serde_json::{Map, Value};

/// The same object, whatever order its keys came in.
pub(super) fn sorted(object: &Map<String, Value>) -> Value {
    fn value(of: &Value) -> Value {
        match of {
            Value::Object(object) => sorted(object),
            Value::Array(list) => list.iter().map(value).collect(),
            other => other.clone(),
        }
    }
    let keys: BTreeMap<&String, Value> = object.iter().map(|(key, of)| (key, value(of))).collect();
    keys.into_iter().map(|(key, value)| (key.clone(), value)).collect::<Map<_, _>>().into()
}

/// A digest of the files that decide how media are processed: all but weights.
pub(super) fn digest(model: &Path) -> ContentHash {
    const KINDS: [&str; 5] = ["json", "jinja", "model", "py", "txt"];
    let is_one =
        |path: &Path| path.extension().is_some_and(|kind| KINDS.iter().any(|known| kind == *known));
    let entries = std::fs::read_dir(model).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).filter(|path| is_one(path)).collect();
    files.sort();
    let parts = files.iter().flat_map(|path| {
        let name =
            path.file_name().map(|name| name.as_encoded_bytes().to_vec()).unwrap_or_default();
        [name, ContentHash::of(&std::fs::read(path).unwrap_or_default()).to_string().into_bytes()]
    });
    ContentHash::of(&parts.fold(Vec::new(), |all, part| PlanClass::identify(&all, &part)))
}
