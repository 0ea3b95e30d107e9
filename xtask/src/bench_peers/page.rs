//! Makes the pages in `docs/benchmarks` from Markdown templates whose placeholders are filled with
//! tables.

use std::fmt::{Display, Write};

use crate::bench_peers::measured::{DIFFERENT, Metric, distinct};
use crate::bench_peers::row::Row;
use crate::error::Error;

/// Fills each `{{name}}` of a template with the value of that name.
///
/// # Errors
/// `NoValue` for a placeholder without a value, `UnusedValue` for a value without a placeholder.
pub(crate) fn fill(template: &str, values: &[(&str, String)]) -> Result<String, Error> {
    let mut unused: Vec<&str> = values.iter().map(|(name, _)| *name).collect();
    let mut pieces = template.split("{{");
    let mut page = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        let no_value =
            || Error::NoValue { name: piece.split("}}").next().unwrap_or(piece).to_owned() };
        let (name, rest) = piece.split_once("}}").ok_or_else(no_value)?;
        let (_, value) = values.iter().find(|(known, _)| *known == name).ok_or_else(no_value)?;
        unused.retain(|other| *other != name);
        page.push_str(value);
        page.push_str(rest);
    }
    match unused.first() {
        Some(name) => Err(Error::UnusedValue { name: (*name).to_owned() }),
        None => Ok(page),
    }
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

    /// Adds a row.
    pub(crate) fn row(&mut self, cells: impl Display) {
        // Writing to a String can't fail.
        let _ = write!(self.0, "\n| {cells} |");
    }

    /// Adds rows and returns the text of the table.
    pub(crate) fn rows(mut self, rows: impl IntoIterator<Item = impl Display>) -> String {
        rows.into_iter().for_each(|cells| self.row(cells));
        self.0
    }
}

/// The table of a page's targets.
pub(crate) struct Targets {
    /// The heads of the first cells and of the numbers of both sides.
    pub(crate) heads: &'static str,
    /// Returns the first cells of a row.
    pub(crate) cells: fn(&Row) -> String,
    /// Formats a number.
    pub(crate) number: fn(Option<f64>) -> String,
    /// Returns `true` if the target is a maximum.
    pub(crate) is_limit: fn(&Row) -> bool,
    /// The text for outputs that are not equal.
    pub(crate) outputs: &'static str,
}

impl Targets {
    /// Returns a table with a line for each row that has a target.
    pub(crate) fn table<'a>(&self, rows: impl IntoIterator<Item = &'a Row>) -> String {
        let table = Table::new(format_args!("{} | ratio | target | reached", self.heads));
        table.rows(rows.into_iter().filter_map(|row| {
            let target = row.target?;
            let sign = if (self.is_limit)(row) { "≤" } else { "≥" };
            let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(self.number);
            let [cells, reached] = [(self.cells)(row), reached(row, self.outputs)];
            Some(format!("{cells} | {ours} | {peer} | {ratio} | {sign} {target} | {reached}"))
        }))
    }
}

/// The table of targets by case, metric and peer. All targets are minimum ratios, for equal
/// prompts.
pub(crate) const BY_METRIC: Targets = Targets {
    heads: "case | metric | against | ours | theirs",
    cells: |row| format!("{} | {} | {}", row.case, row.metric, row.peer_name),
    number,
    is_limit: |_| false,
    outputs: "other prompts",
};

/// Returns the text about a reached or missed target.
pub(crate) fn reached(row: &Row, outputs: &str) -> String {
    match (row.ok, row.equal) {
        (Some(true), _) => "yes".to_owned(),
        (_, Some(false)) => format!("**no: {outputs}**"),
        _ => "**no**".to_owned(),
    }
}

/// Returns an introduction and a list with a line for each missed target; empty if none was missed.
pub(crate) fn missed(rows: &[Row], introduction: &str, line: impl Fn(&Row) -> String) -> String {
    let missed = rows.iter().filter(|row| row.target.is_some() && row.ok == Some(false));
    let lines: String = missed.map(|row| format!("\n- {}", line(row))).collect();
    if lines.is_empty() { lines } else { format!("\n\n{introduction}\n{lines}") }
}

/// Formats a number with three digits, the precision of a run with several processes.
pub(crate) fn number(number: Option<f64>) -> String {
    match number {
        None => "–".to_owned(),
        Some(number) if number >= 100.0 => format!("{number:.0}"),
        Some(number) if number >= 10.0 => format!("{number:.1}"),
        Some(number) => format!("{number:.2}"),
    }
}

/// Returns the text of a number of the whole run, such as the number of rounds.
pub(crate) fn run_value(rows: &[Row], metric: &str) -> String {
    rows.iter()
        .find(|row| row.metric == metric)
        .and_then(|row| row.ours)
        .unwrap_or_default()
        .to_string()
}

/// Returns the peers of these rows, in the order of rows.
pub(crate) fn peers<'a>(rows: impl Iterator<Item = &'a Row>) -> Vec<&'a str> {
    distinct(rows.map(|row| row.peer_name.as_str()))
}

/// Returns a section with the table of a case: a line per metric and a column per side. The cells
/// of peers have the ratio.
pub(crate) fn sides<'a>(case: &'a [Row], metrics: impl Iterator<Item = &'a Metric>) -> String {
    let metrics: Vec<&Metric> =
        metrics.filter(|metric| case.iter().any(|row| row.metric == metric.name)).collect();
    let is_shown = |row: &&Row| metrics.iter().any(|metric| metric.name == row.metric);
    let peers = peers(case.iter().filter(is_shown));
    let table = Table::new(format_args!("| unit | chiasm | {}", peers.join(" | ")));
    let table = table.rows(metrics.iter().map(|Metric { name, unit, .. }| {
        let rows_of_metric = || case.iter().filter(|row| row.metric == *name);
        let ours = number(rows_of_metric().next().and_then(|row| row.ours));
        let theirs = peers.iter().map(|peer| {
            let row = rows_of_metric().find(|row| row.peer_name == *peer);
            let ratio =
                row.and_then(|row| row.ratio).map(|ratio| format!(" (× {})", number(Some(ratio))));
            format!(" | {}{}", number(row.and_then(|row| row.peer)), ratio.unwrap_or_default())
        });
        format!("{name} | {unit} | {ours}{}", theirs.collect::<String>())
    }));
    format!("## {}\n\n{table}", case[0].case)
}

/// Returns a table with the numbers of prompts whose lengths were compared, and of those that
/// differ.
pub(crate) fn prompts(rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| row.metric == DIFFERENT);
    Table::new("case | against | compared | of another length").rows(rows.map(|row| {
        let [compared, different] = [row.ours, row.peer].map(count);
        format!("{} | {} | {compared} | {different}", row.case, row.peer_name)
    }))
}

/// Formats a count; a dash if it is missing.
pub(crate) fn count(count: Option<f64>) -> String {
    count.map_or("–".to_owned(), |count| count.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_placeholder_is_filled_each_time() {
        let values = [("a", "1".to_owned()), ("b", "{{a}}".to_owned())];
        assert_eq!(fill("{{a}} {{b}}, {{a}}\n", &values).unwrap(), "1 {{a}}, 1\n");
        assert_eq!(fill("none", &[]).unwrap(), "none");
    }

    #[test]
    fn placeholder_without_value_is_an_error() {
        let error = fill("{{a}} {{b}}", &[("a", String::new())]).unwrap_err();
        assert!(matches!(error, Error::NoValue { name } if name == "b"));
        assert!(matches!(fill("{{a", &[("a", String::new())]).unwrap_err(), Error::NoValue { .. }));
    }

    #[test]
    fn value_without_placeholder_is_an_error() {
        let error = fill("{{a}}", &[("a", String::new()), ("b", String::new())]).unwrap_err();
        assert!(matches!(error, Error::UnusedValue { name } if name == "b"));
    }

    #[test]
    fn table_rule_has_column_per_head() {
        let table = Table::new("| unit | ours").rows(["x | ms | 1", "y | | "]);
        assert_eq!(table, "| | unit | ours |\n|---|---|---|\n| x | ms | 1 |\n| y | |  |");
    }
}
