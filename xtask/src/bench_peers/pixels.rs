//! Converts the results of `pixels run` to rows, with the project's targets.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::bench_peers::row::{Mandatory, OURS, Row, Target};

/// The name of the benchmark in rows and files.
pub(crate) const BENCH: &str = "pixels";
/// The name of the floor, a side that is a limit and not a peer.
pub(crate) const FLOOR: &str = "floor";
/// The metric of the share of a peer's values that differ from ours.
pub(crate) const DIFFERS: &str = "differing values";
/// The stages in the order of rows.
const STAGES: [&str; 5] = ["whole", "decode", "process", "resize", "layout"];

/// A line of the output of `pixels run`, whose fields are documented there.
#[derive(Debug, Deserialize)]
pub(crate) struct Measurement {
    case: String,
    side: String,
    times: BTreeMap<String, f64>,
    differs: Option<f64>,
    refused: Option<String>,
}

const QWEN2: &str = "qwen2_vl 1920x1080.jpg u8";
const QWEN3: &str = "qwen3_vl 1920x1080.jpg u8";
const LLM_MULTIMODAL: &str = "llm-multimodal";
const TRANSFORMERS: &str = "transformers";

/// The minimum ratios: case, stage, peer and ratio.
const TARGETS: [(&str, &str, &str, f64); 4] = [
    (QWEN2, "whole", LLM_MULTIMODAL, 2.5),
    (QWEN2, "resize", LLM_MULTIMODAL, 5.0),
    (QWEN3, "whole", LLM_MULTIMODAL, 1.8),
    (QWEN3, "resize", LLM_MULTIMODAL, 5.0),
];

/// The maximum time of `whole` for raw patches, as a multiple of the floor. `transformers` has no
/// target: it decodes about as fast as we do, so the floor alone is more than a quarter of its
/// time.
const FLOOR_LIMIT: f64 = 1.2;

/// The mandatory comparisons: all pictures of the models that take raw patches, and one picture of
/// each other format.
pub(crate) const MANDATORY: [Mandatory; 3] = [
    Mandatory {
        cases: &["qwen2_vl", "qwen3_vl"],
        ends: &[
            " 512x512.jpg u8",
            " 1024x1024.jpg u8",
            " 1920x1080.jpg u8",
            " 3840x2160.jpg u8",
            " 512x512.png u8",
            " 1024x1024.png u8",
            " 1920x1080.png u8",
            " 3840x2160.png u8",
        ],
        lines: &[("whole", FLOOR), ("whole", LLM_MULTIMODAL), ("whole", TRANSFORMERS)],
    },
    Mandatory { cases: &[QWEN2, QWEN3], ends: &[""], lines: &[("resize", LLM_MULTIMODAL)] },
    Mandatory {
        cases: &[
            "qwen2_vl 1920x1080.jpg f32",
            "qwen3_vl 1920x1080.jpg f32",
            "llava_1_5 1920x1080.jpg bf16",
            "llama4 1920x1080.jpg bf16",
        ],
        ends: &[""],
        lines: &[("whole", LLM_MULTIMODAL), ("whole", TRANSFORMERS)],
    },
];

/// Returns the cases that Chiasm does not support, with the reasons.
pub(crate) fn refusals(measurements: &[Measurement]) -> Vec<String> {
    let refusal = |it: &Measurement| Some(format!("{}: {}", it.case, it.refused.as_deref()?));
    measurements.iter().filter_map(refusal).collect()
}

/// Returns all rows of a run.
pub(crate) fn rows(measurements: &[Measurement], rounds: u32) -> Vec<Row> {
    let ours = measurements.iter().find(|it| it.refused.is_none()).map_or(OURS, |it| &it.side);
    let mut rows = vec![Row::rounds(BENCH, rounds, ours)];
    for case in measurements.chunk_by(|a, b| a.case == b.case) {
        if let [ours, peers @ ..] = case {
            rows.extend(peers.iter().flat_map(|peer| compare(ours, peer)));
        }
    }
    rows
}

/// Returns the rows of a case and a peer.
fn compare(ours: &Measurement, peer: &Measurement) -> Vec<Row> {
    let is_floor = peer.side == FLOOR;
    let equal = peer.differs.map(|share| share == 0.0);
    let mut rows = Vec::new();
    for stage in STAGES {
        let Some(peer_time) = peer.times.get(stage).copied() else { continue };
        // The floor has the same decoder as our side.
        if is_floor && stage == "decode" {
            continue;
        }
        let our_time = ours.times.get(stage).copied();
        let ratio = our_time
            .map(|our_time| if is_floor { our_time / peer_time } else { peer_time / our_time });
        let target = if is_floor {
            (stage == "whole" && ours.case.ends_with(" u8")).then_some(Target::AtMost(FLOOR_LIMIT))
        } else {
            let is_match = |it: &&(&str, &str, &str, f64)| {
                (it.0, it.1) == (&*ours.case, stage) && peer.side.starts_with(it.2)
            };
            TARGETS.iter().find(is_match).map(|it| Target::AtLeast(it.3))
        };
        let row = row(&ours.case, stage, "ms", &peer.side).numbers(our_time, Some(peer_time));
        let row = Row { equal, ..row }.judged(ratio, target);
        // The floor has no output. The output of a peer that was not compared reaches no target.
        rows.push(Row { ok: row.ok.map(|ok| ok && (is_floor || equal == Some(true))), ..row });
    }
    if let Some(share) = peer.differs.filter(|&share| share > 0.0) {
        let peer_share = Some((100.0 * share).max(0.001));
        rows.push(Row {
            equal,
            ..row(&ours.case, DIFFERS, "%", &peer.side).numbers(None, peer_share)
        });
    }
    rows
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::measured::parse;

    fn measurement(side: &str, whole: f64, differs: Option<f64>) -> Measurement {
        let times =
            BTreeMap::from([("whole".to_owned(), whole), ("decode".to_owned(), whole / 2.0)]);
        Measurement { case: QWEN3.to_owned(), side: side.to_owned(), times, differs, refused: None }
    }

    #[test]
    fn target_needs_ratio_with_equal_bits() {
        let ours = measurement("chiasm", 10.0, Some(0.0));
        let whole = |peer: &Measurement| compare(&ours, peer).remove(0);
        let row = whole(&measurement("llm-multimodal 1.14.0", 18.0, Some(0.0)));
        assert_eq!(
            (row.ratio, row.target, row.ok, row.equal),
            (Some(1.8), Some(1.8), Some(true), Some(true))
        );
        let row = whole(&measurement("llm-multimodal 1.14.0", 17.9, Some(0.0)));
        assert_eq!(row.ok, Some(false));
        let peer = measurement("llm-multimodal 1.14.0", 30.0, Some(0.25));
        assert_eq!((whole(&peer).ok, whole(&peer).equal), (Some(false), Some(false)));
        let differs = compare(&ours, &peer).pop().unwrap();
        assert_eq!(
            (differs.metric.as_str(), differs.peer, differs.unit),
            (DIFFERS, Some(25.0), "%")
        );
    }

    #[test]
    fn floor_is_upper_limit_of_ratio() {
        let mut ours = measurement("chiasm", 12.0, Some(0.0));
        let rows = compare(&ours, &measurement(FLOOR, 10.0, None));
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].ratio, rows[0].target, rows[0].ok), (Some(1.2), Some(1.2), Some(true)));
        let rows = compare(&ours, &measurement(FLOOR, 9.0, None));
        assert_eq!(rows[0].ok, Some(false));
        for (case, target) in
            [("qwen2_vl 512x512.png u8", Some(1.2)), ("qwen2_vl 1920x1080.jpg f32", None)]
        {
            ours.case = case.to_owned();
            assert_eq!(compare(&ours, &measurement(FLOOR, 10.0, None))[0].target, target);
        }
    }

    #[test]
    fn refused_case_is_row_without_our_time() {
        let text = r#"{"case":"x 1x1.png u8","side":"chiasm","times":{},"differs":null,"refused":"no such family"}"#;
        let peer = r#"{"case":"x 1x1.png u8","side":"p 1","times":{"whole":3.0},"differs":null,"refused":null}"#;
        let measurements = parse("pixels", &[text.to_owned(), peer.to_owned()]).unwrap();
        assert_eq!(refusals(&measurements), ["x 1x1.png u8: no such family"]);
        let rows = rows(&measurements, 15);
        assert_eq!(rows.len(), 2);
        assert_eq!(
            (rows[1].ours, rows[1].peer, rows[1].ratio, rows[1].equal),
            (None, Some(3.0), None, None)
        );
    }

    #[test]
    fn targets_are_found_by_case_stage_peer() {
        for (case, stage, peer, target) in TARGETS {
            let mut ours = measurement("chiasm", 1.0, Some(0.0));
            ours.case = case.to_owned();
            ours.times.insert(stage.to_owned(), 1.0);
            let mut peer = measurement(peer, 1.0, None);
            peer.times.insert(stage.to_owned(), 1.0);
            let rows = compare(&ours, &peer);
            assert!(rows.iter().any(|row| row.target == Some(target) && row.metric == stage));
        }
    }
}
