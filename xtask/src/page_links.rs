//! A test that all relative links of the documentation have a target.

use std::collections::HashMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// The checked pages and folders of pages, relative to the repository.
const PAGES: [&str; 5] = ["README.md", "AGENTS.md", "ARCHITECTURE.md", "docs", "deploy"];

/// A link and its line in the page, from 1.
#[derive(Debug, PartialEq)]
struct Link {
    line: usize,
    target: String,
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Adds the pages below a path.
fn pages(path: &Path, found: &mut Vec<PathBuf>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("a folder") {
            pages(&entry.expect("an entry").path(), found);
        }
    } else if path.extension().is_some_and(|extension| extension == "md") {
        found.push(path.to_owned());
    }
}

/// Returns the lines of a page with their numbers, without code blocks.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(number, line)| {
        if line.trim_start().starts_with("```") {
            is_code = !is_code;
            return None;
        }
        (!is_code).then_some((number + 1, line))
    })
}

/// Removes the code between backticks from a line.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Returns the links `[text](target)` of a page.
fn links(text: &str) -> Vec<Link> {
    let mut links = Vec::new();
    for (number, line) in prose(text) {
        for rest in without_code(line).split("](").skip(1) {
            if let Some((target, _)) = rest.split_once(')') {
                links.push(Link { line: number, target: target.to_owned() });
            }
        }
    }
    links
}

/// Returns the anchors of a page's headings as GitHub makes them: lower-case, spaces as dashes, no
/// punctuation, and a number for a repeated anchor.
fn anchors(text: &str) -> Vec<String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let headings = prose(text)
        .filter_map(|(_, line)| Some(line.trim_start_matches('#')).filter(|rest| *rest != line));
    let mut anchors = Vec::new();
    for heading in headings {
        let lower = heading.trim().to_lowercase();
        let kept = lower.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let before = seen.entry(anchor.clone()).or_default();
        anchors.push(if *before == 0 { anchor } else { format!("{anchor}-{before}") });
        *before += 1;
    }
    anchors
}

/// Returns the reason why a link of a page is broken; `None` if it is valid or external.
fn fault(page: &Path, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path =
        if path.is_empty() { page.to_owned() } else { page.parent().expect("a folder").join(path) };
    if !path.exists() {
        return Some("the file does not exist".to_owned());
    }
    if anchor.is_empty() || path.extension().is_none_or(|extension| extension != "md") {
        return None;
    }
    let existing = anchors(&fs::read_to_string(&path).expect("a page"));
    (!existing.iter().any(|other| other == anchor))
        .then(|| format!("the heading does not exist; the page has {existing:?}"))
}

#[test]
fn relative_links_have_targets() {
    let mut found = Vec::new();
    for page in PAGES {
        pages(&root().join(page), &mut found);
    }
    let mut faults = Vec::new();
    let mut count = 0;
    for page in &found {
        let text = fs::read_to_string(page).expect("a page");
        for Link { line, target } in links(&text) {
            count += 1;
            if let Some(fault) = fault(page, &target) {
                let page: PathBuf =
                    page.components().filter(|part| *part != Component::ParentDir).collect();
                faults.push(format!("{}:{line}: {target}: {fault}", page.display()));
            }
        }
    }
    assert!(
        found.len() > 20 && count > 100,
        "{} pages with {count} links are too few: were all pages read?",
        found.len()
    );
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn links_with_anchors_follow_github_rules() {
    let text =
        "# A `b`: c_d\n[x](y.md#z) `[no](no)` [w](v)\n```\n# not\n[no](no)\n```\n## A b c_d\n";
    let expected =
        [(2, "y.md#z"), (2, "v")].map(|(line, target)| Link { line, target: target.to_owned() });
    assert_eq!(links(text), expected);
    assert_eq!(anchors(text), ["a-b-c_d", "a-b-c_d-1"]);
    assert!(fault(&root().join("README.md"), "docs/not-there.md").is_some());
    assert!(fault(&root().join("README.md"), "docs/on-call.md#not-there").is_some());
    assert_eq!(fault(&root().join("README.md"), "docs/on-call.md#it-fails"), None);
}
