//! Pixel tensors of the same files by Chiasm and its peers, in turns: the measuring half of
//! `cargo xtask bench-peers pixels`. Its commands and flags are in `bench/peers/README.md`; it
//! prints [`Row`]s.
//!
//! | file | contents |
//! |---|---|
//! | `case` | models and pictures |
//! | `side` | the sides' interface, and times |
//! | `ours` | Chiasm, and the floor |
//! | `llm_multimodal_peer` | the peer `llm-multimodal` |
//! | `transformers_peer` | the peer `transformers`, in `transformers_peer.py` |

#![forbid(unsafe_code)]

mod case;
mod llm_multimodal_peer;
mod ours;
mod side;
mod transformers_peer;

use std::cell::RefCell;
use std::error::Error;
use std::process::ExitCode;
use std::rc::Rc;

use peers::flags::Flags;
use peers::row::{OURS, Row, less, neutral};
use peers::{USAGE, exit_code};

use crate::case::{Case, Format};
use crate::llm_multimodal_peer::{LlmMultimodal, has_libturbojpeg};
use crate::ours::{FLOOR, Ours};
use crate::side::{Side, Stage, Times, medians};
use crate::transformers_peer::{Python, Transformers};

const NO_LIBTURBOJPEG: &str = "\
!!!
!!!  llm-multimodal FINDS NO libturbojpeg: its JPEG pixels and its times are those of another
!!!  decoder. Install Debian's libturbojpeg0 to measure it as it is meant to run.
!!!";

fn main() -> ExitCode {
    exit_code(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let (command, flags) = Flags::parse_arguments()?;
    match &*command {
        "has-libturbojpeg" => {
            println!("{}", has_libturbojpeg());
            return Ok(());
        }
        "run" => {}
        _ => return Err(USAGE.into()),
    }
    if !has_libturbojpeg() {
        eprintln!("{NO_LIBTURBOJPEG}");
    }
    let rounds = flags.parse("--rounds")?;
    let python = Python::start(&flags.path("--python")?, &flags.path("--script")?)?;
    let python = Rc::new(RefCell::new(python));
    let exchange = tempfile::tempdir()?;
    let mut name = None;
    for case in case::all(&flags.path("--models")?, &flags.path("--pictures")?) {
        eprintln!("{}", case.name);
        let tensor = exchange.path().join("tensor");
        let transformers = Transformers::open(Rc::clone(&python), &case, tensor);
        name = measure(&case, transformers, rounds)?.or(name);
    }
    Row::for_run("rounds", rounds, name.as_deref().unwrap_or(OURS)).print()
}

/// Measures all sides with one case and prints the rows. Returns the name of our side; `None` if it
/// does not support the model.
fn measure(
    case: &Case,
    transformers: Transformers<'_>,
    rounds: usize,
) -> Result<Option<String>, Box<dyn Error>> {
    let mut sides: Vec<Box<dyn Side + '_>> = Vec::new();
    match Ours::open(case)? {
        Ok(ours) => {
            let floor = ours.floor();
            sides.push(Box::new(ours));
            sides.push(Box::new(floor));
        }
        Err(error) => eprintln!("!!! not supported yet: {}: {error}", case.name),
    }
    let is_supported = !sides.is_empty();
    sides.push(Box::new(LlmMultimodal::open(case)?));
    sides.push(Box::new(transformers));

    // A round that does not count warms up, and its tensors are compared.
    let mut tensors = Vec::new();
    for side in &mut sides {
        side.round()?;
        tensors.push(side.tensor()?);
    }
    let mut times = vec![Vec::with_capacity(rounds); sides.len()];
    for round in 0..rounds {
        for turn in 0..sides.len() {
            let side = if round % 2 == 0 { turn } else { sides.len() - 1 - turn };
            times[side].push(sides[side].round()?);
        }
    }
    let mut ours = Times::new();
    let mut our_tensor = None;
    if is_supported {
        ours = medians(&times[0]);
        our_tensor = tensors[0].as_deref();
    }
    let peers = sides.iter().zip(&times).zip(&tensors).skip(usize::from(is_supported));
    for ((side, times), tensor) in peers {
        let differs = our_tensor
            .zip(tensor.as_deref())
            .map(|(ours, theirs)| differing_share(ours, theirs, case.format));
        print_rows(&case.name, &ours, &side.name(), &medians(times), differs)?;
    }
    Ok(is_supported.then(|| sides[0].name()))
}

/// Prints the rows of a peer. `differs` is the share of its values that differ from ours.
fn print_rows(
    case: &str,
    ours: &Times,
    peer: &str,
    times: &Times,
    differs: Option<f64>,
) -> Result<(), Box<dyn Error>> {
    let equal = differs.map(|share| share == 0.0);
    for (stage, &theirs) in times {
        // The floor has the same decoder as our side.
        if peer == FLOOR && *stage == Stage::Decode {
            continue;
        }
        let ours = ours.get(stage).copied().unwrap_or(f64::NAN);
        let row = less(stage.name(), "ms").row(case, peer, ours, theirs);
        let ratio = if peer == FLOOR { ours / theirs } else { row.ratio };
        Row { ratio, equal, ..row }.print()?;
    }
    if let Some(share) = differs.filter(|&share| share > 0.0) {
        let percent = (100.0 * share).max(0.001);
        let row = neutral("differing values", "%").row(case, peer, f64::NAN, percent);
        Row { equal, ..row }.print()?;
    }
    Ok(())
}

/// Returns the share of two tensors' values that differ, from 0 to 1. Tensors of different lengths
/// differ in all values.
fn differing_share(ours: &[u8], theirs: &[u8], format: Format) -> f64 {
    if ours.len() != theirs.len() {
        return 1.0;
    }
    let [ours, theirs] = [ours, theirs].map(|tensor| tensor.chunks_exact(format.size()));
    let values = ours.len();
    let different = ours.zip(theirs).filter(|(ours, theirs)| ours != theirs).count();
    different as f64 / values as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_compared_instead_of_bytes() {
        assert_eq!(differing_share(&[1, 2, 3, 4], &[1, 2, 3, 4], Format::U8), 0.0);
        assert_eq!(differing_share(&[1, 2, 3, 4], &[1, 2, 3, 5], Format::U8), 0.25);
        assert_eq!(differing_share(&[1, 2, 3, 4], &[1, 2, 9, 9], Format::Bf16), 0.5);
        assert_eq!(differing_share(&[1, 2], &[1, 2, 3, 4], Format::U8), 1.0);
    }
}
