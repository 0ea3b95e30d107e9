//! Makes the page `docs/benchmarks/processor.md` from its rows.

use crate::bench_peers::load;
use crate::bench_peers::page::{Table, Targets, count, fill, number, run_value};
use crate::bench_peers::processor::{
    ALONE, CALL, CLIPS, CLIPS_PER_CORE, CONCURRENT_CLIPS, CPU, DIFFERENT, FILE, HELPERS, ITEM_CPU,
    LATENCY, PROMPT, RATE,
};
use crate::bench_peers::row::{ROUNDS, Row};
use crate::error::Error;

const TARGETS: Targets = Targets {
    heads: "case | | against | ours | theirs",
    cells,
    number,
    is_limit: |row| row.metric == CALL,
    outputs: "others",
};

/// Makes the page.
pub(crate) fn write(rows: &[Row]) -> Result<String, Error> {
    let values = [
        ("rounds", run_value(rows, ROUNDS)),
        ("helpers", run_value(rows, HELPERS)),
        ("load", load::sentence(rows)),
        ("targets", TARGETS.table(rows)),
        ("inputs", inputs(rows)),
        ("equality", equality(rows)),
        ("requests", comparisons(rows, &[CPU, LATENCY])),
        ("items", comparisons(rows, &[RATE, ITEM_CPU, CALL])),
        ("clips", comparisons(rows, &[CLIPS_PER_CORE, CLIPS])),
    ];
    fill(include_str!("templates/processor.md"), &values)
}

/// Returns the cells of case, metric with unit, and peer.
fn cells(Row { case, metric, unit, peer_name, .. }: &Row) -> String {
    format!("{case} | {metric}, {unit} | {peer_name}")
}

fn inputs(rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| [FILE, PROMPT, CONCURRENT_CLIPS].contains(&&*row.metric));
    Table::new("| |").rows(rows.map(|row| {
        let Row { case, metric, unit, ours, peer_name, .. } = row;
        let maker = if metric == FILE { format!(", by {peer_name}") } else { String::new() };
        format!("{case} | {metric}{maker} | {} {unit}", number(*ours))
    }))
}

fn equality(rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| row.metric == DIFFERENT);
    Table::new("item | against | compared | others").rows(rows.map(|row| {
        let [compared, different] = [row.ours, row.peer].map(count);
        let kind =
            if row.peer_name.starts_with(ALONE) { "sums of tensors" } else { "lengths of prompts" };
        format!("{}, {kind} | {} | {compared} | {different}", row.case, row.peer_name)
    }))
}

fn comparisons(rows: &[Row], metrics: &[&str]) -> String {
    let rows = rows.iter().filter(|row| metrics.contains(&&*row.metric));
    Table::new("case | | against | ours | theirs | ratio").rows(rows.map(|row| {
        let numbers = [row.ours, row.peer, row.ratio].map(number);
        format!("{} | {}", cells(row), numbers.join(" | "))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::load::Load;
    use crate::bench_peers::processor::{self, tests::run};

    #[test]
    fn page_shows_targets_inputs_comparisons() {
        let text = write(&processor::rows(&run(0.0), 9, Some(Load { processes: 0.5, cores: 3.0 })))
            .unwrap();
        for line in [
            "Medians of 9 rounds; processes of chiasm that make items: 2. Before, 0.5 processes \
             wanted the machine's 3 cores.",
            "| repeated image, theirs new | CPU per request, ms | vllm launch render 0.32.0 | 2.00 \
             | 50.0 | 25.0 | ≥ 20 | yes |",
            "| new image | one call, ms | decoding and processing alone (vLLM 0.32.0) | 22.0 | \
             20.0 | 1.10 | ≤ 1.1 | yes |",
            "| video | file, by libx264 of PyAV 18.1.0 | 487 kB |",
            "| captioning of clips | clips at once | 400 clips |",
            "| image, sums of tensors | decoding and processing alone (vLLM 0.32.0) | 3 | 0 |",
            "| captioning of clips | clips per second of CPU time, clips/s | decoding and \
             processing alone (vLLM 0.32.0) | 4.00 | 5.00 | 0.80 |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn different_outputs_are_shown() {
        let text = write(&processor::rows(&run(1.0), 9, None)).unwrap();
        assert!(text.contains("**no: others**") && !text.contains("| yes |"), "{text}");
    }
}
