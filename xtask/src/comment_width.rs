//! A test that comments stay within the line width. Stable rustfmt wraps only code.

use std::fs;
use std::path::{Path, PathBuf};

/// The maximum width of a line, in characters; `max_width` of `rustfmt.toml`.
const MAX_CHARS: usize = 100;

/// The folders with Rust code, relative to the repository.
const FOLDERS: [&str; 4] = ["crates", "xtask", "bench", "fuzz"];

/// The skipped folders: build output and generated code.
const SKIPPED: [&str; 2] = ["target", "generated"];

/// Adds the Rust files below a folder.
fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let is_skipped = SKIPPED.iter().any(|name| path.ends_with(name));
        if path.is_dir() && !is_skipped {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Returns the line numbers, from 1, of comments that are too wide. Tables, code samples and single
/// words such as links can't be wrapped and may be wider.
fn wide_comments(text: &str) -> Vec<usize> {
    let mut is_sample = false;
    let mut wide = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            is_sample = false;
            continue;
        };
        let words = comment.trim_start_matches(['/', '!']).trim_start();
        if words.starts_with("```") {
            is_sample = !is_sample;
        }
        let can_be_wrapped = !is_sample && !words.starts_with('|') && words.contains(' ');
        if can_be_wrapped && line.chars().count() > MAX_CHARS {
            wide.push(index + 1);
        }
    }
    wide
}

#[test]
fn comments_stay_within_the_line_width() {
    let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut files = Vec::new();
    for folder in FOLDERS {
        rust_files(&root.join(folder), &mut files);
    }
    assert!(files.len() > 100, "{files:?}");
    let mut wide = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).expect("a text");
        let lines = wide_comments(&text);
        wide.extend(lines.iter().map(|line| format!("{}:{line}", file.display())));
    }
    assert!(wide.is_empty(), "comments of more than {MAX_CHARS} columns:\n{}", wide.join("\n"));
}

#[test]
fn wide_prose_is_found_beside_tables_samples_links() {
    let prose = format!("/// {}", "word ".repeat(30));
    let link = format!("// {}", "x".repeat(200));
    let table = format!("//! | {} |", "word ".repeat(30));
    let sample = format!("/// ```\n/// {}\n/// ```\n", "let x = 1; ".repeat(30));
    let text = format!("{link}\n{table}\n{sample}{prose}\nlet code = 1;\n{prose}\n");
    assert_eq!(wide_comments(&text), [6, 8]);
}
