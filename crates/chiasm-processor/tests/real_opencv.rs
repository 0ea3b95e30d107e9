//! Frames of cuts by the real processor, which must be those that vLLM reads from the whole file.
//!
//! Needs `CHIASM_TEST_VLLM`, the program, and `CHIASM_TEST_MODELS`, a folder of models, so the
//! tests are ignored unless `cargo xtask test` runs them.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use chiasm_processor::{
    FrameReader, FramesCall, ItemLimits, Processor, ProcessorError, ProcessorOptions, Sandbox,
    find_python,
};
use chiasm_video::{CutPart, Piece, VideoIndex};
use serde_json::{Map, Value};
use tempfile::TempDir;

use crate::processor::{is_alive, wait_end};

fn variable(name: &str) -> PathBuf {
    let value = std::env::var_os(name);
    value.unwrap_or_else(|| panic!("{name} is not set; run `cargo xtask test`")).into()
}

fn clips() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../chiasm-video/tests/clips"].iter().collect()
}

fn python() -> PathBuf {
    find_python(&variable("CHIASM_TEST_VLLM")).unwrap()
}

async fn start() -> Processor {
    let options = ProcessorOptions {
        python: python(),
        model: variable("CHIASM_TEST_MODELS").join("qwen2vl"),
        vllm_flags: vec!["--dtype".to_owned(), "float32".to_owned()],
        children: 2,
        queue: 256,
        timeout: Duration::from_secs(60),
        startup_timeout: Duration::from_secs(300),
        restart_pause: Duration::ZERO,
        item_bytes: 1 << 30,
        address_space: 16 << 30,
        limits: ItemLimits::default(),
        sandbox: Sandbox::Auto,
    };
    Processor::start(options).await.unwrap()
}

/// vLLM's own loader in a process of its own.
struct WholeFrames {
    process: Child,
    folder: TempDir,
}

impl WholeFrames {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/whole_frames.py");
        let mut command = Command::new(python());
        command.arg("-B").arg(script).arg(clips()).arg(folder.path());
        let process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        Self { process, folder }
    }

    /// Returns the RGB bytes of each frame of the clips.
    fn read(mut self, names: &[String], frame_bytes: &[usize]) -> Vec<Vec<Vec<u8>>> {
        let mut input = self.process.stdin.take().unwrap();
        input.write_all((names.join("\n") + "\n").as_bytes()).unwrap();
        drop(input);
        let lines = BufReader::new(self.process.stdout.take().unwrap()).lines();
        let lines: Vec<String> = lines.map(Result::unwrap).collect();
        assert!(self.process.wait().unwrap().success());
        assert_eq!(lines.last(), names.last());
        let read = |(name, &bytes): (&String, &usize)| {
            let file = std::fs::read(self.folder.path().join(name)).unwrap();
            file.chunks(bytes).map(<[u8]>::to_vec).collect()
        };
        names.iter().zip(frame_bytes).map(read).collect()
    }
}

/// A clip that has an index and always decodes to the same frames.
struct Clip {
    name: String,
    file: Bytes,
    index: VideoIndex,
}

impl Clip {
    fn read(name: &str) -> Option<Self> {
        let file = Bytes::from(std::fs::read(clips().join(name)).unwrap());
        let index = VideoIndex::read(&file).ok()?;
        Some(Self { name: name.to_owned(), file, index })
    }

    fn read_all() -> Vec<Self> {
        let index = std::fs::read(clips().join("index.json")).unwrap();
        let index: Map<String, Value> = serde_json::from_slice(&index).unwrap();
        let stable = index.iter().filter(|(_, golden)| !golden["rgb_sha256"].is_null());
        stable.filter_map(|(name, _)| Self::read(name)).collect()
    }

    fn frame_bytes(&self) -> usize {
        self.index.properties().width as usize * self.index.properties().height as usize * 3
    }

    /// Returns some sets of frames.
    fn wanted_sets(&self) -> Vec<Vec<u64>> {
        let properties = self.index.properties();
        let frames = properties.visible_frames.min(properties.frames);
        let spread = |count: u64| -> Vec<u64> {
            let numbers = (0..count).map(|number| number * (frames - 1) / (count - 1));
            numbers.collect::<BTreeSet<_>>().into_iter().collect()
        };
        vec![vec![frames / 2], spread(3), spread(8), (0..frames).collect()]
    }

    fn call(&self, part: &CutPart) -> FramesCall {
        let piece = |piece: &Piece| match piece {
            Piece::Bytes(bytes) => Bytes::copy_from_slice(bytes),
            Piece::File(range) => self.file.slice(range.clone()),
        };
        FramesCall {
            pieces: part.pieces.iter().map(piece).collect(),
            samples: part.samples.into(),
            positions: part.frames.iter().map(|frame| frame.position.into()).collect(),
            width: self.index.properties().width,
            height: self.index.properties().height,
        }
    }
}

async fn read_all(mut reader: FrameReader) -> Result<Vec<Bytes>, ProcessorError> {
    let mut frames = Vec::new();
    while let Some(frame) = reader.next().await? {
        frames.push(frame);
    }
    Ok(frames)
}

async fn decode(processor: &Processor, call: FramesCall) -> Result<Vec<Bytes>, ProcessorError> {
    read_all(processor.frames(call).await?).await
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn frames_of_cuts_equal_those_of_whole_files() {
    let clips = Clip::read_all();
    let whole = WholeFrames::start();
    let processor = start().await;
    let names: Vec<String> = clips.iter().map(|clip| clip.name.clone()).collect();
    let frame_bytes: Vec<usize> = clips.iter().map(Clip::frame_bytes).collect();
    let whole = whole.read(&names, &frame_bytes);
    let mut files = BTreeSet::new();
    let mut equal = 0;
    let mut wrong = Vec::new();
    for (clip, whole) in clips.iter().zip(&whole) {
        if whole.is_empty() {
            // vLLM seeks to the end and back to count frames, and then reads nothing of this clip.
            assert_eq!(clip.name, "h264_one_frame.mp4");
            continue;
        }
        for wanted in clip.wanted_sets() {
            for parts in [1, 3] {
                let Ok(cut) = clip.index.cut_into(&clip.file, &wanted, parts) else { continue };
                // The parts are decoded at the same time.
                let tasks: Vec<_> = cut
                    .parts
                    .iter()
                    .map(|part| {
                        let processor = processor.clone();
                        let call = clip.call(part);
                        tokio::spawn(async move { decode(&processor, call).await })
                    })
                    .collect();
                for (part, task) in cut.parts.iter().zip(tasks) {
                    let frames = match task.await.unwrap() {
                        Ok(frames) => frames,
                        Err(error) => {
                            wrong.push(format!("{}: {error}", clip.name));
                            continue;
                        }
                    };
                    assert_eq!(frames.len(), part.frames.len(), "{}", clip.name);
                    for (number, frame) in part.frames.iter().zip(frames) {
                        files.insert(&clip.name);
                        if whole.get(number.frame as usize).is_some_and(|whole| *whole == frame) {
                            equal += 1;
                        } else {
                            wrong.push(format!("{}: frame {} differs", clip.name, number.frame));
                        }
                    }
                }
            }
        }
    }
    println!("{equal} frames of {} clips are equal", files.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(files.len() > 60 && equal > 10_000, "{equal} frames of {files:?}");
    // All that ran in the sandbox, unless the kernel has none.
    let has_landlock = std::env::var_os("CHIASM_NO_LANDLOCK").is_none();
    assert_eq!(processor.greeting().sandbox, has_landlock);
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn damaged_file_is_an_error_of_its_own() {
    let processor = start().await;
    let clip = Clip::read("h264.mp4").unwrap();
    let cut = clip.index.cut(&clip.file, &[0, 20, 59]).unwrap();
    let good = clip.call(&cut.parts[0]);
    assert_eq!(decode(&processor, good.clone()).await.unwrap().len(), 3);
    let shortened = |bytes: usize| {
        let file = good.pieces.concat();
        vec![Bytes::copy_from_slice(&file[..file.len() - bytes])]
    };
    let zeroed: Vec<Bytes> =
        good.pieces.iter().map(|piece| Bytes::from(vec![0; piece.len()])).collect();
    for (name, call) in [
        ("a sample too many", FramesCall { samples: good.samples + 1, ..good.clone() }),
        ("a sample too few", FramesCall { samples: good.samples - 1, ..good.clone() }),
        ("another size", FramesCall { width: 96, height: 160, ..good.clone() }),
        ("the end is missing", FramesCall { pieces: shortened(3000), ..good.clone() }),
        ("no header", FramesCall { pieces: zeroed, ..good.clone() }),
        ("no file", FramesCall { pieces: Vec::new(), ..good.clone() }),
    ] {
        let positions = good.positions.iter().copied().filter(|&at| at < call.samples).collect();
        let error = decode(&processor, FramesCall { positions, ..call }).await.unwrap_err();
        println!("{name}: {error}");
        assert!(matches!(error, ProcessorError::OtherFrames(_)), "{name}: {error}");
    }
    assert_eq!(decode(&processor, good).await.unwrap().len(), 3);
}

/// Returns the running processes that `parent` has started.
fn processes_of(parent: usize) -> Vec<usize> {
    let names = std::fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap().file_name());
    let ids = names.filter_map(|name| name.to_str()?.parse().ok());
    let parent = format!("PPid:\t{parent}");
    let is_child = |id: &usize| {
        std::fs::read_to_string(format!("/proc/{id}/status"))
            .is_ok_and(|status| status.lines().any(|line| line == parent))
    };
    ids.filter(is_child).filter(|&id| is_alive(id)).collect()
}

#[tokio::test]
#[ignore = "needs vLLM: `cargo xtask test` runs it"]
async fn dropped_reader_ends_the_decoding() {
    let processor = start().await;
    let clip = Clip::read("h264.mp4").unwrap();
    let cut = clip.index.cut(&clip.file, &(0..60).collect::<Vec<_>>()).unwrap();
    let mut reader = processor.frames(clip.call(&cut.parts[0])).await.unwrap();
    assert_eq!(reader.next().await.unwrap().unwrap().len(), clip.frame_bytes());
    let own = std::process::id() as usize;
    let children: Vec<usize> = processes_of(own).into_iter().flat_map(processes_of).collect();
    assert_eq!(children.len(), 1, "{children:?}");
    let start = Instant::now();
    drop(reader);
    wait_end(children[0]).await;
    println!("the child ended within {:?}", start.elapsed());
    assert_eq!(decode(&processor, clip.call(&cut.parts[0])).await.unwrap().len(), 60);
}
