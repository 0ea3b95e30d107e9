//! Measures the structure of the code: lines per crate, cycles of files, arrows against the order
//! of modules, and errors that are strings. `limits.rs` has the limits, `orders.rs` the orders.
//!
//! A cycle is a group of files that depend on each other, an arrow a dependency of one file or
//! module on another. Tests are not counted: items under `#[cfg(test)]`, files that only such items
//! declare, and test functions.

mod cycles;
mod limits;
mod orders;
mod references;
mod source;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use self::cycles::Arrows;
use self::limits::{LIMITS, Limits};
use self::source::Package;

/// The reason why the structure could not be measured.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StructureError {
    #[error("could not read {path}: {source}", path = .path.display())]
    Read { path: PathBuf, source: io::Error },

    #[error("{path} is not Rust code that can be parsed: {source}", path = .path.display())]
    Parse { path: PathBuf, source: syn::Error },

    #[error("there is no crate `{name}`")]
    UnknownCrate { name: String },
}

/// The measured numbers and the limits that they exceed.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) text: String,
    /// A line for each exceeded limit.
    pub(crate) problems: Vec<String>,
}

/// A package and its measurements.
struct Measured {
    package: Package,
    arrows: Arrows,
    cycles: Vec<BTreeSet<usize>>,
    violations: BTreeSet<String>,
}

/// Measures all crates of the repository at `root`.
pub(crate) fn measure(root: &Path) -> Result<Report, StructureError> {
    measure_against(root, &LIMITS)
}

/// Describes one crate: the items that the files of its cycles use from each other, and its arrows
/// against the order.
pub(crate) fn describe(root: &Path, name: &str) -> Result<String, StructureError> {
    let found = source_folders(root)?.into_iter().find(|(package, _)| package == name);
    let unknown = || StructureError::UnknownCrate { name: name.to_owned() };
    let (_, src) = found.ok_or_else(unknown)?;
    let Measured { package, arrows, cycles, violations } = read(name, &src, &LIMITS)?;
    let lines = package.product_lines();
    let mut text = format!("{name}: {lines} lines without tests, {} cycles\n", cycles.len());
    for cycle in &cycles {
        text.push_str(&format!("\ncycle of {} files\n", cycle.len()));
        let mut lines = BTreeSet::new();
        for ((from, to), items) in &arrows {
            if cycle.contains(from) && cycle.contains(to) {
                let from = &package.files[*from].path;
                let to = &package.files[*to].path;
                lines.insert(format!("  {from} → {to}: {}\n", joined(items, ", ")));
            }
        }
        text.extend(lines);
    }
    text.push_str(&format!("\narrows against the order: {}\n", violations.len()));
    text.extend(violations.iter().map(|violation| format!("  {violation}\n")));
    Ok(text)
}

fn measure_against(root: &Path, limits: &Limits) -> Result<Report, StructureError> {
    let mut measured = Vec::new();
    for (name, src) in source_folders(root)? {
        measured.push(read(&name, &src, limits)?);
    }
    let mut report = Report::default();
    report.add_lines(&measured, limits);
    report.add_cycles(&measured, limits);
    let violations: Vec<String> =
        measured.iter().flat_map(|package| package.violations.clone()).collect();
    report.add(&format!("\narrows against the order: {}", violations.len()));
    for violation in &violations {
        report.add(&format!("  {violation}"));
    }
    report.problems.extend(violations);
    report.add_string_errors(&measured);
    Ok(report)
}

impl Report {
    fn add(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn check(&mut self, what: &str, found: usize, limit: usize) {
        if found > limit {
            self.problems.push(format!("{what}: {found}, the limit is {limit}"));
        }
    }

    fn add_lines(&mut self, measured: &[Measured], limits: &Limits) {
        self.add("lines without tests");
        for Measured { package, .. } in measured {
            let name = &package.name;
            let lines = package.product_lines();
            let limit = limits.crate_lines;
            self.add(&format!("  {name:20} {lines:6} of {limit:6}"));
            self.check(&format!("lines of {name}"), lines, limit);
        }
    }

    fn add_cycles(&mut self, measured: &[Measured], limits: &Limits) {
        let mut cycles: Vec<(&Package, &BTreeSet<usize>)> = Vec::new();
        for Measured { package, cycles: found, .. } in measured {
            cycles.extend(found.iter().map(|cycle| (package, cycle)));
        }
        cycles.sort_by_key(|(_, cycle)| Reverse(cycle.len()));
        let files: usize = cycles.iter().map(|(_, cycle)| cycle.len()).sum();
        let largest = cycles.first().map_or(0, |(_, cycle)| cycle.len());
        let numbers = [
            ("cycles of files", cycles.len(), limits.cycles),
            ("files in cycles", files, limits.files_in_cycles),
            ("files of the largest cycle", largest, limits.files_per_cycle),
        ];
        self.add("");
        for (what, found, limit) in numbers {
            self.add(&format!("{what}: {found} of {limit}"));
            self.check(what, found, limit);
        }
        for (package, cycle) in cycles {
            let paths = cycle.iter().map(|file| package.files[*file].path.clone());
            let paths = joined(&paths.collect(), " ");
            self.add(&format!("  {:3} {}: {paths}", cycle.len(), package.name));
        }
    }

    /// Adds the errors that are strings, which callers can't match on. Callers in xtask never do.
    fn add_string_errors(&mut self, measured: &[Measured]) {
        let packages = measured
            .iter()
            .map(|measured| &measured.package)
            .filter(|package| package.name != "xtask");
        let files = packages
            .flat_map(|package| package.files.iter().map(move |file| (&package.name, file)));
        let lines = files.flat_map(|(name, file)| {
            file.string_errors.iter().map(move |line| (name, &file.path, line))
        });
        let found: Vec<String> = lines
            .map(|(name, path, line)| {
                format!("{name}: {path}:{line} has an error that is a String")
            })
            .collect();
        self.add(&format!("errors that are a String: {}", found.len()));
        self.problems.extend(found);
    }
}

fn joined(words: &BTreeSet<String>, separator: &str) -> String {
    words.iter().map(String::as_str).collect::<Vec<_>>().join(separator)
}

/// Reads a package and measures it.
fn read(name: &str, src: &Path, limits: &Limits) -> Result<Measured, StructureError> {
    let package = Package::read(name, src)?;
    let references = references::references(&package);
    let arrows = cycles::arrows(&package, &references);
    let cycles = cycles::cycles(package.files.len(), &arrows);
    let order = limits.orders.iter().find(|order| order.package == name);
    let violations = order.map(|order| order.violations(&package, &references)).unwrap_or_default();
    Ok(Measured { package, arrows, cycles, violations })
}

/// Returns the names and `src` folders of all packages, sorted by name. A package has a `lib.rs` or
/// `main.rs`.
fn source_folders(root: &Path) -> Result<Vec<(String, PathBuf)>, StructureError> {
    let crates = root.join("crates");
    let unreadable = |source| StructureError::Read { path: crates.clone(), source };
    let mut packages = vec![("xtask".to_owned(), root.join("xtask/src"))];
    for entry in crates.read_dir().map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        packages.push((entry.file_name().to_string_lossy().into_owned(), entry.path().join("src")));
    }
    packages.retain(|(_, src)| src.join("lib.rs").is_file() || src.join("main.rs").is_file());
    packages.sort();
    Ok(packages)
}
