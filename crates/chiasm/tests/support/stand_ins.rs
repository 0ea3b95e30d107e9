//! Videos, recordings and texts that replace the demo's pictures: one of each per picture, all of
//! the same size.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use chiasm::scenarios::{PICTURES, Picture};
use serde_json::{Value, json};

/// Returns the video or recording that replaces picture number `picture`.
pub fn file(modality: &str, picture: usize) -> Vec<u8> {
    match modality {
        "video" => video(picture),
        "audio" => recording(picture),
        other => panic!("pictures have no replacement of modality {other}"),
    }
}

/// Replaces the pictures of a request. URLs of pictures are replaced by URLs at `origin`.
pub fn replace_pictures(body: &mut Value, modality: &str, origin: &str) {
    let parts = body["messages"][0]["content"].as_array_mut().expect("parts");
    for part in parts.iter_mut().filter(|part| part["type"] == "image_url") {
        let url = part["image_url"]["url"].as_str().expect("a URL");
        let is_at_url = |picture: &Picture| {
            url.ends_with(picture.name) || url.ends_with(&STANDARD.encode(picture.jpeg))
        };
        let number = PICTURES.iter().position(is_at_url).expect("one of the pictures");
        if modality == "text" {
            *part = json!({"type": "text", "text": text(number)});
            continue;
        }
        let url = if url.starts_with("http") {
            format!("{origin}/{modality}/{number}")
        } else {
            format!("data:;base64,{}", STANDARD.encode(file(modality, number)))
        };
        let field = format!("{modality}_url");
        *part = json!({"type": field, (field.clone()): {"url": url}});
    }
}

/// Returns a text of several blocks, different for each number.
fn text(number: usize) -> String {
    let words = ["dawn", "noon", "dusk", "night", "storm", "snow"];
    let word = words[number % words.len()];
    (0..60).map(|at| format!(" {word} {at}")).collect()
}

/// Returns the same video with `number` in an MP4 box that decoders ignore, so that files differ.
fn video(number: usize) -> Vec<u8> {
    let clip = std::fs::read(format!("{}/tests/clips/silent.mp4", env!("CARGO_MANIFEST_DIR")))
        .expect("a clip");
    [&clip[..], &16_u32.to_be_bytes(), b"free", &(number as u64).to_be_bytes()].concat()
}

/// Returns a WAV file with a tone of five seconds, different for each number: 16,000 samples of
/// 16 bits per second.
fn recording(number: usize) -> Vec<u8> {
    const RATE: u32 = 16_000;
    let step = 0.05 * (number + 1) as f32;
    let samples =
        (0..5 * RATE).flat_map(|at| (((at as f32 * step).sin() * 9_000.0) as i16).to_le_bytes());
    let samples: Vec<u8> = samples.collect();
    let size = samples.len() as u32;
    let format = [
        &16_u32.to_le_bytes()[..],
        &[1, 0, 1, 0],
        &RATE.to_le_bytes(),
        &(2 * RATE).to_le_bytes(),
        &[2, 0, 16, 0],
    ];
    [
        b"RIFF",
        &(36 + size).to_le_bytes()[..],
        b"WAVEfmt ",
        &format.concat(),
        b"data",
        &size.to_le_bytes(),
        &samples,
    ]
    .concat()
}
