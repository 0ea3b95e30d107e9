//! Turns what `peers pixels` measured into rows, with the targets that the project has set itself.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::bench_peers::row::{Mandatory, Row, rounded};
use crate::error::Error;

/// The bench's name in rows and files.
pub(crate) const BENCH: &str = "pixels";
/// The side that is a limit and no peer.
pub(crate) const FLOOR: &str = "floor";
/// The metric of how many of a peer's values are not ours.
pub(crate) const DIFFERS: &str = "differing values";
/// The metric that tells how many rounds the medians are of, in a row that has our own name for the peer's.
pub(crate) const ROUNDS: &str = "rounds";
/// The stages, in the order of rows.
const STAGES: [&str; 5] = ["whole", "decode", "process", "resize", "layout"];

/// A line of `peers pixels`; documented there.
#[derive(Debug, Deserialize)]
pub(crate) struct Measurement {
    case: String,
    side: String,
    times: BTreeMap<String, f64>,
    differs: Option<f64>,
    refused: Option<String>,
}

/// A ratio to reach against a peer.
struct Target {
    case: &'static str,
    stage: &'static str,
    peer: &'static str,
    ratio: f64,
}

const fn target(case: &'static str, stage: &'static str, peer: &'static str, ratio: f64) -> Target {
    Target { case, stage, peer, ratio }
}

const QWEN2: &str = "qwen2_vl 1920x1080.jpg u8";
const QWEN3: &str = "qwen3_vl 1920x1080.jpg u8";
const LLM_MULTIMODAL: &str = "llm-multimodal";
const TRANSFORMERS: &str = "transformers";

const TARGETS: [Target; 4] = [
    target(QWEN2, "whole", LLM_MULTIMODAL, 2.5),
    target(QWEN2, "resize", LLM_MULTIMODAL, 5.0),
    target(QWEN3, "whole", LLM_MULTIMODAL, 1.8),
    target(QWEN3, "resize", LLM_MULTIMODAL, 5.0),
];

/// What `whole` may take of raw patches, in times of the floor. `transformers` has no target: it decodes about as fast as we
/// do, so that the floor alone is more than a quarter of its time.
const OF_THE_FLOOR: f64 = 1.2;

/// Every picture of the models that take raw patches, and one of each other format.
pub(crate) const MANDATORY: [Mandatory; 3] = [
    Mandatory {
        cases: &[
            "qwen2_vl 512x512.jpg u8",
            "qwen2_vl 1024x1024.jpg u8",
            QWEN2,
            "qwen2_vl 3840x2160.jpg u8",
            "qwen2_vl 512x512.png u8",
            "qwen2_vl 1024x1024.png u8",
            "qwen2_vl 1920x1080.png u8",
            "qwen2_vl 3840x2160.png u8",
            "qwen3_vl 512x512.jpg u8",
            "qwen3_vl 1024x1024.jpg u8",
            QWEN3,
            "qwen3_vl 3840x2160.jpg u8",
            "qwen3_vl 512x512.png u8",
            "qwen3_vl 1024x1024.png u8",
            "qwen3_vl 1920x1080.png u8",
            "qwen3_vl 3840x2160.png u8",
        ],
        lines: &[("whole", FLOOR), ("whole", LLM_MULTIMODAL), ("whole", TRANSFORMERS)],
    },
    Mandatory { cases: &[QWEN2, QWEN3], lines: &[("resize", LLM_MULTIMODAL)] },
    Mandatory {
        cases: &[
            "qwen2_vl 1920x1080.jpg f32",
            "qwen3_vl 1920x1080.jpg f32",
            "llava_1_5 1920x1080.jpg bf16",
            "llama4 1920x1080.jpg bf16",
        ],
        lines: &[("whole", LLM_MULTIMODAL), ("whole", TRANSFORMERS)],
    },
];

/// Parses the lines. They come case by case, ours first in each.
pub(crate) fn parse(lines: &[String]) -> Result<Vec<Measurement>, Error> {
    let what = "what peers pixels printed";
    let parse = |line: &String| serde_json::from_str(line);
    lines.iter().map(parse).collect::<Result<_, _>>().map_err(|source| Error::Json { what: what.to_owned(), source })
}

/// What Chiasm does not do yet, by case.
pub(crate) fn refusals(measurements: &[Measurement]) -> Vec<String> {
    let refusal = |it: &Measurement| Some(format!("{}: {}", it.case, it.refused.as_deref()?));
    measurements.iter().filter_map(refusal).collect()
}

/// All rows of a run.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32) -> Vec<Row> {
    let ours = measurements.iter().find(|it| it.refused.is_none()).map_or("chiasm", |it| &it.side);
    let rounds = Some(f64::from(rounds));
    let mut rows =
        vec![Row { metric: ROUNDS.to_owned(), unit: "rounds", ours: rounds, peer: rounds, ..row("all", ours) }];
    for case in measurements.chunk_by(|a, b| a.case == b.case) {
        if let [ours, peers @ ..] = case {
            rows.extend(peers.iter().flat_map(|peer| compare(ours, peer)));
        }
    }
    rows
}

/// The rows of one case and peer.
fn compare(ours: &Measurement, peer: &Measurement) -> Vec<Row> {
    let floor = peer.side == FLOOR;
    let equal = peer.differs.map(|share| share == 0.0);
    let mut rows = Vec::new();
    for stage in STAGES {
        let (our_time, peer_time) = (ours.times.get(stage).copied(), peer.times.get(stage).copied());
        // The floor's decoding is ours.
        if peer_time.is_none() || (floor && stage == "decode") {
            continue;
        }
        let ratio = our_time.zip(peer_time).map(|(ours, peer)| if floor { ours / peer } else { peer / ours });
        let target = if floor {
            (stage == "whole" && ours.case.ends_with(" u8")).then_some(OF_THE_FLOOR)
        } else {
            let is = |it: &&Target| it.case == ours.case && it.stage == stage && peer.side.starts_with(it.peer);
            TARGETS.iter().find(is).map(|target| target.ratio)
        };
        let reached = |target: f64| match ratio {
            Some(ratio) if floor => ratio <= target,
            Some(ratio) => ratio >= target && equal == Some(true),
            None => false,
        };
        rows.push(Row {
            metric: stage.to_owned(),
            ours: our_time.map(rounded),
            peer: peer_time.map(rounded),
            ratio: ratio.map(rounded),
            target,
            ok: target.map(reached),
            equal,
            ..row(&ours.case, &peer.side)
        });
    }
    if let Some(share) = peer.differs.filter(|&share| share > 0.0) {
        rows.push(Row {
            metric: DIFFERS.to_owned(),
            unit: "%",
            peer: Some(rounded(100.0 * share).max(0.001)),
            equal,
            ..row(&ours.case, &peer.side)
        });
    }
    rows
}

fn row(case: &str, peer: &str) -> Row {
    Row::milliseconds(BENCH, case, peer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(side: &str, whole: f64, differs: Option<f64>) -> Measurement {
        let times = BTreeMap::from([("whole".to_owned(), whole), ("decode".to_owned(), whole / 2.0)]);
        Measurement { case: QWEN3.to_owned(), side: side.to_owned(), times, differs, refused: None }
    }

    #[test]
    fn a_target_is_reached_by_the_ratio_and_only_with_equal_bits() {
        let ours = measurement("chiasm", 10.0, Some(0.0));
        let whole = |peer: &Measurement| compare(&ours, peer).remove(0);
        let row = whole(&measurement("llm-multimodal 1.14.0", 18.0, Some(0.0)));
        assert_eq!((row.ratio, row.target, row.ok, row.equal), (Some(1.8), Some(1.8), Some(true), Some(true)));
        let row = whole(&measurement("llm-multimodal 1.14.0", 17.9, Some(0.0)));
        assert_eq!(row.ok, Some(false));
        let peer = measurement("llm-multimodal 1.14.0", 30.0, Some(0.25));
        assert_eq!((whole(&peer).ok, whole(&peer).equal), (Some(false), Some(false)));
        let differs = compare(&ours, &peer).pop().unwrap();
        assert_eq!((differs.metric.as_str(), differs.peer, differs.unit), (DIFFERS, Some(25.0), "%"));
    }

    #[test]
    fn the_floor_is_a_limit_from_below() {
        let mut ours = measurement("chiasm", 12.0, Some(0.0));
        let rows = compare(&ours, &measurement(FLOOR, 10.0, None));
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].ratio, rows[0].target, rows[0].ok), (Some(1.2), Some(1.2), Some(true)));
        let rows = compare(&ours, &measurement(FLOOR, 9.0, None));
        assert_eq!(rows[0].ok, Some(false));
        for (case, target) in [("qwen2_vl 512x512.png u8", Some(1.2)), ("qwen2_vl 1920x1080.jpg f32", None)] {
            ours.case = case.to_owned();
            assert_eq!(compare(&ours, &measurement(FLOOR, 10.0, None))[0].target, target);
        }
    }

    #[test]
    fn what_we_refuse_is_a_row_without_our_time_and_named() {
        let text = r#"{"case":"x 1x1.png u8","side":"chiasm","times":{},"differs":null,"refused":"no such family"}"#;
        let peer = r#"{"case":"x 1x1.png u8","side":"p 1","times":{"whole":3.0},"differs":null,"refused":null}"#;
        let measurements = parse(&[text.to_owned(), peer.to_owned()]).unwrap();
        assert_eq!(refusals(&measurements), ["x 1x1.png u8: no such family"]);
        let rows = rows(&measurements, 15);
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[1].ours, rows[1].peer, rows[1].ratio, rows[1].equal), (None, Some(3.0), None, None));
    }

    #[test]
    fn every_target_can_be_found() {
        for target in TARGETS {
            let mut ours = measurement("chiasm", 1.0, Some(0.0));
            ours.case = target.case.to_owned();
            ours.times.insert(target.stage.to_owned(), 1.0);
            let mut peer = measurement(target.peer, 1.0, None);
            peer.times.insert(target.stage.to_owned(), 1.0);
            let rows = compare(&ours, &peer);
            assert!(rows.iter().any(|row| row.target == Some(target.ratio) && row.metric == target.stage));
        }
    }
}
