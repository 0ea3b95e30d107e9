//! The pages in `docs/benchmarks`, made from Markdown templates whose placeholders are filled with
//! tables.

use std::collections::BTreeMap;
use std::fmt::{Display, Write};

use crate::bench_peers::row::{BASELINE, LENGTHS, LOAD, OURS, PROFILE, RUN, Row, Target};
use crate::bench_peers::spec::{Columns, Spec};
use crate::error::Error;

/// The columns of a page whose rows are identified by case, metric and peer.
pub(crate) const BY_METRIC: Columns = Columns {
    heads: "case | metric | against | ours | theirs",
    cells: |row| format!("{} | {} | {}", row.case, row.metric, row.peer_name),
    number,
    outputs: "other prompts",
};

/// Makes the page of a benchmark.
pub(crate) fn write(spec: &Spec, rows: &[Row]) -> Result<String, Error> {
    // Each template has some of these.
    let common = [
        ("rounds", run_value(rows, "rounds")),
        ("load", load(rows)),
        ("profile", profile(rows)),
        ("targets", targets(spec, rows)),
        ("prompts", prompts(rows)),
        ("baseline", baseline(rows)),
        ("cases", sides_by_case(rows)),
    ];
    fill(spec.template, &common, &(spec.values)(rows))
}

/// Fills each `{{name}}` of a template with the value of that name.
///
/// # Errors
/// `NoValue` for a placeholder without a value, `UnusedValue` for an `own` value without a
/// placeholder.
fn fill(
    template: &str,
    common: &[(&str, String)],
    own: &[(&str, String)],
) -> Result<String, Error> {
    let mut unused: Vec<&str> = own.iter().map(|(name, _)| *name).collect();
    let mut pieces = template.split("{{");
    let mut page = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let no_value =
            || Error::NoValue { name: piece.split("}}").next().unwrap_or(piece).to_owned() };
        let (name, rest) = piece.split_once("}}").ok_or_else(no_value)?;
        let mut values = own.iter().chain(common);
        let (_, value) = values.find(|(known, _)| *known == name).ok_or_else(no_value)?;
        unused.retain(|other| *other != name);
        page.push_str(value);
        page.push_str(rest);
    }
    match unused.first() {
        Some(name) => Err(Error::UnusedValue { name: (*name).to_owned() }),
        None => Ok(page),
    }
}

/// Returns a part of a page, on lines of its own, if a row has what it describes.
pub(crate) fn part_if(rows: &[Row], is_described: impl Fn(&Row) -> bool, part: &str) -> String {
    let part = part.trim_end();
    if rows.iter().any(is_described) { format!("\n{part}") } else { String::new() }
}

/// A Markdown table without a line break after its last row.
pub(crate) struct Table(String);

impl Table {
    /// Creates a table with these column heads, which are separated by ` | ` like the cells of
    /// rows.
    pub(crate) fn new(heads: impl Display) -> Self {
        let heads = format!("| {heads} |");
        let columns = heads.matches('|').count() - 1;
        Self(format!("{heads}\n|{}", "---|".repeat(columns)))
    }

    /// Adds rows and returns the text of the table.
    pub(crate) fn rows(mut self, rows: impl IntoIterator<Item = impl Display>) -> String {
        for cells in rows {
            // Writing to a String can't fail.
            let _ = write!(self.0, "\n| {cells} |");
        }
        self.0
    }
}

/// The cells of a table by line and column. Lines and columns are in the order in which they were
/// added.
pub(crate) struct Grid {
    columns: Vec<String>,
    lines: Vec<(String, BTreeMap<String, String>)>,
}

impl Grid {
    /// Creates a grid with the first columns.
    pub(crate) fn new(columns: impl IntoIterator<Item = impl ToString>) -> Self {
        Self {
            columns: columns.into_iter().map(|column| column.to_string()).collect(),
            lines: Vec::new(),
        }
    }

    /// Sets the text of a cell, unless it has one. Adds the line and the column if they are new.
    pub(crate) fn set(&mut self, line: &str, column: &str, text: String) {
        if !self.columns.iter().any(|known| known == column) {
            self.columns.push(column.to_owned());
        }
        let known = self.lines.iter().position(|(known, _)| known == line);
        let number = known.unwrap_or_else(|| {
            self.lines.push((line.to_owned(), BTreeMap::new()));
            self.lines.len() - 1
        });
        self.lines[number].1.entry(column.to_owned()).or_insert(text);
    }

    /// Returns the table. `head` has the headings of the columns in front of the grid's, each after
    /// a `|`; `filler` is the text of cells that were not set.
    pub(crate) fn table(&self, head: &str, filler: &str) -> String {
        let head = format!("{head} | {}", self.columns.join(" | "));
        let lines = self.lines.iter().map(|(line, cells)| {
            let cell = |column| cells.get(column).map_or(filler, String::as_str);
            format!("{line} | {}", self.columns.iter().map(cell).collect::<Vec<_>>().join(" | "))
        });
        Table::new(head.trim_start()).rows(lines)
    }
}

/// Returns the table of targets, without those against another commit.
fn targets(spec: &Spec, rows: &[Row]) -> String {
    let Columns { heads, cells, number, outputs } = spec.columns;
    let table = Table::new(format_args!("{heads} | ratio | target | reached"));
    let rows_with_target = rows.iter().filter(|row| row.peer_name != BASELINE);
    table.rows(rows_with_target.filter_map(|row| {
        let target = row.target?;
        let is_limit = matches!((spec.target)(row, rows), Some(Target::AtMost(_)));
        let sign = if is_limit { "≤" } else { "≥" };
        let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
        let [cells, reached] = [cells(row), reached(row, outputs)];
        Some(format!("{cells} | {ours} | {peer} | {ratio} | {sign} {target} | {reached}"))
    }))
}

/// Returns the text about a reached or missed target.
fn reached(row: &Row, outputs: &str) -> String {
    match (row.ok, row.equal) {
        (None, _) => "–".to_owned(),
        (Some(true), _) => "yes".to_owned(),
        (_, Some(false)) => format!("**no: {outputs}**"),
        _ => "**no**".to_owned(),
    }
}

/// Returns an introduction and a list with a line for each missed target; empty if none was missed.
pub(crate) fn missed(rows: &[Row], introduction: &str, line: impl Fn(&Row) -> String) -> String {
    let missed = rows.iter().filter(|row| row.ok == Some(false));
    let lines: String = missed.map(|row| format!("\n- {}", line(row))).collect();
    if lines.is_empty() { lines } else { format!("\n\n{introduction}\n{lines}") }
}

/// Returns the section that compares CPU times with those of another commit; empty if none was
/// measured.
fn baseline(rows: &[Row]) -> String {
    let is_cpu = |row: &&Row| row.peer_name == BASELINE && row.metric.starts_with("CPU");
    let lines: Vec<String> = rows
        .iter()
        .filter(is_cpu)
        .map(|row| {
            let [ours, peer] = [row.ours, row.peer].map(number);
            let [ratio, target] = [row.ratio, row.target].map(|it| decimals(it, 3, "–"));
            let reached = reached(row, BY_METRIC.outputs);
            format!(
                "{} | {} | {ours} | {peer} | {ratio} | {target} | {reached}",
                row.case, row.unit
            )
        })
        .collect();
    if lines.is_empty() {
        return String::new();
    }
    let table = Table::new("case | unit | ours | baseline | ratio | maximum | reached").rows(lines);
    format!("\n\n## CPU time of the frontend, compared with another commit\n\n{table}")
}

/// Returns a section for each case with a rate: a line per metric and a column per side. The cells
/// of peers have the ratio.
fn sides_by_case(rows: &[Row]) -> String {
    let is_rate = |row: &&Row| row.unit.ends_with("/s");
    sections(distinct(rows.iter().filter(is_rate).map(|row| &*row.case)), |case| {
        let mut grid = Grid::new([OURS]);
        // Requests to the origin are only relevant for images from URLs.
        let is_shown = |row: &&Row| {
            row.case == case
                && row.metric != LENGTHS
                && (case.contains("URL") || !row.metric.starts_with("origin"))
        };
        for row in rows.iter().filter(is_shown) {
            let line = format!("{} | {}", row.metric, row.unit);
            grid.set(&line, OURS, number(row.ours));
            grid.set(&line, &row.peer_name, with_ratio(row));
        }
        grid.table("| unit", "–")
    })
}

/// Returns a section for each title, with its text.
pub(crate) fn sections<'a>(
    titles: impl IntoIterator<Item = &'a str>,
    text: impl Fn(&str) -> String,
) -> String {
    let section = |title: &str| format!("## {}\n\n{}", title.trim_end_matches(", "), text(title));
    titles.into_iter().map(section).collect::<Vec<_>>().join("\n\n")
}

/// Returns the number of a peer with the ratio in parentheses.
pub(crate) fn with_ratio(row: &Row) -> String {
    let ratio = row.ratio.map(|ratio| format!(" (× {})", number(Some(ratio))));
    number(row.peer) + &ratio.unwrap_or_default()
}

/// Returns a table with the numbers of prompts whose lengths were compared, and of those that
/// differ.
fn prompts(rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| row.metric == LENGTHS);
    Table::new("case | against | compared | of another length").rows(rows.map(|row| {
        let [compared, different] = [row.ours, row.peer].map(|it| decimals(it, 0, "–"));
        format!("{} | {} | {compared} | {different}", row.case, row.peer_name)
    }))
}

/// Returns the cargo profile: `release` if no row names it, as in older runs.
fn profile(rows: &[Row]) -> String {
    let row = rows.iter().find(|row| row.metric == PROFILE);
    row.map_or("release", |row| &row.unit).to_owned()
}

/// Returns a sentence about the load with a space in front; empty if the rows have no load.
fn load(rows: &[Row]) -> String {
    rows.iter().find(|row| row.metric == LOAD).map_or_else(String::new, |row| {
        let [processes, cores] = [row.ours, row.peer].map(Option::unwrap_or_default);
        format!(" Load before the run: {processes} processes on {cores} cores.")
    })
}

/// Returns the text of a number of the whole run, such as the number of rounds; empty if it is
/// missing.
pub(crate) fn run_value(rows: &[Row], metric: &str) -> String {
    let row = rows.iter().find(|row| row.case == RUN && row.metric == metric);
    row.and_then(|row| row.ours).map(|number| number.to_string()).unwrap_or_default()
}

/// Formats a number with three digits, the precision of a run with several processes.
pub(crate) fn number(number: Option<f64>) -> String {
    let places = match number {
        Some(number) if number >= 100.0 => 0,
        Some(number) if number >= 10.0 => 1,
        _ => 2,
    };
    decimals(number, places, "–")
}

/// Formats a number with this number of decimal places, or returns `missing`.
pub(crate) fn decimals(number: Option<f64>, places: usize, missing: &str) -> String {
    number.map_or_else(|| missing.to_owned(), |number| format!("{number:.places$}"))
}

/// Returns the distinct items in the order of their first occurrence.
pub(crate) fn distinct<T: PartialEq>(items: impl IntoIterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for item in items {
        if !distinct.contains(&item) {
            distinct.push(item);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_placeholder_is_filled_each_time() {
        let values = [("a", "1".to_owned()), ("b", "{{a}}".to_owned())];
        assert_eq!(fill("{{a}} {{b}}, {{a}}\n", &values, &[]).unwrap(), "1 {{a}}, 1\n");
        assert_eq!(fill("none", &values, &[]).unwrap(), "none");
    }

    #[test]
    fn placeholder_without_value_is_an_error() {
        let values = [("a", String::new())];
        let error = fill("{{a}} {{b}}", &values, &[]).unwrap_err();
        assert!(matches!(error, Error::NoValue { name } if name == "b"));
        assert!(matches!(fill("{{a", &values, &[]).unwrap_err(), Error::NoValue { .. }));
    }

    #[test]
    fn value_without_placeholder_is_an_error() {
        let error = fill("{{a}}", &[], &[("a", String::new()), ("b", String::new())]).unwrap_err();
        assert!(matches!(error, Error::UnusedValue { name } if name == "b"));
    }

    #[test]
    fn grid_fills_empty_cells() {
        let mut grid = Grid::new(["ours"]);
        grid.set("x | ms", "ours", "1".to_owned());
        grid.set("x | ms", "ours", "2".to_owned());
        grid.set("y |", "theirs", "3".to_owned());
        assert_eq!(
            grid.table("| unit", "–"),
            "| | unit | ours | theirs |\n|---|---|---|---|\n| x | ms | 1 | – |\n| y | | – | 3 |"
        );
    }

    #[test]
    fn section_shows_sides_with_ratios() {
        let row = |metric: &str, peer: &str, number| Row {
            ours: Some(1.0),
            peer: number,
            ratio: number,
            ..Row::new("text, 1 client", metric, "tokens/s", peer)
        };
        let rows = [
            row("tokens", "a 1", Some(2.0)),
            row("tokens", "b 2", None),
            row(LENGTHS, "a 1", Some(0.0)),
        ];
        assert_eq!(
            sides_by_case(&rows),
            "## text, 1 client\n\n| | unit | chiasm | a 1 | b 2 |\n|---|---|---|---|---|\n\
             | tokens | tokens/s | 1.00 | 2.00 (× 2.00) | – |"
        );
        assert!(prompts(&rows).ends_with("| text, 1 client | a 1 | 1 | 0 |"));
    }

    #[test]
    fn baseline_has_its_own_table() {
        let row = Row {
            ratio: Some(1.01),
            target: Some(1.03),
            ok: Some(true),
            ..Row::new("streaming, 64 clients", "CPU per output token", "µs", BASELINE)
        };
        let table = baseline(&[row]);
        assert!(
            table.ends_with("| streaming, 64 clients | µs | – | – | 1.010 | 1.030 | yes |"),
            "{table}"
        );
        assert_eq!(baseline(&[]), "");
    }
}
