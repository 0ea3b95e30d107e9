//! Memory of one side, alone in a process: growth of what is resident while the caches of a fleet
//! fill.
//!
//! | metric | is |
//! |---|---|
//! | `memory` | growth of resident memory, bytes |
//! | `memory, own count` | what the index says of itself, bytes; only ours can |
//! | `memory, cleared` | what is left of the growth when all workers hold nothing any more, bytes |
//! | `held` | pairs of a worker and a block |

use std::collections::HashMap;
use std::error::Error;
use std::fs;

use crate::Value;
use crate::subject::{From, Subject};
use crate::trace::Trace;

/// Small, as the events that are ready at a time are resident too.
const SLICE: usize = 4_000;

/// Fills one side. `name` is one of the names of sides.
pub(crate) fn measure(trace: &Trace, name: &str, mut side: Box<dyn Subject>) -> Result<Vec<Value>, Box<dyn Error>> {
    let name = crate::SIDES.into_iter().find(|side| *side == name).ok_or("no such side")?;
    let slices = trace.slices(0..trace.fill, SLICE);
    side.load(trace, 0..1, From::Tokens);
    let before = resident()?;
    let mut end = 0;
    for slice in slices {
        end = slice.end;
        side.load(trace, slice, From::Tokens);
        side.apply();
    }
    side.load(trace, end..trace.fill, From::Tokens);
    side.apply();
    let mut values = vec![(name, "memory", resident()?.saturating_sub(before) as f64)];
    values.extend(side.bytes().map(|bytes| (name, "memory, own count", bytes as f64)));
    side.clear(trace.workers);
    values.push((name, "memory, cleared", resident()?.saturating_sub(before) as f64));
    if name == crate::SIDES[0] {
        values.push((name, "held", held(trace) as f64));
    }
    Ok(values)
}

/// Pairs of a worker and a block when the caches are full.
fn held(trace: &Trace) -> usize {
    let mut held: HashMap<u32, usize> = HashMap::new();
    for event in (0..trace.fill).flat_map(|batch| trace.batch(batch)) {
        let worker = held.entry(event.worker).or_default();
        let blocks = event.blocks as usize;
        *worker = if event.stored { *worker + blocks } else { worker.saturating_sub(blocks) };
    }
    held.values().sum()
}

/// Bytes of this process that are in memory.
fn resident() -> Result<usize, Box<dyn Error>> {
    let numbers = fs::read_to_string("/proc/self/statm")?;
    let pages: usize = numbers.split(' ').nth(1).ok_or("/proc/self/statm has no second number")?.parse()?;
    Ok(pages * rustix::param::page_size())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Fleet, make};

    #[test]
    fn full_caches_hold_nine_tenths_of_what_they_can() {
        let held = held(&make(&Fleet { workers: 3, blocks: 3_000 }, 1_000, 2));
        assert!((8_100..=9_000).contains(&held), "{held}");
    }
}
