//! Makes the golden files again with the pinned transformers and says which of the repository's files came out different.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::child;
use crate::error::Error;
use crate::models;
use crate::vllm_env::{Setup, VllmEnv};

/// Each is run from the repository's root and writes its files where the tests read them.
const SCRIPTS: [Script; 5] = [
    Script::new("python/goldens/make_vision_goldens.py", Arguments::None),
    Script::new("python/goldens/make_vision_kwargs_goldens.py", Arguments::Models(&["qwen2vl", "qwen25vl", "qwen3vl"])),
    Script::new("python/goldens/make_family_goldens.py", Arguments::None),
    Script::new("python/media_goldens/make_media_goldens.py", Arguments::None),
    Script::new("python/prompt_goldens/make_prompt_goldens.py", Arguments::None),
];

#[derive(Clone, Copy)]
struct Script {
    path: &'static str,
    arguments: Arguments,
}

impl Script {
    const fn new(path: &'static str, arguments: Arguments) -> Self {
        Self { path, arguments }
    }
}

#[derive(Clone, Copy)]
enum Arguments {
    None,
    /// The directories of these tiny models.
    Models(&'static [&'static str]),
}

/// Path in the repository → hash of the file's bytes.
type Snapshot = BTreeMap<String, blake3::Hash>;

/// Runs every script, then reports.
pub(crate) fn remake(setup: &Setup, env: &VllmEnv) -> Result<(), Error> {
    let root = &setup.workspace.root;
    for script in SCRIPTS {
        setup.workspace.file(script.path)?;
    }
    let models = models::ensure(setup, env)?;
    let before = snapshot(root)?;
    for Script { path, arguments } in SCRIPTS {
        setup.output.say(&format!("running {path}"))?;
        let mut python = env.python_command();
        // -B: a __pycache__ beside a script would be one more thing to ignore.
        python.args(["-B", path]);
        if let Arguments::Models(names) = arguments {
            python.args(names.iter().map(|name| models.join(name)));
        }
        python.current_dir(root).stdin(Stdio::null());
        child::run(&mut python, path, &setup.output, &setup.cancel)?;
    }
    let changes = changes(&before, &snapshot(root)?);
    if changes.is_empty() {
        println!("the goldens came out as they were");
        return Ok(());
    }
    print!("{changes}");
    println!("against the last commit:");
    let mut diff = git(root);
    diff.args(["diff", "--stat"]);
    println!("{}", child::read(&mut diff, "git diff --stat")?);
    Ok(())
}

fn git(root: &Path) -> Command {
    let mut git = Command::new("git");
    git.arg("-C").arg(root);
    // git sets them for hooks, and they would win over the directory.
    for name in ["GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"] {
        git.env_remove(name);
    }
    git
}

/// Every file that git tracks or would track. The working tree is the baseline, not the last commit: whoever changes
/// a script has other changes lying about.
fn snapshot(root: &Path) -> Result<Snapshot, Error> {
    let mut list = git(root);
    list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let names = child::read(&mut list, "git ls-files")?;
    let mut snapshot = Snapshot::new();
    for name in names.split_terminator('\0') {
        let path = root.join(name);
        match fs::read(&path) {
            Ok(bytes) => snapshot.insert(name.to_owned(), blake3::hash(&bytes)),
            // Deleted in the working tree and not yet in the index.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::io("read", path)(error)),
        };
    }
    Ok(snapshot)
}

/// One line for each file that is new, different or gone.
fn changes(before: &Snapshot, after: &Snapshot) -> String {
    let mut lines = String::new();
    let mut line = |what: &str, name: &str| {
        // Writing to a String can't fail.
        let _ = writeln!(lines, "{what} {name}");
    };
    for (name, hash) in after {
        match before.get(name) {
            None => line("new      ", name),
            Some(old) if old != hash => line("different", name),
            Some(_) => {}
        }
    }
    for name in before.keys().filter(|name| !after.contains_key(*name)) {
        line("gone     ", name);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_different_and_gone_files_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        child::read(git(root).args(["init", "-q"]), "git init").unwrap();
        let write = |name: &str, text: &str| fs::write(root.join(name), text).unwrap();
        write("same", "1");
        write("different file", "1");
        write("gone", "1");
        write(".gitignore", "ignored\n");
        child::read(git(root).args(["add", "gone", "same"]), "git add").unwrap();
        let before = snapshot(root).unwrap();
        assert_eq!(changes(&before, &before), "");
        write("same", "1");
        write("different file", "2");
        write("new", "1");
        write("ignored", "1");
        fs::remove_file(root.join("gone")).unwrap();
        let after = snapshot(root).unwrap();
        assert_eq!(changes(&before, &after), "different different file\nnew       new\ngone      gone\n");
    }
}
