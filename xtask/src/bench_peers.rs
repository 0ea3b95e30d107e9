//! Chiasm against its peers in one run: `cargo xtask bench-peers BENCH`.
//!
//! Each bench makes what it needs, measures, and leaves rows and a note made of them in `docs/benchmarks`.
//!
//! | file | is |
//! |---|---|
//! | `row` | the form of every result |
//! | `pixels`, `pixels_note` | the bench of image preprocessing: its targets, its note |
//! | `peers` | the program that measures it, which has a workspace of its own |
//! | `turbojpeg` | a library that one of the peers needs to be exact |

mod peers;
mod pixels;
mod pixels_note;
mod row;
mod turbojpeg;

use std::fs;
use std::path::PathBuf;

use crate::bench_peers::peers::Peers;
use crate::child;
use crate::error::Error;
use crate::keyed_dir::KeyedDir;
use crate::vllm_env::{self, Setup, VllmEnv};

/// Fewer say nothing on a machine that others use too.
pub(crate) const FEWEST_ROUNDS: u32 = 15;

const RESULTS: &str = "docs/benchmarks";
const MODELS: &str = "bench/peers/models";
const TRANSFORMERS_PEER: &str = "bench/peers/transformers_peer.py";
const MAKE_PICTURES: &str = "bench/peers/make_pictures.py";

/// Image preprocessing: ours, `llm-multimodal` and `transformers` on the same files. With `json`, prints the rows.
pub(crate) fn pixels(setup: &Setup, rounds: u32, json: bool) -> Result<(), Error> {
    let root = &setup.workspace.root;
    let script = setup.workspace.file(TRANSFORMERS_PEER)?;
    let env = vllm_env::ensure(setup)?;
    let pictures = pictures(setup, &env)?;
    let peers = Peers::build(setup)?;
    let mut measure = peers.command();
    measure.arg("pixels");
    for (flag, value) in [
        ("--models", root.join(MODELS)),
        ("--pictures", pictures),
        ("--python", env.python()),
        ("--script", script),
        ("--rounds", rounds.to_string().into()),
    ] {
        measure.arg(flag).arg(value);
    }
    let measurements = pixels::parse(&peers::lines(&mut measure, "peers pixels")?)?;
    let rows = pixels::rows(&measurements, rounds);
    if json {
        for line in row::lines(&rows)? {
            println!("{line}");
        }
    }
    let results = root.join(RESULTS);
    fs::create_dir_all(&results).map_err(Error::io("create", &results))?;
    row::write(&results.join("pixels.json"), &rows)?;
    let note = results.join("pixels.md");
    fs::write(&note, pixels_note::write(&rows)).map_err(Error::io("write", &note))?;
    for refusal in pixels::refusals(&measurements) {
        setup.output.say(&format!("!!! not supported yet: {refusal}"))?;
    }
    for row in rows.iter().filter(|row| row.equal == Some(false) && row.metric == pixels::DIFFERS) {
        let share = row.peer.unwrap_or_default();
        setup.output.say(&format!("!!! other bits: {}, {}: {share} % of the values", row.case, row.peer_name))?;
    }
    let (reached, all) = (rows.iter().filter(|row| row.ok == Some(true)), rows.iter().filter(|row| row.ok.is_some()));
    setup.output.say(&format!("{} of {} targets reached, see {}", reached.count(), all.count(), note.display()))
}

/// Makes the pictures, or finds them made.
fn pictures(setup: &Setup, env: &VllmEnv) -> Result<PathBuf, Error> {
    let script = setup.workspace.file(MAKE_PICTURES)?;
    // Pillow's version decides on the bytes as much as the script does.
    let mut inputs = vllm_env::inputs(&setup.workspace)?;
    inputs.push(fs::read(&script).map_err(Error::io("read", &script))?);
    let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
    let dir = KeyedDir::new(&setup.workspace.cache, "pictures", &inputs);
    dir.ensure(
        &setup.output,
        &setup.cancel,
        |_| true,
        |path, held| {
            setup.output.say(&format!("making {}", path.display()))?;
            let mut python = env.python_command();
            python.arg("-B").arg(&script).arg(path).stdin(held.as_input()?);
            child::run(&mut python, MAKE_PICTURES, &setup.output, &setup.cancel)
        },
    )?;
    Ok(dir.path().to_owned())
}
