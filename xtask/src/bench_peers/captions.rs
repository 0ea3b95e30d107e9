//! The part of the benchmark `video` with whole servers, which caption many clips at once.

use std::process::Command;

use crate::bench_peers::page::{Grid, number, with_ratio};
use crate::bench_peers::row::{OURS, Row, Target};
use crate::bench_peers::runs::{Flags, engine_variables, run_further};
use crate::bench_peers::spec::Sides;
use crate::bench_peers::{SHORT_ROUNDS, door_peers, programs};
use crate::error::Error;
use crate::setup::Setup;
use crate::{child, ffmpeg, models, vllm_env, vllm_overlay};

/// The name of the case in rows.
pub(crate) const CASE: &str = "captions, servers";
/// The metric of the program that decodes for vLLM's Rust frontend, whose version is in the row's
/// `unit`.
const DECODER: &str = "decoder";
/// The metric of the number of clips.
const CLIPS: &str = "clips at once";
/// The size of a clip's file, which the page has elsewhere.
const FILE: &str = "file";
/// The metrics with a target.
const RATED: [&str; 3] = ["clips per second of CPU time", "clips per second", "peak memory"];
/// The minimum factor by which we are better.
const TARGET: f64 = 2.0;
const MAKE_INPUTS: &str = "bench/processor/caption_inputs.py";
/// The tiny model whose videos all servers take: vLLM's Rust frontend takes none of Qwen2.5-VL.
const MODEL: &str = "qwen3vl";
/// The numbers of clips, in a run and in a short run.
const COUNTS: [u32; 2] = [400, 40];

/// Measures all servers.
pub(crate) fn run(setup: &Setup, rounds: u32, sides: &Sides) -> Result<Vec<Row>, Error> {
    let env = vllm_env::ensure(setup)?;
    let newest = vllm_overlay::ensure_version(setup, &env, door_peers::VLLM)?;
    let ffmpeg = ffmpeg::ensure(setup)?;
    let inputs = tempfile::tempdir().map_err(Error::io("create", "a folder for clips"))?;
    let mut make = env.python_command();
    // -s: ignores packages of the user. -B: no __pycache__ beside the script.
    make.args(["-s", "-B"]).arg(setup.workspace.file(MAKE_INPUTS)?);
    make.arg(inputs.path()).arg(models::ensure(setup, &env)?.join(MODEL));
    setup.output.print_line("making clips")?;
    child::run(&mut make, MAKE_INPUTS, &setup.output, &setup.cancel)?;
    let count = COUNTS[usize::from(rounds == SHORT_ROUNDS)];
    let mut flags: Flags = vec![
        ("--chiasm", programs::chiasm(setup, sides.profile)?),
        ("--vllm-serve", newest.vllm()),
        ("--vllm-rs", door_peers::ensure(setup)?.vllm_rs()),
        ("--vllm", door_peers::VLLM.into()),
        ("--engine-variables", engine_variables().into()),
        ("--model", inputs.path().join("model")),
        ("--clips", inputs.path().join("clips")),
        ("--count", count.to_string().into()),
        ("--libraries", ffmpeg.libraries.into()),
    ];
    flags.extend(ffmpeg.folder.map(|folder| ("--ffmpeg", folder)));
    let mut measure = Command::new(programs::measuring(setup, "door")?);
    measure.arg("captions");
    let mut rows = run_further(measure, "the program door", flags)?;
    rows.push(Row::new(CASE, DECODER, &format!("ffmpeg {}", ffmpeg.version), OURS));
    Ok(rows)
}

/// Returns the target of a row of this case.
pub(crate) fn target(row: &Row) -> Option<Target> {
    RATED.contains(&&*row.metric).then_some(Target::AtLeast(TARGET))
}

/// Returns the part of the page; empty without rows of this case.
pub(crate) fn part(rows: &[Row]) -> String {
    let rows: Vec<&Row> = rows.iter().filter(|row| row.case == CASE).collect();
    let find = |metric| rows.iter().find(|row| row.metric == metric);
    let Some(clips) = find(CLIPS) else { return String::new() };
    let count = clips.ours.unwrap_or_default().to_string();
    let decoder = find(DECODER).map(|row| &*row.unit).unwrap_or_default();
    let mut grid = Grid::new([OURS]);
    for row in rows.iter().filter(|row| ![CLIPS, DECODER, FILE].contains(&&*row.metric)) {
        let line = format!("{} | {}", row.metric, row.unit);
        // In rows of equality, `ours` is the number of compared answers.
        let ours = if row.equal.is_some() && row.ratio.is_none() { None } else { row.ours };
        grid.set(&line, OURS, ours.map_or("–".to_owned(), |ours| number(Some(ours))));
        grid.set(&line, &row.peer_name, with_ratio(row));
    }
    let part = include_str!("templates/video_servers.md").trim_end();
    let part = part.replace("{{count}}", &count).replace("{{decoder}}", decoder);
    part.replace("{{servers}}", &grid.table("| unit", "–"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(metric: &str, peer: &str, ratio: Option<f64>) -> Row {
        Row { ours: Some(4.0), peer: Some(2.0), ratio, ..Row::new(CASE, metric, "x", peer) }
    }

    #[test]
    fn part_needs_rows_of_servers() {
        assert_eq!(part(&[Row::new("captions", CLIPS, "clips", OURS)]), "");
        let rows = [
            Row { ours: Some(400.0), ..Row::new(CASE, CLIPS, "clips", OURS) },
            row(RATED[0], "vllm serve 0.1", Some(2.0)),
            Row { equal: Some(true), ..row("clips with other pixels", "vllm serve 0.1", None) },
            Row::new(CASE, DECODER, "ffmpeg 1.2", OURS),
        ];
        let part = part(&rows);
        assert!(part.contains("400 requests") && part.contains("and ffmpeg 1.2 for"), "{part}");
        assert!(part.contains("| 4.00 | 2.00 (× 2.00) |") && part.ends_with("| – | 2.00 |"));
        assert!(!part.contains("{{"), "{part}");
    }

    #[test]
    fn rates_and_memory_have_targets() {
        assert_eq!(target(&row(RATED[2], "vllm-rs 0.1", None)), Some(Target::AtLeast(TARGET)));
        assert_eq!(target(&row("errors", "vllm-rs 0.1", None)), None);
    }
}
