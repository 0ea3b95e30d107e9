//! The recordings of the tests, and what vLLM makes of them.

use serde_json::Value;

use crate::wav;

/// A recording.
pub(crate) struct TestRecording {
    pub(crate) name: String,
    pub(crate) file: Vec<u8>,
    /// The results of vLLM.
    pub(crate) expected: Value,
}

/// Returns a file of results.
pub(crate) fn json(name: &str) -> Value {
    serde_json::from_slice(&read(name)).expect("JSON")
}

/// Returns all recordings.
pub(crate) fn recordings() -> Vec<TestRecording> {
    let index = json("index.json");
    let entries = index["recordings"].as_object().expect("recordings");
    let recording = |(name, expected): (&String, &Value)| {
        let file = match &expected["wav"] {
            Value::Null => read(name),
            recipe => wav::build(recipe),
        };
        TestRecording { name: name.clone(), file, expected: expected.clone() }
    };
    entries.iter().map(recording).collect()
}

fn read(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/recordings/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"))
}
