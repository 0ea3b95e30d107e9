//! Clips of several encoders against what OpenCV says of them.
//!
//! `CHIASM_VIDEO_CLIPS` names another folder of clips, in which `make_video_goldens.py` has written
//! an `index.json`.

use std::path::PathBuf;

use chiasm_video::{IndexError, VideoIndex};
use serde_json::{Map, Value};

/// A clip and its entry in `index.json`.
pub(crate) struct Clip {
    pub(crate) name: String,
    pub(crate) file: Vec<u8>,
    pub(crate) golden: Value,
}

/// Returns the directory of the clips.
pub(crate) fn directory() -> PathBuf {
    match std::env::var_os("CHIASM_VIDEO_CLIPS") {
        Some(folder) => folder.into(),
        None => [env!("CARGO_MANIFEST_DIR"), "tests", "clips"].iter().collect(),
    }
}

/// Returns all clips.
pub(crate) fn clips() -> Vec<Clip> {
    let read = |name: &str| {
        std::fs::read(directory().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let index: Map<String, Value> = serde_json::from_slice(&read("index.json")).unwrap();
    let is_complete = index.len() > 60 || std::env::var_os("CHIASM_VIDEO_CLIPS").is_some();
    assert!(is_complete, "the clips are incomplete");
    index.into_iter().map(|(name, golden)| Clip { file: read(&name), name, golden }).collect()
}

#[test]
fn properties_equal_those_of_opencv() {
    let mut wrong = Vec::new();
    for Clip { name, file, golden } in clips() {
        match VideoIndex::read(&file) {
            Ok(index) => {
                let properties = index.properties();
                let ours = serde_json::json!({
                    "frames": properties.frames, "fps": format!("{:?}", properties.fps),
                    "width": properties.width, "height": properties.height,
                    "rotation": properties.rotation, "decoded": properties.visible_frames,
                });
                println!("{name}: {properties:?}");
                for (key, value) in ours.as_object().unwrap() {
                    if golden[key] != *value {
                        wrong.push(format!("{name}: {key} is {value}, not {}", golden[key]));
                    }
                }
            }
            Err(error) => println!("{name}: {error} ({})", IndexError::cause(error)),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
