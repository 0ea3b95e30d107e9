//! What is asked: some pictures much more often than others, each time with another question.

use std::error::Error;
use std::path::Path;

use bytes::Bytes;
use fastrand::Rng;
use peers::body::Pieces;
use peers::numbers::Zipf;
use peers::picture::{self, Picture};

/// The name under which all sides serve the model.
pub(crate) const MODEL: &str = "serve";
/// Tokens of each answer.
pub(crate) const ANSWER_TOKENS: u64 = 16;
/// Pictures that are asked about.
const PICTURES: usize = 12;
/// Requests of a round.
const REQUESTS: usize = 96;
/// Seed of all that is drawn, so that each run asks the same. The number has no meaning.
const SEED: u64 = 20_261_124;

/// Makes requests, no two alike.
pub(crate) struct Workload {
    /// Each picture's file in base64, in two pieces.
    pictures: Vec<[Bytes; 2]>,
    /// Shares of the requests that are about each.
    law: Zipf,
    rng: Rng,
    made: u64,
}

impl Workload {
    /// A workload of the JPEG files in a folder. Where there are fewer than are asked about, some
    /// have the same pixels; no two are the same file, by which they are known, so that engines
    /// compute each.
    pub(crate) fn new(folder: &Path) -> Result<Self, Box<dyn Error>> {
        let files: Vec<Picture> =
            picture::read(folder)?.iter().map(|file| Picture::new(file)).collect::<Result<_, _>>()?;
        let pictures = files.iter().cycle().zip(0..PICTURES as u64).map(|(file, number)| file.numbered(number));
        let law = Zipf::new(PICTURES);
        Ok(Self { pictures: pictures.collect(), law, rng: Rng::with_seed(SEED), made: 0 })
    }

    /// A request for each picture.
    pub(crate) fn each(&mut self) -> Vec<Pieces> {
        (0..PICTURES).map(|picture| self.request(picture)).collect()
    }

    /// The requests of a round.
    pub(crate) fn round(&mut self) -> Vec<Pieces> {
        (0..REQUESTS)
            .map(|_| {
                let picture = self.law.draw(&mut self.rng);
                self.request(picture)
            })
            .collect()
    }

    /// A question about a picture that nobody has asked yet.
    fn request(&mut self, picture: usize) -> Pieces {
        self.made += 1;
        let head = format!(
            r#"{{"model":"{MODEL}","max_tokens":{ANSWER_TOKENS},"ignore_eos":true,"temperature":0,"stream":true,"stream_options":{{"include_usage":true}},"messages":[{{"role":"user","content":[{{"type":"image_url","image_url":{{"url":"data:image/jpeg;base64,"#
        );
        // The number always has eight digits, so that all questions are of equally many tokens or
        // nearly.
        let tail =
            format!(r#""}}}},{{"type":"text","text":"Question {:08}: what is in this picture?"}}]}}]}}"#, self.made);
        let [first, second] = self.pictures[picture].clone();
        [head.into(), first, second, tail.into()].into()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use http_body_util::BodyExt;

    #[tokio::test]
    async fn all_pictures_are_asked_about_the_first_most_often_and_no_request_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let file = [&[0xff, 0xd8, 0xff, 0xe0, 0, 4, 1, 2][..], &[0xff, 0xdb, 0, 3, 9], &[0xff, 0xd9]].concat();
        std::fs::write(dir.path().join("0.jpg"), file).unwrap();
        let mut workload = Workload::new(dir.path()).unwrap();
        let mut requests = workload.each();
        requests.extend((0..10).flat_map(|_| workload.round()));
        let mut bodies = Vec::new();
        for request in requests {
            let body = request.collect().await.unwrap().to_bytes();
            bodies.push(serde_json::from_slice::<serde_json::Value>(&body).unwrap());
        }
        let picture = |body: &serde_json::Value| {
            let url = body["messages"][0]["content"][0]["image_url"]["url"].as_str().unwrap();
            STANDARD.decode(url.strip_prefix("data:image/jpeg;base64,").unwrap()).unwrap()
        };
        let pictures: Vec<Vec<u8>> = bodies.iter().map(picture).collect();
        let count = |of: usize| pictures[PICTURES..].iter().filter(|picture| **picture == pictures[of]).count();
        let counts: Vec<usize> = (0..PICTURES).map(count).collect();
        assert_eq!(counts.iter().sum::<usize>(), 10 * REQUESTS);
        // 1 / 3.103 and 1 / 12 of that of 960.
        assert!((260..360).contains(&counts[0]) && (10..45).contains(&counts[11]), "{counts:?}");
        let unlike: std::collections::BTreeSet<String> = bodies.iter().map(ToString::to_string).collect();
        assert_eq!(unlike.len(), bodies.len());
    }
}
