//! Converts the results of `bench/processor/measure.py` to rows, with the project's targets.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::bench_peers::door_peers::DYNAMO;
use crate::bench_peers::load::Load;
use crate::bench_peers::measured::{self, Measurement};
use crate::bench_peers::row::{Mandatory, OURS, Row, Target};
use crate::error::Error;

/// The name of the benchmark in rows and files.
pub(crate) const BENCH: &str = "processor";
/// The beginnings of the names of the other sides.
pub(crate) const RENDER: &str = "vllm launch render";
pub(crate) const NO_TENSORS: &str = "render without tensors";
pub(crate) const ONE_PROCESS: &str = "one process";
pub(crate) const ALONE: &str = "decoding and processing alone";
/// The case of values of the whole run.
const ALL: &str = "all";
/// The metric of the number of processes that make items.
pub(crate) const HELPERS: &str = "helpers";
/// The metric of the size of a file.
pub(crate) const FILE: &str = "file";
/// The metric of the number of tokens of a prompt with one item.
pub(crate) const PROMPT: &str = "prompt";
/// The metric of equality. In its row, `ours` is the number of compared prompts or items and `peer`
/// the number of those that differ.
pub(crate) const DIFFERENT: &str = "others";
/// The metric of a frontend's CPU time for a request.
pub(crate) const CPU: &str = "CPU per request";
pub(crate) const LATENCY: &str = "latency p50";
/// The metric of the rate of items, made one after the other or by all helpers.
pub(crate) const RATE: &str = "items per second";
pub(crate) const ITEM_CPU: &str = "CPU per item";
/// The metric of the time of a call, measured by a frontend.
pub(crate) const CALL: &str = "one call";
pub(crate) const CLIPS_PER_CORE: &str = "clips per second of CPU time";
pub(crate) const CLIPS: &str = "clips per second";
/// The metric of the number of concurrent clips.
pub(crate) const CONCURRENT_CLIPS: &str = "clips at once";

/// The end of the name of a case that compares our repeated item with a peer's new item.
const COLD: &str = "theirs new";
/// The end of the name of a case that compares our repeated item with a peer's repeated item.
const WARM: &str = "theirs repeated too";
/// The case of many clips.
const CAPTIONING: &str = "captioning of clips";

/// The minimum ratio for [`COLD`].
const COLD_TARGET: f64 = 20.0;
/// The minimum ratio for [`WARM`].
const WARM_TARGET: f64 = 3.0;
/// The minimum rate of each helper as a part of the rate of one process alone.
const HELPER_TARGET: f64 = 0.8;
/// The maximum time of a call for a picture, as a multiple of decoding and processing it.
const CALL_LIMIT: f64 = 1.1;

pub(crate) const MANDATORY: [Mandatory; 6] = [
    Mandatory {
        cases: &["repeated image", "repeated video"],
        ends: &[", theirs new", ", theirs repeated too"],
        lines: &IN_FRONTENDS,
    },
    Mandatory { cases: &["new image", "new video"], ends: &[""], lines: &IN_FRONTENDS },
    Mandatory { cases: &["new images", "new videos"], ends: &[""], lines: &[(RATE, ALONE)] },
    Mandatory { cases: &["new image", "new video"], ends: &[""], lines: &[(CALL, ALONE)] },
    Mandatory {
        cases: &[CAPTIONING],
        ends: &[""],
        lines: &[(CLIPS_PER_CORE, ALONE), (CLIPS, ALONE)],
    },
    Mandatory {
        cases: &["image", "video"],
        ends: &[""],
        lines: &[
            (DIFFERENT, RENDER),
            (DIFFERENT, NO_TENSORS),
            (DIFFERENT, ONE_PROCESS),
            (DIFFERENT, ALONE),
        ],
    },
];
const IN_FRONTENDS: [(&str, &str); 3] = [(CPU, RENDER), (CPU, NO_TENSORS), (CPU, ONE_PROCESS)];

/// The first line: the setting of the run.
#[derive(Debug, Deserialize)]
struct Setting {
    vllm: String,
    /// The version of PyAV, whose encoder made the clips.
    av: String,
    helpers: u32,
    /// The size of the file by kind of item.
    bytes: BTreeMap<String, u64>,
}

/// The results of a run.
#[derive(Debug)]
pub(crate) struct Run {
    setting: Setting,
    measurements: Vec<Measurement>,
}

/// Parses the lines of output.
pub(crate) fn parse(lines: &[String]) -> Result<Run, Error> {
    let (setting, measurements) = measured::parse_with_head("measure.py", lines)?;
    Ok(Run { setting, measurements })
}

/// The comparison of a metric of ours with a peer's.
struct Comparison<'a> {
    /// Our case and side in the measurements.
    ours: (&'a str, &'a str),
    /// The peer's case and side in the measurements.
    theirs: (&'a str, &'a str),
    measured: &'a str,
    metric: &'static str,
    unit: &'static str,
    ratio: RatioKind,
    target: Option<f64>,
}

/// The meaning of a ratio.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RatioKind {
    /// The factor by which ours is better; lower values are better.
    LessIsBetter,
    /// The factor by which ours is better; higher values are better.
    MoreIsBetter,
    /// Ours as a multiple of theirs, which is a limit.
    MultipleOfLimit,
}

/// Returns all rows of a run. `load` is the load at its start.
pub(crate) fn rows(run: &Run, rounds: u32, load: Option<Load>) -> Vec<Row> {
    let Setting { av, helpers, bytes, .. } = &run.setting;
    let mut rows = vec![
        Row::rounds(BENCH, rounds, OURS),
        Row { ours: Some(f64::from(*helpers)), ..row(ALL, HELPERS, "processes", OURS) },
    ];
    rows.extend(load.map(|load| load.row(BENCH)));
    let maker = |kind: &str| {
        if kind == "image" { "Pillow".to_owned() } else { format!("libx264 of PyAV {av}") }
    };
    let file = |(kind, bytes): (&String, &u64)| {
        row(kind, FILE, "kB", &maker(kind)).numbers(Some(*bytes as f64 / 1e3), None)
    };
    rows.extend(bytes.iter().map(file));
    for kind in ["image", "video"] {
        rows.extend(run.equality(kind));
        rows.extend(run.requests(kind));
        rows.extend(run.items(kind));
    }
    rows.extend(run.clips());
    rows
}

impl Run {
    fn value(&self, case: &str, side: &str, metric: &str) -> Option<f64> {
        measured::value(&self.measurements, (case, None), side, metric)
    }

    /// Returns a peer's name with its versions.
    fn name(&self, side: &str) -> String {
        let vllm = &self.setting.vllm;
        match side {
            "render" => format!("{RENDER} {vllm}"),
            "render, no tensors" => format!("{NO_TENSORS} (vLLM {vllm})"),
            "in one process" => format!("{ONE_PROCESS} (vLLM {vllm}, as Dynamo {DYNAMO})"),
            _ => format!("{ALONE} (vLLM {vllm})"),
        }
    }

    /// Returns `true` if the peer's prompts or tensors equal ours; `None` if they were not
    /// compared.
    fn is_equal(&self, kind: &str, side: &str) -> Option<bool> {
        self.value(kind, side, "different").map(|different| different == 0.0)
    }

    /// Returns the rows about the equality of prompts and tensors.
    fn equality(&self, kind: &str) -> Vec<Row> {
        let prompt = self.value(kind, OURS, "prompt tokens");
        let mut rows = vec![Row { ours: prompt, ..row(kind, PROMPT, "tokens", OURS) }];
        for side in ["render", "render, no tensors", "in one process", "alone"] {
            let unit = if side == "alone" { "items" } else { "prompts" };
            let [ours, peer] =
                ["compared", "different"].map(|metric| self.value(kind, side, metric));
            let equal = self.is_equal(kind, side);
            rows.push(Row { ours, peer, equal, ..row(kind, DIFFERENT, unit, &self.name(side)) });
        }
        rows
    }

    /// Returns the rows about the cost of a request in a frontend.
    fn requests(&self, kind: &str) -> Vec<Row> {
        let [new, repeated] = ["new", "repeated"].map(|what| format!("{what} {kind}"));
        let [cold, warm] = [COLD, WARM].map(|theirs| format!("{repeated}, {theirs}"));
        let cases = [
            (cold, &repeated, &new, Some(COLD_TARGET)),
            (warm, &repeated, &repeated, Some(WARM_TARGET)),
            (new.clone(), &new, &new, None),
        ];
        let mut rows = Vec::new();
        for (case, ours, theirs, target) in &cases {
            for (metric, measured) in [(CPU, "CPU"), (LATENCY, "time")] {
                for side in ["render", "render, no tensors", "in one process"] {
                    // A router needs less than an engine, so the side without tensors is shown but
                    // has no target.
                    let has_target = metric == CPU && side != "render, no tensors";
                    rows.extend(self.compare(
                        case,
                        kind,
                        &Comparison {
                            ours: (ours, OURS),
                            theirs: (theirs, side),
                            measured,
                            metric,
                            unit: "ms",
                            ratio: RatioKind::LessIsBetter,
                            target: target.filter(|_| has_target),
                        },
                    ));
                }
            }
        }
        rows
    }

    /// Returns the rows about making new items.
    fn items(&self, kind: &str) -> Vec<Row> {
        let [measured_as, case] = [format!("many {kind}s"), format!("new {kind}s")];
        let [ours, theirs, call] = ["helpers", "alone", "item"].map(|side| (&*measured_as, side));
        let rate_target = HELPER_TARGET * f64::from(self.setting.helpers);
        let call_limit = (kind == "image").then_some(CALL_LIMIT);
        let compare = |case, ours, measured, metric, unit, ratio, target| {
            self.compare(
                case,
                kind,
                &Comparison { ours, theirs, measured, metric, unit, ratio, target },
            )
        };
        let rows = [
            compare(
                &case,
                ours,
                "rate",
                RATE,
                "items/s",
                RatioKind::MoreIsBetter,
                Some(rate_target),
            ),
            compare(&case, ours, "CPU", ITEM_CPU, "ms", RatioKind::LessIsBetter, None),
            compare(
                &format!("new {kind}"),
                call,
                "time",
                CALL,
                "ms",
                RatioKind::MultipleOfLimit,
                call_limit,
            ),
        ];
        rows.into_iter().flatten().collect()
    }

    /// Returns the rows about many concurrent clips.
    fn clips(&self) -> Vec<Row> {
        let compare = |measured, metric, unit, ratio| {
            let [ours, theirs] = ["helpers", "alone"].map(|side| ("clips", side));
            self.compare(
                CAPTIONING,
                "video",
                &Comparison { ours, theirs, measured, metric, unit, ratio, target: None },
            )
        };
        let per_core = compare("CPU", CLIPS_PER_CORE, "clips/s", RatioKind::LessIsBetter);
        let per_second =
            |milliseconds: Option<f64>| milliseconds.map(|milliseconds| 1e3 / milliseconds);
        let per_core = per_core.map(|row| {
            let [ours, peer] = [row.ours, row.peer].map(per_second);
            row.numbers(ours, peer)
        });
        let [clips, prompt] =
            ["clips", "prompt tokens"].map(|metric| self.value("clips", "helpers", metric));
        let inputs = [(clips, CONCURRENT_CLIPS, "clips"), (prompt, PROMPT, "tokens")]
            .map(|(ours, metric, unit)| Some(Row { ours, ..row(CAPTIONING, metric, unit, OURS) }));
        inputs
            .into_iter()
            .chain([per_core, compare("rate", CLIPS, "clips/s", RatioKind::MoreIsBetter)])
            .flatten()
            .collect()
    }

    /// Returns the row of a comparison; `None` if one of the sides was not measured.
    fn compare(&self, case: &str, kind: &str, it: &Comparison<'_>) -> Option<Row> {
        let ours = self.value(it.ours.0, it.ours.1, it.measured)?;
        let theirs = self.value(it.theirs.0, it.theirs.1, it.measured)?;
        let ratio = if it.ratio == RatioKind::LessIsBetter { theirs / ours } else { ours / theirs };
        let target = it.target.map(if it.ratio == RatioKind::MultipleOfLimit {
            Target::AtMost
        } else {
            Target::AtLeast
        });
        let row = row(case, it.metric, it.unit, &self.name(it.theirs.1))
            .numbers(Some(ours), Some(theirs));
        let row =
            Row { equal: self.is_equal(kind, it.theirs.1), ..row }.judged(Some(ratio), target);
        // Outputs that were not compared reach no target.
        Some(Row { ok: row.ok.map(|ok| ok && row.equal == Some(true)), ..row })
    }
}

fn row(case: &str, metric: &str, unit: &'static str, peer: &str) -> Row {
    Row::new(BENCH, case, metric, unit, peer)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::bench_peers::row::missing;
    use crate::bench_peers::row::tests::find;

    /// Returns a run with two helpers. A repeated item costs us 2 ms of CPU time. Peers take 30 ms
    /// for a repeated and 50 ms for a new item. A call takes 22 ms, of which decoding and
    /// processing alone take 20 ms. The helpers make 80 items per second.
    pub(crate) fn run(different: f64) -> Run {
        let mut measurements = Vec::new();
        let mut add = |case: &str, side: &str, metric: &str, value| {
            measurements.push(Measurement::new(case, None, side, metric, value));
        };
        for kind in ["image", "video"] {
            add(kind, OURS, "prompt tokens", 1265.0);
            for side in ["render", "render, no tensors", "in one process", "alone"] {
                add(kind, side, "compared", 3.0);
                add(kind, side, "different", different);
                for (what, cpu) in [("new", 50.0), ("repeated", 30.0)] {
                    add(&format!("{what} {kind}"), side, "CPU", cpu);
                    add(&format!("{what} {kind}"), side, "time", cpu);
                }
            }
            for (what, cpu) in [("new", 40.0), ("repeated", 2.0)] {
                add(&format!("{what} {kind}"), OURS, "CPU", cpu);
                add(&format!("{what} {kind}"), OURS, "time", 2.0 * cpu);
            }
            for (side, rate, time) in
                [("helpers", 80.0, 50.0), ("alone", 50.0, 20.0), ("item", 45.0, 22.0)]
            {
                add(&format!("many {kind}s"), side, "rate", rate);
                add(&format!("many {kind}s"), side, "CPU", 1e3 / rate);
                add(&format!("many {kind}s"), side, "time", time);
            }
        }
        add("clips", "helpers", "clips", 400.0);
        add("clips", "helpers", "prompt tokens", 2443.0);
        for (side, rate) in [("helpers", 4.0), ("alone", 5.0)] {
            add("clips", side, "rate", rate);
            add("clips", side, "CPU", 1e3 / rate);
        }
        let bytes = [("image", 550_087), ("video", 487_347)]
            .map(|(kind, bytes)| (kind.to_owned(), bytes))
            .into();
        Run {
            setting: Setting { vllm: "0.32.0".into(), av: "18.1.0".into(), helpers: 2, bytes },
            measurements,
        }
    }

    #[test]
    fn repeated_item_is_compared_with_new_then_repeated() {
        let rows = rows(&run(0.0), 9, None);
        let cold = find(&rows, "repeated image, theirs new", CPU, RENDER);
        assert_eq!((cold.ours, cold.peer, cold.ratio), (Some(2.0), Some(50.0), Some(25.0)));
        assert_eq!((cold.target, cold.ok, cold.equal), (Some(20.0), Some(true), Some(true)));
        let warm = find(&rows, "repeated video, theirs repeated too", CPU, ONE_PROCESS);
        assert_eq!((warm.ratio, warm.target, warm.ok), (Some(15.0), Some(3.0), Some(true)));
        assert!(warm.peer_name.contains("as Dynamo 1."), "{}", warm.peer_name);
        assert_eq!(find(&rows, "repeated image, theirs new", CPU, NO_TENSORS).target, None);
        assert_eq!(find(&rows, "new image", CPU, RENDER).ratio, Some(1.25));
        assert_eq!(find(&rows, "new image", LATENCY, RENDER).ratio, Some(0.625));
    }

    #[test]
    fn helper_rate_has_target_while_call_has_limit() {
        let rows = rows(&run(0.0), 9, None);
        let rate = find(&rows, "new videos", RATE, ALONE);
        assert_eq!((rate.ratio, rate.target, rate.ok), (Some(1.6), Some(1.6), Some(true)));
        let call = find(&rows, "new image", CALL, ALONE);
        assert_eq!((call.ratio, call.target, call.ok), (Some(1.1), Some(1.1), Some(true)));
        assert_eq!(find(&rows, "new video", CALL, ALONE).target, None);
        let clips = find(&rows, CAPTIONING, CLIPS_PER_CORE, ALONE);
        assert_eq!(
            (clips.ours, clips.peer, clips.ratio, clips.ok),
            (Some(4.0), Some(5.0), Some(0.8), None)
        );
    }

    #[test]
    fn different_prompts_or_tensors_reach_no_target() {
        let rows = rows(&run(1.0), 9, None);
        assert!(rows.iter().all(|row| row.ok != Some(true)));
        assert_eq!(rows.iter().filter(|row| row.ok == Some(false)).count(), 11);
        let different = find(&rows, "image", DIFFERENT, ALONE);
        assert_eq!(
            (different.ours, different.peer, different.equal),
            (Some(3.0), Some(1.0), Some(false))
        );
    }

    #[test]
    fn missing_side_is_named() {
        let mut run = run(0.0);
        assert!(missing(&rows(&run, 9, None), &MANDATORY).is_empty());
        run.measurements.retain(|it| it.case != "many images" || it.side != "item");
        assert_eq!(
            missing(&rows(&run, 9, None), &MANDATORY),
            [format!("new image, {CALL}, {ALONE}")]
        );
    }
}
