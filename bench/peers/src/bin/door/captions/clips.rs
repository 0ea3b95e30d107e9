//! The clips, and requests about them.

use std::error::Error;
use std::fs;
use std::ops::Range;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;

use crate::pieces::Pieces;
use crate::workload::MODEL;

/// The number of clips before a measurement. They start a server's processes.
const BEFORE: usize = 20;
/// The number of tokens of a measured answer.
pub(super) const ANSWER_TOKENS: u64 = 4;
/// The number of tokens in which the simulated engine describes a clip, with a digest of its
/// pixels.
pub(super) const DESCRIPTION_TOKENS: u64 = 64;

/// Clips with different pixels, in base64.
pub(super) struct Clips(Vec<Bytes>);

impl Clips {
    /// Reads `measured` clips and [`BEFORE`] further ones from a folder, in the order of their
    /// names.
    pub(super) fn read(folder: &Path, measured: usize) -> Result<Self, Box<dyn Error>> {
        let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
        let mut paths = entries.collect::<Result<Vec<_>, std::io::Error>>()?;
        paths.sort();
        let count = BEFORE + measured;
        if paths.len() < count {
            let found = paths.len();
            return Err(format!("{} has {found} clips, not {count}", folder.display()).into());
        }
        let encode = |path| Ok::<_, std::io::Error>(STANDARD.encode(fs::read(path)?).into());
        Ok(Self(paths.iter().take(count).map(encode).collect::<Result<_, _>>()?))
    }

    /// Returns the numbers of the clips before a measurement.
    pub(super) fn before(&self) -> Range<usize> {
        0..BEFORE
    }

    /// Returns the numbers of the measured clips.
    pub(super) fn measured(&self) -> Range<usize> {
        BEFORE..self.0.len()
    }

    /// Returns the mean size of the files, to a few bytes.
    pub(super) fn mean_bytes(&self) -> f64 {
        let encoded: usize = self.0.iter().map(Bytes::len).sum();
        encoded as f64 / self.0.len() as f64 * 3.0 / 4.0
    }

    /// Returns the request for a caption of a clip.
    pub(super) fn request(&self, number: usize, tokens: u64) -> Pieces {
        let options = format!(r#""max_tokens":{tokens},"temperature":0"#);
        let message = r#"{"role":"user","content":[{"type":"video_url","video_url":"#;
        let head = format!(
            r#"{{"model":"{MODEL}",{options},"messages":[{message}{{"url":"data:video/mp4;base64,"#
        );
        // The number always has the same digits, so all texts have the same number of tokens.
        let text = format!("Caption {number:03}: what happens in this clip?");
        let tail = format!(r#""}}}},{{"type":"text","text":"{text}"}}]}}]}}"#);
        [Bytes::from(head), self.0[number].clone(), Bytes::from(tail)].into()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use http_body_util::BodyExt;
    use serde_json::Value;

    use super::*;

    #[tokio::test]
    async fn request_has_its_clip() {
        let dir = tempfile::tempdir().unwrap();
        for number in 0..BEFORE + 3 {
            fs::write(dir.path().join(format!("{number:03}.mp4")), [number as u8; 4]).unwrap();
        }
        let clips = Clips::read(dir.path(), 2).unwrap();
        assert_eq!((clips.before(), clips.measured()), (0..BEFORE, BEFORE..BEFORE + 2));
        let body = clips.request(BEFORE + 1, ANSWER_TOKENS).collect().await.unwrap().to_bytes();
        let json: Value = serde_json::from_slice(&body).unwrap();
        let [video, text] = &json["messages"][0]["content"].as_array().unwrap()[..] else {
            panic!("{json}");
        };
        let url = video["video_url"]["url"].as_str().unwrap();
        let file = STANDARD.decode(url.strip_prefix("data:video/mp4;base64,").unwrap()).unwrap();
        assert_eq!(file, [21; 4]);
        assert_eq!(text["text"], "Caption 021: what happens in this clip?");
        assert_eq!(json["max_tokens"], ANSWER_TOKENS);
        assert!(Clips::read(dir.path(), 4).is_err());
    }
}
