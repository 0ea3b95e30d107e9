//! Properties that hold for any bytes. The fuzz target `recording` includes this file.

use chiasm_audio::{AudioFamily, AudioModel, Extractor, Loader, Recording};

/// The most samples of a frame or packet, of which the smallest has a byte.
const MAX_SAMPLES_PER_BYTE: u64 = 65_536;

const EXTRACTOR: Extractor =
    Extractor { sampling_rate: 16_000, hop_length: 160, max_samples: 480_000, features: 128 };

/// Returns the loaders whose lengths are known.
pub(crate) fn loaders() -> [Loader; 2] {
    [
        Loader::Sndfile { sndfile: "1.2.2".to_owned(), avformat: Some(62) },
        Loader::Torchcodec { ffmpeg: Some(8) },
    ]
}

/// Reads the length of a recording for each loader, and computes its size in each model. Asserts
/// that they are plausible. Returns `true` if there was a length.
pub(crate) fn length_and_size(file: &[u8]) -> bool {
    let mut has_length = false;
    for loader in loaders() {
        let Ok(recording) = Recording::read(file, &loader) else { continue };
        has_length = true;
        assert!(recording.rate >= 1 && recording.samples >= 1, "{recording:?}");
        assert!((1..=8).contains(&recording.channels), "{recording:?}");
        assert!(recording.samples <= file.len() as u64 * MAX_SAMPLES_PER_BYTE, "{recording:?}");
        for family in [AudioFamily::Qwen2Audio, AudioFamily::Qwen25Omni, AudioFamily::Qwen3Omni] {
            let model = AudioModel::new(family, EXTRACTOR).expect("a valid extractor");
            if let Ok(size) = model.size(recording.samples, recording.rate) {
                assert!(size.tokens >= 1 && size.elements >= 128, "{recording:?}: {size:?}");
            }
        }
    }
    has_length
}
