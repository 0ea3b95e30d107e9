//! Chiasm and its peers make pixel tensors of the same files, in turns, in one run: the measuring
//! half of `cargo xtask bench-peers pixels`. Its commands and flags are in `bench/peers/README.md`;
//! it prints [`Measurement`]s.
//!
//! | file | is |
//! |---|---|
//! | `case` | which models, which pictures |
//! | `side` | what all sides have in common |
//! | `ours`, `llm_multimodal_peer`, `transformers_peer` | the sides; `transformers_peer.py` is the last one's other end |
//! | `times` | the clock and the stages |
//! | `make_pictures.py`, `models/` | what is measured with: formulas, and settings as published |

#![forbid(unsafe_code)]

mod case;
mod llm_multimodal_peer;
mod ours;
mod side;
mod times;
mod transformers_peer;

use std::cell::RefCell;
use std::error::Error;
use std::process::ExitCode;
use std::rc::Rc;

use peers::arguments::Flags;
use peers::ending;
use serde::Serialize;

use crate::case::{Case, Format};
use crate::llm_multimodal_peer::{LlmMultimodal, has_libturbojpeg};
use crate::ours::Ours;
use crate::side::Side;
use crate::times::{Times, medians};
use crate::transformers_peer::{Python, Transformers};

/// One side's result for one case.
#[derive(Serialize)]
struct Measurement {
    /// Model, picture and format, such as `qwen3_vl 1920x1080.jpg u8`.
    case: String,
    /// Name and version.
    side: String,
    /// Median CPU time of each stage, ms; of none if `refused`.
    times: Times,
    /// Share of the tensor's values that are not Chiasm's; none for a side without a tensor, or if
    /// Chiasm has none.
    differs: Option<f64>,
    /// Why this side cannot do it.
    refused: Option<String>,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    ending::exit(match arguments.split_first() {
        Some((command, [])) if command == "has-libturbojpeg" => {
            println!("{}", has_libturbojpeg());
            Ok(())
        }
        Some((command, flags)) if command == "run" => pixels(&Flags::new(flags)),
        _ => Err("usage: see bench/peers/README.md".into()),
    })
}

fn pixels(flags: &Flags<'_>) -> Result<(), Box<dyn Error>> {
    let rounds = flags.parse("--rounds")?;
    let python = Rc::new(RefCell::new(Python::start(&flags.path("--python")?, &flags.path("--script")?)?));
    let exchange = tempfile::tempdir()?;
    for case in case::all(&flags.path("--models")?, &flags.path("--pictures")?) {
        eprintln!("{}", case.name());
        let transformers = Transformers::open(Rc::clone(&python), &case, &exchange.path().join("tensor"));
        for measurement in measure(&case, transformers, rounds)? {
            println!("{}", serde_json::to_string(&measurement)?);
        }
    }
    Ok(())
}

/// All sides on one case. Chiasm comes first in the answer.
fn measure(case: &Case, transformers: Transformers<'_>, rounds: usize) -> Result<Vec<Measurement>, Box<dyn Error>> {
    let mut measurements = Vec::new();
    let mut sides: Vec<Box<dyn Side + '_>> = Vec::new();
    match Ours::open(case)? {
        Ok(ours) => {
            let floor = ours.floor();
            sides.push(Box::new(ours));
            sides.push(Box::new(floor));
        }
        Err(error) => measurements.push(Measurement {
            case: case.name(),
            side: "chiasm".to_owned(),
            times: Times::new(),
            differs: None,
            refused: Some(error.to_string()),
        }),
    }
    let refused = !measurements.is_empty();
    sides.push(Box::new(LlmMultimodal::open(case)?));
    sides.push(Box::new(transformers));

    // A round that does not count: it warms up, and its tensors are compared.
    let mut tensors = Vec::new();
    for side in &mut sides {
        side.round()?;
        tensors.push(side.tensor()?);
    }
    let ours = if refused { None } else { tensors[0].as_deref() };
    let differs: Vec<_> =
        (tensors.iter()).map(|tensor| Some(share_that_differs(ours?, tensor.as_deref()?, case.format))).collect();

    let mut times = vec![Vec::with_capacity(rounds); sides.len()];
    for round in 0..rounds {
        let forward = round % 2 == 0;
        for turn in 0..sides.len() {
            let side = if forward { turn } else { sides.len() - 1 - turn };
            times[side].push(sides[side].round()?);
        }
    }
    measurements.extend(sides.iter().zip(&times).zip(differs).map(|((side, times), differs)| Measurement {
        case: case.name(),
        side: side.name(),
        times: medians(times),
        differs,
        refused: None,
    }));
    Ok(measurements)
}

/// Share of two tensors' values that differ: 0 is none, 1 is all. Tensors of different lengths
/// differ in all.
fn share_that_differs(ours: &[u8], theirs: &[u8], format: Format) -> f64 {
    if ours.len() != theirs.len() {
        return 1.0;
    }
    let values = ours.len() / format.size();
    let different =
        (ours.chunks_exact(format.size()).zip(theirs.chunks_exact(format.size()))).filter(|(a, b)| a != b).count();
    different as f64 / values as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_compared_and_not_bytes() {
        assert_eq!(share_that_differs(&[1, 2, 3, 4], &[1, 2, 3, 4], Format::U8), 0.0);
        assert_eq!(share_that_differs(&[1, 2, 3, 4], &[1, 2, 3, 5], Format::U8), 0.25);
        assert_eq!(share_that_differs(&[1, 2, 3, 4], &[1, 2, 9, 9], Format::Bf16), 0.5);
        assert_eq!(share_that_differs(&[1, 2], &[1, 2, 3, 4], Format::U8), 1.0);
    }
}
