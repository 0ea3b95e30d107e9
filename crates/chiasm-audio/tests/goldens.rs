//! Lengths, tokens and tensors equal those of vLLM 0.32 and 0.33.
//!
//! The results are in `tests/recordings`, from `python/audio_goldens`; both releases give the same.

use chiasm_audio::{AudioFamily, AudioModel, AudioSize, Extractor, Loader, Recording};
use serde_json::{Value, json};

use crate::properties::loaders;
use crate::recordings::{TestRecording, json, recordings};

/// The recordings whose lengths are not known, with the cause. vLLM refuses some of them.
const UNKNOWN: [(&str, &str); 11] = [
    ("tone_16k_cut.flac", "frames"),
    ("tone_16k_without_length.flac", "no_length"),
    ("tone_24k_hidden_extension.m4a", "extension"),
    ("tone_cbr_cut.mp3", "truncated"),
    ("tone_cut.m4a", "truncated"),
    ("tone_fragments.m4a", "fragments"),
    ("tone_quicktime.mov", "encoding"),
    ("wav_empty", "empty"),
    ("wav_size_of_zero", "chunks"),
    ("wav_size_too_small", "chunks"),
    ("wav_unknown_chunk", "chunks"),
];

/// The recordings whose lengths are known with libsndfile only.
const UNKNOWN_WITH_TORCHCODEC: [&str; 4] =
    ["tone_lame_short.mp3", "wav_cut", "wav_cut_inside_a_sample", "wav_size_too_large"];

fn check_length(recording: &TestRecording, loader: &Loader, expected: &Value) -> bool {
    let name = recording.name.as_str();
    match Recording::read(&recording.file, loader) {
        Ok(Recording { rate, samples, .. }) => {
            assert_eq!(&json!({"rate": rate, "samples": samples}), expected, "{name} {loader:?}");
            true
        }
        Err(error) => {
            let known = UNKNOWN.iter().find(|(unknown, _)| *unknown == name);
            let is_expected = match (known, loader) {
                (Some((_, cause)), _) => *cause == error.cause(),
                (None, Loader::Torchcodec { .. }) => UNKNOWN_WITH_TORCHCODEC.contains(&name),
                (None, _) => false,
            };
            assert!(is_expected, "{name} {loader:?}: {}", error.cause());
            false
        }
    }
}

#[test]
fn lengths_equal_those_of_vllms_loaders() {
    let [sndfile, torchcodec] = loaders();
    let index = json("index.json");
    assert_eq!(index["loader"], json!({"name": "sndfile", "sndfile": "1.2.2", "avformat": 62}));
    let by_torchcodec = json("torchcodec.json");
    assert_eq!(by_torchcodec["loader"], json!({"name": "torchcodec", "ffmpeg": 8}));
    let mut known = [0, 0];
    for recording in recordings() {
        let name = &recording.name;
        let expected = &recording.expected["length"];
        known[0] += usize::from(check_length(&recording, &sndfile, expected));
        let expected = &by_torchcodec["lengths"][name];
        known[1] += usize::from(check_length(&recording, &torchcodec, expected));
    }
    assert!(known.iter().all(|&known| known >= 50), "{known:?}");
}

#[test]
fn sizes_equal_those_of_vllms_processor() {
    let [sndfile, _] = loaders();
    let models = json("index.json")["models"].clone();
    for (name, description) in models.as_object().unwrap() {
        let model = model(description);
        let mut sizes = 0;
        for recording in recordings() {
            let Ok(read) = Recording::read(&recording.file, &sndfile) else { continue };
            let expected = &recording.expected[name];
            match model.size(read.samples, read.rate) {
                Ok(AudioSize { tokens, elements }) => {
                    let size = json!({"tokens": tokens, "elements": elements});
                    assert_eq!(&size, expected, "{name} {}", recording.name);
                    sizes += 1;
                }
                Err(error) => {
                    assert_eq!(error.cause(), "empty", "{name} {}", recording.name);
                    assert!(expected.is_null(), "{name} {}", recording.name);
                }
            }
        }
        assert!(sizes >= 48, "{name}: {sizes}");
    }
}

/// Returns the model of a processor's own description.
fn model(description: &Value) -> AudioModel {
    let number = |key: &str| description["extractor"][key].as_u64().unwrap();
    assert_eq!(description["extractor"]["kind"], "WhisperFeatureExtractor");
    let extractor = Extractor {
        sampling_rate: number("sampling_rate") as u32,
        hop_length: number("hop_length") as u32,
        max_samples: number("max_samples"),
        features: number("features") as u32,
    };
    let class = description["processor"].as_str().unwrap();
    AudioModel::new(AudioFamily::from_processor_class(class).unwrap(), extractor).unwrap()
}
