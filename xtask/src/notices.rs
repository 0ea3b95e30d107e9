//! The licence texts of the crates in the binary. Most licences require their text with each copy.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// The prefixes of the names of licence files, in capitals.
const NAME_PREFIXES: [&str; 6] =
    ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
/// The number of folder levels to search: vendored C libraries have licences in subfolders.
const MAX_DEPTH: usize = 3;
/// The maximum size of a licence file; a larger file is something else.
const MAX_TEXT_BYTES: u64 = 256 << 10;

/// A crate and the folder of its sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sources {
    /// The name and the version.
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
}

/// Writes each text once, below the names of the crates that have it.
pub(crate) fn write(crates: &[Sources], path: &Path) -> Result<(), Error> {
    let mut holders: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut without = Vec::new();
    for package in crates {
        let mut texts = Vec::new();
        collect(&package.folder, MAX_DEPTH, &mut texts)?;
        if texts.is_empty() {
            without.push(package.name.as_str());
        }
        texts.sort();
        texts.dedup();
        for text in texts {
            holders.entry(text).or_default().push(&package.name);
        }
    }
    let mut notices =
        String::from("Licences of what is linked into chiasm, or carried along in it.\n");
    for (text, names) in &holders {
        notices.push_str(&format!("\n{}\n{}\n\n{text}\n", "=".repeat(80), names.join(", ")));
    }
    if !without.is_empty() {
        let names = without.join(", ");
        notices.push_str(&format!(
            "\n{}\nWithout a text of their own; the bill of materials names their licences:\n\
             {names}\n",
            "=".repeat(80)
        ));
    }
    fs::write(path, notices).map_err(Error::io("write", path))
}

/// Adds the licence texts in a folder and in `depth` levels of its subfolders.
fn collect(folder: &Path, depth: usize, texts: &mut Vec<String>) -> Result<(), Error> {
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let entry = entry.map_err(Error::io("list", folder))?;
        let path = entry.path();
        let metadata = entry.metadata().map_err(Error::io("read", &path))?;
        let name = entry.file_name().to_string_lossy().to_uppercase();
        if metadata.is_dir() && depth > 0 {
            collect(&path, depth - 1, texts)?;
        } else if metadata.is_file() && metadata.len() <= MAX_TEXT_BYTES && is_licence(&name) {
            let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
            texts.push(String::from_utf8_lossy(&bytes).replace("\r\n", "\n").trim().to_owned());
        }
    }
    Ok(())
}

/// Returns `true` if a file of this name, in capitals, is a licence text; source code such as
/// `licence.rs` is not.
fn is_licence(name: &str) -> bool {
    let is_text = !name.contains('.')
        || [".TXT", ".MD"].iter().any(|end| name.ends_with(end))
        || name.contains("-APACHE")
        || name.contains("-MIT");
    is_text && NAME_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_text_is_written_once_with_its_crates() {
        let dir = tempfile::tempdir().unwrap();
        let package = |name: &str, files: &[(&str, &str)]| {
            let folder = dir.path().join(name);
            for (file, text) in files {
                let path = folder.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            fs::create_dir_all(&folder).unwrap();
            Sources { name: name.to_owned(), folder }
        };
        let crates = [
            package("a 1", &[("LICENSE-MIT", "Text one\r\n"), ("src/license.rs", "fn no() {}")]),
            package("b 2", &[("COPYING", "Text one"), ("vendored/c/LICENSE.txt", "Text two")]),
            package("bare 3", &[]),
        ];
        let path = dir.path().join("notices");
        write(&crates, &path).unwrap();
        let notices = fs::read_to_string(path).unwrap();
        assert_eq!(notices.matches("Text one").count(), 1);
        assert!(
            notices.contains("a 1, b 2\n\nText one") && notices.contains("b 2\n\nText two"),
            "{notices}"
        );
        assert!(notices.contains("names their licences:\nbare 3\n"));
        assert!(!notices.contains("fn no"), "{notices}");
    }
}
