//! Cuts decoded by OpenCV, whose frames must be those of the whole file.
//!
//! Needs `CHIASM_TEST_VLLM`, a program beside the Python that has OpenCV, so the test is ignored
//! unless `cargo xtask test` runs it.

use std::path::{Path, PathBuf};
use std::process::Command;

use chiasm_video::VideoIndex;

use crate::clips::{Clip, clips, directory};
use crate::cuts::cuts;

#[test]
#[ignore = "needs OpenCV: `cargo xtask test` runs it"]
fn cuts_decode_to_the_frames_of_the_whole_file() {
    let vllm = std::env::var_os("CHIASM_TEST_VLLM").expect("set CHIASM_TEST_VLLM");
    let python = Path::new(&vllm).with_file_name("python");
    let folder = tempfile::tempdir().unwrap();
    let mut manifest = Vec::new();
    for Clip { name, file, golden } in clips() {
        let Ok(index) = VideoIndex::read(&file) else { continue };
        if golden["rgb_sha256"].is_null() {
            continue;
        }
        for (_, cut) in cuts(&index, &file) {
            for part in &cut.parts {
                let path = format!("{}.mp4", manifest.len());
                std::fs::write(folder.path().join(&path), part.to_vec(&file)).unwrap();
                let frames: Vec<(u64, u32)> =
                    part.frames.iter().map(|frame| (frame.frame, frame.position)).collect();
                manifest.push(serde_json::json!({
                    "clip": directory().join(&name), "file": path,
                    "samples": part.samples, "frames": frames,
                }));
            }
        }
    }
    let manifest = serde_json::to_vec(&manifest).unwrap();
    std::fs::write(folder.path().join("manifest.json"), manifest).unwrap();
    let script: PathBuf =
        [env!("CARGO_MANIFEST_DIR"), "../../python/video_goldens/check_cuts.py"].iter().collect();
    let output = Command::new(python).arg(script).arg(folder.path()).output().unwrap();
    println!("{}", String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
