//! Measures reading the length of an hour of generated MP3, or of a file.
//!
//! Run with `cargo run --release -p chiasm-audio --example length [FILE]`.

use std::time::{Duration, Instant};

use chiasm_audio::{Loader, Recording};

/// An hour of MPEG-1 at 44.1 kHz.
const FRAMES: usize = 137_813;
/// A stereo frame of 128 kbit/s: 417 bytes.
const FRAME_HEADER: [u8; 4] = [0xFF, 0xFB, 0x90, 0x00];
const FRAME_BYTES: usize = 417;
const RUNS: usize = 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let file = match std::env::args().nth(1) {
        Some(path) => std::fs::read(path)?,
        None => {
            let mut frame = [0; FRAME_BYTES];
            frame[..FRAME_HEADER.len()].copy_from_slice(&FRAME_HEADER);
            frame.repeat(FRAMES)
        }
    };
    let loader = Loader::Sndfile { sndfile: "1.2.2".to_owned(), avformat: Some(62) };
    let recording = Recording::read(&file, &loader)?;
    println!("{recording:?}, {:.1} s, {} bytes", recording.seconds(), file.len());
    let mut times: Vec<Duration> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            std::hint::black_box(Recording::read(std::hint::black_box(&file), &loader))
                .map(drop)?;
            Ok(start.elapsed())
        })
        .collect::<Result<_, chiasm_audio::LengthError>>()?;
    times.sort();
    println!("median of {RUNS} runs: {:?}", times[RUNS / 2]);
    Ok(())
}
