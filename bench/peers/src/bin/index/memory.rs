//! The memory of one side alone in a process: the growth of resident memory while the caches of a
//! fleet fill.
//!
//! | metric | meaning |
//! |---|---|
//! | `memory` | the growth of resident memory in bytes |
//! | `memory, own count` | the index's own count of bytes; only ours has one |
//! | `memory, cleared` | the rest of the growth in bytes when all workers have dropped all blocks |
//! | `held` | the number of pairs of a worker and a block |

use std::collections::HashMap;
use std::error::Error;
use std::fs;

use peers::row::OURS;

use crate::Value;
use crate::subject::{Input, Subject};
use crate::trace::Trace;

/// The number of blocks that are loaded at once. It is small, as loaded events are resident too.
const SLICE: usize = 4_000;

pub(crate) fn measure(
    trace: &Trace,
    name: &'static str,
    mut side: Box<dyn Subject>,
) -> Result<Vec<Value>, Box<dyn Error>> {
    let slices = trace.filling_slices(SLICE);
    side.load(trace, 0..1, Input::Tokens);
    let before = resident()?;
    for slice in slices {
        side.load(trace, slice, Input::Tokens);
        side.apply();
    }
    let mut values = vec![(name, "memory", resident()?.saturating_sub(before) as f64)];
    values.extend(side.bytes().map(|bytes| (name, "memory, own count", bytes as f64)));
    side.clear(trace.workers);
    values.push((name, "memory, cleared", resident()?.saturating_sub(before) as f64));
    if name == OURS {
        values.push((name, "held", held(trace) as f64));
    }
    Ok(values)
}

/// Returns the number of pairs of a worker and a block when the caches are full.
fn held(trace: &Trace) -> usize {
    let mut held: HashMap<u32, usize> = HashMap::new();
    for event in (0..trace.fill).flat_map(|batch| trace.batch(batch)) {
        let worker = held.entry(event.worker).or_default();
        let blocks = event.blocks as usize;
        *worker = if event.stored { *worker + blocks } else { worker.saturating_sub(blocks) };
    }
    held.values().sum()
}

/// Returns the resident memory of this process in bytes.
fn resident() -> Result<usize, Box<dyn Error>> {
    let numbers = fs::read_to_string("/proc/self/statm")?;
    let pages = numbers.split(' ').nth(1).ok_or("/proc/self/statm has no second number")?;
    Ok(pages.parse::<usize>()? * rustix::param::page_size())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::{Fleet, make};

    #[test]
    fn full_caches_hold_nine_tenths_of_capacity() {
        let held = held(&make(&Fleet { workers: 3, blocks: 3_000 }, 1_000, 2));
        assert!((8_100..=9_000).contains(&held), "{held}");
    }
}
